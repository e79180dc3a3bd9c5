"""Define the interface of all workers, and the description of a way to start them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from piper_ir.plan.plan import Plan
from piper_runtime.launch.ground.progress import OnSave, OnStep

Launcher = Literal["ray", "processes", "inline", "emulated"]


class Workers(Protocol):
    """Run up to `world` ranks, for any number of runs, one at a time."""

    world: int

    def run(
        self,
        plan: Plan,
        requests: Mapping[int, Any],
        timeout_s: float,
        on_step: OnStep | None = None,
        on_save: OnSave | None = None,
    ) -> dict[int, Any]:
        """Give every rank its request (see `piper_runtime.launch.worker.worker.perform`) and collect the answers.

        On any failure, and on an interrupt, all workers are ended first. `on_step` is called with steps if the requests
        say `stream`, `on_save` with the ranks' reports on files of checkpoints.
        """

    def close(self) -> None:
        """End all workers; a later run starts new ones."""

    def room(self) -> float:
        """Return for how many ranks there is room now; infinite if nobody knows."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


def _nothing() -> None:
    """Check nothing, for launchers that need nothing but this machine."""


@dataclass(frozen=True)
class LauncherKind:
    """Describe a way to start workers.

    Attributes:
        about: a description for messages.
        open: starts workers, given their number, the address of a cluster, and the number of spare ranks; None if ranks
            run in this process.
        check: raises ExecutionError if workers visibly cannot be started.
        on_clusters: whether workers may run on other machines, so that it takes an address and keeps room for spare
            ranks.
        joins: whether it takes the processes that torchrun has started.
    """

    about: str
    open: Callable[[int, str, int], Workers] | None
    check: Callable[[], None] = _nothing
    on_clusters: bool = False
    joins: bool = False
