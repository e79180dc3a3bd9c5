"""Memory truth: a counter that knows nothing of the plan finds the bytes that the plan says, instruction by
instruction."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from packages.runtime.tests.chains import chain, run
from packages.runtime.tests.handmade import CODE, adamw
from piper_ir.plan.plan import COMPUTE, Plan, RolePlan
from piper_runtime import execute
from piper_runtime.engine.memory import MemoryCounter
from piper_runtime.rank.values.code import ShippedCode
from tests.helpers.cases import each_case


def test_the_counter_sees_what_lives_and_forgets_what_died() -> None:
    counter = MemoryCounter()
    kept = torch.zeros(100)
    counter.track([kept, kept[:10]])  # one storage
    assert counter.base == counter.live == 400
    with counter.during(0):
        a = torch.ones(50)
        b = a.view(5, 10) * 2  # a view is no storage of its own
        del a
        c = b.t()
        with counter.paused():
            torch.ones(1000)
    assert (counter.peak, counter.live) == (800, 600)
    with counter.during(1):
        del b
        assert counter.live == 600  # c shares it
        del c
    assert [(p.instr, p.within, p.after) for p in counter.points] == [(0, 800, 600), (1, 400, 400)]
    assert counter.record().peak_at == 0 and counter.record().states == 400


def planned_after(plan: Plan, role: RolePlan) -> Iterator[tuple[int, int]]:
    """(instruction, bytes of states and values alive when it is done) of the compute stream, from the plan alone."""
    live = sum(s.nbytes for s in role.states) + sum(
        plan.values[v].nbytes for v in role.allocs_first
    )
    for index, instr in enumerate(role.program):
        if instr.stream != COMPUTE:
            continue
        made = [v for p in instr.parts for v in p.writes] + list(instr.allocs_after)
        gone = [v for p in instr.parts for v in p.frees] + list(instr.frees_before)
        live += sum(plan.values[v].nbytes for v in made) - sum(plan.values[v].nbytes for v in gone)
        yield index, live


@each_case(
    "case",
    [
        dict(),
        dict(dp=2, tied=True, optimizer=adamw),
        dict(masked=True, clip_norm=0.1),
        dict(drop=True, fuse=False),
    ],
)
def test_value_bytes_equal_the_plan_after_every_instruction(case: dict[str, Any]) -> None:
    plan, job = chain(**case)
    found = run(plan, job, memory=True)
    for role in plan.roles:
        for rank in role.ranks:
            record = found.memory[rank]
            assert record.states == sum(s.nbytes for s in role.states)
            assert [(p.instr, p.after) for p in record.points if p.instr >= 0] == list(
                planned_after(plan, role)
            )
            assert found.peak_bytes[rank] == record.peak >= max(p.after for p in record.points)


def test_the_trace_has_what_was_measured_at_the_start_of_each_instruction() -> None:
    plan, job = chain()
    found = execute(plan, CODE, job, steps=2, launcher="inline", memory=True, trace=True)
    starts = {(s.rank, s.instr): s.start for s in found.trace.spans}
    samples = [(m.rank, m.instr, m.bytes) for m in found.trace.memory]
    points = {r: [p for p in record.points if p.instr >= 0] for r, record in found.memory.items()}
    assert (
        samples
        == [(r, p.instr, {"measured": p.within}) for r in sorted(points) for p in points[r]]
        != []
    )
    assert all(m.time == starts[m.rank, m.instr] for m in found.trace.memory)
    assert execute(plan, CODE, job, steps=1, launcher="inline", memory=True).trace.memory == ()


def test_negative_control_a_leaked_tensor_shows() -> None:
    leak: list[torch.Tensor] = []
    source = CODE["plain"]["F"].source.replace(
        "y = torch.mm(x, w); del x", "y = torch.mm(x, w); LEAK.append(x + 1); del x"
    )
    assert "LEAK" in source
    code = CODE | {"plain": CODE["plain"] | {"F": ShippedCode(source, {"LEAK": leak})}}
    plan, job = chain()
    found = execute(plan, code, job, steps=1, launcher="inline", memory=True)
    role = plan.roles[0]
    after = [(p.instr, p.after) for p in found.memory[0].points if p.instr >= 0]
    assert leak and after != list(planned_after(plan, role))


@pytest.mark.parametrize("name", ["RMSprop", "Adamax"])
def test_state_that_an_optimizer_makes_in_its_first_step_is_measured_in_the_second(
    name: str,
) -> None:
    plan, job = chain(
        optimizer=lambda named: getattr(torch.optim, name)([p for _, p in named], lr=0.01)
    )
    planned = {
        rank: sum(s.nbytes for s in role.states) for role in plan.roles for rank in role.ranks
    }
    found = run(plan, job, memory=True, steps=2)
    assert {rank: record.states for rank, record in found.memory.items()} == planned
    assert all(
        planned[rank] > record.states
        for rank, record in run(plan, job, memory=True, steps=1).memory.items()
    )
