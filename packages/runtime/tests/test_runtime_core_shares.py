"""Ranks on CPUs keep to cores of their own, and the threads that carry messages displace none that compute."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import batch
from piper_runtime.engine import core_shares as module
from piper_runtime.engine.core_shares import core_share, core_sharers
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.launch.worker.worker import WorkerContext
from piper_runtime.rank.values.device import CPU
from piper_runtime.transport.gloo import GlooCommunicators

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"),
    reason="the system does not let a process choose its cores",
)


class Cores:
    """Stand for a system with some usable cores, and keep what a process asks of it."""

    def __init__(self, usable: set[int]) -> None:
        self.usable, self.asked = usable, list[list[int]]()

    def sched_getaffinity(self, pid: int) -> set[int]:
        return self.usable

    def sched_setaffinity(self, pid: int, cores: list[int]) -> None:
        self.asked.append(list(cores))


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def shares(usable: set[int], world: int) -> list[list[int]]:
    """Return the cores of each rank, having checked that all of them are given back in the end."""
    found = []
    for rank in range(world):
        system = Cores(usable)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "os", system)
            patch.setattr(module, "usable_cores", lambda: len(usable))
            with core_share(CPU, rank, world) as own:
                assert own, "there are as many cores as ranks"
        share, back = system.asked
        assert back == sorted(usable)
        found.append(share)
    return found


@pytest.mark.usefixtures("one_thread")
@given(usable=st.sets(st.integers(0, 200), min_size=2, max_size=20), world=st.integers(2, 20))
def test_shares_have_each_core_once_and_are_equal(usable: set[int], world: int) -> None:
    world = min(world, len(usable))
    found = shares(usable, world)
    assert [core for share in found for core in share] == sorted(usable), (
        "no core is left, or in two shares"
    )
    sizes = {len(share) for share in found}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("kind", "world", "threads", "own"),
    [("cpu", 1, 1, True), ("cpu", 5, 1, False), ("cpu", 2, 3, True), ("cuda", 2, 1, True)],
    ids=["alone", "more ranks than cores", "more threads than cores", "on a device"],
)
def test_ranks_stay_where_they_are(
    kind: str, world: int, threads: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    system = Cores({0, 1, 2, 3})
    monkeypatch.setattr(module, "os", system)
    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with core_share(torch.device(kind), 0, world) as found:
        assert found == own
    assert not system.asked


@pytest.mark.usefixtures("one_thread")
def test_ranks_compute_where_a_sandbox_refuses_them_a_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    system = Cores({0, 1})
    monkeypatch.setattr(system, "sched_setaffinity", refused)
    monkeypatch.setattr(module, "os", system)
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    with core_share(CPU, 0, 2) as found:
        assert found, "there are as many cores as ranks"


def test_cores_are_divided_among_the_ranks_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two machines binds each rank to a core of its own, and the other lets its ranks run on both cores."""
    here = threading.local()
    monkeypatch.setattr(module, "os", SimpleNamespace(sched_getaffinity=lambda pid: here.cores))
    monkeypatch.setattr(module, "platform", SimpleNamespace(node=lambda: here.node))
    store = dist.HashStore()

    def joined(rank: int, place: tuple[str, set[int]]) -> WorkerContext:
        here.node, here.cores = place
        return WorkerContext(
            rank, *[cast(Any, None)] * 3, core_sharers=core_sharers(store, rank, len(places))
        )

    places = [("bound", {0}), ("bound", {1}), ("free", {0, 1}), ("free", {1, 0}), ("bound", {0, 1})]
    with ThreadPoolExecutor(len(places)) as pool:
        found = list(pool.map(joined, range(len(places)), places))
    assert [context.on_cores(5) for context in found] == [(0, 1), (0, 1), (0, 2), (1, 2), (0, 1)]
    assert found[2].on_cores(3) == (0, 1), "a plan of three ranks leaves the last of the team out"
    assert replace(found[2], core_sharers=None).on_cores(5) == (2, 5), (
        "processes of one launcher are on the same cores"
    )


@pytest.mark.usefixtures("one_thread")
def test_new_threads_stay_on_the_share_too() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("this machine has one core")
    with core_share(CPU, 1, 2), ThreadPoolExecutor(1) as pool:
        here, there = os.sched_getaffinity(0), pool.submit(os.sched_getaffinity, 0).result()
    assert here == there == set(sorted(before)[len(before) // 2 :])
    assert os.sched_getaffinity(0) == before


def test_each_rank_of_a_run_has_its_share(pool: Pool, tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("this machine has one core")

    def noted(step: int, rows: range) -> Any:
        (tmp_path / f"{rows.start}.json").write_text(json.dumps(sorted(os.sched_getaffinity(0))))
        return batch(step, rows)

    plan, job = chain(pp=1, dp=2, batch=noted, microbatches=1)
    run(plan, job, launcher="processes", pool=pool, steps=1)
    found = [json.loads(file.read_text()) for file in sorted(tmp_path.iterdir())]
    assert found == [cores[: len(cores) // 2], cores[len(cores) // 2 :]]


@pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH"),
    reason="the system has no policy for threads that displace no other",
)
def test_threads_that_read_sockets_displace_no_other() -> None:
    def policies() -> dict[int, int]:
        return {
            int(thread): os.sched_getscheduler(int(thread))
            for thread in os.listdir("/proc/self/task")
        }

    before = policies()
    ranks = GlooCommunicators(dist.HashStore(), 0)
    group = ranks.group("alone", [0])
    new = [policy for thread, policy in policies().items() if thread not in before]
    assert os.SCHED_BATCH in new, "gloo's thread for sockets"
    assert new.count(os.SCHED_OTHER) >= 1, "gloo's thread that sends is one as any other"
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    del group


@pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH"),
    reason="the system has no policy for threads that displace no other",
)
def test_a_system_that_allows_no_other_policy_still_has_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    group = GlooCommunicators(dist.HashStore(), 0).group("alone", [0])
    numbers = torch.ones(3)
    assert group.allreduce([numbers]).wait() and numbers.tolist() == [1.0] * 3
