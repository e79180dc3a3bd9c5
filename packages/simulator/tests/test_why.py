"""Why a step takes as long as it does, on plans where the critical path can be told by hand, and what holds of any
plan."""

import json
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.simulator.tests.toys import changed, toy
from piper_compiler import Strategy, compile_program, recipes, synthetic
from piper_ir.fold.issue import issue_times
from piper_ir.fold.timing import Times, prepare, sweep
from piper_ir.ground.errors import ClusterError, PlanError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Plan, Value
from piper_ir.program.costs import CommDuration, Costs, Duration
from piper_ir.program.program import Cost, Kernel
from piper_simulator import Why, compare, load_cluster, simulate, why
from piper_simulator.explanation.critical import Chains, PathPiece
from piper_simulator.explanation.gaps import idle_gaps, time_shares
from piper_simulator.explanation.whatif import changes, cluster_constants
from tests.helpers.random_plans import PlanBuilder, random_plan

FLAT = toy("flat", {"float32": 100.0}, 1e9, 1 << 30, 2.0, 0.0, 1.0, 0.0, per_node=8)
Line = tuple[float, float, str]


def pipeline(recipe: str, *, hop: float = 0.5, microbatches: int = 4) -> Plan:
    """Two stages of F = I = W = 1 s."""
    program = synthetic(stages=2, F=1.0, I=1.0, W=1.0, hop=hop)
    made = getattr(recipes, recipe)(pp=2, microbatches=microbatches)
    return compile_program(program, Strategy(Mesh(pp=2), made)).plan


def lines(found: Why, pieces: tuple[PathPiece, ...]) -> list[Line]:
    return [(p.start, p.end, found.owners.of_piece(p).text) for p in pieces]


def two_devices() -> Plan:
    """300 FLOPs on the first, 16 bytes to the second, 200 FLOPs, 8 bytes back, 100 FLOPs; on FLAT 3, 8, 2, 4 and 1
    s."""
    build = PlanBuilder(2)
    build.compute(0, 3.0, name="a.F@0")
    build.transfer(0, 1, waits=(("compute", 1),), nbytes=16)
    build.compute(1, 2.0, waits=(("0>1", 1),), name="b.F@0")
    build.transfer(1, 0, waits=(("compute", 1),), nbytes=8)
    build.compute(0, 1.0, waits=(("1>0", 1),), name="a.B@0")
    return computed(build.plan())


def computed(plan: Plan, rng: Random | None = None) -> Plan:
    """A plan of given durations as one that needs a cluster: 100 FLOPs for each second; with `rng` also kernels bound
    by memory or launches, and messages of some bytes."""
    chunks = []
    for chunk in plan.chunks:
        flops = int(100 * (chunk.steps["F"].cost.seconds or 0))
        memory, count = (rng.choice((0, 10**9)), rng.choice((1, 5))) if rng else (0, 1)
        kernel = Kernel("matmul", (1, 1, 1), "float32", flops, memory, count)
        chunks.append(replace(chunk, steps={"F": replace(chunk.steps["F"], cost=Cost((kernel,)))}))
    values = (
        {v: Value(v, TensorSpec((rng.randint(0, 9),), "uint8"), "activation") for v in plan.values}
        if rng
        else plan.values
    )
    return replace(plan, chunks=tuple(chunks), values=values)


