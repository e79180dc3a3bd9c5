"""The order of an epoch is a permutation, without a table: every sample once, differently in every epoch, all orders
equally."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_runtime.data import Permutation
from tests.helpers.cases import each_case


def is_bijection(n: int, image: Callable[[int], int]) -> bool:
    return sorted(map(image, range(n))) == list(range(n))


@given(n=st.integers(1, 700), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_every_number_is_hit_once(n: int, seed: int, epoch: int) -> None:
    assert is_bijection(n, Permutation(n, seed, epoch))


@given(st.integers(1, 2**60), st.integers(0, 99), st.data())
def test_images_lie_in_range_and_differ_where_no_table_could_be_held(
    n: int, seed: int, data: st.DataObject
) -> None:
    permuted = Permutation(n, seed, 0)
    asked = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=20))
    images = {permuted(k) for k in asked}
    assert len(images) == len(asked) and 0 <= min(images) <= max(images) < n


def test_negative_control_a_hash_is_no_bijection() -> None:
    assert not is_bijection(50, lambda k: (k * 2654435761 >> 7) % 50)


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = [
        [Permutation(64, seed, epoch)(k) for k in range(64)]
        for seed in range(4)
        for epoch in range(4)
    ]
    assert len(set(map(tuple, orders))) == 16


def test_neighbours_do_not_stay_neighbours() -> None:
    """Two neighbours are neighbours again in a random order of n with probability 2 / n."""
    n = 1000
    images = [Permutation(n, 0, 0)(k) for k in range(n)]
    assert sum(abs(a - b) == 1 for a, b in pairwise(images)) < 12


@each_case("n", [2, 3, 4])
def test_all_orders_come_equally_often(n: int) -> None:
    """The chi-squared statistic stays below the value that a fair choice exceeds once in 10,000 times."""
    limit = {2: 15.1, 3: 25.7, 4: 59.1}[n]  # 1, 5 and 23 degrees of freedom
    epochs = 4800
    found = Counter(tuple(Permutation(n, 7, e)(k) for k in range(n)) for e in range(epochs))
    orders = {2: 2, 3: 6, 4: 24}[n]
    fair = epochs / orders
    assert (
        len(found) == orders and sum((count - fair) ** 2 / fair for count in found.values()) < limit
    )


@each_case("n", [4, 9, 25])
def test_odd_permutations_are_reached_too(n: int) -> None:
    """All would be even, were there rounds over an odd number of pairs of odd size."""
    parities = Counter(parity([Permutation(n, 3, e)(k) for k in range(n)]) for e in range(200))
    assert min(parities[0], parities[1]) > 60


def parity(order: list[int]) -> int:
    return sum(a > b for i, a in enumerate(order) for b in order[i + 1 :]) % 2


def test_a_large_dataset_needs_no_memory() -> None:
    tracemalloc.start()
    permuted = Permutation(10**12, 0, 0)
    assert len({permuted(k) for k in range(1000)}) == 1000
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_no_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one element"):
        Permutation(0, 0, 0)
