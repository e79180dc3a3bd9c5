"""The quick way through settled values finds what the rules find for each value alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from packages.ir.tests.plans_for_tests import good_plan
from piper_ir.plan.plan import COMPUTE, Instr, Part, Plan
from piper_ir.program.ops import Collective
from piper_ir.verify import values as verify_values
from piper_ir.verify.columns import AllBefore, HappensBefore, PlanColumns
from piper_ir.verify.rules import Findings, Violation
from piper_ir.verify.settled import unsettled
from piper_ir.verify.values import check_values
from tests.helpers import compositions
from tests.helpers.compositions import Composition

SHARDED = Composition("gpt", 2, 2, 2, "1f1b", zero=3)
"""A plan that gathers, scatters, sends and receives."""
FIELDS = ("reads", "writes", "frees", "held", "frees_before", "allocs_after")


def broken(plan: Plan, draw: random.Random) -> Plan:
    """Leave out, repeat or put in a value, once or twice, anywhere."""
    for _ in range(draw.choice((1, 1, 2))):
        role = draw.choice(plan.roles)
        index = draw.randrange(len(role.program))
        changed = _changed(role.program[index], list(plan.values), draw)
        program = (*role.program[:index], changed, *role.program[index + 1 :])
        plan = replace(
            plan, roles=tuple(replace(r, program=program) if r is role else r for r in plan.roles)
        )
    return plan


def _changed(instr: Instr, values: list[str], draw: random.Random) -> Instr:
    field = draw.choice(FIELDS)
    if field in ("frees_before", "allocs_after"):
        return replace(instr, **{field: _edited(getattr(instr, field), values, draw)})
    k = draw.randrange(len(instr.parts))
    part: Part = replace(
        instr.parts[k], **{field: _edited(getattr(instr.parts[k], field), values, draw)}
    )
    return replace(instr, parts=(*instr.parts[:k], part, *instr.parts[k + 1 :]))


def _edited(found: tuple[str, ...], values: list[str], draw: random.Random) -> tuple[str, ...]:
    at = draw.randrange(len(found) + 1)
    if found and draw.random() < 0.5:
        at = min(at, len(found) - 1)
        return found[:at] + found[at + 1 :] if draw.random() < 0.7 else (*found, found[at])
    return (*found[:at], draw.choice(values), *found[at:])


def violations(plan: Plan) -> list[Violation]:
    findings = Findings(plan)
    check_values(findings, {role.role: HappensBefore(role) for role in plan.roles})
    return findings.violations


def sharded_plan() -> Plan:
    """Return a compiled plan as plain tuples and dicts."""
    plan = compositions.compiled(SHARDED).plan
    roles = tuple(replace(role, program=tuple(role.program)) for role in plan.roles)
    return replace(plan, roles=roles, values=dict(plan.values))


def without_waits(plan: Plan) -> Iterator[Plan]:
    """Yield the plan without one of its waits, each in turn."""
    for role in plan.roles:
        for k, instr in enumerate(role.program):
            for n in range(len(instr.waits)):
                less = replace(instr, waits=(*instr.waits[:n], *instr.waits[n + 1 :]))
                program = (*role.program[:k], less, *role.program[k + 1 :])
                yield replace(
                    plan,
                    roles=tuple(
                        replace(r, program=program) if r is role else r for r in plan.roles
                    ),
                )


def with_spoiled_reads(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with a part that holds a buffer which a collective before it leaves undefined, each in turn."""
    for role in plan.roles:
        for k, instr in enumerate(role.program):
            op = instr.parts[0].op
            if isinstance(op, Collective) and op.law.spoils and instr.parts[0].reads:
                n = next(
                    n for n in range(k + 1, len(role.program)) if role.program[n].stream == COMPUTE
                )
                late = role.program[n]
                parts = (
                    replace(late.parts[0], held=(*late.parts[0].held, *instr.parts[0].reads)),
                    *late.parts[1:],
                )
                program = (*role.program[:n], replace(late, parts=parts), *role.program[n + 1 :])
                yield replace(
                    plan,
                    roles=tuple(
                        replace(r, program=program) if r is role else r for r in plan.roles
                    ),
                )


@pytest.mark.parametrize(
    ("make", "seeds"), [(good_plan, 400), (sharded_plan, 50)], ids=["by hand", "zero=3"]
)
def test_broken_plans_are_found_alike(
    make: Callable[[], Plan], seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = make()
    plans = [
        good,
        *without_waits(good),
        *with_spoiled_reads(good),
        *(broken(good, random.Random(seed)) for seed in range(seeds)),
    ]
    quick = [violations(plan) for plan in plans]
    assert quick[0] == [] and sum(map(bool, quick)) > seeds // 2
    assert len({v.rule for found in quick for v in found}) >= 5, "R11 to R16, R29"

    def one_by_one(columns: PlanColumns, order: AllBefore) -> list[int]:
        return list(range(columns.count))

    monkeypatch.setattr(verify_values, "unsettled", one_by_one)
    assert [violations(plan) for plan in plans] == quick


def test_all_values_of_a_good_plan_are_settled() -> None:
    plan = sharded_plan()
    order = AllBefore([HappensBefore(role) for role in plan.roles])
    assert unsettled(PlanColumns(plan), order) == []