def test_gpipe_waits_for_the_last_stage_going_up_and_for_the_first_coming_down() -> None:
    """By hand: F0 on the first device, the hop, four F and the first B on the second, the hop, four B on the first."""
    found = why(pipeline("gpipe"))
    assert found.step_s == 16.0
    assert lines(found, found.path) == [
        (0.0, 1.0, "F of stage 0"),
        (1.0, 1.5, "activation over pp0>pp1.act"),
        *[(k + 1.5, k + 2.5, "F of stage 1") for k in range(4)],
        (5.5, 7.5, "B of stage 1"),
        (7.5, 8.0, "gradient over pp1>pp0.grad"),
        *[(8.0 + 2 * k, 10.0 + 2 * k, "B of stage 0") for k in range(4)],
    ]
    assert [p.holder for p in found.path][1] == "latency", "the hop occupies nothing"
    first, second = found.gaps
    assert [(g.start, g.end, lines(found, g.pieces)) for g in first] == [
        (
            4.0,
            8.0,
            [
                (4.0, 4.5, "F of stage 1"),
                (4.5, 5.5, "F of stage 1"),
                (5.5, 7.5, "B of stage 1"),
                (7.5, 8.0, "gradient over pp1>pp0.grad"),
            ],
        )
    ]
    assert lines(found, second[0].pieces) == [
        (0.0, 1.0, "F of stage 0"),
        (1.0, 1.5, "activation over pp0>pp1.act"),
    ]
    assert second[-1].node == -1 and lines(found, second[-1].pieces) == [
        (14.0, 16.0, "B of stage 0")
    ]
    assert [(s.computing, s.bubble, s.waiting, s.host) for s in found.shares] == [
        (12.0, 3.5, 0.5, 0.0),
        (12.0, 3.0, 1.0, 0.0),
    ]


def test_one_f_one_b_pays_its_hops_in_between() -> None:
    """By hand: the second device waits for F2, which the first may run only after B0: two round trips instead of
    one."""
    found = why(pipeline("one_f_one_b"))
    assert found.step_s == 17.0
    assert {o.text: s for o, s in found.path_by_owner.items()} == {
        "B of stage 1": 6.0,
        "B of stage 0": 4.0,
        "F of stage 1": 3.0,
        "F of stage 0": 2.0,
        "activation over pp0>pp1.act": 1.0,
        "gradient over pp1>pp0.grad": 1.0,
    }
    (row,) = found.what_if
    assert (row.name, row.step_s) == ("perfect overlap", 15.0)
    result = compare(why(pipeline("gpipe")), found)
    assert (result.step.change, result.peak.change) == (1.0, -2.0), (
        "a second more, and two activations less"
    )
    assert {d.name: d.change for d in result.path if d.name.startswith("comm")} == {
        "communication: activation": 0.5, "communication: gradient": 0.5
    }  # fmt: skip
    assert {d.name: d.change for d in result.device if d.change} == {
        "bubble, waiting for B": 0.5, "bubble, waiting for F": -0.25, "exposed communication: activation": 0.25,
        "exposed communication: gradient": 0.5,
    }  # fmt: skip


def test_a_slow_link_owns_the_path() -> None:
    found = why(two_devices(), FLAT)
    assert [(p.seconds, p.holder) for p in found.path] == [
        (3.0, "compute"), (8.0, "communication"), (2.0, "compute"), (4.0, "communication"), (1.0, "compute")
    ]  # fmt: skip
    rows = {w.name: w.step_s for w in found.what_if}
    assert rows == {
        "twice the bandwidth within nodes": 12.0,
        "twice the memory bandwidth": 18.0,
        "twice the peak FLOP/s": 15.0,
        "no launch cost": 18.0,
        "no interference": 18.0,
        "perfect overlap": 8.0,  # 6 s of compute, less than the 8 s that one of the links is busy
    }
    by_name = {s.name: s.per_percent for s in found.sensitivities}
    assert by_name == pytest.approx(
        {
            "intra_bandwidth": -12 / 18 / 1.01,
            **dict.fromkeys(("peak_flops[float32]", "matmul_fraction"), -6 / 18 / 1.01),
        }
    )
    assert next((c.owner.text, c.count, c.seconds, c.on_path) for c in found.formulas) == (
        "activation over 0>1",
        1,
        8.0,
        8.0,
    )


