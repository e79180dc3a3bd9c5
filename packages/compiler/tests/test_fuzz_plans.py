"""Random placement x order x microbatches: every plan is verified, runs, peaks where it says, and is the same every
time."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import piper_compiler.compile as passes
from packages.compiler.tests.canonical import makespan
from packages.compiler.tests.compile_cases import Case, random_case
from packages.compiler.tests.plan_walk import walk
from piper_compiler import Options, Strategy, compile_program, order, split
from piper_compiler.passes.steps.arrays import int_array
from piper_compiler.passes.steps.draft import WaitEdges
from piper_compiler.passes.steps.release import Releases
from piper_ir.fold.timing import prepare
from piper_ir.ground.errors import CompileError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.plan.plan import COMPUTE, Part, Plan
from piper_ir.plan.text import format_plan
from piper_ir.program.ops import Compute
from piper_ir.verify import verify
from tests.helpers.cases import each_case

CASES = 240
NOTHING = Releases(*[int_array(())] * 4, WaitEdges(int_array(()), int_array(())))
ROOT = Path(__file__).resolve().parents[3]


def compiled(case: Case, fuse: bool = True, recv_ahead: int = 2) -> Plan:
    options = Options(fuse=fuse, recv_ahead=recv_ahead)
    lowered = compile_program(
        case.program,
        case.strategy,
        global_batch=case.global_batch,
        training=case.training,
        options=options,
    )
    return lowered.plan


def parts_in_order(plan: Plan) -> list[list[Part]]:
    """Per role what it computes, in order, however it is cut into instructions."""
    return [
        [replace(p, frees=()) for i in r.program if i.stream == COMPUTE for p in i.parts]
        for r in plan.roles
    ]


@pytest.mark.parametrize("third", [0, *(pytest.param(k, marks=pytest.mark.long) for k in (1, 2))])
@each_case("seed", range(0, CASES, 3))
def test_random_plans_are_legal_run_and_peak_where_they_say(seed: int, third: int) -> None:
    case = random_case(seed + third)
    plan = compiled(case)
    verify(plan)
    prepare(plan)
    assert walk(plan, seed + third) == {r.role: r.peak_bytes for r in plan.roles}, case.text


@pytest.mark.long
@each_case("seed", range(0, CASES, 3))
def test_fusion_changes_no_part_and_frees_cost_no_time(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(seed)
    plan, single = compiled(case), compiled(case, fuse=False, recv_ahead=seed % 4)
    verify(single)
    assert walk(single, seed) == {r.role: r.peak_bytes for r in single.roles}, case.text
    assert parts_in_order(plan) == parts_in_order(single), case.text
    monkeypatch.setattr(passes, "releases", lambda *given: NOTHING)
    bare = compiled(case)
    assert not any(i.frees_before for r in bare.roles for i in r.program)
    assert makespan(plan) == pytest.approx(makespan(bare), rel=1e-12), case.text


def test_a_plan_is_byte_identical_in_every_process() -> None:
    seeds = range(0, CASES, 14)
    here = "".join(fingerprint(seed) for seed in seeds)
    code = (
        "from packages.compiler.tests.test_fuzz_plans import fingerprint\n"
        f"print(''.join(fingerprint(s) for s in range({seeds.start}, {seeds.stop}, {seeds.step})))"
    )
    for hash_seed in ("1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip() == here


def fingerprint(seed: int) -> str:
    return compiled(random_case(seed)).key


def test_a_plan_is_byte_identical_when_compiled_twice() -> None:
    for seed in range(0, CASES, 23):
        once, again = compiled(random_case(seed)), compiled(random_case(seed))
        assert format_plan(once) == format_plan(again)


def test_the_cases_are_as_varied_as_they_claim() -> None:
    texts = [random_case(seed).text for seed in range(CASES)]
    for wanted in (
        "chain",
        "V on",
        "loop",
        "random on",
        "double",
        "order default",
        "order total",
        "order partial",
        "order gpipe",
    ):
        assert sum(wanted in t for t in texts) >= 10, wanted
    programs = [random_case(seed).program for seed in range(CASES)]
    uses = [[e.ref for c in p.chunks for e in c.inputs if e.kind == "value"] for p in programs]
    assert sum(len(u) > len(set(u)) for u in uses) >= 50, "values with several consumers"
    assert sum(len(c.steps) == 1 for p in programs for c in p.chunks) >= 20, (
        "chunks without a backward"
    )
    assert sum(p.loss_kind == "sum" for p in programs) >= 40
    assert sum(o.kind == "buffer" for p in programs for c in p.chunks for o in c.outputs) >= 20


def test_negative_control_the_walk_finds_a_leak_a_misuse_and_a_deadlock() -> None:
    plan = next(p for seed in range(50) if len((p := compiled(random_case(seed))).roles) > 1)
    role = plan.roles[0]
    at = next(k for k, i in enumerate(role.program) if i.parts[-1].frees)
    instr = role.program[at]

    def changed(**fields: object) -> Plan:
        program = (*role.program[:at], replace(instr, **fields), *role.program[at + 1 :])
        return replace(plan, roles=(replace(role, program=program), *plan.roles[1:]))

    leak = (*instr.parts[:-1], replace(instr.parts[-1], frees=instr.parts[-1].frees[1:]))
    with pytest.raises(AssertionError, match="ends the step with"):
        walk(changed(parts=leak))
    with pytest.raises((AssertionError, KeyError)):
        walk(changed(frees_before=(*instr.frees_before, instr.parts[-1].frees[0])))
    with pytest.raises(AssertionError, match="deadlock"):
        walk(changed(waits=((role.streams[-1], 1000),)))


def test_random_cyclic_orders_are_refused_with_the_cycle_and_both_directives() -> None:
    """Take a legal order of one device and another `order` that asks for two of its neighbours the other way round."""
    tried = 0
    for seed in range(CASES // 4):
        case = random_case(1000 + seed, orders=("total",))
        for chosen in (d for d in case.strategy.directives if isinstance(d, order)):
            pairs = [
                (a, b)
                for a, b in pairwise(chosen.selections)
                if dict(a.terms)["mb"] != dict(b.terms)["mb"]
            ]
            if not pairs:
                continue
            against = order(pairs[0][1], pairs[0][0])
            with pytest.raises(CompileError, match="cyclic") as caught:
                compile_program(
                    case.program, Strategy(case.strategy.mesh, (*case.strategy.directives, against))
                )
            message = str(caught.value)
            assert str(against.selections[0]) in message and against.site in message
            reasons = {
                line.split(": ", 1)[1]
                for line in message.splitlines()[1:]
                if ": ordered by " in line
            }
            assert len(reasons) >= 2, message
            tried += 1
    assert tried >= CASES // 4


def test_an_order_against_the_data_is_refused_with_the_reason() -> None:
    program = random_case(0).program
    strategy = Strategy(
        Mesh(),
        (split(where(), microbatches=1), order(where(phase="B", mb=0), where(phase="F", mb=0))),
    )
    with pytest.raises(CompileError, match="ordered by order") as caught:
        compile_program(program, strategy)
    assert "test_fuzz_plans.py" in str(caught.value)
    assert "follows its forward" in str(caught.value) or "needs its result" in str(caught.value)


def test_no_part_of_a_plan_is_a_joined_backward() -> None:
    for seed in range(0, CASES, 31):
        ops = [
            p.op
            for role in compiled(random_case(seed)).roles
            for i in role.program
            for p in i.parts
        ]
        assert not any(isinstance(op, Compute) and op.step == "B" for op in ops)
