"""The ways to start workers, and the one interface that they share."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from piper_ir.errors import ExecutionError
from piper_ir.plan import Plan
from piper_runtime.launch.progress import OnStep

Launcher = Literal["ray", "processes", "inline", "emulated"]
LAUNCHERS = {
    "ray": "one actor per rank, on this machine or a cluster",
    "processes": "one process per rank on this machine, or the processes that torchrun has started",
    "inline": "all ranks in this process",
}
"""Name -> what it is."""


class Workers(Protocol):
    """Workers for up to `world` ranks, for any number of runs, one at a time."""

    world: int

    def run(self, plan: Plan, requests: Mapping[int, Any], timeout_s: float, on_step: OnStep | None = None) -> dict[int, Any]:
        """Give every rank its request and collect the answers.

        Which requests there are says `piper_runtime.launch.worker.perform`.

        On any failure, and on an interrupt, all workers are ended first. `on_step` hears of steps if the requests say
        `stream`.
        """

    def close(self) -> None:
        """End all workers; a later run starts new ones."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...


def check_launcher(launcher: str) -> None:
    """ExecutionError when there is no launcher of this name."""
    known = ", ".join(f'"{name}" ({about})' for name, about in LAUNCHERS.items())
    if launcher == "emulated":
        raise ExecutionError(
            'launcher "emulated" needs the durations of a cluster: `piper run --emulate CLUSTER`, or piper.execute(cluster=...)'
        )
    if launcher not in LAUNCHERS:
        raise ExecutionError(f"launcher {launcher!r} is not known; use {known}")


def check_startable(launcher: str) -> None:
    """Raise ExecutionError when a launcher is not known, or cannot start workers here.

    The latter is looked at as far as it is found out without starting.
    """
    check_launcher(launcher)
    if launcher == "ray":
        from piper_runtime.launch.ray_cluster import check_ray

        check_ray()


def open_pool(launcher: str, world: int, *, cluster: str = "auto") -> Workers:
    """Return workers of a launcher other than "inline".

    `cluster`: for "ray", see `piper_runtime.launch.ray_launcher.RayPool`.
    """
    check_launcher(launcher)
    if launcher == "ray":
        from piper_runtime.launch.ray_launcher import RayPool

        return RayPool(world, cluster=cluster)
    from piper_runtime.launch import torchrun
    from piper_runtime.launch.processes import Pool

    if launcher != "processes":
        raise ExecutionError(f'launcher "{launcher}" has no workers of its own')
    return torchrun.TorchrunPool(world) if torchrun.is_active() else Pool(world)
