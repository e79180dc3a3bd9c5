"""Measured costs in a simulation: where each duration comes from, what messages take from computation, and what does
not fit."""

from dataclasses import replace

import pytest

from packages.simulator.tests.toys import changed
from piper_ir.ground.errors import ClusterError
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Part, Plan, Value
from piper_ir.program.costs import (
    AllocatorCosts,
    CommDuration,
    Costs,
    Duration,
    HostCosts,
    Origin,
    PartDuration,
    StepDuration,
)
from piper_ir.program.ops import Load
from piper_ir.program.program import Cost, Kernel
from piper_ir.tools import machine_name
from piper_simulator import Cluster, Simulation, cpu_local, load_cluster, simulate
from tests.helpers.cases import each_case
from tests.helpers.random_plans import PlanBuilder

CPU = cpu_local(
    matmul_flops=1e3,
    memory_bandwidth=1e3,
    link_bandwidth=1e3,
    link_latency=0.25,
    launch_s=0.0,
    host_issue_s=0.0,
)
ORIGIN = Origin(
    machine_name(), "cpu-local", "gloo", "processes", 2, 1, "3.11", "2.13", "key", "2026-01-01", 7
)
COMM = tuple(
    CommDuration("p2p", n, 2, Duration(s), busy_s=s / 10) for n, s in ((8, 0.5), (32, 1.0))
)


def two_stages() -> Plan:
    """a on the first device, a message of 16 bytes, b on the second; then a again on the first, beside the message.
    Every chunk has 500 FLOPs and a code of its own."""
    build = PlanBuilder(2)
    build.compute(0, 1.0)
    build.transfer(0, 1, waits=(("compute", 1),), nbytes=16)
    build.compute(0, 1.0)
    build.compute(1, 2.0, waits=(("0>1", 1),))
    plan = build.plan()
    kernel = Kernel("matmul", (1, 1, 1), "float32", 500, 0)
    chunks = tuple(
        replace(c, code=f"code {c.id}", steps={"F": replace(c.steps["F"], cost=Cost((kernel,)))})
        for c in plan.chunks
    )
    return replace(plan, rows=4, chunks=chunks)


def measured(
    *codes: str,
    rows: tuple[int, ...] = (4,),
    origin: Origin | None = ORIGIN,
    host: HostCosts | None = None,
) -> Costs:
    """A row takes a second."""
    steps = tuple(
        StepDuration(f"code {c}", "F", r, Duration(float(r))) for c in codes for r in rows
    )
    return Costs(steps=steps, comm=COMM, origin=origin, host=host)


def spans(s: Simulation) -> list[tuple[int, str, float, float, str]]:
    return [(x.rank, x.stream, x.start, x.end, x.source) for x in s.trace.spans]


def test_measured_then_interpolated_then_formula() -> None:
    """c0 is measured, the message lies between two sizes (0.5 s at 8 bytes, 1 s at 32), c1 is computed: 500 FLOPs at
    1000/s."""
    s = simulate(two_stages(), CPU, costs=measured("c0"))
    message = 0.5**0.5
    assert spans(s) == [
        (0, "compute", 0.0, 4.0, "measured"),
        (0, "0>1", 4.0, pytest.approx(4.0 + message), "interpolated"),
        (0, "compute", 4.0, 8.0, "measured"),
        (1, "0>1", 4.0, pytest.approx(4.0 + message), "interpolated"),
        (1, "compute", pytest.approx(4.0 + message), pytest.approx(4.5 + message), "formula"),
    ]
    total = 8.0 + 2 * message + 0.5
    assert s.summary()["sources"] == {
        "formula": pytest.approx(0.5 / total),
        "interpolated": pytest.approx(2 * message / total),
        "measured": pytest.approx(8.0 / total),
    }
    assert s.notes == ("1 of 2 chunks have no cost and are computed by formula: c1",)