def test_a_slow_host_owns_the_path() -> None:
    """10 s per instruction: the fourth of the first device is issued at 40 s, long after all that it waits for."""
    found = why(two_devices(), changed(FLAT, host_issue_s=10.0))
    assert lines(found, found.path) == [(0.0, 40.0, "host of pp0"), (40.0, 41.0, "F of pp0")]
    assert {w.name: w.step_s for w in found.what_if}["no launch cost"] == 18.0
    assert found.shares[1].host == 41.0 - 2.0 - found.shares[1].bubble - found.shares[1].waiting
    assert max(found.sensitivities, key=lambda s: s.per_percent).name == "host_issue_s"


def test_a_host_that_launches_slowly_owns_the_path() -> None:
    """10 s per launch; measured messages stay when launches take none."""
    plan, on = two_devices(), changed(FLAT, launch_s=10.0)
    costs = Costs(comm=(CommDuration("p2p", 0, 2, Duration(4.0)),))
    found = why(plan, on, costs=costs)
    assert found.path[0].holder == "host"
    assert found.step_s == simulate(plan, on, costs=costs).step_s > 20.0
    rows = {w.name: w.step_s for w in found.what_if}
    assert rows["no launch cost"] == simulate(plan, FLAT, costs=costs).step_s < 20.0
    assert rows["no interference"] == found.step_s and rows["perfect overlap"] >= 20.0
    assert max(found.sensitivities, key=lambda s: s.per_percent).name == "launch_s"


def test_links_between_nodes_have_a_row_where_there_are_nodes() -> None:
    rows = {
        w.name: w.step_s for w in why(two_devices(), changed(FLAT, per_node=1, nodes=2)).what_if
    }
    assert (
        rows["twice the bandwidth between nodes"] == 18.0
        and rows["twice the bandwidth within nodes"] == 30.0
    )


def test_a_measured_duration_changes_as_its_formula() -> None:
    """The first message was measured at 20 s, where the formula says 8: a link twice as fast makes it 10."""
    costs = Costs(comm=(CommDuration("p2p", 16, 2, Duration(20.0)),))
    found = why(two_devices(), FLAT, costs=costs)
    assert found.step_s == 30.0
    assert {w.name: w.step_s for w in found.what_if}[
        "twice the bandwidth within nodes"
    ] == 6.0 + 10.0 + 2.0
    assert "activation over 0>1" not in {c.owner.text for c in found.formulas}


def test_the_interval_is_that_of_the_spreads() -> None:
    plan = two_devices()
    ids = [c.id for c in plan.chunks]
    costs = Costs(
        {ids[0]: {"F": Duration(3.0, spread=0.1)}, ids[1]: {"F": Duration(2.0, spread=0.2)}}
    )
    found = why(plan, FLAT, costs=costs, draws=400, seed=3).interval
    assert found is not None
    assert (found.fast, found.slow) == (pytest.approx(17.7), pytest.approx(18.3))
    sigma = 1.4826 * (0.1**2 + 0.2**2) ** 0.5  # of a sum
    assert found.median == pytest.approx(18.0, abs=0.15 * sigma)
    assert (found.high - found.low) / (2 * 1.645 * sigma) == pytest.approx(1.0, abs=0.15)
    assert found.covered == pytest.approx((3 + 2) / (3 + 8 + 8 + 2 + 4 + 4 + 1)), (
        "both ends of a message"
    )
    assert (
        why(plan, FLAT, costs=costs, draws=400, seed=3).interval
        == found
        != why(plan, FLAT, costs=costs, seed=4).interval
    )


def test_without_a_spread_there_is_no_interval() -> None:
    assert why(two_devices(), FLAT).interval is None
    assert (
        why(
            two_devices(), FLAT, costs=Costs(comm=(CommDuration("p2p", 16, 2, Duration(20.0)),))
        ).interval
        is None
    )


