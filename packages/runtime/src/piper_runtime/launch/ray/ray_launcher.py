"""Run one Ray actor per rank: place them, bring them requests, and watch them."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piper_ir.ground.errors import ExecutionError, RankError
from piper_ir.plan.plan import Plan
from piper_ir.tools import ray_reason
from piper_runtime.engine.streams import HEART_SLOTS
from piper_runtime.launch.ground.environment import check_environments, environment
from piper_runtime.launch.ground.progress import OnSave, OnStep
from piper_runtime.launch.ground.report import aligned
from piper_runtime.launch.ground.watch import LOADING_HEART, STARTUP_S, TICK_S
from piper_runtime.launch.processes.pool import TeamPool
from piper_runtime.launch.ray.ray_actor import OWN_DEVICE, RankActor, pack
from piper_runtime.launch.ray.ray_cluster import RayLink, connect, silence
from piper_runtime.launch.ray.ray_placement import RankHost, SpareRoom, await_room, place_ranks
from piper_runtime.rank.values import device
from piper_runtime.transport.gloo import LOOPBACK
from piper_runtime.transport.transport import SHARED_DEVICE

LOOK_AT_RAY_S = 1.0
"""The seconds between two looks at Ray's own processes."""
GONE_S = 5.0
"""The seconds that killed actors of this machine may take to be gone."""
CLOCK_SAMPLES = 9


