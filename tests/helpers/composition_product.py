"""The full product of models, meshes, schedules and microbatches, and which part of it `make test` runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from itertools import product as combined
from typing import Any

import pytest

from tests.helpers import models
from tests.helpers.compositions import Composition


def product() -> list[Composition]:
    """Every model x (pp=2, dp=2, both, pp=4) x (GPipe, 1F1B) x m in (1, 4, 8). Without pipeline there is no schedule,
    with one microbatch the two are one; a model whose buffers follow the batch has no replicas; masked rows come one by
    one, so that some microbatches weigh nothing."""
    out = []
    for name, case in models.CASES.items():
        if name in ("deep", "gpt_refilled"):  # for schedules with several chunks on a device
            continue
        for (pp, dp), m in combined(((2, 1), (1, 2), (2, 2), (4, 1)), (1, 4, 8)):
            if dp > 1 and name == "buffers":
                continue
            rows = 1 if case.loss is models.masked_cross_entropy and m > 1 else 2
            schedules: tuple[str, ...] = (
                ("default",) if pp == 1 else ("gpipe",) if m == 1 else ("gpipe", "1f1b")
            )
            out += [Composition(name, pp, dp, m, schedule, rows=rows) for schedule in schedules]
    return out


def quick(cases: list[Composition]) -> list[Composition]:
    """All cases with fewer than eight microbatches; of those with eight, for each model and mesh one schedule, in turn.
    Any three of model, mesh, schedule and microbatches that meet in the product meet here too."""
    names, meshes = list(models.CASES), list(dict.fromkeys((c.pp, c.dp) for c in cases))

    def kept(c: Composition) -> bool:
        turn = names.index(c.model) + meshes.index((c.pp, c.dp))
        return c.microbatches < 8 or c.schedule in ("default", ("gpipe", "1f1b")[turn % 2])

    return [c for c in cases if kept(c)]


def pairs(c: Composition) -> set[Any]:
    """Every two of the case's model, mesh, schedule and microbatches."""
    factors = (
        ("model", c.model),
        ("mesh", c.pp, c.dp),
        ("schedule", c.schedule),
        ("microbatches", c.microbatches),
    )
    return set(combinations(factors, 2))


def pairwise(cases: list[Composition]) -> list[Composition]:
    """Cases in which every pair meets that meets in any case: one by one, that with the most pairs that are still
    missing."""
    missing = set().union(*map(pairs, cases))
    out = []
    while missing:
        out.append(max(cases, key=lambda c: len(pairs(c) & missing)))
        missing -= pairs(out[-1])
    return out


def marked_product(part: Callable[[list[Composition]], list[Composition]] = quick) -> list[Any]:
    """The product for `pytest.mark.parametrize`; what is not in the part is in `make test-long` only."""
    cases = product()
    now = set(part(cases))
    return [pytest.param(c, marks=[pytest.mark.long] * (c not in now)) for c in cases]
