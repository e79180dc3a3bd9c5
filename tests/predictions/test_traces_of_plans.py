"""Protects: a profiler's trace of a plan gives the plan's times back, by names of instructions and by messages alone.

The traces are those of simulated steps, written as torch's profiler writes them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import piper
from packages.traces.tests.kineto_files import KinetoFile
from piper_compiler.directives import Directive
from piper_ir.ground.errors import FormatError
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import Duration, HostCosts, Origin
from piper_ir.program.ops import COMM, message_op
from piper_simulator import DeviceModel, Simulation, load_cluster, model_for
from piper_traces import Matched, match_messages, match_ranges, measured_costs, read_ranks
from tests.helpers import shared_jobs
from tests.helpers.slow_devices import slow_devices

CLUSTER = load_cluster("h100x8")
ORIGIN = Origin("a device", CLUSTER.name, "trace", "trace", 4, 1, "", "", "", "", 1)


def plan_with(*more: Directive) -> Plan:
    mesh = piper.Mesh(pp=2, dp=2)
    directives = [
        *piper.recipes.one_f_one_b(pp=2, microbatches=2),
        *more,
        *piper.recipes.data_parallel(over=("dp",), zero=1),
    ]
    return piper.compile(shared_jobs.job("gpt"), piper.Strategy(mesh, directives)).plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_with()


@pytest.fixture(scope="module")
def predicted(plan: Plan) -> Simulation:
    return piper.simulate(plan, CLUSTER, contention=False)


def written(
    plan: Plan, predicted: Simulation, folder: Path, *, slower: float = 1.0, named: bool = True
) -> list[Path]:
    """Write a trace of each rank: the host names every instruction and launches a kernel, all before the step."""
    paths = []
    for rank in range(plan.mesh.world):
        trace = KinetoFile(rank, plan.mesh.world)
        trace.range("ProfilerStep#4", -1e6, 0)
        host = -1e6
        for span in sorted(
            (s for s in predicted.trace.spans if s.rank == rank), key=lambda s: s.instr
        ):
            host += 10
            op = plan.role_of(rank).program[span.instr].parts[0].op
            start, end = span.start * 1e6 * slower, span.end * 1e6 * slower
            if named:
                trace.range(span.name, host, host + 8)
            if isinstance(op, COMM):
                peers = plan.peers(plan.channel(op.channel), rank)
                name = {"p2p": "send"}.get(message_op(op), message_op(op))
                trace.message(name, span.bytes, peers, start, end, host + 5)
            else:
                trace.kernel("sm90_gemm", start, end, launched=host + 5)
        paths.append(trace.write(folder))
    return paths


@pytest.mark.parametrize(("slower", "keep"), [(1.0, "all"), (3.0, "all"), (3.0, "inputs")])
def test_costs_of_a_trace_predict_its_step(slower: float, keep: str, tmp_path: Path) -> None:
    plan = plan_with(*([piper.recompute(piper.where(), keep=keep)] if keep != "all" else []))
    on = slow_devices("h100x8")
    predicted = piper.simulate(plan, on, contention=False)
    matched = match_ranges(plan, read_ranks(written(plan, predicted, tmp_path, slower=slower)))
    assert matched.missing == ()
    model = model_for(plan, on, None, DeviceModel)
    costs = measured_costs(plan, matched, model, on, ORIGIN)
    again = piper.simulate(plan, on, costs=costs, contention=False)
    assert again.step_s == pytest.approx(slower * predicted.step_s, rel=0.03)


def test_a_long_instruction_and_the_time_between_them_count(tmp_path: Path) -> None:
    directives = [piper.split(piper.where(), microbatches=4)]
    plan = piper.compile(shared_jobs.job("gpt"), piper.Strategy(piper.Mesh(), directives)).plan
    on = load_cluster("cpu-local")
    predicted = piper.simulate(plan, on)
    trace, at = KinetoFile(0, 1), 0.0
    for k, span in enumerate(predicted.trace.spans):
        lasts = (span.end - span.start) * 1e6 * (1 + 9 * (k == 1))
        trace.range(span.name, at, at + lasts)
        at += lasts + 500
    trace.range("ProfilerStep#4", 0, at)
    matched = match_ranges(plan, read_ranks([trace.write(tmp_path)]))
    costs = measured_costs(plan, matched, model_for(plan, on, None, DeviceModel), on, ORIGIN)
    assert costs.host is not None and costs.host.issue_s == pytest.approx(500e-6)
    assert piper.simulate(plan, on, costs=costs).step_s == pytest.approx(at / 1e6, rel=0.03)
    assert at / 1e6 > 1.5 * predicted.step_s


def _without_host(plan: Plan, simulated: Simulation, host: HostCosts) -> Matched:
    """Return the spans of a simulated step as a trace has them: the host's time lies between instructions."""
    issued: Counter[int] = Counter()
    spans = []
    for span in sorted(simulated.trace.spans, key=lambda s: (s.rank, s.instr)):
        if plan.role_of(span.rank).program[span.instr].comm:
            issued[span.rank] += 1
        else:
            own = host.issue_s + issued.pop(span.rank, 0) * host.comm_s
            span = replace(span, start=span.start + own)
        spans.append(span)
    return Matched(replace(simulated.trace, spans=tuple(spans)), simulated.step_s, (), ())