@dataclass
class _Team:
    """Hold running actors, by rank; `fault` is asked every LOOK_AT_RAY_S which of Ray's own processes has died.

    The placement group ends with the team unless the pool keeps it (`kept`).
    """

    ray: Any
    fault: Callable[[], str]
    group: Any
    places: list[RankHost]
    kept: bool = False
    actors: list[Any] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    hearts: dict[str, memoryview] = field(default_factory=dict)
    calls: dict[Any, int] = field(default_factory=dict)
    looks: dict[Any, int] = field(default_factory=dict)
    looked: dict[int, float] = field(default_factory=dict)
    deaths: dict[int, str] = field(default_factory=dict)
    look_at: float = 0.0
    ray_at: float = 0.0
    broken: bool = False
    shared: str = field(default_factory=lambda: f"piper-{uuid.uuid4().hex}")

    def send(self, requests: Mapping[int, Any]) -> None:
        """Give every rank its request; data that several ranks share goes to the object store once."""
        self.hearts.clear()
        stored: dict[
            int, Any
        ] = {}  # by identity: a role's ranks share their request, all roles the plan
        packed = {id(r): pack(r) for r in {id(r): r for r in requests.values()}.values()}
        for body, blobs in packed.values():
            for blob in (body, *blobs):
                if id(blob) not in stored:
                    stored[id(blob)] = self.ray.put(blob)
        for rank, request in requests.items():
            body, blobs = packed[id(request)]
            self.calls[
                self.actors[rank].perform.remote(*(stored[id(b)] for b in (body, *blobs)))
            ] = rank

    def wait(self, ranks: Collection[int], seconds: float) -> list[tuple[int, Any]]:
        """Return messages as `WatchedTeam.wait` does; raise ExecutionError when Ray itself has died."""
        if time.monotonic() >= self.ray_at:
            self._check_ray()
        if time.monotonic() >= self.look_at:
            self.look_at = time.monotonic() + TICK_S
            for rank in set(ranks) - set(self.looks.values()):
                self.looks[self.actors[rank].look.remote()] = rank
                self.looked[rank] = time.monotonic()
        calls = [call for call, rank in self.calls.items() if rank in ranks]
        self.ray.wait([*calls, *self.looks], num_returns=1, timeout=seconds)
        # Looks first: messages of a rank before its answer come before it.
        said = [m for look in self._ready(self.looks) for m in self._looked(look)]
        return said + [m for call in self._ready(calls) for m in self._answered(call)]

    def _check_ray(self) -> None:
        """Raise ExecutionError when Ray itself has died, which would otherwise end this process after a minute."""
        self.ray_at = time.monotonic() + LOOK_AT_RAY_S
        if problem := self.fault():
            self.broken = True
            raise RankError(
                f"{problem}, so the run was ended. Look whether somebody ended Ray or the machine ran out of "
                f"memory (dmesg), and start the run again"
            )

    def _ready(self, refs: Collection[Any]) -> list[Any]:
        ready: list[Any] = (
            self.ray.wait(list(refs), num_returns=len(refs), timeout=0)[0] if refs else []
        )
        return ready

    def _looked(self, look: Any) -> list[tuple[int, Any]]:
        rank = self.looks.pop(look)
        try:
            hearts, said = self.ray.get(look)
        except self.ray.exceptions.RayError:  # its call says so too, and that counts
            return []
        self.hearts[self.places[rank].node] = memoryview(hearts).cast("q")
        return [(rank, self._aligned(rank, m)) for m in pickle.loads(said)]

    def _answered(self, call: Any) -> list[tuple[int, Any]]:
        rank = self.calls.pop(call)
        # A look under way may have taken the last messages.
        looks = [look for look, r in self.looks.items() if r == rank]
        if looks:
            self.ray.wait(looks, num_returns=1, timeout=GONE_S)
        before = [m for look in self._ready(looks) for m in self._looked(look)]
        try:
            said = pickle.loads(self.ray.get(call))
        except self.ray.exceptions.RayError as e:
            self._check_ray()
            self.deaths[rank] = _cause(e)
            return [*before, *self._last_look(rank), (rank, None)]
        return before + [(rank, self._aligned(rank, m)) for m in said]

    def _last_look(self, dead: int) -> list[tuple[int, Any]]:
        """Learn a dead rank's last heart from a living rank of its node, and return that one's messages.

        The dead rank's own messages since the last look are lost, so that a run may repeat the steps since then.
        """
        node = self.places[dead].node
        living = [
            r for r, place in enumerate(self.places) if place.node == node and r not in self.deaths
        ]
        if not living:
            return []
        look = self.actors[living[0]].look.remote()
        self.looks[look] = living[0]
        self.ray.wait([look], num_returns=1, timeout=GONE_S)
        return [m for ref in self._ready([look]) for m in self._looked(ref)]

    def _aligned(self, rank: int, message: Any) -> Any:
        clock = self.clocks.get(self.places[rank].node)
        return message if clock is None else aligned(message, *clock)

    def heart(self, rank: int) -> Sequence[int]:
        """Return a rank's heart as of the last look at its node."""
        beats = self.hearts.get(self.places[rank].node)
        return (
            LOADING_HEART if beats is None else beats[rank * HEART_SLOTS : (rank + 1) * HEART_SLOTS]
        )

    def exit_reason(self, rank: int) -> str:
        return self.deaths.get(rank, "has ended")

    def node(self, rank: int) -> str:
        return f"node {self.places[rank].name}"

    def silent(self, seconds: float) -> list[int]:
        before = time.monotonic() - seconds
        return [
            r
            for r in self.looks.values()
            if self.looked.get(r, before) < before and not self.places[r].here
        ]

    def ask(self, what: str, refs: Mapping[Any, int]) -> dict[int, Any]:
        """Return the answers of starting actors; raise ExecutionError with the rank of one that does not answer."""
        answers = {}
        for ref, rank in refs.items():
            try:
                answers[rank] = self.ray.get(ref, timeout=STARTUP_S)
            except self.ray.exceptions.GetTimeoutError:
                raise ExecutionError(
                    f"rank {rank} on {self.node(rank)} did not {what} within {STARTUP_S:.0f} s"
                ) from None
            except self.ray.exceptions.RayError as e:
                raise ExecutionError(
                    f"rank {rank} on {self.node(rank)} could not {what}: {_cause(e)}"
                ) from e
        return answers

    def finish_early(self, ranks: int, steps: int) -> bool:
        """Return False, since an interrupt at a terminal ends Ray's own processes too, and with them the actors."""
        return False

    def end(self) -> None:
        """Kill every actor, and wait until the actors of this machine are gone."""
        if not self.ray.is_initialized():
            return
        if self.broken:
            self._end_by_hand()
            return
        with suppress(self.ray.exceptions.RayError):  # a cluster that is gone has nothing left
            for actor in self.actors:
                self.ray.kill(actor)
            if not self.kept:
                self.ray.util.remove_placement_group(self.group)
        deadline = time.monotonic() + GONE_S
        here = {p for p, place in zip(self.pids, self.places) if place.here}
        while time.monotonic() < deadline and any(os.path.exists(f"/proc/{p}") for p in here):
            time.sleep(0.01)
        self.actors.clear()
        Path(tempfile.gettempdir(), self.shared).unlink(
            missing_ok=True
        )  # there only if the actors did not come up

    def _end_by_hand(self) -> None:
        """End the actors of this machine without Ray, which would wait for its dead processes."""
        for pid, place in zip(self.pids, self.places):
            if place.here:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.actors.clear()


