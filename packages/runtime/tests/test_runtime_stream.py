"""from_stream: rows come from shards, a shard is read by one replica, and a resumed run goes on where the last one
ended."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import piper
from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import WIDTH
from piper_ir.ground.errors import JobError
from piper_runtime.data import StreamBatch, from_stream
from piper_runtime.data.from_stream import ShardLayout
from tests.helpers.cases import each_case

Sample = tuple[int, int]
SIZES = st.tuples(st.integers(1, 24), st.integers(1, 24))
"""Rows per step, and shards."""


def numbered(shard: int) -> Iterator[Sample]:
    """Yield (shard, number)."""
    return ((shard, n) for n in count())


def read(batch: StreamBatch, step: int, rows: range) -> list[Sample]:
    """Return (shard, number) of rows, as `numbered` made them."""
    shards, positions = batch(step, rows)
    return list(zip(shards.tolist(), positions.tolist(), strict=True))


@given(SIZES)
def test_shards_give_their_samples_in_order_and_equally_many(sizes: tuple[int, int]) -> None:
    rows, shards = sizes
    layout = ShardLayout(rows, shards)
    next_of = dict.fromkeys(range(shards), 0)
    for step in range(3 * shards):
        assert [layout.consumed(step, k) for k in range(shards)] == list(next_of.values())
        for row in range(rows):
            shard, number = layout.place(step, row)
            assert number == next_of[shard]
            next_of[shard] += 1
        given_so_far = (step + 1) * rows
        assert all(abs(n - given_so_far / shards) < rows + 1 for n in next_of.values())
    assert len(set(next_of.values())) == 1, "after a number of steps that the shards divide"


@given(SIZES, st.integers(1, 6))
def test_a_shard_belongs_to_one_replica_of_those_that_divide_rows_and_shards(
    sizes: tuple[int, int], replicas: int
) -> None:
    rows, shards = sizes[0] * replicas, sizes[1] * replicas
    layout = ShardLayout(rows, shards)
    owner: dict[int, int] = {}
    for step in range(2 * shards):
        for row in range(rows):
            shard, _ = layout.place(step, row)
            assert owner.setdefault(shard, row * replicas // rows) == row * replicas // rows
    assert len(owner) == shards


def test_negative_control_row_mod_shards_gives_a_shard_to_several_replicas() -> None:
    owners = defaultdict(set)
    for row in range(8):
        owners[row % 4].add(row * 2 // 8)
    assert all(len(found) == 2 for found in owners.values())


@given(st.integers(1, 8), st.integers(1, 8))
def test_where_rows_divide_shards_the_shards_take_turns(rows: int, times: int) -> None:
    layout = ShardLayout(rows, rows * times)
    for step in range(2 * times):
        assert [layout.place(step, r)[0] for r in range(rows)] == [
            (step * rows + r) % (rows * times) for r in range(rows)
        ]


@each_case("rows", [4, 6, 8, 16, 32])
def test_a_resume_at_every_step_reads_what_comes_next(rows: int) -> None:
    steps = range(9)
    whole_batch = from_stream(numbered, shards=8).bound(rows)
    whole = [read(whole_batch, step, range(rows)) for step in steps]
    assert len({s for step in whole for s in step}) == 9 * rows
    for start in steps:
        stored = json.loads(json.dumps(whole_batch.state_dict(start)))
        assert sum(stored["consumed"]) == start * rows
        batch = pickle.loads(pickle.dumps(from_stream(numbered, shards=8).bound(rows)))
        batch.load_state_dict(stored)
        assert [read(batch, step, range(rows)) for step in steps[start:]] == whole[start:]


def test_the_rows_per_step_may_change_in_a_resumed_run() -> None:
    """Nothing is repeated and nothing left out, and the state after that counts all of it."""
    first, second = (
        from_stream(numbered, shards=6).bound(4),
        from_stream(numbered, shards=6).bound(9),
    )
    before = [s for step in range(5) for s in read(first, step, range(4))]
    second.load_state_dict(first.state_dict(5))
    after = [s for step in range(5, 9) for s in read(second, step, range(9))]
    assert len({*before, *after}) == 5 * 4 + 4 * 9
    counts = second.state_dict(9)["consumed"]
    assert {(k, n) for k in range(6) for n in range(counts[k])} == {*before, *after}
    with pytest.raises(JobError, match="step 0 lies before step 5"):
        second(0, range(9))


def test_negative_control_without_the_state_samples_are_left_out() -> None:
    first, second = (
        from_stream(numbered, shards=6).bound(4),
        from_stream(numbered, shards=6).bound(9),
    )
    before = {s for step in range(5) for s in read(first, step, range(4))}
    after = {s for step in range(5, 9) for s in read(second, step, range(9))}
    assert {(k, n) for k in range(6) for n in range(8)} - before - after


@each_case("dp", [1, 2, 4])
@each_case("each", [1, 2, 4])
def test_replicas_and_microbatches_share_the_same_rows(dp: int, each: int) -> None:
    """Microbatches may be loaded in any order, and no stream is opened again for it."""
    opened: list[int] = []

    def noted(shard: int) -> Iterator[Sample]:
        opened.append(shard)
        return numbered(shard)

    whole = from_stream(numbered, shards=8).bound(16)
    replicas = [from_stream(noted, shards=8).bound(16) for _ in range(dp)]
    for step in range(5):
        found: list[Sample] = []
        for d, batch in enumerate(replicas):
            parts = [range(k, k + each) for k in range(d * 16 // dp, (d + 1) * 16 // dp, each)]
            order = parts[::-1] if step % 2 else parts
            of_part = {part: read(batch, step, part) for part in order}
            found += [s for part in parts for s in of_part[part]]
        assert found == read(whole, step, range(16))
    assert sorted(opened) == list(range(8))


def test_an_open_stream_stays_where_it_is_read() -> None:
    batch = from_stream(numbered, shards=2).bound(2)
    batch(3, range(2))
    assert read(pickle.loads(pickle.dumps(batch)), 4, range(2)) == read(batch, 4, range(2))


def test_replicas_open_their_own_shards_only() -> None:
    opened: dict[int, set[int]] = {0: set(), 1: set()}
    for replica in (0, 1):
        batch = from_stream(lambda k, r=replica: opened[r].add(k) or numbered(k), shards=8).bound(
            32
        )
        for step in range(3):
            batch(step, range(16 * replica, 16 * replica + 16))
    assert opened[0] | opened[1] == set(range(8)) and not opened[0] & opened[1]


class Skipping:
    """A stream that can begin later, as those of Hugging Face's datasets."""

    opened: list[tuple[int, int]] = []

    def __init__(self, shard: int, start: int = 0, length: int = 10) -> None:
        self.shard, self.start, self.length = shard, start, length

    def skip(self, n: int) -> Skipping:
        return Skipping(self.shard, n, self.length)

    def __iter__(self) -> Iterator[Sample]:
        self.opened.append((self.shard, self.start))
        return ((self.shard, n) for n in range(self.start, self.length))