def test_costs_that_hold_everything_need_no_cluster_and_give_no_warning() -> None:
    s = simulate(two_stages(), costs=measured("c0", "c1"))
    assert s.notes == () and s.step_s == pytest.approx(8.0 + 0.5**0.5)
    assumed = changed(CPU, notes="assumed")
    host = HostCosts(0.0, 0.0)
    assert simulate(two_stages(), assumed, costs=measured("c0", "c1", host=host)).notes == (), (
        "no constant of it was used"
    )
    assert (
        simulate(two_stages(), assumed, costs=measured("c0", host=host)).notes[0]
        == "cpu-local: assumed"
    )


def test_messages_take_processor_time_from_what_is_issued_next() -> None:
    """On a CPU: 0.25 s per message and a tenth of its time from the second a, which runs beside it; of b, which waits
    for the message anyway, only the former. Each computation takes 1 s more to be issued."""
    busy = 0.5**0.5 / 10
    costs = measured("c0", "c1", host=HostCosts(1.0, 0.25))
    at = {
        (x.rank, x.stream, x.instr): x.end - x.start
        for x in simulate(two_stages(), CPU, costs=costs).trace.spans
    }
    assert at[0, "compute", 0] == 5.0
    assert at[0, "compute", 2] == pytest.approx(5.0 + 0.25 + busy)
    assert at[1, "compute", 1] == pytest.approx(5.0 + 0.25)
    plan = two_stages()
    first, second = plan.roles
    longer = replace(
        plan, roles=(replace(first, program=(*first.program, replace(first.program[2]))), second)
    )
    last = max(
        (x for x in simulate(longer, CPU, costs=costs).trace.spans if x.rank == 0),
        key=lambda x: x.instr,
    )
    assert last.end - last.start == 5.0, "a message is paid for once"
    apart = simulate(two_stages(), changed(CPU, synchronous=False), costs=costs, contention=False)
    assert [x.end - x.start for x in apart.trace.spans if x.stream == "compute"] == [
        4.0,
        4.0,
        4.0,
    ], "an accelerator's host"


def test_extrapolated_rows_and_messages_are_named() -> None:
    far = replace(two_stages(), rows=8)
    s = simulate(far, CPU, costs=measured("c0", "c1", rows=(2, 4)))
    assert s.notes == ("interpolated beyond what was measured: 8 rows (measured 2 to 4)",)
    assert [x.end - x.start for x in s.trace.spans if x.stream == "compute"] == pytest.approx(
        [8.0] * 3
    )
    large = {v: Value(v, TensorSpec((64,), "uint8"), "activation") for v in far.values}
    s = simulate(replace(two_stages(), values=large), CPU, costs=measured("c0", "c1"))
    assert s.notes == (
        "interpolated beyond what was measured: p2p of 64 bytes (measured up to 32)",
    )


def test_what_is_too_far_away_is_computed_and_named() -> None:
    s = simulate(replace(two_stages(), rows=16), CPU, costs=measured("c0", "c1", rows=(2, 4)))
    assert s.notes == (
        "16 rows per microbatch were not measured; durations are interpolated between two measured numbers of rows, "
        "and up to a factor of 2 beyond; computed "
        "by formula: c0, c1",
    )
    assert {x.source for x in s.trace.spans if x.stream == "compute"} == {"formula"}
    huge = {v: Value(v, TensorSpec((65,), "uint8"), "activation") for v in two_stages().values}
    s = simulate(replace(two_stages(), values=huge), CPU, costs=measured("c0", "c1"))
    assert s.notes == ("not in the costs, computed by formula: p2p of 65 bytes over 2 ranks",)


def test_many_chunks_without_cost_are_counted() -> None:
    build = PlanBuilder(1)
    for k in range(6):
        build.compute(0, 1.0 + k)
    plan = build.plan()
    chunks = tuple(
        replace(c, code=f"code {c.id}", steps={"F": replace(c.steps["F"], cost=Cost((), None))})
        for c in plan.chunks
    )
    s = simulate(replace(plan, rows=4, chunks=chunks), CPU, costs=measured("c0", origin=None))
    assert s.notes == (
        "5 of 6 chunks have no cost and are computed by formula: c1, c2, c3 and 2 more",
    )