class RayPool(TeamPool[_Team]):
    """Run Ray actors with one CPU and one thread each; see `TeamPool`.

    `cluster` is as for `piper_runtime.launch.ray.ray_cluster.connect`; a Ray that was started for this pool ends with
    it. A rank gets a GPU if the cluster has as many as ranks, unless runs are to take the CPU. The output
    of workers stays in Ray's logs. The pool keeps room for `spares` more ranks, which take the places of ranks that
    die.
    """

    def __init__(
        self,
        world: int,
        *,
        cluster: str = "auto",
        spares: int = 0,
    ):
        super().__init__(world)
        self._cluster = cluster
        self._link: RayLink | None = None
        self._had_gpus = False
        self._spare_room = SpareRoom(spares) if spares else None

    def close(self) -> None:
        """End all actors, and Ray if it was started for them."""
        super().close()
        if self._link is not None:
            if self._spare_room is not None:
                self._spare_room.release(self._link.ray)
            self._link.close()
        self._link = None

    def room(self) -> float:
        if self._link is None:
            return super().room()
        return await_room(
            self._link.ray,
            self.world,
            self._gpus_per_rank(self._link.ray),
            silence,
            self._spare_room,
        )

    def _gpus_per_rank(self, ray: Any) -> int:
        # A cluster that has lost a node may have too few for all ranks; the remaining ranks still need theirs.
        self._had_gpus |= bool(gpus_per_rank(ray.cluster_resources(), self.world))
        return int(self._had_gpus and device.default != "cpu")

    def _end_team(self) -> None:
        team = self._team
        super()._end_team()
        if team is None:
            return
        if self._spare_room is not None:
            self._spare_room.dead |= {team.places[rank].bundle for rank in team.deaths}
        if team.broken and self._link is not None:  # a next run needs another Ray
            self._link.close()
            if self._spare_room is not None:
                self._spare_room.release(self._link.ray)
            self._link = None

    def run(
        self,
        plan: Plan,
        requests: Mapping[int, Any],
        timeout_s: float,
        on_step: OnStep | None = None,
        on_save: OnSave | None = None,
    ) -> dict[int, Any]:
        try:
            return super().run(plan, requests, timeout_s, on_step, on_save)
        except Exception as e:
            if self._link is not None and isinstance(e, self._link.ray.exceptions.RayError):
                raise RankError(f"Ray {_cause(e)}") from e
            raise

    def start(self) -> _Team:
        """Start actors; raise ExecutionError also when there is no Ray, no room, or when nodes differ."""
        if self._team is not None:
            return self._team
        if self._link is None:
            self._link = connect(
                self._cluster,
                self.world + (self._spare_room.ranks if self._spare_room is not None else 0),
            )
        ray, gpus = self._link.ray, self._gpus_per_rank(self._link.ray)
        place = place_ranks if self._spare_room is None else self._spare_room.place
        group, places = place(ray, self.world, gpus)
        team = self._keep(
            _Team(ray, self._link.fault, group, places, kept=self._spare_room is not None)
        )
        try:
            _bring_up(team, gpus)
        except BaseException:
            self._end_team()
            raise
        return team


