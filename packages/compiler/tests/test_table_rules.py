"""A broken table is judged like its instructions by hand: `check` may judge one of those that are alike for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import pytest

from packages.compiler.tests.compile_cases import layered
from piper_compiler import Strategy, Training, compile_program, recipes
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.instr_table import InstrTable, InstrTemplate
from piper_ir.plan.plan import COMPUTE, Plan, Values
from piper_ir.plan.table_kinds import TableKinds
from piper_ir.program.ops import Op, Seed
from piper_ir.verify import Violation, check
from tests.helpers.cases import each_case

Columns = dict[str, Any]


@cache
def good() -> Plan:
    strategy = Strategy(
        Mesh(pp=2, dp=2),
        (*recipes.one_f_one_b(pp=2, microbatches=4), *recipes.data_parallel(bucket_mb=0.0004)),
    )
    return compile_program(layered(4), strategy, global_batch=8, training=Training(clip=1.0)).plan


@dataclass(frozen=True)
class Judged:
    """Hold the violations of a broken table, and those of its instructions by name."""

    of_table: Sequence[Violation]
    by_name: Sequence[Violation]


def broken(role: int, change: Callable[[Columns], None], **fields: Any) -> Judged:
    """Change the columns of one role's table, and fields of the plan."""
    plan = replace(good(), **fields)
    table = plan.roles[role].program
    assert isinstance(table, InstrTable)
    columns: Columns = {
        "templates": list(table.templates),
        "used": list(table.used),
        "mbs": list(table.mbs),
        "waits": [table.waits[i] for i in range(len(table))],
        "early": dict(table.early),
        "made": dict(table.made),
    }
    change(columns)
    bad = InstrTable(table.values, first=table.first, **columns)
    roles = list(plan.roles)
    roles[role] = replace(roles[role], program=bad)
    programs = [r.program for r in roles if isinstance(r.program, InstrTable)]
    as_tables = replace(plan, roles=tuple(roles), values=Values(TableKinds(programs)))
    named = tuple([replace(r, program=tuple(r.program)) for r in roles])
    return Judged(
        check(as_tables), check(replace(plan, roles=named, values=dict(as_tables.values)))
    )


def seen(judged: Judged) -> set[str]:
    assert list(judged.of_table) == list(judged.by_name)
    return {v.rule for v in judged.of_table}


def of_last_microbatch(columns: Columns, computes: bool) -> int:
    """An instruction of the last microbatch, whose template an earlier one has too."""
    used, templates = columns["used"], columns["templates"]
    return max(
        i
        for i, mb in enumerate(columns["mbs"])
        if mb == 3 and (templates[used[i]].stream == COMPUTE) is computes and used[i] in used[:i]
    )


def test_the_plan_is_good() -> None:
    assert seen(broken(0, lambda columns: None)) == set()
    table = good().roles[0].program
    assert len(set(table.alike)) < len(table) / 2  # type: ignore[attr-defined]  # a table, which Sequence hides


@each_case("role", (0, 1))
@each_case("computes", (True, False))
def test_a_microbatch_that_the_plan_does_not_have_is_found(role: int, computes: bool) -> None:
    """Where values are numbers, one too far is a value of another family, which says something else."""

    def change(columns: Columns) -> None:
        columns["mbs"][of_last_microbatch(columns, computes)] = 4

    assert seen(broken(role, change))


@each_case("microbatches", (1, 2, 3, 5))
@each_case("role", (0, 1))
def test_a_table_of_another_number_of_microbatches_is_found(role: int, microbatches: int) -> None:
    def change(columns: Columns) -> None:
        """Start the gradients of losses as such a plan does, so that no other rule finds it."""
        columns["templates"] = [
            replace(t, parts=tuple([replace(p, op=_started(p.op, microbatches)) for p in t.parts]))
            for t in columns["templates"]
        ]

    expected = "R07-signature" if microbatches < 4 else "R21-steps"
    assert expected in seen(broken(role, change, microbatches=microbatches))


def _started(op: Op, microbatches: int) -> Op:
    return replace(op, value=1 / (2 * microbatches)) if isinstance(op, Seed) else op


def test_the_microbatch_of_another_is_found() -> None:
    def change(columns: Columns) -> None:
        columns["mbs"][of_last_microbatch(columns, True)] = 2

    assert seen(broken(1, change))


@pytest.mark.parametrize("kind", ("reads", "writes"))
def test_a_template_that_says_something_wrong_is_found(kind: str) -> None:
    def change(columns: Columns) -> None:
        k = columns["used"][of_last_microbatch(columns, True)]
        template: InstrTemplate = columns["templates"][k]
        part = next(p for p in template.parts if getattr(p, kind))
        less = replace(part, **{kind: getattr(part, kind)[1:]})
        columns["templates"][k] = replace(
            template, parts=tuple([less if p is part else p for p in template.parts])
        )

    assert seen(broken(0, change)) & {"R06-names", "R07-signature"}


def test_what_differs_between_those_that_are_alike_is_judged_for_each() -> None:
    def later(columns: Columns) -> None:
        i = of_last_microbatch(columns, True)
        columns["waits"][i] = (i + 1,)

    def allocates(columns: Columns) -> None:
        columns["made"][of_last_microbatch(columns, False)] = (0,)

    assert "R05-waits" in seen(broken(0, later))
    assert "R04-allocation" in seen(broken(0, allocates))


@each_case("seed", range(30))
def test_any_swap_is_judged_alike(seed: int) -> None:
    random = Random(seed)

    def change(columns: Columns) -> None:
        column = columns[random.choice(("used", "mbs", "waits"))]
        i, j = random.sample(range(len(column)), 2)
        column[i], column[j] = column[j], column[i]

    seen(broken(seed % 2, change))


def test_a_value_that_differs_in_one_microbatch_is_found() -> None:
    """A plan may give a size of its own to any value, whatever its programs are."""
    plan = good()
    name = next(v for v in plan.values if v.endswith("out0@3"))
    odd = replace(plan.values[name], spec=TensorSpec((7,), "float32"))
    found = check(replace(plan, values={**plan.values, name: odd}))
    assert {v.rule for v in found} == {"R07-signature"}
    assert all(name in v.message for v in found)
