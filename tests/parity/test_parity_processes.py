"""The same over gloo: one process per rank. A cover in which every pair of (model, mesh, schedule, microbatches,
optimizer) values occurs."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from piper_ir.verify import verify
from piper_runtime.launch.processes.processes import Pool
from tests.helpers import compositions, models, parity
from tests.helpers.compositions import Composition, fitted

FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(n for n in sorted(models.CASES) if n != "buffers"),
    "mesh": ((2, 1), (1, 2), (2, 2), (4, 1)),
    "schedule": ("gpipe", "1f1b"),
    "microbatches": (1, 4, 8),
    "numbers": (("sgd", None, False), ("adamw", 0.05, True)),
}


def pairwise(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Few rows in which every two values of two factors meet. Greedy: each row takes, factor by factor, the value with
    most new pairs."""
    names = list(factors)
    missing = {
        ((a, x), (b, y)) for a, b in combinations(names, 2) for x in factors[a] for y in factors[b]
    }
    rows = []
    while missing:
        (a, x), (b, y) = min(missing, key=repr)
        row: dict[str, Any] = {a: x, b: y}
        for name in names:
            if name not in row:
                row[name] = max(
                    factors[name], key=lambda v: len(_pairs({**row, name: v}, names) & missing)
                )
        missing -= _pairs(row, names)
        rows.append({n: row[n] for n in names})
    return rows


def _pairs(row: dict[str, Any], names: list[str]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return {((a, row[a]), (b, row[b])) for a, b in combinations(names, 2) if a in row and b in row}


def cover() -> list[Composition]:
    out = []
    for row in pairwise(FACTORS):
        (pp, dp), (optimizer, clip, scheduler), m = row["mesh"], row["numbers"], row["microbatches"]
        rows = 1 if row["model"] == "keywords" and m > 1 else 2
        out.append(
            Composition(
                row["model"],
                pp,
                dp,
                m,
                row["schedule"],
                "recipe",
                rows,
                optimizer,
                clip,
                scheduler,
                bucket_mb=0.003,
            )
        )
    return out


def judge(c: Composition, pool: Pool) -> None:
    c = fitted(c)
    plan = compositions.compiled(c).plan
    verify(plan)
    run = compositions.run(c, plan, launcher="processes", pool=pool)
    parity.assert_parity(run, compositions.expected(c), label=repr(c))


@pytest.mark.parametrize("c", cover(), ids=str)
def test_pairwise_cover(c: Composition, pool: Pool) -> None:
    judge(c, pool)


@pytest.mark.parametrize(
    "c",
    [
        Composition("buffers", 2, 1, 4, "1f1b"),
        Composition("gpt", 2, 2, 4, "1f1b", "v", clip=0.05),
        Composition("gpt_dropout", 3, 1, 4, "random", "shared", seed=5),
        Composition("skip", 4, 1, 4, "random", "random", shared_streams=True, seed=2),
    ],
    ids=str,
)
def test_other_placements(c: Composition, pool: Pool) -> None:
    judge(c, pool)


def test_processes_and_inline_have_equal_bits(pool: Pool) -> None:
    c = Composition("gpt_untied", 4, 1, 4, "1f1b")
    plan = compositions.compiled(c).plan
    a, b = compositions.run(c, plan), compositions.run(c, plan, launcher="processes", pool=pool)
    x, y = a.state_dict(), b.state_dict()
    assert a.losses == b.losses and all(x[n].equal(y[n]) for n in x)


def test_the_cover_is_a_cover() -> None:
    rows = pairwise(FACTORS)
    met = set().union(*(_pairs(row, list(FACTORS)) for row in rows))
    assert all(
        ((a, x), (b, y)) in met
        for a, b in combinations(FACTORS, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
    )
    assert len(rows) < 0.2 * 12 * 4 * 2 * 3 * 2
    assert pairwise({"a": (1, 2), "b": (3, 4)}) and replace(cover()[0], seed=1) != cover()[0]