def test_all_of_it_is_json() -> None:
    found = json.loads(json.dumps(why(two_devices(), FLAT).as_dict()))
    assert [p["instruction"] for p in found["critical_path"]] == [
        "a.F@0",
        "0>1.recv@0",
        "b.F@0",
        "1>0.recv@0",
        "a.B@0",
    ]
    assert found["roles"][0]["gaps"][0]["before"] == "a.B@0"
    assert found["roles"][0]["ranks"] == [0]
    assert (
        json.loads(
            json.dumps(compare(why(two_devices(), FLAT), why(two_devices(), FLAT)).as_dict())
        )["step_s"]["change"]
        == 0
    )


def test_what_cannot_be_explained_is_said() -> None:
    with pytest.raises(ClusterError, match="name a cluster"):
        why(two_devices())
    with pytest.raises(ClusterError, match="unknown cluster 'k80x2'"):
        why(two_devices(), "k80x2")
    with pytest.raises(PlanError, match=r"why\(draws=0\)"):
        why(two_devices(), FLAT, draws=0)


def test_constants_are_the_floats_of_a_cluster() -> None:
    found = {name: put(7.5) for name, _, put in cluster_constants(FLAT)}
    assert found["intra_latency"] == changed(FLAT, intra_latency=7.5)
    assert found["peak_flops[float32]"].device.peak_flops == {"float32": 7.5}
    assert not {"per_node", "nodes", "memory_bytes", "synchronous", "name"} & found.keys(), (
        "counts, sizes and names"
    )


def test_interference_has_a_row_and_a_part_of_the_path() -> None:
    """Two messages from one device: on one port they take 8 s together, alone 4 s each, at the same time."""
    build = PlanBuilder(3)
    for target in (1, 2):
        build.transfer(0, target, nbytes=8)
    build.compute(1, 1.0, waits=(("0>1", 1),))
    found = why(computed(build.plan()), FLAT)
    assert (found.step_s, found.slowed_s) == (pytest.approx(9.0), pytest.approx(4.0))
    rows = {w.name: w.step_s for w in found.what_if}
    assert rows["no interference"] == 5.0
    assert [p.holder for p in found.path] == ["communication", "compute"]


def contiguous(pieces: tuple[PathPiece, ...], start: float, end: float) -> None:
    assert pieces[0].start == start and pieces[-1].end == end
    assert all(a.end == b.start for a, b in pairwise(pieces)), "no gap, no overlap"
    assert all(p.start < p.end for p in pieces)


def swept(seed: int, issue: float) -> tuple[Plan, list[float], Times, Chains]:
    plan, durations = random_plan(seed)
    prepared = prepare(plan)
    host = issue_times(prepared.offsets, issue)
    times = sweep(prepared, durations, latency=plan.hop, issue=host)
    return plan, durations, times, Chains(prepared, times, latency=plan.hop, issue=host)


SEEDS, ISSUES = st.integers(0, 1 << 30), st.sampled_from((0.0, 0.1, 0.7))


@given(seed=SEEDS, issue=ISSUES)
def test_the_path_is_contiguous_and_what_is_on_it_is_critical(seed: int, issue: float) -> None:
    """A second more in an instruction on the path is at least a second more in the step."""
    plan, durations, times, chains = swept(seed, issue)
    path = chains.critical_path()
    if not path:
        assert times.makespan == 0.0
        return
    contiguous(path, 0.0, times.makespan)
    prepared = prepare(plan)
    for piece in path:
        if piece.holder == "latency":
            assert prepared.p2p[prepared.group_of[piece.node]] and piece.seconds == pytest.approx(
                plan.hop
            )
            continue
        if piece.holder == "host":
            issued = (
                piece.node - max(first for first in prepared.offsets if first <= piece.node) + 1
            )
            assert (piece.start, piece.end) == (0.0, pytest.approx(issued * issue))
            continue
        assert (piece.start, piece.end) == (times.start[piece.node], times.end[piece.node])
        longer = list(durations)
        for m in (
            (piece.node,)
            if prepared.group_of[piece.node] < 0
            else prepared.groups[prepared.group_of[piece.node]]
        ):
            longer[m] += 1.0
        assert (
            sweep(
                prepared, longer, latency=plan.hop, issue=issue_times(prepared.offsets, issue)
            ).makespan
            >= times.makespan + 1.0 - 1e-9
        )