def test_a_loss_slower_than_predicted_and_the_issue_of_messages_count() -> None:
    directives = piper.recipes.one_f_one_b(pp=2, microbatches=4)
    plan = piper.compile(shared_jobs.job("gpt"), piper.Strategy(piper.Mesh(pp=2), directives)).plan
    on = load_cluster("cpu-local")
    model = model_for(plan, on, None, DeviceModel)
    free = HostCosts(0.0, 0.0)
    first = measured_costs(
        plan, _without_host(plan, piper.simulate(plan, on), free), model, on, ORIGIN
    )
    host = HostCosts(20e-6, 200e-6)
    slow = replace(
        first,
        host=host,
        steps=tuple(
            replace(s, duration=Duration(s.duration.seconds * (20 if s.chunk == "root.1" else 1)))
            for s in first.steps
        ),
    )
    ran = piper.simulate(plan, on, costs=slow)
    found = measured_costs(plan, _without_host(plan, ran, host), model, on, ORIGIN)
    assert found.host is not None
    assert found.host.issue_s == pytest.approx(host.issue_s)
    assert found.host.comm_s == pytest.approx(host.comm_s, rel=0.05)
    of_loss = [[s for s in c.steps if (s.chunk, s.step) == ("root.1", "F")] for c in (slow, found)]
    planned, measured = (s.duration.seconds for (s,) in of_loss)
    assert measured == pytest.approx(planned, rel=0.1)
    assert piper.simulate(plan, on, costs=found).step_s == pytest.approx(ran.step_s, rel=0.01)


def test_the_slowest_of_equal_ranks_decides() -> None:
    directives = piper.recipes.data_parallel(over=("dp",), zero=1)
    strategy = piper.Strategy(piper.Mesh(dp=2), directives)
    plan, on = piper.compile(shared_jobs.job("gpt"), strategy).plan, slow_devices("h100x8")
    ran = piper.simulate(plan, replace(on, slow_ranks={1: 1.2}), contention=False)
    matched = Matched(ran.trace, ran.step_s, (), ())
    costs = measured_costs(plan, matched, model_for(plan, on, None, DeviceModel), on, ORIGIN)
    again = piper.simulate(plan, on, costs=costs, contention=False)
    assert again.step_s == pytest.approx(ran.step_s, rel=0.03)
    assert piper.simulate(plan, on, contention=False).step_s < 0.9 * ran.step_s


def test_messages_alone_match_a_plan(plan: Plan, predicted: Simulation, tmp_path: Path) -> None:
    ranks = read_ranks(written(plan, predicted, tmp_path, named=False))
    model = model_for(plan, CLUSTER, None, DeviceModel)
    work = {
        rank: [model.work(plan.role_of(rank), i) for i in plan.role_of(rank).program]
        for rank in range(plan.mesh.world)
    }
    found = match_messages(plan, work, ranks)
    assert (found.matched, found.unplanned) == (1.0, {})
    for window in found.windows:
        assert window.measured_s == pytest.approx(window.predicted_s, rel=0.01)
    assert {w.kinds for w in found.windows} >= {"1 F"}
    cut = [
        replace(r, events=[e for e in r.events if e.message is None or e.message.op != "p2p"])
        for r in ranks
    ]
    assert match_messages(plan, work, cut).matched < 1.0
    of_gloo = [  # whose traces name no bytes
        replace(
            r,
            events=[
                e if e.message is None else replace(e, message=replace(e.message, nbytes=0))
                for e in r.events
            ],
        )
        for r in ranks
    ]
    with pytest.raises(FormatError, match=r"no sizes.*over NCCL \(traces of gloo have none\)"):
        match_messages(plan, work, of_gloo)


def test_a_trace_of_another_plan_is_refused(
    plan: Plan, predicted: Simulation, tmp_path: Path
) -> None:
    ranks = read_ranks(written(plan, predicted, tmp_path))
    with pytest.raises(FormatError, match=r"is of rank 9; the plan has ranks 0 to 3"):
        match_ranges(plan, [replace(ranks[0], rank=9)])
    with pytest.raises(FormatError, match="no range has the name of an instruction"):
        match_ranges(plan, [replace(ranks[0], ranges=[])])
