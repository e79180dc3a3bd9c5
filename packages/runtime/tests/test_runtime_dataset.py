"""from_dataset: which sample is which row follows from the step alone, with torch's conventions."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from packages.runtime.tests.chains import TOLERANCE, chain, distance, run
from packages.runtime.tests.handmade import WIDTH
from piper_ir.ground.errors import JobError
from piper_runtime.data import DatasetBatch, Permutation, from_dataset
from piper_runtime.rank.batches.batches import microbatch_rows
from tests.helpers.cases import each_case

N, ROWS = 21, 8
"""Samples, and rows per step: neither divides the other, so that two of three steps lie in two epochs or more."""
NUMBERS = [(torch.tensor(i), torch.tensor(-i)) for i in range(N)]


def numbers(batch: Any, step: int, rows: range) -> list[int]:
    """Return which samples these rows are."""
    inputs, targets = batch(step, rows)
    assert torch.equal(inputs, -targets)
    found: list[int] = inputs.tolist()
    return found


def test_a_row_is_the_sample_that_the_formula_says() -> None:
    batch = from_dataset(NUMBERS, seed=5).bound(ROWS)
    for step in range(3 * N):
        wanted = [
            Permutation(N, 5, (step * ROWS + r) // N)((step * ROWS + r) % N) for r in range(ROWS)
        ]
        assert numbers(batch, step, range(ROWS)) == wanted


@given(n=st.integers(1, 60), rows=st.integers(1, 40), seed=st.integers(0, 9), shuffle=st.booleans())
def test_every_epoch_goes_once_through_all_samples(
    n: int, rows: int, seed: int, shuffle: bool
) -> None:
    batch = from_dataset([(i, -i) for i in range(n)], seed=seed, shuffle=shuffle).bound(rows)
    read = [i for step in range(-(-3 * n // rows)) for i in numbers(batch, step, range(rows))]
    for epoch in range(3):
        found = read[epoch * n : (epoch + 1) * n]
        assert sorted(found) == list(range(n)) and (shuffle or found == list(range(n)))


@each_case("dp", [1, 2, 4])
@each_case("microbatches", [1, 2, 4, 8])
def test_replicas_and_microbatches_share_the_same_rows(dp: int, microbatches: int) -> None:
    """The rows are equal in 3 epochs, boundaries included, with 32 rows per step that are cut in every way."""
    rows = 32
    plan, _ = chain(pp=1, dp=dp, microbatches=microbatches, rows=rows // dp // microbatches)
    batch = from_dataset(NUMBERS, seed=1).bound(rows)
    for step in range(-(-3 * N // rows) + 1):
        parts = [microbatch_rows(plan, d, mb) for d in range(dp) for mb in range(microbatches)]
        read = [i for part in parts for i in numbers(batch, step, part)]
        assert read == numbers(batch, step, range(rows))


@each_case(("dp", "microbatches"), [(1, 4), (2, 2), (4, 1)])
def test_a_run_trains_as_one_device(dp: int, microbatches: int) -> None:
    samples = TensorDataset(
        *torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    )
    plan, job = chain(pp=2, dp=dp, microbatches=microbatches, batch=from_dataset(samples, seed=2))
    assert isinstance(job.batch, DatasetBatch) and job.batch.global_batch == 8
    found = run(plan, job, steps=4)
    assert distance(found, plan, job) < TOLERANCE
    other_plan, other = chain(pp=2, dp=1, microbatches=4, batch=from_dataset(samples, seed=2))
    assert found.losses == pytest.approx(run(other_plan, other, steps=4).losses, rel=1e-12)


def test_a_resume_at_every_step_of_three_epochs_reads_what_comes_next() -> None:
    """The step alone decides the rows, so the state is empty."""
    steps = range(-(-3 * N // ROWS))
    first = from_dataset(NUMBERS, seed=3).bound(ROWS)
    whole = [numbers(first, step, range(ROWS)) for step in steps]
    for start in steps:
        batch = pickle.loads(pickle.dumps(from_dataset(NUMBERS, seed=3).bound(ROWS)))
        batch.load_state_dict(first.state_dict(start))
        assert batch.fingerprint() == first.fingerprint() and first.state_dict(start) == {}
        assert [numbers(batch, step, range(ROWS)) for step in steps[start:]] == whole[start:]


def test_an_order_that_depends_on_more_would_be_found() -> None:
    """The controls: another seed, another number of rows, and an order of each step's own."""
    read = [
        numbers(from_dataset(NUMBERS, seed=s).bound(g), 1, range(ROWS))
        for s, g in ((3, ROWS), (4, ROWS), (3, ROWS + 1))
    ]
    assert read[0] != read[1] and read[0] != read[2]
    of_step = [Permutation(N, 3, step)(r) for step in range(5) for r in range(ROWS)]
    assert max(Counter(of_step[:N]).values()) > 1


