"""Memory that kernels hold inside on a kind of device counts there, and so does memory of updates."""

from __future__ import annotations

from dataclasses import replace

from packages.ir.tests.plans_for_tests import good_plan
from piper_ir.fold.memory import on_device, peak, scan
from piper_ir.fold.memory_owners import MemoryOwner, held_at_peak, owners
from piper_ir.fold.part_memory import part_peak
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.sizes import Affine, bind
from piper_ir.plan.plan import Plan, RolePlan
from piper_ir.program.ops import Compute, Update
from piper_ir.program.program import Inside, Liveness
from tests.helpers.cases import each_case

LOSS = Liveness((0,), ((Affine(0, 10),), ()), ((Inside(Affine(2, 10), Affine(0, 4), 20),), ()))
"""A step that holds 10 bytes per row; on CUDA 2 more, and 4 for each row up to five."""


@each_case(("rows", "wanted"), [(1, 16), (5, 72), (6, 82), (100, 1022)])
def test_what_comes_in_slices_stops_growing(rows: int, wanted: int) -> None:
    bound = LOSS.bind(rows)
    assert (bound.peak({}), bound.peak({}, "cpu"), bound.peak({}, "cuda")) == (
        10 * rows,
        10 * rows,
        wanted,
    )


def test_an_input_that_dies_before_gives_its_bytes_back() -> None:
    late = Liveness((0,), ((30,), (40,)), ((), (Inside(40, 8, 5),)))
    assert (late.peak({0: 7}), late.peak({0: 7}, "cuda"), late.peak({}, "cuda")) == (33, 38, 45)


def with_inside(plan: Plan, chunk: str, nbytes: int) -> Plan:
    """Return the plan, in which step I of a chunk holds so many bytes more on CUDA."""

    chunks = []
    for c in plan.chunks:
        made = (
            sum(bind(c.ports[port].nbytes, 0) for port in c.steps["I"].writes)
            if "I" in c.steps
            else 0
        )
        known = Liveness((), ((made,),), ((Inside(made, nbytes, nbytes),),))
        steps = {s: replace(sig, liveness=known) if s == "I" else sig for s, sig in c.steps.items()}
        chunks.append(replace(c, steps=steps) if c.id == chunk else c)
    return replace(plan, chunks=tuple(chunks))


def runs(role: RolePlan, chunk: str) -> bool:
    return any(
        isinstance(p.op, Compute) and p.op == Compute(chunk, "I")
        for i in role.program
        for p in i.parts
    )


def test_peaks_for_a_kind_of_device() -> None:
    """The instruction that holds more becomes the fullest one, with all that it holds; elsewhere nothing changes."""
    plain = good_plan()
    parts = [p for role in plain.roles for i in role.program for p in i.parts]
    chunk = next(p.op.chunk for p in parts if isinstance(p.op, Compute) and p.op.step == "I")
    plan = with_inside(plain, chunk, 10**6)
    assert on_device(plan, "") is plan
    found = on_device(plan, "cuda")
    assert found.device == "cuda" and loads(Plan, dumps(found)) == found
    for before, after in zip(plan.roles, found.roles, strict=True):
        if runs(before, chunk):
            assert after.peak_bytes >= 10**6 and after.peak_by_category["workspace"] >= 10**6
            assert (
                sum(h.bytes for h in held_at_peak(found, after))
                == after.peak_bytes
                == max(u.total for u in scan(found, after))
            )
            extra = next(o for o in owners(found, after) if o.category == "workspace")
            assert extra.name.startswith(f"{chunk}.I@")
        else:
            assert after == before
    assert [r.peak_bytes for r in on_device(found, "").roles] == [r.peak_bytes for r in plain.roles]


def test_an_update_holds_its_temporaries() -> None:
    plan = good_plan()
    role = plan.roles[0]
    at = next(k for k, i in enumerate(role.program) if isinstance(i.parts[0].op, Update))
    part = role.program[at].parts[0]
    assert isinstance(part.op, Update)
    more = replace(part, op=replace(part.op, workspace=10**6))
    assert part_peak(plan, more, {}) - part_peak(plan, part, {}) == 10**6
    program = (
        *role.program[:at],
        replace(role.program[at], parts=(more,)),
        *role.program[at + 1 :],
    )
    changed = replace(plan, roles=(replace(role, program=program), *plan.roles[1:]))
    most = peak(changed, changed.roles[0])
    assert most.instr == at and most.bytes["workspace"] == 10**6
    assert loads(Plan, dumps(changed)) == changed


def test_an_owner_in_words() -> None:
    assert (
        MemoryOwner("activation", "layers.3", 8, (0, 1, 2, 3), 13 << 30).text
        == "layers.3: activation 13 GiB of 4 microbatches"
    )
    assert (
        MemoryOwner("activation", "layers.3", 8, (2,), 1 << 20).text
        == "layers.3: activation 1 MiB of 1 microbatch"
    )
    assert MemoryOwner("param", "bucket0: w", 1, (), 5).text == "bucket0: w: param 5 B"


def test_what_a_cpu_computes_written_out_is_not_counted_on_a_cuda_device() -> None:
    live = Liveness((0,), ((10,), (4,)), ((Inside(12),), ()), on_cpu=((Affine(5, 20),), ())).bind(2)
    assert live.peak({}) == live.peak({}, "cpu") == 45
    assert live.peak({}, "cuda") == 12
