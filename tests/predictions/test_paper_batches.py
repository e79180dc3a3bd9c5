"""The paper's memory figure on a small model and device: largest batches, and their order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paper.zero_batches import (
    SYSTEMS,
    Largest,
    Line,
    Point,
    Setting,
    largest,
    missed,
    point,
)
from piper.models import MoEConfig

MODEL = MoEConfig(
    layers=2,
    width=16,
    heads=2,
    kv_heads=2,
    hidden=32,
    vocab=64,
    length=16,
    qk_norm=True,
    experts=2,
    top_k=1,
    capacity_factor=2.0,
)
DEVICE = """
name = "small"
nodes = { count = 1, devices = 4 }
[device]
base = "a100-40g-sxm"
memory_bytes = 900_000
context_bytes = 0
group_bytes = 0
p2p_bytes = 0
"""


@pytest.fixture
def small(tmp_path: Path) -> Setting:
    path = tmp_path / "small.toml"
    path.write_text(DEVICE)
    return Setting(MODEL, length=16, pp=2, dp=2, microbatches=2, place=str(path))


@pytest.mark.long
def test_the_largest_batch_fits_and_the_next_does_not(small: Setting) -> None:
    one, three = SYSTEMS[0], SYSTEMS[-1]
    found = {system.name: largest(small, system, "inputs", most=64) for system in (one, three)}
    for batch in found.values():
        assert batch.fits is not None and batch.fits.fits and not batch.over.fits
        assert (
            batch.over.rows == batch.fits.rows + 1
            and batch.fits.rows <= batch.batch < batch.over.rows
        )
    assert found[one.name].batch < found[three.name].batch
    with pytest.raises(ValueError, match="2 rows fit"):
        largest(small, three, "inputs", most=2)


@pytest.mark.long
def test_what_a_system_keeps_beside_our_plan_counts(small: Setting) -> None:
    one = SYSTEMS[0]
    more, none = point(small, one, 4, "all"), point(small, replace(one, more=0.0), 4, "all")
    assert more.device - none.device == more.lines["more"] > 0 == none.lines["more"]
    assert sum(more.lines.values()) == more.device


def line(system: int, batch: int) -> Line:
    fits, over = (Point(n, n, {}, batch, 1.0) for n in (batch, batch + 1))
    return Line(
        SYSTEMS[system],
        dict.fromkeys(("all", "products", "inputs"), Largest(fits if batch else None, over)),
    )


def test_another_order_and_smaller_batches_are_named() -> None:
    good = [line(0, 3), line(1, 4), line(2, 12), line(3, 32), line(4, 40)]
    assert missed(good) == []
    assert good[0].reached == 0, "3 rows are less than the paper's smallest"
    assert missed([*good[:1], line(1, 12), *good[2:]]) == [
        "best other, ZeRO-3 reaches 12.0 rows, best other, ZeRO-2 12.0"
    ]
    assert missed([*good[:4], line(4, 39)]) == ["Piper, ZeRO-3 reaches 39.0 rows, published 40"]