def _bring_up(team: _Team, gpus: int) -> None:
    """Create the actors, compare their software, and connect them."""
    ray, world = team.ray, len(team.places)
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    # A look must be answered while a request is performed, and in spite of one that hangs.
    options = dict(
        num_cpus=1,
        num_gpus=gpus,
        max_concurrency=4,
        runtime_env={"env_vars": _variables(gpus)},
    )
    for rank, place in enumerate(team.places):
        chosen = strategy(
            team.group,
            placement_group_bundle_index=place.bundle,
            placement_group_capture_child_tasks=False,
        )
        actor = ray.remote(RankActor).options(scheduling_strategy=chosen, **options)
        team.actors.append(actor.remote(rank, world, team.shared))
    descriptions = team.ask("start", {a.describe.remote(): r for r, a in enumerate(team.actors)})
    team.pids = [descriptions[r][0] for r in range(world)]
    first_of_node = {place.node: rank for rank, place in reversed(list(enumerate(team.places)))}
    team.ask("clear up", {team.actors[r].forget_file.remote(): r for r in first_of_node.values()})
    check_environments(
        environment(),
        f"this process on {socket.gethostname()}",
        {team.node(r): descriptions[r][1] for r in descriptions},
    )
    _rendezvous(team, alone=len(first_of_node) == 1)
    for node, rank in first_of_node.items():
        if not team.places[rank].here:
            team.clocks[node] = _clock_ahead(ray, team.actors[rank])


def _rendezvous(team: _Team, *, alone: bool) -> None:
    """Join all ranks in a store on rank 0's node; if `alone`, all are on one node, and loopback is enough."""
    interfaces = [LOOPBACK if alone else place.address for place in team.places]
    port = team.ask("open a store", {team.actors[0].host_store.remote(interfaces[0]): 0})[0]
    joins = {
        a.connect.remote(interfaces[0], port, interfaces[r]): r for r, a in enumerate(team.actors)
    }
    team.ask(f"reach rank 0 at {interfaces[0]}:{port}", joins)


def _clock_ahead(ray: Any, actor: Any) -> tuple[float, float]:
    """Return the seconds that an actor's clock is ahead of ours, and the error: half of the quickest round trip."""
    samples = []
    for _ in range(CLOCK_SAMPLES):
        start = time.perf_counter()
        theirs = ray.get(actor.clock.remote())
        end = time.perf_counter()
        samples.append(((end - start) / 2, theirs - (start + end) / 2))
    error, ahead = min(samples)
    return ahead, error


def gpus_per_rank(resources: Mapping[str, float], world: int) -> int:
    """Return how many GPUs each rank asks Ray for: one if the cluster has that many and runs may take them."""
    return int(device.default != "cpu" and resources.get("GPU", 0) >= world)


def _variables(gpus: int) -> dict[str, str]:
    """Return the environment of actors, with this process's paths outside of its Python installation."""
    installed = (sys.prefix, sys.base_prefix)
    paths = [os.path.abspath(p) for p in sys.path]
    ours = [p for p in paths if not p.startswith(installed)]
    variables = {
        "PYTHONPATH": os.pathsep.join(ours),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    wanted = {SHARED_DEVICE: os.environ[SHARED_DEVICE]} if SHARED_DEVICE in os.environ else {}
    return variables | wanted | ({OWN_DEVICE: "1"} if gpus else {})


def _cause(error: Exception) -> str:
    """Return Ray's reason for a failed call, in few words."""
    # An actor may be "unavailable" before Ray knows that it is dead; it is never used again.
    actor = any(
        kind.__name__ in ("RayActorError", "OutOfMemoryError") for kind in type(error).__mro__
    )
    reason = ray_reason(error)
    return f"has died ({reason})" if actor else f"has failed: {reason}"
