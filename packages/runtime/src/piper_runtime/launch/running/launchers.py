"""List the ways to start workers, and define the interface that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from piper_ir.ground.errors import ExecutionError
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


def _check_ray() -> None:
    from piper_runtime.launch.ray.ray_cluster import check_ray

    check_ray()


def _ray(world: int, cluster: str, spares: int) -> Workers:
    from piper_runtime.launch.ray.ray_launcher import RayPool

    return RayPool(world, cluster=cluster, spares=spares)


def _processes(world: int, cluster: str, spares: int) -> Workers:
    from piper_runtime.launch.processes.processes import Pool
    from piper_runtime.launch.torchrun import torchrun

    return torchrun.TorchrunPool(world) if torchrun.is_active() else Pool(world)


@dataclass(frozen=True)
class LauncherKind:
    """Describe a way to start workers.

    Attributes:
        about: a description for messages.
        open: starts workers, given their number, the address of a cluster, and the number of spare ranks; None if ranks
            run in this process.
        check: raises ExecutionError if workers visibly cannot be started.
        on_clusters: whether workers may run on other machines, so that it takes an address and spares.
        joins: whether it takes the processes that torchrun has started.
    """

    about: str
    open: Callable[[int, str, int], Workers] | None
    check: Callable[[], None] = _nothing
    on_clusters: bool = False
    joins: bool = False


LAUNCHERS = {
    "ray": LauncherKind(
        "one actor per rank, on this machine or a cluster", _ray, _check_ray, on_clusters=True
    ),
    "processes": LauncherKind(
        "one process per rank on this machine, or the processes that torchrun has started",
        _processes,
        joins=True,
    ),
    "inline": LauncherKind("all ranks in this process", None),
}
"""The launchers by name."""
ELSEWHERE = {
    "emulated": 'launcher "emulated" needs the durations of a cluster: `piper run --emulate '
    "CLUSTER`, or "
    "piper.execute(cluster=...)"
}
"""The launchers that only `piper.execute` has, each with a message for callers that ask for it elsewhere."""


def launcher_kind(launcher: str) -> LauncherKind:
    """Return the row of a launcher; raise ExecutionError when there is none of this name."""
    kind = LAUNCHERS.get(launcher)
    if kind is None:
        known = ", ".join(f'"{name}" ({kind.about})' for name, kind in LAUNCHERS.items())
        raise ExecutionError(
            ELSEWHERE.get(launcher, f"launcher {launcher!r} is not known; use {known}")
        )
    return kind


def open_pool(launcher: str, world: int, *, cluster: str = "auto", spares: int = 0) -> Workers:
    """Return workers of a launcher other than "inline"; `cluster` and `spares` are for "ray", as in `RayPool`."""
    kind = launcher_kind(launcher)
    if kind.open is None:
        raise ExecutionError(f'launcher "{launcher}" has no workers of its own')
    return kind.open(world, cluster, spares)
