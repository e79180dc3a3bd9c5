"""Measurements of shared states run, and their committed pages say what they find."""

from __future__ import annotations

import re

import pytest

from benchmarks import (
    fsdp2_schedules,
    shared_rates,
    step_kinds,
    step_model,
    step_sharded,
    step_sides,
)
from piper_ir.program.ops import Collective


def test_planning_is_measured_at_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(LAYERS=2, STAGES=2, BY_MICROBATCHES=(2, 4)).items():
        monkeypatch.setattr(shared_rates, name, value)
    rows = shared_rates.rows(True)
    assert [row.goal for row in rows] == [
        None, shared_rates.COMPILE_GOAL, shared_rates.GROWTH_GOAL, None, shared_rates.VERIFY_GOAL, shared_rates.GROWTH_GOAL
    ]  # fmt: skip
    assert all(row.value > 0 for row in rows)


@pytest.mark.parametrize("kind", step_kinds.SHARDED)
def test_the_plans_beside_fsdp2_share_all_states(kind: str) -> None:
    gathers = {}
    for resident in (0, "step"):
        plan = step_sharded.prepared(kind, step_model.TINY, resident).plan
        assert all(b.shard.params == ("dp",) for b in plan.buckets)
        parts = [p for i in plan.roles[0].program for p in i.parts]
        gathers[resident] = sum(
            isinstance(p.op, Collective) and p.op.kind == "all_gather" for p in parts
        )
    assert gathers["step"] < gathers[0]


@pytest.mark.long
def test_both_sides_train_the_same_and_hold_what_is_measured() -> None:
    kind = "FSDP2, 1F1B"
    time, cpu = step_sharded.timed(kind, step_model.TINY, 0, 1)
    assert time.value > 0 and cpu.value > 0
    assert [row.value > 0 for row in step_sharded.peaks(kind, step_model.TINY)] == [True, True]
    assert step_sides.SHARDED is step_kinds.SHARDED


def test_gradients_of_a_plan_are_those_of_the_page() -> None:
    found = re.findall(
        r"\| ([^|]+) \| ([^|]+) \| ([^|]+) \|", fsdp2_schedules.PAGE.read_text(encoding="utf-8")
    )
    rows = {kind: (torch, ours) for kind, torch, ours in found if kind in step_kinds.PIPELINES}
    assert rows.keys() == step_kinds.PIPELINES.keys() and {ours for _, ours in rows.values()} == {
        "equal"
    }
    wrong = {kind for kind, (torch, _) in rows.items() if "wrong" in torch}
    assert wrong == {"interleaved zero bubble", "ZBV", "DualPipeV"}
    assert str(fsdp2_schedules.compared(dict(fsdp2_schedules.ours("ZBV")))) == "equal"


def test_a_wrong_gradient_is_seen() -> None:
    """Negative control, and one that is missing."""
    found = dict(fsdp2_schedules.expected())
    name = next(iter(found))
    assert (
        str(fsdp2_schedules.compared({**found, name: 1.5 * found[name]})) == "wrong, by up to 0.5"
    )
    assert str(fsdp2_schedules.compared({**found, name: None})) == "equal; 1 missing"
