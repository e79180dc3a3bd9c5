"""What `simulate` reports, on plans of a few instructions where every number can be told by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packages.simulator.tests.toys import changed, toy
from piper_ir.fold.memory import with_peaks
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import ClusterError, PlanError
from piper_ir.ground.intervals import uncovered
from piper_ir.ground.sizes import TensorSpec
from piper_ir.ground.trace import Trace
from piper_ir.plan.plan import State
from piper_ir.program.costs import Costs, Duration
from piper_ir.program.program import Cost, Input, Kernel, Param
from piper_simulator import STACKS, load_cluster, simulate
from piper_simulator.interval import LAUNCHES
from tests.helpers.random_plans import PlanBuilder, given_durations, random_plan


def two_devices(hop: float = 0.0, dp: int = 1) -> PlanBuilder:
    """3 s on the first, a transfer, 2 s on the second, back, 1 s on the first."""
    build = PlanBuilder(2, hop=hop, dp=dp)
    build.compute(0, 3.0, name="a.F@0")
    build.transfer(0, 1, waits=(("compute", 1),), nbytes=16)
    build.compute(1, 2.0, waits=(("0>1", 1),), name="b.F@0")
    build.transfer(1, 0, waits=(("compute", 1),), nbytes=8)
    build.compute(0, 1.0, waits=(("1>0", 1),), name="a.B@0")
    return build


def test_times_and_bubbles() -> None:
    s = simulate(two_devices().plan())
    assert (s.step_s, s.period_s) == (6.0, 6.0)
    assert s.bubble_s == (2.0, 4.0)
    assert s.global_bubble_s == 4.0, "the second device works 2 of 6 s"
    assert s.span_bubble_s == 2.0, "the first one waits 2 s between its instructions"
    assert s.exposed_comm_s == 0.0
    assert s.tokens_per_s is s.mfu is s.hfu is None


def test_latency_is_exposed_where_nothing_computes() -> None:
    s = simulate(two_devices(hop=0.5).plan())
    assert s.step_s == 7.0
    assert s.exposed_comm_s == 1.0, "both devices are idle during both hops"


def test_communication_beside_compute_is_not_exposed() -> None:
    build = PlanBuilder(2, hop=0.5)
    build.compute(0, 0.25)
    build.compute(1, 0.25)
    build.transfer(0, 1)
    assert simulate(build.plan()).exposed_comm_s == 0.25, "half of the hop is hidden"


def test_instructions_without_duration_do_not_stretch_the_span() -> None:
    build = PlanBuilder(2)
    build.compute(1, 0.0, name="load")
    build.compute(0, 3.0)
    build.transfer(0, 1, waits=(("compute", 1),))
    build.compute(1, 2.0, waits=(("0>1", 1),))
    assert simulate(build.plan()).span_bubble_s == 0.0


def test_every_rank_of_a_role_reports_what_its_role_does() -> None:
    s = simulate(two_devices(dp=3).plan())
    assert s.bubble_s == (2.0, 2.0, 2.0, 4.0, 4.0, 4.0)
    assert len(s.peak_bytes) == len(s.device_bytes) == len(s.peak_by_category) == 6
    assert [x.rank for x in s.trace.spans if x.name == "a.F@0"] == [0, 1, 2]


def test_the_trace() -> None:
    plan = two_devices().plan()
    trace = simulate(plan).trace
    span = trace.spans[1]
    assert (span.rank, span.stream, span.instr, span.name) == (0, "0>1", 1, "0>1.send@0")
    assert (span.start, span.end, span.ready, span.bytes, span.source) == (
        3.0,
        3.0,
        3.0,
        16,
        "given",
    )
    assert (trace.plan_key, trace.kind, trace.step) == (plan.key, "simulated", 0)
    assert loads(Trace, dumps(trace)) == trace


def test_of_several_steps_the_trace_is_the_last_from_its_own_start() -> None:
    build = PlanBuilder(1)
    build.compute(0, 2.0)
    s = simulate(build.plan(), steps=3)
    assert (s.trace.step, s.trace.spans[0].start, s.trace.spans[0].end) == (2, 0.0, 2.0)
    assert s.step_s == 2.0
    with pytest.raises(PlanError, match=r"simulate\(steps=0\)"):
        simulate(build.plan(), steps=0)


def test_memory_peaks_and_samples() -> None:
    plan = two_devices().plan()
    roles = (
        replace(plan.roles[0], states=(State("param", "w", 64),), allocs_first=("v0>1@0",)),
        plan.roles[1],
    )
    plan = with_peaks(replace(plan, roles=roles))
    s = simulate(plan)
    assert s.peak_bytes == (80, 0) == tuple(r.peak_bytes for r in plan.roles)
    assert s.peak_by_category[0] == {"param": 64, "activation": 16}
    assert s.device_bytes == s.peak_bytes
    assert [(m.rank, m.instr, m.time) for m in s.trace.memory] == [
        (0, 0, 0.0),
        (0, 3, 5.0),
        (1, 1, 3.0),
    ]


def test_device_bytes_count_what_is_not_tensors() -> None:
    cluster = load_cluster("h100x8")
    plan = two_devices().plan()
    plan = replace(
        plan, roles=(replace(plan.roles[0], states=(State("param", "w", 1000),)), plan.roles[1])
    )
    s = simulate(plan, cluster)
    assert s.device_bytes[0] == cluster.device.context_bytes + 1050 + 2 * cluster.device.p2p_bytes


FLAT = toy("flat", {"float32": 100.0}, 1e9, 1 << 30, 1e9, 0.0, 1e9, 0.0, per_node=8)


def test_utilisation() -> None:
    """One chunk of 600 FLOPs and one device of 100 FLOP/s. N = 10, 2 rows of 3 tokens: 6 N x 6 = 360 model FLOPs in 6
    s."""
    build = PlanBuilder(1)
    build.compute(0, 1.0)
    plan = build.plan()
    kernel = Kernel("matmul", (1, 1, 1), "float32", 600, 0)
    chunk = replace(
        plan.chunks[0], steps={"F": replace(plan.chunks[0].steps["F"], cost=Cost((kernel,)))}
    )
    plan = replace(
        plan, chunks=(chunk,), params=(Param("w", TensorSpec((10,), "float32")),), rows=2
    )
    s = simulate(plan, FLAT, tokens_per_row=3)
    assert (s.step_s, s.tokens_per_s) == (6.0, 1.0)
    assert s.hfu == pytest.approx(1.0)
    assert s.mfu == pytest.approx(360 / 600)
    assert simulate(plan, FLAT, model_flops_per_step=300).mfu == pytest.approx(0.5)
    attention = Kernel("attention", (1, 1, 5, 5, 2), "float32", 0, 0)
    more = replace(chunk, steps={"F": replace(chunk.steps["F"], cost=Cost((kernel, attention)))})
    long = simulate(replace(plan, chunks=(more,)), FLAT, tokens_per_row=3)
    assert long.mfu == pytest.approx((360 + 3 * 4 * 50) / 600)
    few = simulate(replace(plan, chunks=(more,)), FLAT, tokens_per_row=1)
    assert any("count causal attention in full" in n and "83% of them" in n for n in few.notes)
    many = simulate(replace(plan, chunks=(more,)), FLAT, tokens_per_row=30)
    assert any("by 6 N per token" in n for n in many.notes), "attention does not explain that"


def test_of_experts_model_flops_count_what_a_token_visits() -> None:
    """2 rows of 3 tokens; 4 experts of 50 numbers, of whose products each has 3 rows; N = 10 + 4 x 50 x 3 / 6. A
    batched product whose shape no parameter has (attention written out) changes nothing."""
    build = PlanBuilder(1)
    build.compute(0, 1.0)
    plan = build.plan()
    chunk = plan.chunks[0]
    sizes = {"w": (10,), "experts": (4, 5, 10)}
    params = tuple(Param(name, TensorSpec(shape, "float32")) for name, shape in sizes.items())
    inputs = tuple(Input("param", p.name, p.spec) for p in params)
    for dims, n in (
        ((4, 3, 10, 5), 110),
        ((4, 3, 5, 10), 110),
        ((4, 6, 10, 5), 210),
        ((4, 3, 10, 6), 210),
        ((12, 10, 5), 210),
    ):
        kernel = Kernel("matmul", dims, "float32", 600, 0)
        changed = replace(
            chunk, inputs=inputs, steps={"F": replace(chunk.steps["F"], cost=Cost((kernel,)))}
        )
        s = simulate(
            replace(plan, chunks=(changed,), params=params, rows=2), FLAT, tokens_per_row=3
        )
        assert s.mfu == pytest.approx(6 * n * 6 / 600), dims


def test_a_plan_without_given_durations_needs_a_cluster() -> None:
    plan = two_devices().plan()
    bare = tuple(replace(c, steps={"F": replace(c.steps["F"], cost=Cost())}) for c in plan.chunks)
    with pytest.raises(ClusterError, match="name a cluster"):
        simulate(replace(plan, chunks=bare))
    assert simulate(replace(plan, chunks=bare), "h100x8").summary()["sources"] == {"formula": 1.0}
    with pytest.raises(ClusterError, match="unknown cluster 'k80x2'"):
        simulate(plan, "k80x2")


def test_what_is_not_calibrated_is_in_the_summary_and_the_trace() -> None:
    plan = two_devices().plan()
    kernel = Kernel("matmul", (1, 1, 1), "int8", 600, 0)
    chunks = tuple(
        replace(c, steps={"F": replace(c.steps["F"], cost=Cost((kernel,)))}) for c in plan.chunks
    )
    s = simulate(replace(plan, chunks=chunks), "h100x8")
    constants, guess, advice = s.summary()["notes"]
    assert constants.startswith("h100-80g-sxm:8: ") and "not calibrated" in constants
    assert "no FLOP/s known for int8" in guess
    assert "no software stack with constants is named" in advice and "hopper-nemo" in advice
    assert "no software" not in str(simulate(plan, "h100x8@hopper-nemo").notes)
    priced = replace(plan, chunks=chunks)
    elsewhere = simulate(priced, "h100x8@ampere-torch")
    assert any("hold for a100-80g-sxm, a100-40g-sxm and not for h100" in n for n in elsewhere.notes)
    widths = [x.interval.high / x.period_s for x in (s, elsewhere) if x.interval is not None]
    assert widths == [pytest.approx(1.45)] * 2, "constants of another device narrow nothing"
    narrow = simulate(priced, "a100x8@ampere-torch")
    assert narrow.interval is not None and narrow.interval.stack == "ampere-torch"
    assert not any("hold for" in n for n in narrow.notes)
    assert s.trace.notes == {"cluster": "h100-80g-sxm:8", "warnings": f"{constants}; {guess}"}
    assert simulate(plan, changed(FLAT, notes="")).notes == ()


@pytest.mark.parametrize(("size", "more"), [(8, 1 + LAUNCHES), (2048, 1.0)], ids=["host", "device"])
def test_a_step_that_waits_for_its_host_has_a_wider_interval(size: int, more: float) -> None:
    plan = two_devices().plan()
    kernels = (Kernel("matmul", (size, size, size), "bfloat16", 2 * size**3, 6 * size**2),) * 100
    chunks = tuple(
        replace(c, steps={"F": replace(c.steps["F"], cost=Cost(kernels))}) for c in plan.chunks
    )
    found = simulate(replace(plan, chunks=chunks), "a100x8@ampere-torch")
    assert found.interval is not None
    seen = STACKS["ampere-torch"].seen
    width = math.hypot(math.log1p(seen), math.log(more))
    up, down = found.interval.high / found.period_s, found.period_s / found.interval.low
    assert math.log(up) == pytest.approx(width, rel=0.02)
    assert math.log1p(seen) <= math.log(down) + 1e-9 <= width + 1e-6, (
        "with quicker launches the device is the slower one"
    )


def test_a_guess_behind_the_utilisation_alone_is_noted() -> None:
    """Durations are looked up, so only mfu and hfu need the rate of the dtype."""
    plan = two_devices().plan()
    kernel = Kernel("matmul", (1, 1, 1), "int8", 600, 0)
    chunks = tuple(
        replace(c, steps={"F": replace(c.steps["F"], cost=Cost((kernel,)))}) for c in plan.chunks
    )
    costs = Costs({c.id: {"F": Duration(1.0)} for c in chunks})
    notes = simulate(replace(plan, chunks=chunks), FLAT, costs=costs).notes
    assert sum("no FLOP/s known for int8" in note for note in notes) == 1


def test_the_summary_is_plain_numbers() -> None:
    summary = simulate(two_devices().plan()).summary()
    assert summary["step_s"] == 6.0 and summary["sources"] == {"given": 1.0}
    assert all(v is None or isinstance(v, int | float | dict | list) for v in summary.values())


@given(seed=st.integers(0, 1 << 30))
@example(66673331)  # 2.7 - 1.0 is more than 1.7
def test_invariants_on_random_plans(seed: int) -> None:
    plan, _ = random_plan(seed)
    s = simulate(plan)
    durations = given_durations(plan)
    assert s.step_s >= max(x.end for x in s.trace.spans) >= s.step_s - plan.hop - 1e-9
    assert s.period_s <= s.step_s + 1e-9, (
        "steps that overlap cannot be slower than steps that do not"
    )
    assert len(s.trace.spans) == len(durations)
    assert all(x.ready <= x.start <= x.end for x in s.trace.spans)
    assert all(0 <= b <= s.step_s for b in s.bubble_s)
    assert (
        0 <= s.exposed_comm_s <= s.step_s and -1e-9 <= s.span_bubble_s <= s.global_bubble_s + 1e-9
    )
    again = simulate(plan)
    assert again == s and again.trace == s.trace


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=6),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6),
)
def test_uncovered_counts_what_a_ruler_would(
    some: list[tuple[int, int]], gaps: list[tuple[int, int]]
) -> None:
    intervals = [(float(a), float(a + n)) for a, n in some]
    by, at = [], 0.0
    for gap, length in gaps:
        by.append((at + gap, at + gap + length))
        at += gap + length
    inside = [k + 0.5 for k in range(60)]
    expected = sum(
        any(a < x < b for a, b in intervals) and not any(a < x < b for a, b in by) for x in inside
    )
    assert math.isclose(uncovered(intervals, by), expected)
