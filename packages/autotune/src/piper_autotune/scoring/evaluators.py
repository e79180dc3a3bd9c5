"""Score candidates in this process or in worker processes; `piper_autotune.scoring.on_ray` does so on Ray.

An evaluator takes strategies and gives outcomes by ticket. A candidate that ends its worker, or takes longer than the
timeout, has an outcome like any other.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import IO, Protocol

from piper_autotune.scoring.scoring import Needs, Refused, Scored, score
from piper_autotune.scoring.worker import READY
from piper_autotune.space.problem import Programs, TuningProblem, Wanted, packed, packed_strategy
from piper_compiler import CaptureRequest, Strategy
from piper_ir.ground.errors import TuneError

Outcome = Scored | Refused
START_S = 120.0
"""The seconds until a worker must have started: imports on a busy machine."""


class Evaluator(Protocol):
    """Score the candidates of a search.

    `width` is how many candidates are worth handing in before the first outcome is asked for.
    """

    @property
    def width(self) -> int: ...

    def submit(self, strategy: Strategy, engine: bool = False) -> int:
        """Hand in a candidate, and return its ticket."""

    def result(self, ticket: int) -> Outcome:
        """Wait for a candidate's outcome; once per ticket."""

    def close(self) -> None:
        """End everything that was started; candidates that are still being scored are dropped."""


class Here:
    """Score in this process, one after the other; a candidate that hangs, hangs it."""

    width = 1

    def __init__(self, problem: TuningProblem, programs: Programs) -> None:
        self._problem, self._programs = problem, programs
        self._waiting: list[tuple[Strategy, bool]] = []
        self._known: dict[object, Outcome] = {}

    def submit(self, strategy: Strategy, engine: bool = False) -> int:
        self._waiting.append((strategy, engine))
        return len(self._waiting) - 1

    def result(self, ticket: int) -> Outcome:
        strategy, engine = self._waiting[ticket]
        while isinstance(
            answer := score(self._problem, strategy, self._programs.found, engine, self._known),
            Needs,
        ):
            self._programs.add(answer.wanted)
        return answer

    def close(self) -> None:
        """Do nothing: nothing was started."""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    errors: IO[bytes]
    ready: bool = False
    ticket: int | None = None
    deadline: float = float("inf")
    knows: set[Wanted] = field(default_factory=set)
    requests: set[CaptureRequest] = field(default_factory=set)
    """The requests of the programs that it asked for."""

    def end(self) -> int:
        """Kill the process, and return its exit code."""
        self.process.kill()
        code = self.process.wait()
        self.connection.close()
        self.errors.close()
        return code


class Processes:
    """Score in `count` worker processes, each with at most `timeout_s` seconds per candidate."""

    def __init__(
        self,
        problem: TuningProblem,
        programs: Programs,
        count: int,
        timeout_s: float,
        modules: Iterable[ModuleType] = (),
    ) -> None:
        self._blob = packed(problem, [*modules, *problem.own_modules])
        self._programs, self._timeout_s = programs, timeout_s
        self.width = 1 if count == 1 else 2 * count
        self._jobs: list[tuple[bytes, bool]] = []
        self._queue: deque[int] = deque()
        self._outcomes: dict[int, Outcome] = {}
        self._workers: list[_Worker] = []
        try:
            for _ in range(count):
                self._workers.append(_start(self._blob))
        except BaseException:  # Ctrl-C, too: nobody has this object yet, to close it
            self.close()
            raise

    def submit(self, strategy: Strategy, engine: bool = False) -> int:
        self._jobs.append((packed_strategy(strategy), engine))
        self._queue.append(len(self._jobs) - 1)
        self._assign()
        return len(self._jobs) - 1

    def result(self, ticket: int) -> Outcome:
        while ticket not in self._outcomes:
            self._assign()
            self._wait()
        return self._outcomes.pop(ticket)

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _assign(self) -> None:
        for worker in self._workers:
            if not self._queue:
                return
            if worker.ready and worker.ticket is None:
                self._hand_over(worker, self._queue.popleft())

    def _hand_over(self, worker: _Worker, ticket: int) -> None:
        strategy, engine = self._jobs[ticket]
        new = {
            wanted: program
            for wanted, program in self._programs.found.items()
            if wanted.request in worker.requests and not wanted.alone and wanted not in worker.knows
        }  # most others are for bounds of candidates that no worker gets
        worker.ticket, worker.deadline = ticket, time.monotonic() + self._timeout_s
        worker.knows |= new.keys()
        with contextlib.suppress(
            OSError
        ):  # a worker that is gone shows when its answer is waited for
            worker.connection.send_bytes(pickle.dumps((strategy, engine, new)))

    def _wait(self) -> None:
        """Wait until a worker answers, dies, or is too late."""
        now = time.monotonic()
        first = min((w.deadline for w in self._workers), default=now)
        heard = wait(
            [w.connection for w in self._workers], timeout=max(0.0, min(first - now, 3600.0))
        )
        for index, worker in enumerate(self._workers):
            if worker.connection in heard:
                self._hear(index, worker)
            elif time.monotonic() >= worker.deadline:
                if not worker.ready:
                    raise TuneError(
                        f"a worker process did not start within {START_S:g} s{_said(worker)}"
                    )
                self._replace(
                    index,
                    "hang",
                    f"it took longer than {self._timeout_s:g} s; its worker process was ended",
                )

    def _hear(self, index: int, worker: _Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            if not worker.ready:
                raise TuneError(f"a worker process ended while it started{_said(worker)}") from None
            said = _said(worker)
            self._replace(
                index,
                "crash",
                f"its worker process ended with {_exit_text(worker.process.wait())}{said}",
            )
            return
        worker.deadline = float("inf")
        if message == READY:
            worker.ready = True
            return
        ticket, worker.ticket = worker.ticket, None
        assert ticket is not None, "an answer without a question"
        if isinstance(message, Needs):
            self._programs.add(message.wanted)
            worker.requests.add(message.wanted.request)
            self._queue.appendleft(ticket)
        else:
            self._outcomes[ticket] = message

    def _replace(self, index: int, kind: str, reason: str) -> None:
        worker = self._workers[index]
        worker.end()
        if worker.ticket is not None:
            self._outcomes[worker.ticket] = Refused(kind, reason)
        self._workers[index] = _start(self._blob)


def _start(blob: bytes) -> _Worker:
    ours, theirs = Pipe()
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when its worker ends
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    code = f"from piper_autotune.scoring.worker import serve; serve({theirs.fileno()})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        env=env,
    )
    theirs.close()
    with contextlib.suppress(OSError):  # if it is gone already, that shows when it is waited for
        ours.send_bytes(blob)
    return _Worker(process, ours, errors, deadline=time.monotonic() + START_S)


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _said(worker: _Worker) -> str:
    """Return the last line that a worker wrote."""
    worker.errors.seek(0)
    lines = worker.errors.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1]}" if lines else ""
