"""Plans stay what they were, byte for byte: a change of the compiler that is to change none changes no key.

The slow families (captured models, examples, larger recipes) are compared by `python benchmarks/plan_keys.py
--check`."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

from benchmarks import plan_keys
from packages.compiler.tests.compile_cases import random_case
from piper_compiler import Directive, Options, compile_program, recipes
from piper_ir.plan.plan import Plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["recipes-small", "random", "overlaps"])
def test_the_plans_of_a_family_are_those_of_the_golden(family: str) -> None:
    golden = json.loads(plan_keys.GOLDEN.read_text())
    assert plan_keys.family_key(family) == golden[family], (
        f"see `python benchmarks/plan_keys.py {family}` here and before"
    )


def test_negative_control_another_plan_has_another_key() -> None:
    case = random_case(7)

    def plan(recv_ahead: int) -> Plan:
        return compile_program(
            case.program, case.strategy, options=Options(recv_ahead=recv_ahead)
        ).plan

    assert (
        plan_keys.key(partial(plan, 2))
        == plan_keys.key(partial(plan, 2))
        != plan_keys.key(partial(plan, 0))
    )


def test_a_recipe_of_a_users_file_changes_no_family(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [name for name, _ in plan_keys.FAMILIES["recipes-small"]()]

    def mine(pp: int, microbatches: int) -> list[Directive]:
        return recipes.gpipe(pp=pp, microbatches=microbatches)

    monkeypatch.setitem(
        recipes.RECIPES, "mine", replace(recipes.RECIPES["gpipe"], name="mine", make=mine)
    )
    assert [name for name, _ in plan_keys.FAMILIES["recipes-small"]()] == before