def test_costs_of_another_model_are_named_with_the_chunks_that_have_none() -> None:
    s = simulate(two_stages(), CPU, costs=measured("x"))
    assert s.notes[-1] == (
        "the costs (program key, 2026-01-01) are of another model: none of the 2 chunks has a cost, all are "
        "computed by formula: c0, c1; profile this model, or leave the costs out"
    )
    assert {x.source for x in s.trace.spans if x.stream == "compute"} == {"formula"}
    s = simulate(two_stages(), CPU, costs=Costs(comm=COMM))
    assert not any("another model" in n for n in s.notes), "without steps there is nothing to fit"


def test_costs_of_another_machine_or_of_fewer_ranks_are_named() -> None:
    other = replace(ORIGIN, device="another processor, 64 cores", ranks=4)
    notes = simulate(two_stages(), CPU, costs=measured("c0", "c1", origin=other)).notes
    assert notes[-2].startswith(
        "the costs were measured on another machine: another processor, 64 cores; this is "
    )
    assert (
        notes[-1]
        == "the costs were measured while 4 ranks computed at once; the plan has 2, which share "
        "what the machine has"
    )
    on_gpus = replace(
        ORIGIN, device="NVIDIA H200", cluster="h200-141g-sxm:8", ranks=1
    )  # devices that share nothing
    notes = simulate(
        two_stages(), load_cluster("h200x8"), costs=measured("c0", "c1", origin=on_gpus)
    ).notes
    assert not any("at once" in n for n in notes)
    notes = simulate(two_stages(), load_cluster("h100x8"), costs=measured("c0", "c1")).notes
    assert (
        notes[-1]
        == f"the costs were measured on cpu-local ({machine_name()}), and this is h100-80g-sxm:8"
    )


@each_case(
    ("cluster", "batch_s", "first_s"),
    [(CPU, 3.0, 3.5), (load_cluster("h100x8"), 3.0, 0.5), (load_cluster("h100x8"), 20.0, 12.5)],
    ids=["a core does both", "hidden beside the device", "longer than the 8 s of compute"],
)
def test_other_ops_are_looked_up_by_what_they_move_and_the_first_load_waits_for_the_batch_function(
    cluster: Cluster, batch_s: float, first_s: float
) -> None:
    plan = two_stages()
    (first, second) = plan.roles
    loads = [
        replace(first.program[0], parts=(Part(n, Load(n), 0, writes=(n,)),)) for n in ("x", "y")
    ]
    values = {n: Value(n, TensorSpec((8,), "uint8"), "batch") for n in ("x", "y")}
    plan = replace(
        plan,
        roles=(replace(first, program=(*loads, *first.program)), second),
        values={**plan.values, **values},
    )
    parts = (PartDuration("Load", 8, Duration(0.5)), PartDuration("Batch", 4, Duration(batch_s)))
    costs = replace(measured("c0", "c1"), parts=parts)
    found = [
        x for x in simulate(plan, cluster, costs=costs, contention=False).trace.spans if x.rank == 0
    ][:2]
    assert [x.end - x.start for x in found] == [first_s, 0.5] and {x.source for x in found} == {
        "measured"
    }


def test_memory_as_the_allocator_was_measured() -> None:
    plan = two_stages()
    costs = replace(measured("c0", "c1"), allocator=AllocatorCosts(1000, 1.5))
    s = simulate(plan, CPU, costs=costs)
    assert s.device_bytes == tuple(1000 + round(1.5 * b) for b in s.peak_bytes)


def test_without_a_cluster_what_the_costs_lack_is_refused() -> None:
    with pytest.raises(
        ClusterError, match="step F of chunk c1 has no given duration; name a cluster"
    ):
        simulate(two_stages(), costs=measured("c0"))
