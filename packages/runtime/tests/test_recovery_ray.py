"""Ray starts failed runs again, on bundles that were kept for it, or with fewer ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packages.runtime.tests.chains import chain
from packages.runtime.tests.handmade import CODE, adamw, batch
from packages.runtime.tests.instants import pids_alive
from packages.runtime.tests.kills import read_all
from piper_ir.ground.errors import PiperWarning
from piper_runtime import Checkpoints, execute
from piper_runtime.launch.ray import ray_placement
from piper_runtime.launch.ray.ray_launcher import RayPool
from piper_runtime.launch.ray.ray_placement import RankHost, SpareRoom, await_room, free_ranks
from piper_runtime.launch.running.survivors import IN_MEMORY, PREFIX
from piper_runtime.rank.values import device


def killed_in(step: int, folder: Path) -> Callable[[int, range], Any]:
    """Return a batch function that kills one process in this step, once; what a rank said long before is known."""

    def killing(now: int, rows: range) -> Any:
        time.sleep(0.05)
        if now == step:
            try:
                (folder / "killed").touch(exist_ok=False)
            except FileExistsError:
                return batch(now, rows)
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return batch(now, rows)

    return killing


class Cluster:
    """What Ray knows of its nodes: the free CPUs and GPUs of each, as they are at one look after another."""

    def __init__(self, *looks: dict[str, dict[str, float]]) -> None:
        self.looks = list(looks)
        self._private = SimpleNamespace(state=self)

    def nodes(self) -> list[dict[str, Any]]:
        now = self.looks[0]
        return [
            {"NodeID": n, "Alive": n in now, "NodeManagerAddress": n, "NodeManagerPort": 1}
            for n in "abc"
        ]

    def available_resources_per_node(self) -> dict[str, dict[str, float]]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


def test_room_is_counted_in_whole_ranks_that_living_nodes_have_free() -> None:
    ray = Cluster({"a": {"CPU": 3.5, "GPU": 2.0}, "b": {"CPU": 2.0}})
    assert free_ranks(ray, 0) == 5 and free_ranks(ray, 1) == 2


def test_room_is_what_is_free_when_killed_actors_have_given_theirs_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_placement, "PLACE_S", 0.5)
    monkeypatch.setattr(ray_placement, "LOOK_S", 0.01)
    answers: Any = lambda host, port: None  # noqa: E731 - typed Any, as a def cannot be
    late = Cluster(
        {"a": {}, "b": {"CPU": 2.0}},
        {"a": {}, "b": {"CPU": 2.0}},
        {"a": {"CPU": 2.0}, "b": {"CPU": 2.0}},
    )
    assert await_room(late, 4, 0, answers) == 4
    assert await_room(Cluster({"a": {"CPU": 3.0}}), 4, 0, answers) == 3, "others have the rest"
    room = SpareRoom(1)
    room._group, room._hosts = (
        "kept",
        [RankHost(b, node, node, node, False) for b, node in enumerate("abb")],
    )
    assert await_room(Cluster({"b": {"CPU": 1.0}}), 4, 0, answers, room) == 3, (
        "two bundles of the group and one beside it"
    )


def test_a_node_that_does_not_answer_is_waited_for_until_ray_gives_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_placement, "LOOK_S", 0.01)
    both = {"a": {"CPU": 2.0}, "b": {"CPU": 2.0}}
    ray, looks = Cluster(both), iter(range(5))

    def nodes() -> list[dict[str, Any]]:
        if next(looks, None) is None:
            ray.looks = [{"a": {"CPU": 2.0}}]
        return Cluster.nodes(ray)

    monkeypatch.setattr(ray, "nodes", nodes)
    assert await_room(ray, 2, 0, lambda host, port: "no route" if host == "b" else None) == 2
    assert next(looks, None) is None, (
        "without the wait it would count as room for four, and take ranks"
    )


def test_a_pool_whose_ranks_had_devices_looks_for_room_with_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "default", "cuda")
    pool = RayPool(4)
    gpus = iter((4.0, 2.0))
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 64.0, "GPU": next(gpus)})
    assert pool._gpus_per_rank(ray) == 1
    assert pool._gpus_per_rank(ray) == 1, (
        "a node was lost with two of them: 62 CPUs are no room for four ranks"
    )


def test_a_spare_bundle_takes_the_place_of_one_whose_rank_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = [RankHost(b, node, node, node, False) for b, node in enumerate(("a", "a", "b", "b"))]
    alive, removed, asked = {"a", "b"}, list[str](), list[int]()

    def place(ray: Any, world: int, gpus: int) -> Any:
        asked.append(world)
        return f"group {len(asked)}", [h for h in hosts if h.node in alive][:world]

    monkeypatch.setattr(ray_placement, "place_ranks", place)
    ray: Any = SimpleNamespace(
        nodes=lambda: [{"NodeID": n, "Alive": n in alive} for n in "ab"], is_initialized=lambda: True,
        exceptions=SimpleNamespace(RayError=OSError), util=SimpleNamespace(remove_placement_group=removed.append),
    )  # fmt: skip
    room = SpareRoom(1)

    def bundles() -> list[int]:
        return [host.bundle for host in room.place(ray, 2, 0)[1]]

    assert bundles() == [0, 1] and asked == [3]
    room.dead = {0}
    assert bundles() == [1, 2], "the spare one"
    room.dead = {0, 1}
    assert bundles() == [0, 1], "too few are unhurt: the process died, its node lives"
    assert asked == [3] and removed == []
    alive.discard("a")
    assert bundles() == [2, 3] and asked == [3, 2] and removed == ["group 1"], (
        "a node is gone: room anew, without spares"
    )
    room.release(ray)
    assert removed == ["group 1", "group 2"]


@pytest.mark.long
def test_a_killed_actor_is_replaced_on_a_spare_bundle(ray_address: str, tmp_path: Path) -> None:
    plan, job = chain(pp=2, optimizer=adamw)
    with RayPool(2, cluster=ray_address, spares=1) as pool:
        pids = pool.start().pids
        with pytest.warns(
            PiperWarning, match=r"rank \d has died .*Restart 1 of 1: the run goes on with step [24]"
        ):
            found = execute(
                plan, CODE, replace(job, batch=killed_in(5, tmp_path)), steps=8, launcher="ray", pool=pool, restarts=1,
                checkpoint=Checkpoints(tmp_path / "saved", every=2, asynchronous=False),
            )  # fmt: skip
        assert not pids_alive(pids)
        assert 2 in {place.bundle for place in pool.start().places}
        last = pool.pids
    assert found.losses == pytest.approx(
        execute(plan, CODE, job, steps=8, launcher="inline").losses, rel=1e-9
    )
    assert len(found.restarts) == 1 and len(found.restarts[0].lost) == 1 and not pids_alive(last)
    assert read_all(tmp_path / "saved") == 3


@pytest.mark.long
def test_actors_go_on_from_host_snapshots(ray_address: str, tmp_path: Path) -> None:
    plan, job = chain(pp=1, dp=2, optimizer=adamw)
    saved = Checkpoints(tmp_path / "saved", every=100, snapshot=2)
    with (
        RayPool(2, cluster=ray_address) as pool,
        pytest.warns(PiperWarning, match=r"step 4, from the host snapshot of rank \d "),
    ):
        found = execute(
            plan, CODE, replace(job, batch=killed_in(5, tmp_path)), steps=8, launcher="ray", pool=pool, restarts=1,
            checkpoint=saved,
        )  # fmt: skip
    assert found.losses == pytest.approx(
        execute(plan, CODE, job, steps=8, launcher="inline").losses, rel=1e-9
    )
    assert not list(IN_MEMORY.glob(f"{PREFIX}{os.getpid()}-*"))


@pytest.mark.long
def test_actors_go_on_with_fewer_ranks(ray_address: str, tmp_path: Path) -> None:
    plan, job = chain(pp=2, dp=2, microbatches=4, optimizer=adamw)
    fewer, _ = chain(pp=2, microbatches=8, optimizer=adamw)
    asked: list[int] = []
    with (
        RayPool(4, cluster=ray_address) as pool,
        pytest.warns(PiperWarning, match=r"goes on with step [24] on Mesh\(pp=2\)"),
    ):
        found = execute(
            plan, CODE, replace(job, batch=killed_in(5, tmp_path)), steps=8, launcher="ray", pool=pool, restarts=1,
            checkpoint=Checkpoints(tmp_path / "saved", every=2, asynchronous=False),
            replan=lambda devices: (asked.append(devices), (fewer, CODE))[1],
        )  # fmt: skip
        assert asked == [3] and pool.world == 4, "the pool has its size back"
    assert found.losses == pytest.approx(
        execute(plan, CODE, job, steps=8, launcher="inline").losses, rel=1e-9
    )
    assert found.restarts[0].ranks == 2


def killing_ray(step: int, folder: Path) -> Callable[[int, range], Any]:
    """Return a batch function that kills the raylet of its actor in this step, once."""

    def killing(now: int, rows: range) -> Any:
        time.sleep(0.05)
        if now == step:
            try:
                (folder / "killed").touch(exist_ok=False)
            except FileExistsError:
                return batch(now, rows)
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        return batch(now, rows)

    return killing


@pytest.mark.long
def test_a_run_goes_on_in_another_ray_when_its_own_has_died(tmp_path: Path) -> None:
    plan, job = chain(pp=2, optimizer=adamw)
    with (
        RayPool(2, cluster="local") as pool,
        pytest.warns(PiperWarning, match=r"Restart 1 of 1: the run goes on with step [24]"),
    ):
        found = execute(
            plan, CODE, replace(job, batch=killing_ray(5, tmp_path)), steps=8, launcher="ray", pool=pool, restarts=1,
            checkpoint=Checkpoints(tmp_path / "saved", every=2, asynchronous=False),
        )  # fmt: skip
    assert found.losses == pytest.approx(
        execute(plan, CODE, job, steps=8, launcher="inline").losses, rel=1e-9
    )
