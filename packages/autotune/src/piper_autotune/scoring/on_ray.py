"""Score candidates as Ray tasks, one candidate each; only here, and only for an evaluator, ray is imported."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from piper_autotune.scoring.evaluators import Outcome
from piper_autotune.scoring.scoring import Needs, Refused, Scored, score
from piper_autotune.space.problem import Programs, TuningProblem, Variants, packed, packed_strategy
from piper_compiler import Strategy
from piper_ir.ground.errors import TuneError
from piper_ir.tools import ray_reason

_KNOWN: dict[bytes, TuningProblem] = {}
_LOCK = threading.Lock()


def task(
    name: bytes, blob: bytes, strategy: bytes, engine: bool, variants: Variants
) -> Scored | Refused | Needs:
    """Score one candidate in a Ray worker; `blob` is a packed TuningProblem called `name`, unpacked once per worker."""
    with _LOCK:
        if name not in _KNOWN:
            _KNOWN.clear()
            _KNOWN[name] = pickle.loads(blob)
        problem = _KNOWN[name]
    return score(problem, pickle.loads(strategy), variants, engine)


class OnRay:
    """Run tasks on the Ray cluster to which this process is connected; a task is not repeated when its worker dies."""

    def __init__(
        self,
        problem: TuningProblem,
        programs: Programs,
        timeout_s: float,
        modules: Iterable[ModuleType] = (),
    ) -> None:
        try:
            import ray
        except ImportError as e:
            raise TuneError(
                f"scoring on Ray needs it: {e}; install ray, or give workers as a number of processes"
            ) from None
        if not ray.is_initialized():
            raise TuneError(
                "this process is not connected to a Ray cluster; call ray.init() first, or use piper.tune"
            )
        self._ray: Any = ray
        self._programs, self._timeout_s = programs, timeout_s
        self._blob = ray.put(packed(problem, [*modules, *problem.own_modules]))
        self._name = self._blob.binary()
        self._task = ray.remote(task).options(max_retries=0, num_cpus=1)
        self.width = 2 * max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self._jobs: list[tuple[bytes, bool]] = []
        self._refs: dict[int, Any] = {}

    def submit(self, strategy: Strategy, engine: bool = False) -> int:
        self._jobs.append((packed_strategy(strategy), engine))
        self._send(len(self._jobs) - 1)
        return len(self._jobs) - 1

    def _send(self, ticket: int) -> None:
        strategy, engine = self._jobs[ticket]
        self._refs[ticket] = self._task.remote(
            self._name, self._blob, strategy, engine, self._programs.found
        )

    def result(self, ticket: int) -> Outcome:
        errors = self._ray.exceptions
        while True:
            ref = self._refs[
                ticket
            ]  # it stays there until it is done, so that an interrupted search cancels it
            try:
                answer = self._ray.get(ref, timeout=self._timeout_s)
            except errors.GetTimeoutError:
                self._ray.cancel(ref, force=True)
                answer = Refused(
                    "hang", f"it took longer than {self._timeout_s:g} s; its Ray worker was ended"
                )
            except errors.RayError as e:
                answer = Refused("crash", f"its Ray worker failed: {ray_reason(e)}")
            del self._refs[ticket]
            if not isinstance(answer, Needs):
                outcome: Outcome = answer
                return outcome
            self._programs.add(answer.wanted)
            self._send(ticket)

    def close(self) -> None:
        for ref in self._refs.values():
            self._ray.cancel(ref, force=True)
        self._refs.clear()
