"""The bound of the uneven cases (`benchmarks.zero_bubble_search`) against every order of small ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

from benchmarks.zero_bubble_search import Case
from packages.compiler.tests.order_validator import Did, execute, peaks
from tests.helpers.cases import each_case

Row = tuple[Did, ...]


def interleaved(rows: tuple[Row, ...]) -> Iterator[Row]:
    """Every way to do what is in the rows, each in its order."""
    if not any(rows):
        yield ()
    for k, row in enumerate(rows):
        if row:
            for rest in interleaved((*rows[:k], row[1:], *rows[k + 1 :])):
                yield (row[0], *rest)


def orders_of_device(one: Case, device: int) -> list[Row]:
    """All orders of a device, with F, I and W of each stage and microbatch in turn, within the limit."""
    stages = [device] if one.chunks == 1 else [device, 2 * one.pp - 1 - device]
    rows = tuple(
        [tuple([Did(s, x, k) for x in "FIW"]) for s in stages for k in range(one.microbatches)]
    )
    return [order for order in interleaved(rows) if peaks([[(x,) for x in order]])[0] <= one.units]


def best(one: Case) -> float:
    """The smallest makespan there is."""
    times = {"F": one.F, "I": one.I, "W": one.W}
    out = float("inf")
    for orders in product(*[orders_of_device(one, r) for r in range(one.pp)]):
        try:
            run = execute(
                [[(x,) for x in order] for order in orders],
                stages=one.pp * one.chunks,
                times=times,
                hop=one.hop,
            )
        except AssertionError:  # they block each other
            continue
        out = min(out, run.makespan)
    return out


@each_case(
    ("pp", "microbatches", "chunks", "cases", "at_least"),
    [(2, 2, 1, 16, 4), (2, 1, 2, 16, 4), (3, 2, 1, 3, 0)],
)
def test_no_order_ends_before_the_bound(
    pp: int, microbatches: int, chunks: int, cases: int, at_least: int
) -> None:
    draw = Random(f"{pp} {microbatches} {chunks}")
    met = 0
    for _ in range(cases):
        times = [tuple([draw.randint(1, 9) for _ in range(pp * chunks)]) for _ in range(3)]
        one = Case(
            pp, microbatches, chunks, draw.randint(chunks, 2 * chunks), draw.randint(0, 2), *times
        )
        least = best(one)
        assert one.bound() <= least < float("inf"), one
        met += one.bound() == least
    assert met >= at_least, "where there is nothing behind the busiest device, an order meets it"
