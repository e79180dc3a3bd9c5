"""List the ways to start workers, and start the workers of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from piper_ir.ground.errors import ExecutionError
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.launch.ground.workers import LauncherKind, Workers


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
    "CLUSTER`, or piper.execute(cluster=...)"
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


@contextmanager
def workers_of(options: RunOptions, world: int) -> Iterator[Workers | None]:
    """Yield the workers of a run: the given ones, or some of its own; None if ranks run in this process."""
    pool = options.pool
    if launcher_kind(options.launcher).open is None:
        yield None
    elif pool is not None:
        size = pool.world
        try:
            yield pool
        finally:
            if pool.world != size:
                # The run went on with fewer ranks; the caller chooses the next run's number.
                pool.close()
                pool.world = size
    else:
        with open_pool(
            options.launcher, world, cluster=options.cluster, spares=options.spares
        ) as own:
            yield own