@pytest.mark.parametrize(
    ("step", "opened"), [(7, [(0, 7)]), (25, [(0, 25), (0, 0), (0, 0), (0, 0)])]
)
def test_a_stream_that_can_skip_is_not_read_through(
    step: int, opened: list[tuple[int, int]]
) -> None:
    """But where it ends before: then its length must be learnt."""
    Skipping.opened.clear()
    assert read(from_stream(Skipping, shards=1).bound(1), step, range(1)) == [(0, step % 10)]
    assert Skipping.opened == opened


def test_a_stream_that_ends_begins_again_and_an_empty_one_is_refused() -> None:
    batch = from_stream(lambda k: islice(numbered(k), 3), shards=2).bound(2)
    assert [read(batch, step, range(2)) for step in range(7)] == [
        [(0, n % 3), (1, n % 3)] for n in range(7)
    ]
    assert read(batch, 1, range(2)) == [(0, 1), (1, 1)], "a step again"
    with pytest.raises(JobError, match="stream of shard 1 gave no sample"):
        from_stream(lambda k: numbered(k) if k == 0 else iter(()), shards=2).bound(2)(0, range(2))


def test_samples_that_are_passed_over_are_not_held_after_their_step() -> None:
    batch = from_stream(numbered, shards=2).bound(8)
    for step in range(20):
        batch(step, range(2, 4))
        batch(step, range(4, 6))
    assert all(len(stream._kept) <= 4 for stream in batch._open.values())


def test_wrong_arguments_and_states_are_refused() -> None:
    with pytest.raises(JobError, match="got a list; give a function of a shard's number"):
        from_stream([1, 2])  # type: ignore[arg-type]  # what is refused
    for shards in (0, True, 2.0):
        with pytest.raises(JobError, match="an integer of at least 1"):
            from_stream(numbered, shards=shards)  # type: ignore[arg-type]  # what is refused
    assert from_stream(numbered, shards=8).bound(4).fingerprint() == {
        "kind": "stream",
        "shards": 8,
        "global_batch": 4,
    }
    with pytest.raises(JobError, match="the state is that of 3 shards at step 2"):
        from_stream(numbered, shards=4).load_state_dict({"step": 2, "consumed": [1, 1, 1]})


def tensors(shard: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(shard)
    while True:
        yield tuple(torch.randn(2, WIDTH, generator=generator, dtype=torch.float64))


def test_replicas_that_do_not_divide_the_shards_are_refused_by_name() -> None:
    plan, job = chain(pp=1, dp=4, microbatches=1, batch=from_stream(tensors, shards=6))
    with pytest.raises(
        JobError,
        match=r"from_stream\(shards=6\): the 4 data-parallel replicas.*give a multiple of 4",
    ):
        run(plan, job)
    model = lambda: torch.nn.Linear(WIDTH, WIDTH)  # noqa: E731 - a job's model
    wrong = piper.Job(
        model, from_stream(tensors, shards=3), torch.nn.functional.mse_loss,
        lambda named: torch.optim.SGD([p for _, p in named]), global_batch=4,
    )  # fmt: skip
    with pytest.raises(JobError, match="the 2 data-parallel replicas"):
        piper.compile(wrong, piper.Strategy(piper.Mesh(dp=2), piper.recipes.data_parallel()))


def test_a_run_trains_the_same_for_every_mesh() -> None:
    losses = []
    for pp, dp, microbatches in ((1, 1, 4), (2, 2, 2), (1, 4, 1)):
        plan, job = chain(
            pp=pp, dp=dp, microbatches=microbatches, batch=from_stream(tensors, shards=4)
        )
        losses.append(run(plan, job, steps=5).losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12) and losses[0] == pytest.approx(
        losses[2], rel=1e-12
    )
