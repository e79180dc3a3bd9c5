"""Plans as files: a large plan is written as tables, and reads back as the same plan."""

import json
from dataclasses import replace
from typing import Any

import pytest

import piper_ir.plan.plan_file as plan_file
from piper_compiler import Strategy, compile_program, recipes, synthetic
from piper_ir.fold.memory import peak
from piper_ir.ground.codec import dumps, encode
from piper_ir.ground.errors import FormatError
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.instr_table import InstrTable
from piper_ir.plan.plan import Plan
from piper_ir.plan.plan_file import plan_text, read_plan
from piper_ir.verify import verify
from tests.helpers.cases import each_case


@pytest.fixture(scope="module")
def plan() -> Plan:
    replicas = recipes.data_parallel(zero=2)
    recipe = (*recipes.zbv(pp=2, microbatches=4), *replicas)
    program = synthetic(stages=4, F=3, I=4, W=2, params=100, activation=8)
    return compile_program(program, Strategy(Mesh(pp=2, dp=2), recipe)).plan


@pytest.fixture
def tables(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(plan_file, "MOST_VALUES", 10)
    return plan_text(plan)


def test_a_large_plan_is_written_as_tables_and_is_the_same_plan(plan: Plan, tables: str) -> None:
    assert json.loads(tables)["format"] == "PlanTables"
    found = read_plan(tables)
    assert all(isinstance(role.program, InstrTable) for role in found.roles)
    assert found == plan and found.key == plan.key and dumps(found) == dumps(plan)
    assert [peak(found, role) for role in found.roles] == [peak(plan, role) for role in plan.roles]
    verify(found)


@each_case("microbatches", [1, 4])
@each_case(("schedule", "zero"), [(recipes.dualpipe_v, 0), (recipes.zbv, 3)])
def test_the_quick_text_of_a_plan_is_that_of_the_codec(
    microbatches: int, schedule: Any, zero: int
) -> None:
    program = synthetic(stages=4, F=3, I=4, W=2, params=100, activation=8)
    recipe = (
        *schedule(pp=2, microbatches=4 * microbatches),
        *recipes.data_parallel(zero=zero, prefetch=0),
    )
    made = compile_program(program, Strategy(Mesh(pp=2, dp=2), recipe)).plan
    named = replace(
        made, roles=tuple(replace(role, program=tuple(role.program)) for role in made.roles)
    )
    assert named.key == made.key
    first = named.roles[0]
    waiting = replace(first.program[0], waits=(("nowhere", 2), (first.streams[0], 1000)))
    odd = replace(first, program=(waiting, *first.program[1:], replace(waiting, parts=())))
    wrong = replace(named, roles=(odd, *named.roles[1:]), values={})
    for plan in (made, named, wrong):  # also one that the verifier refuses
        encoded = json.loads(dumps(replace(plan, roles=(), values={}))) | encode(plan)
        assert dumps(plan) == json.dumps(encoded, separators=(",", ":"))
        assert read_plan(dumps(plan)) == plan


def test_a_small_plan_and_one_by_hand_name_every_instruction(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan_text(plan) == dumps(plan)
    monkeypatch.setattr(plan_file, "MOST_VALUES", 10)
    named = replace(
        plan, roles=tuple(replace(role, program=tuple(role.program)) for role in plan.roles)
    )
    assert plan_text(named) == dumps(plan)
    assert read_plan(dumps(plan)) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d["programs"][0]["used"].__setitem__(1, 9999),
            r"programs\[0\]\.used: the number 9999 leads out",
        ),
        (
            lambda d: d["programs"][1]["mbs"].__setitem__(0, 9999),
            r"programs\[1\]\.mbs: the number 10000 leads out",
        ),
        (lambda d: d["programs"][0]["mbs"].pop(), r"used, mbs and waits have an entry for each"),
        (lambda d: d["programs"].pop(), r"a program for each of the 2 roles"),
        (lambda d: d["kind"].__setitem__(0, 77), r"\.kind: the number 77 leads out"),
        (
            lambda d: d["programs"][0]["templates"][0]["parts"][0].__setitem__("writes", [10**6]),
            r"programs\[0\]: the number",
        ),
        (lambda d: d["ids"].pop(), r"ids, tails, whole and kind"),
        (lambda d: d.__setitem__("more", 1), r"unknown key 'more'"),
    ],
)
def test_numbers_that_lead_out_of_a_table_are_refused_by_their_place(
    tables, change, message
) -> None:
    document = json.loads(tables)
    change(document)
    with pytest.raises(FormatError, match=message):
        read_plan(json.dumps(document))
