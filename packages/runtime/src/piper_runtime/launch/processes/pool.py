"""Share the code of all pools of workers, however their workers are started."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

from piper_ir.ground.errors import ExecutionError, PiperError
from piper_ir.plan.plan import Plan
from piper_runtime.launch.ground.interrupt import PATIENCE_S
from piper_runtime.launch.ground.progress import OnSave, OnStep, Progress
from piper_runtime.launch.ground.protocol import first_step
from piper_runtime.launch.ground.report import Interrupted
from piper_runtime.launch.ground.watch import Watch, WatchedTeam

NOTICE_S = 0.1
"""The seconds within which ranks notice on a busy machine that they are told to end their run."""


class Team(WatchedTeam, Protocol):
    """Control running workers, one per rank."""

    @property
    def pids(self) -> list[int]:
        """Return process ids by rank."""

    def send(self, requests: Mapping[int, Any]) -> None:
        """Give every rank its request; a request that several ranks share is sent once."""

    def finish_early(self, ranks: int, steps: int) -> bool:
        """Let the ranks of a run end it together, `steps` after the first one's step; return False if impossible."""

    def end(self) -> None:
        """End every worker, and wait until the workers of this machine are gone; go on where an interrupt ended it."""


T = TypeVar("T", bound=Team)


class TeamPool(ABC, Generic[T]):
    """Run up to `world` ranks, for any number of runs, one at a time.

    Workers start with the first run, and again after a run that failed, since its communicators are broken; they end at
    the latest when Python exits. Use it as a context manager, or call `close`.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._team: T | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Return process ids by rank, each on its node; empty when no workers run."""
        return list(self._team.pids) if self._team is not None else []

    def close(self) -> None:
        """End all workers; a later run starts new ones."""
        self._end_team()

    def room(self) -> float:
        """See `piper_runtime.launch.ground.workers.Workers`."""
        return math.inf

    @abstractmethod
    def start(self) -> T:
        """Start the workers, unless they run already; raise ExecutionError when they do not come up."""

    def run(
        self,
        plan: Plan,
        requests: Mapping[int, Any],
        timeout_s: float,
        on_step: OnStep | None = None,
        on_save: OnSave | None = None,
    ) -> dict[int, Any]:
        """See `piper_runtime.launch.ground.workers.Workers`."""
        if len(requests) > self.world:
            raise ExecutionError(
                f"the plan has {len(requests)} ranks, this pool has workers for {self.world}; make a larger pool"
            )
        progress = Progress(plan, on_step, on_save, first_step(requests))
        try:
            team = self.start()
            team.send(requests)
            return Watch(plan, team, len(requests), timeout_s).collect(progress)
        except KeyboardInterrupt as e:
            reports = self._finished_early(plan, len(requests), progress)
            self._end_team()
            if reports:
                raise Interrupted(reports) from e
            raise
        except BaseException:
            self._end_team()
            raise

    def _finished_early(self, plan: Plan, world: int, progress: Progress) -> dict[int, Any]:
        """Return the results of an interrupted run whose ranks end it together, after a step.

        The result is empty if they cannot, or do not within some steps; another interrupt goes through.
        """
        if self._team is None or progress.latest is None:
            return {}
        step_s = progress.latest.step_s
        ahead = 2 + math.ceil(NOTICE_S / max(step_s, 1e-6))
        try:
            if not self._team.finish_early(world, ahead):
                return {}
            return Watch(plan, self._team, world, PATIENCE_S + (ahead + 2) * step_s).collect(
                progress
            )
        except (PiperError, KeyboardInterrupt):  # only the interrupt matters
            return {}

    def _keep(self, team: T) -> T:
        """Keep a team that is coming up, so that it is ended whatever happens from now on."""
        self._team, self._finalizer = team, weakref.finalize(self, team.end)
        return team

    def _end_team(self) -> None:
        if self._team is not None:
            self._team.end()
        if self._finalizer is not None:
            self._finalizer.detach()  # not before: what an interrupt leaves is ended when Python exits
        self._team = self._finalizer = None
