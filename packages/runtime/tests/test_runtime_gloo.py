"""Gloo's binding gathers a few numbers without receives that spin."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from piper_runtime.profile.measured_plans import channels_plan
from piper_runtime.rank.binding.rank import BoundComm
from piper_runtime.transport import gloo
from piper_runtime.transport.gloo import GlooCommunicators

RANKS = 3


class Noting:
    """Stand before a process group, and note which of its methods are called."""

    def __init__(self, group: Any) -> None:
        self._group, self.called = group, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.called.add(name)
        return getattr(self._group, name)


def together(work: Callable[[int, GlooCommunicators], Any]) -> list[Any]:
    """Return what each rank makes, each in a thread of its own with communicators of its own."""
    store = dist.HashStore()
    held = [
        GlooCommunicators(dist.PrefixStore("ranks", store), rank) for rank in range(RANKS)
    ]  # until all are done

    def one(rank: int) -> Any:
        ranks = held[rank]
        ranks.connect(channels_plan(RANKS, (tuple(range(RANKS)),)))
        return work(rank, ranks)

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(one, range(RANKS)))


def gathered(numbers: int) -> list[tuple[torch.Tensor, set[str]]]:
    """Return what each rank has after a gather of as many numbers from each, and what it asked of gloo."""

    def work(rank: int, ranks: GlooCommunicators) -> tuple[torch.Tensor, set[str]]:
        key = ranks._keys["0,1,2"]
        ranks._groups[key] = noting = Noting(ranks._groups[key])
        given, got = torch.full((numbers,), float(rank)), torch.empty(RANKS, numbers)
        ranks.bind(
            BoundComm("all_gather", "0,1,2", tuple(range(RANKS)), lambda: given, lambda: got)
        )()
        return got, noting.called

    return together(work)


SPINNING = {"recv", "send"}
"""The methods after which gloo's thread spins until a message comes."""


def test_small_gathers_do_not_spin_and_large_ones_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = gloo.COPIED // (RANKS * 4)
    for numbers, called in ((1, {"alltoall_base"}), (few, {"alltoall_base"}), (few + 1, SPINNING)):
        for got, asked in gathered(numbers):
            assert (
                torch.equal(got, torch.arange(float(RANKS)).unsqueeze(1).expand(RANKS, numbers))
                and asked == called
            ), numbers
    monkeypatch.setattr(gloo, "COPIED", 0)
    assert all(asked == SPINNING for _, asked in gathered(1)), "the check sees a gather that spins"


def test_ranks_add_up_their_own_numbers_after_a_plan_of_fewer_ranks() -> None:
    """Processes stay between runs, and so does their store: the sums of an earlier run are not those of this one."""
    store = dist.HashStore()
    communicators = [GlooCommunicators(store, rank) for rank in range(4)]
    for ranks in ((0, 1), (0, 1, 2, 3), (0, 1), (0, 1, 2, 3)):
        meetings = [communicators[rank].meeting(len(ranks), ranks) for rank in ranks]
        for step in range(3):
            for rank, meeting in zip(ranks, meetings, strict=True):
                meeting.begin()
                meeting.give(torch.tensor([1.0 + rank, 10.0 * step], dtype=torch.float64))
            expected = [sum(1.0 + rank for rank in ranks), 10.0 * step * len(ranks)]
            assert [meeting.total().tolist() for meeting in meetings] == [expected] * len(ranks)
