"""How often a step gathers sharded parameters: closed forms, and never more often than torch's runtime for the same
order."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from benchmarks.gathers import (
    PAGE,
    SCHEDULES,
    counted,
    gathered,
    order_of,
    plan_of,
    steps_that_hold,
)
from piper_compiler.passes.steps import residency
from piper_compiler.passes.steps.windows import windows
from tests.helpers.cases import each_case

P, M, LAYERS = 4, 8, 3
"""Devices, microbatches, layers per stage. A bucket is a layer; two uses of a layer that follow each other share a
gather."""


def one_f_one_b(device: int) -> int:
    """The last layer is shared by an F and the B after it, the first one by a B and the F after it."""
    alternating = M - min(M, P - device)
    return 2 * M * LAYERS - (alternating + 1) - alternating


def interleaved(device: int, chunks: int = 2) -> int:
    """The same, where the F and the B are of one stage (the order of arXiv 2104.04473, as Megatron-LM has it)."""
    total = M * chunks
    first = min(total, 2 * (P - device - 1) + (chunks - 1) * P)

    def stage(k: int, backward: bool) -> int:
        chunk = k % (P * chunks) // P
        return chunks - 1 - chunk if backward else chunk

    alternating = [(stage(first + k, False), stage(k, True)) for k in range(total - first)]
    shared = sum(f == b for f, b in alternating) + sum(
        b == f for (_, b), (f, _) in pairwise(alternating)
    )
    return 2 * total * LAYERS - shared


FORMS = {
    "GPipe": lambda device: 2 * M * LAYERS - 1,
    "1F1B": one_f_one_b,
    "interleaved, v=2": interleaved,
}


@each_case("title", FORMS)
def test_gathers_without_room_have_a_closed_form(title: str) -> None:
    plan = plan_of(order_of(title, P, M), LAYERS, 0)
    assert [gathered(plan, role) for role in plan.roles] == [
        FORMS[title](device) for device in range(P)
    ]


@each_case("title", FORMS)
def test_what_is_kept_for_the_step_is_gathered_once(title: str) -> None:
    order = order_of(title, P, M)
    plan = plan_of(order, LAYERS, None)
    assert [gathered(plan, role) for role in plan.roles] == [order.held * LAYERS] * P


@each_case("title", ["ZB-H1", "ZBV", "DualPipe"])
def test_no_weight_gradient_holds_parameters(title: str) -> None:
    order = order_of(title, P, M)
    held = steps_that_hold(plan_of(order, LAYERS, 0))
    assert held == {"F": held["F"], "I": held["F"]} and held["F"] == order.stages * LAYERS * M


@each_case("title", SCHEDULES)
def test_never_more_than_torch_gathers_for_as_many_bytes(title: str) -> None:
    for held in range(1, order_of(title, P, M).held + 1):
        found = counted(title, P, M, 2, held)
        assert found.ours <= found.torch, found


def test_the_page_has_what_is_counted() -> None:
    """And at one stage held at most 0.75 of torch's gathers where stages alternate."""
    found = re.findall(r"\| ([^|]+) \| (\d) \| (\d+) \| ([\d.]+) \|", PAGE.read_text())
    rows = {(title, int(held)): (int(torch), float(ours)) for title, held, torch, ours in found}
    assert rows and all(ours < torch for torch, ours in rows.values())
    left_out = [title for title in SCHEDULES if (title, 1) not in rows]
    assert len(left_out) == 5, "the schedules whose stages do not alternate"
    for title in left_out:
        equal = counted(title, 4, 16, 8, 1)
        assert equal.ours == equal.torch, title
    for title in ("interleaved, v=2", "interleaved zero bubble, v=2", "DualPipe"):
        torch, ours = rows[title, 1]
        assert ours <= 0.75 * torch
    again = counted("interleaved, v=2", 4, 16, 8, 1)
    assert (again.torch, again.ours) == rows["interleaved, v=2", 1]


def test_without_the_cache_there_are_more_than_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: nothing is kept, whatever room there is."""
    monkeypatch.setattr(residency, "windows", lambda uses, nbytes, room: windows(uses, nbytes, 0))
    found = counted("interleaved, v=2", P, M, 2, 1)
    assert found.ours > found.torch