def test_a_fingerprint_tells_other_data() -> None:
    stored = from_dataset(NUMBERS, seed=3).bound(ROWS).fingerprint()
    assert json.loads(json.dumps(stored)) == stored
    assert stored == {
        "kind": "dataset",
        "samples": N,
        "seed": 3,
        "shuffle": True,
        "global_batch": ROWS,
    }
    for other in (
        from_dataset(NUMBERS[:-1], seed=3).bound(ROWS),
        from_dataset(NUMBERS, seed=4).bound(ROWS),
        from_dataset(NUMBERS, seed=3, shuffle=False).bound(ROWS),
        from_dataset(NUMBERS, seed=3).bound(16),
    ):
        assert len(stored.items() - other.fingerprint().items()) == 1


class Dicts(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.full((2,), i), "scale": i / 2}, (i, "abc"[i % 3] and float(i))


def test_batches_are_collated_as_by_a_dataloader() -> None:
    for step, (inputs, targets) in enumerate(DataLoader(Dicts(), batch_size=7)):
        found = from_dataset(Dicts(), shuffle=False).bound(7)(step, range(7))
        assert found[0].keys() == inputs.keys() and all(
            torch.equal(found[0][k], inputs[k]) for k in inputs
        )
        assert all(
            torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found[1], targets, strict=True)
        )


def test_inputs_that_are_a_tuple_stay_positional() -> None:
    inputs, targets = from_dataset([((i, 2 * i), 3 * i) for i in range(4)], shuffle=False).bound(4)(
        0, range(4)
    )
    assert isinstance(inputs, tuple) and [t.tolist() for t in inputs] == [
        [0, 1, 2, 3],
        [0, 2, 4, 6],
    ]
    assert targets.tolist() == [0, 3, 6, 9]


def test_samples_are_fetched_together_where_the_dataset_offers_it() -> None:
    class Together(Subset[Any]):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(indices)
            return super().__getitems__(indices)

    asked: list[list[int]] = []
    batch = from_dataset(Together(Dicts(), list(range(N))), shuffle=False).bound(4)
    assert batch(0, range(1, 4))[0]["scale"].tolist() == [0.5, 1.0, 1.5] and asked == [[1, 2, 3]]


def test_a_collate_of_ones_own() -> None:
    def padded(samples: list[str]) -> Any:
        width = max(map(len, samples))
        ids = torch.tensor([[ord(c) for c in s.ljust(width)] for s in samples])
        return ids[:, :-1], ids[:, 1:]

    inputs, targets = from_dataset(["ab", "cde"], padded, shuffle=False).bound(2)(0, range(2))
    assert inputs.tolist() == [[97, 98], [99, 100]] and targets.tolist() == [[98, 32], [100, 101]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Endless(Dataset[int]):
    def __getitem__(self, i: int) -> int:
        return i


@each_case(
    ("dataset", "options", "says"),
    [
        (Stream(), {}, "got a Stream.*from_stream"),
        (DataLoader(Dicts()), {}, "got a DataLoader, which has no samples by number"),
        (Endless(), {}, "got a Endless without a length"),
        ([], {}, "got a list without samples"),
        (NUMBERS, {"seed": "3"}, "seed='3'.*an integer"),
        (NUMBERS, {"shuffle": "no"}, "shuffle='no'.*True or False"),
        (NUMBERS, {"collate": 5}, "collate=5.*a function of a list of samples"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset: Any, options: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        from_dataset(dataset, **options)


def test_samples_that_are_dicts_are_inputs_alone() -> None:
    inputs, targets = from_dataset([{"x": 1, "y": 2}] * 2, shuffle=False).bound(2)(0, range(2))
    assert targets is None and {name: tensor.tolist() for name, tensor in inputs.items()} == {
        "x": [1, 1],
        "y": [2, 2],
    }


def test_samples_that_are_no_pairs_and_rows_that_are_not_known_are_refused() -> None:
    with pytest.raises(
        JobError,
        match=r"collated to a Tensor; a pair \(inputs, targets\) is needed, or a dict .*collate=",
    ):
        from_dataset([1, 2]).bound(2)(0, range(2))
    with pytest.raises(JobError, match=r"rows per step are not known yet.*piper\.Job"):
        from_dataset(NUMBERS)(0, range(2))