@given(seed=SEEDS, issue=ISSUES)
def test_every_idle_moment_of_a_role_has_an_owner(seed: int, issue: float) -> None:
    plan, durations, times, chains = swept(seed, issue)
    prepared = prepare(plan)
    gaps = idle_gaps(prepared, times, chains)
    found = time_shares(times.makespan, gaps)
    for r, own in enumerate(gaps):
        nodes = range(prepared.offsets[r], prepared.offsets[r + 1])
        busy = sum(durations[n] for n in nodes if prepared.group_of[n] < 0)
        assert found[r].computing == pytest.approx(busy)
        assert busy + sum(g.seconds for g in own) == pytest.approx(times.makespan)
        for gap in own:
            contiguous(gap.pieces, gap.start, gap.end)
            assert not any(p.holder == "compute" and p.node in nodes for p in gap.pieces), (
                "it computes nothing meanwhile"
            )


@pytest.mark.long
@given(seed=SEEDS, contention=st.booleans())
def test_what_if_is_a_simulation_of_the_changed_cluster(seed: int, contention: bool) -> None:
    rng = Random(seed)
    plan = computed(random_plan(seed, most=30)[0], rng)
    cluster = changed(
        FLAT,
        per_node=4,
        nodes=2,
        intra_latency=0.1,
        launch_s=0.3,
        host_issue_s=rng.choice((0.0, 0.2)),
    )
    found = why(plan, cluster, contention=contention)
    rows = {w.name: w.step_s for w in found.what_if}
    assert found.step_s == simulate(plan, cluster, contention=contention).step_s
    for name, other in changes(cluster):
        step_s = rows.pop(name)
        assert step_s == simulate(plan, other, contention=contention).step_s
        assert contention or step_s <= found.step_s
    alone, overlap = rows.pop("no interference", found.step_s), rows.pop("perfect overlap")
    assert alone == simulate(plan, cluster, contention=False).step_s
    assert overlap is not None and overlap <= alone <= found.step_s + 1e-9 and not rows


@pytest.mark.long
@given(seeds=st.tuples(SEEDS, SEEDS))
def test_the_parts_of_a_difference_add_up_to_it(seeds: tuple[int, int]) -> None:
    a, b = (
        why(computed(random_plan(s, most=30)[0], Random(s)), changed(FLAT, host_issue_s=0.1))
        for s in seeds
    )
    result = compare(a, b)
    for parts in (result.path, result.device):
        assert sum(d.change for d in parts) == pytest.approx(result.step.change)
        assert sum(d.a for d in parts) == pytest.approx(a.step_s) and sum(
            d.b for d in parts
        ) == pytest.approx(b.step_s)
    assert sum(d.change for d in result.memory) == result.peak.change


@pytest.mark.long
def test_messages_of_a_clusters_table_change_with_its_links() -> None:
    """The reductions of this cluster are looked up, and take as much less as their formula does."""
    plan = compile_program(
        synthetic(stages=2, F=1e-3, I=1e-3, W=1e-3, params=1 << 26),
        Strategy(Mesh(dp=8), recipes.data_parallel()),
    ).plan
    given = {c.id: {s: Duration(1e-3, "given") for s in c.steps} for c in plan.chunks}
    bare = [
        replace(c, steps={s: replace(g, cost=Cost()) for s, g in c.steps.items()})
        for c in plan.chunks
    ]
    free = replace(plan, chunks=tuple(bare))
    found = why(free, load_cluster("a100-40gx8"), costs=Costs(given))
    rows = {w.name: w.step_s for w in found.what_if}
    assert (
        load_cluster("a100-40gx8").links.messages
        and rows["twice the bandwidth within nodes"] < 0.98 * found.step_s
    )
