"""Decide whether a failed run is started again, and keep the records of its steps until then."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from piper_ir.ground.errors import (
    ExecutionError,
    HangError,
    JobError,
    NonFiniteLossError,
    PiperError,
    PiperWarning,
    RankError,
)
from piper_ir.plan.plan import Plan
from piper_runtime.launch.ground.report import StepRecord
from piper_runtime.launch.ground.restart import Restart
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.rank.values.code import ExportedCode


class Recovery:
    """Follow a run over its attempts: the steps done, the failures, and the number of devices left.

    A step that is done again after a failure counts once: its first record stays, and `on_step` does not hear it twice.
    """

    def __init__(self, options: RunOptions, devices: int):
        self._options, self._devices = options, devices
        self._records: dict[int, StepRecord] = {}
        self._raised_in: int | None = None
        self._since: float | None = None
        self.failures: list[Restart] = []

    @property
    def next(self) -> int:
        """Return the number of the first step that is not done."""
        return self._options.first + len(self._records)

    def heard(self, record: StepRecord) -> None:
        """Take a finished step of any attempt; this is an OnStep."""
        if self._since is not None:
            self.failures[-1] = replace(self.failures[-1], seconds=time.monotonic() - self._since)
            self._since = None
        if record.step < self.next:
            return
        self._records[record.step] = record
        if self._options.on_step is not None:
            self._options.on_step(record)

    def records(self, found: Iterable[StepRecord]) -> list[StepRecord]:
        """Return the records of the whole run, given the records of its last attempt."""
        return sorted(({r.step: r for r in found} | self._records).values(), key=lambda r: r.step)

    def check(self, error: PiperError) -> None:
        """Raise the error of an attempt again unless the run is to be started again."""
        self._since = time.monotonic()
        if not self._options.goes_on:
            raise error
        raised = isinstance(error, RankError | HangError) and not lost(error)
        again = raised and self._raised_in == self.next
        if not self._helps(error):
            raise self._ended(error, "")
        if again:
            raise self._ended(
                error, f"It came again in step {self.next}, and no step was finished in between"
            )
        if len(self.failures) >= self._options.restarts:
            raise self._ended(
                error, f"No more restarts are allowed (restarts={self._options.restarts})"
            )
        self._raised_in = self.next if raised else None

    def _helps(self, error: PiperError) -> bool:
        """Return whether another attempt may go better: after a rank's failure, or when workers did not start again."""
        if isinstance(error, NonFiniteLossError):
            return False
        return isinstance(error, RankError | HangError) or (
            bool(self.failures) and isinstance(error, ExecutionError)
        )

    def _ended(self, error: PiperError, why: str) -> PiperError:
        """Return the error that ends the run, with the reason and the restarts so far."""
        tried = ""
        if self.failures:
            times = "once" if len(self.failures) == 1 else f"{len(self.failures)} times"
            tried = f"The run had been started again {times}, the last time from step {self.failures[-1].resumed}"
        error.args = (". ".join(text for text in (str(error).rstrip("."), why, tried) if text),)
        return error

    @property
    def replans(self) -> bool:
        """Return whether a rank that dies takes its device with it."""
        return self._options.replan is not None

    def replanned(
        self, error: PiperError, plan: Plan, code: ExportedCode, room: Callable[[], float]
    ) -> tuple[Plan, ExportedCode]:
        """Return the plan of the next attempt, with its code; `room` tells for how many ranks the workers have room.

        If devices are lost for good and too few are left, it is one for fewer ranks. Raises the error again when there
        is none.
        """
        if self._options.replan is None:
            return plan, code
        known = room()
        # Ranks that did not come up again: nobody knows how many, except for a launcher that knows its room.
        unknown = int(math.isinf(known) and not isinstance(error, RankError | HangError))
        self._devices = int(min(self._devices - len(lost(error)) - unknown, known))
        if self._devices >= plan.mesh.world:
            return plan, code
        with self.ending(error, f"On {self._devices} devices the run"):
            if self._devices < 1:
                raise JobError("no device is left")
            return self._options.replan(self._devices)

    @contextmanager
    def ending(self, error: PiperError, what: str = "The run") -> Iterator[None]:
        """Raise the error of an attempt again if the block, which tries to go on, fails."""
        try:
            yield
        except PiperError as none:
            raise self._ended(error, f"{what} cannot go on: {none}") from none

    def goes_on(self, error: PiperError, resumed: int, plan: Plan, where: str) -> None:
        """Record that the run goes on with a step, and warn of it; `where` names the state that it goes on from."""
        restart = Restart(
            self.next,
            type(error).__name__,
            str(error),
            lost(error),
            resumed,
            plan.mesh.world,
            source=where,
        )
        self.failures.append(restart)
        fewer = f" on {plan.mesh}" if self.replans else ""
        warnings.warn(
            f"{error}. Restart {len(self.failures)} of {self._options.restarts}: the run goes on with step "
            f"{resumed}{fewer}, from {where}",
            PiperWarning,
            stacklevel=2,
        )
        if self._options.on_restart is not None:
            self._options.on_restart(restart)


def lost(error: PiperError) -> tuple[int, ...]:
    """Return the ranks whose process has died, as an error says."""
    return error.lost if isinstance(error, RankError) else ()
