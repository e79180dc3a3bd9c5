"""The quick way through plain values finds what the rules find for each value alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from packages.ir.tests.plans_for_tests import good_plan
from piper_ir.plan import Instr, Part, Plan
from piper_ir.verify import values as verify_values
from piper_ir.verify.rules import Findings, Violation
from piper_ir.verify.values import HappensBefore, check_values

FIELDS = ("reads", "writes", "frees", "frees_before", "allocs_after")


def broken(plan: Plan, draw: random.Random) -> Plan:
    """Leave out, repeat or put in a value, once or twice, anywhere."""
    for _ in range(draw.choice((1, 1, 2))):
        role = draw.choice(plan.roles)
        index = draw.randrange(len(role.program))
        changed = _changed(role.program[index], list(plan.values), draw)
        program = (*role.program[:index], changed, *role.program[index + 1 :])
        plan = replace(plan, roles=tuple(replace(r, program=program) if r is role else r for r in plan.roles))
    return plan


def _changed(instr: Instr, values: list[str], draw: random.Random) -> Instr:
    field = draw.choice(FIELDS)
    if field in ("frees_before", "allocs_after"):
        return replace(instr, **{field: _edited(getattr(instr, field), values, draw)})
    k = draw.randrange(len(instr.parts))
    part: Part = replace(instr.parts[k], **{field: _edited(getattr(instr.parts[k], field), values, draw)})
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


def test_broken_plans_are_found_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [good_plan(), *(broken(good_plan(), random.Random(seed)) for seed in range(400))]
    quick = [violations(plan) for plan in plans]
    assert quick[0] == [] and sum(map(bool, quick)) > 200
    rules = {v.rule for found in quick for v in found}
    assert len(rules) >= 5, "R11 to R16"
    monkeypatch.setattr(verify_values, "_plain_values", lambda roles: {role.role: set() for role in roles})
    assert [violations(plan) for plan in plans] == quick


def test_most_values_of_a_plan_are_plain() -> None:
    plan = good_plan()
    plain = verify_values._plain_values(plan.roles)
    assert 0 < sum(map(len, plain.values())) < len(plan.values)
