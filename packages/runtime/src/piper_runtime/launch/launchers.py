"""List the ways to start workers, and define the interface that they share."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from piper_ir.errors import ExecutionError
from piper_ir.plan import Plan
from piper_runtime.launch.progress import OnSave, OnStep

Launcher = Literal["ray", "processes", "inline", "emulated"]
LAUNCHERS = {
    "ray": "one actor per rank, on this machine or a cluster",
    "processes": "one process per rank on this machine, or the processes that torchrun has started",
    "inline": "all ranks in this process",
}
"""The launchers by name, each with a description."""


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
        """Give every rank its request (see `piper_runtime.launch.worker.perform`) and collect the answers.

        On any failure, and on an interrupt, all workers are ended first. `on_step` is called with steps if the requests
        say `stream`, `on_save` with what ranks write of checkpoints.
        """

    def close(self) -> None:
        """End all workers; a later run starts new ones."""

    def room(self) -> float:
        """Return for how many ranks there is room now; infinite where nobody knows."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...


def check_launcher(launcher: str) -> None:
    """Raise ExecutionError when there is no launcher of this name."""
    known = ", ".join(f'"{name}" ({about})' for name, about in LAUNCHERS.items())
    if launcher == "emulated":
        raise ExecutionError(
            'launcher "emulated" needs the durations of a cluster: `piper run --emulate CLUSTER`, or piper.execute(cluster=...)'
        )
    if launcher not in LAUNCHERS:
        raise ExecutionError(f"launcher {launcher!r} is not known; use {known}")


def check_startable(launcher: str) -> None:
    """Raise ExecutionError when a launcher is unknown, or visibly cannot start workers here; start nothing."""
    check_launcher(launcher)
    if launcher == "ray":
        from piper_runtime.launch.ray_cluster import check_ray

        check_ray()


def open_pool(launcher: str, world: int, *, cluster: str = "auto", spares: int = 0) -> Workers:
    """Return workers of a launcher other than "inline"; `cluster` and `spares` are for "ray", as in `RayPool`."""
    check_launcher(launcher)
    if launcher == "ray":
        from piper_runtime.launch.ray_launcher import RayPool

        return RayPool(world, cluster=cluster, spares=spares)
    from piper_runtime.launch import torchrun
    from piper_runtime.launch.processes import Pool

    if launcher != "processes":
        raise ExecutionError(f'launcher "{launcher}" has no workers of its own')
    return torchrun.TorchrunPool(world) if torchrun.is_active() else Pool(world)
