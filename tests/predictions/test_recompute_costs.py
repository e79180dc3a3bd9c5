"""Recomputation has its costs in simulations, in measured durations, in texts, and for GPT-3."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import piper
from benchmarks.recompute_flops import Policy, measure, missed
from piper.api.running import profiling
from piper.api.running.tuning import Conditions, problem_of
from piper.views.explained.explain import explain
from piper.views.strategy_facts import facts_of
from piper_autotune.scoring.evaluators import Here
from piper_autotune.scoring.scoring import Scored
from piper_autotune.space.in_flight_bound import ChunkRun
from piper_autotune.space.problem import Programs
from piper_autotune.space.sketch import Sketches
from piper_compiler import Strategy
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.plan.phases import instr_label
from piper_ir.plan.plan import Part, Plan
from piper_ir.program.costs import Costs, Duration, StepDuration
from piper_ir.program.ops import Compute
from piper_ir.tools import size_text
from piper_simulator import load_cluster, simulate
from piper_simulator.metrics import executed_flops
from tests.helpers import shared_jobs
from tests.helpers.cases import each_case
from tests.parity.test_recompute import PIPELINES, dropout_job


def plan_of(schedule: str, *more: Any) -> Plan:
    job = replace(dropout_job(), tokens_per_row=8)
    return piper.compile(job, Strategy(Mesh(pp=2), (*PIPELINES[schedule](), *more))).plan


def again_flops(plan: Plan) -> int:
    """FLOPs of all R of a step."""
    ops = [
        p.op
        for role in plan.roles
        for i in role.program
        for p in i.parts
        if isinstance(p.op, Compute) and p.op.step == "R"
    ]
    return sum(plan.chunk(op.variant).steps["R"].cost.flops for op in ops)


@pytest.mark.long
def test_hardware_utilisation_counts_what_is_made_again_and_model_utilisation_does_not() -> None:
    plain, under = plan_of("1f1b"), plan_of("1f1b", piper.recompute(where()))
    one, other = simulate(plain, "h100x8"), simulate(under, "h100x8")
    assert None not in (one.hfu, one.mfu, other.hfu, other.mfu)
    assert other.mfu == pytest.approx(one.mfu * one.period_s / other.period_s), (
        "the same FLOPs in another time"
    )  # type: ignore[operator]  # none is None
    done = one.hfu * one.period_s  # type: ignore[operator]  # neither is None
    more = other.hfu * other.period_s  # type: ignore[operator]  # neither is None
    assert again_flops(under) > 0
    assert executed_flops(under) == executed_flops(plain) + again_flops(under)
    assert more / done == pytest.approx(executed_flops(under) / executed_flops(plain))
    assert other.period_s > one.period_s


def test_measured_durations_hold_under_any_policy_and_r_follows_from_the_forward() -> None:
    """F, I and W were measured without recomputation; R takes the part of F's time that it takes by formula."""
    plan = plan_of("1f1b", piper.recompute(where()))
    steps = {(c.code, s): c.id for c in plan.chunks for s, sig in c.steps.items() if not sig.empty}
    measured = Costs(
        steps=tuple(
            StepDuration(code, s, plan.rows, Duration(1.0), id) for (code, s), id in steps.items()
        )
    )
    found = simulate(plan, "h100x8", costs=measured)
    spans = {(s.rank, s.instr): s for s in found.trace.spans}
    seen = set()
    for role in plan.roles:
        for k, instr in enumerate(role.program):
            kinds = [p.op.step for p in instr.parts if isinstance(p.op, Compute)]
            if kinds and "U" not in instr_label(instr).label:
                span = spans[role.ranks[0], k]
                known, again = sum(s != "R" for s in kinds), kinds.count("R")
                seen.add(bool(again))
                assert known <= span.end - span.start < known + again + 0.01 * len(instr.parts)
                assert again == 0 or span.end - span.start > known + 0.3 * again, (
                    "R takes most of what F takes"
                )
    assert seen == {True, False}


def test_labels_of_instructions() -> None:
    labels = {
        apart: {instr_label(i).label.rstrip("0123456789") for r in plan.roles for i in r.program}
        for apart, plan in (
            (a, plan_of("1f1b", piper.recompute(where(), apart=a))) for a in (False, True)
        )
    }
    assert "R" not in labels[False] and "B" in labels[False]
    assert "R" in labels[True]


def test_explain_says_what_a_policy_costs_and_saves_and_what_zero_bubble_keeps() -> None:
    def text(schedule: str) -> str:
        directives = (
            *PIPELINES[schedule](),
            piper.recompute(where(stage=0)),
            piper.recompute(where(stage=1), keep="products"),
        )
        return explain(piper.compile(dropout_job(), Strategy(Mesh(pp=2), directives)))

    whole, split = text("1f1b"), text("zb_h1")
    assert (
        "pp0        inputs: 2 chunks keep 0 B and 4 KiB of inputs in place of 62.5 KiB; R is 33.2% "
        "of the FLOPs" in whole
    )
    assert "pp1        products: 3 chunks keep 36.5 KiB" in whole and "from I to W" not in whole
    assert "a split backward keeps 65 KiB from I to W, which recomputation does not change" in split
    assert "after F 0 B" in split


def parts_of(plan: Plan, role: str, step: str) -> list[Part]:
    """The parts of one step of the first microbatch on a role."""
    parts = [p for i in plan.role(role).program for p in i.parts]
    return [p for p in parts if isinstance(p.op, Compute) and p.op.step == step and p.mb == 0]


def held(plan: Plan, values: set[str]) -> str:
    return size_text(sum(plan.values[v].nbytes for v in values))


def read_by_w(plan: Plan, role: str) -> set[str]:
    """Return what W reads in chunks that have an I before."""
    chunks = {p.op.chunk for p in parts_of(plan, role, "I") if isinstance(p.op, Compute)}
    return {
        v
        for p in parts_of(plan, role, "W")
        if isinstance(p.op, Compute) and p.op.chunk in chunks
        for v in p.reads
    }


@each_case("keep", ["inputs", "products", "attention"])
def test_what_explain_says_of_a_policy_is_what_the_values_of_the_plan_are(keep: str) -> None:
    under = (*PIPELINES["zb_h1"](), piper.recompute(where(stage=0), keep=keep))
    made, whole = (
        piper.compile(dropout_job(), Strategy(Mesh(pp=2), d)) for d in (under, PIPELINES["zb_h1"]())
    )
    plan, text = made.plan, explain(made)
    first = parts_of(plan, "pp0", "F")
    had, kept = (
        {v for p in first for v in p.reads},
        {v for p in first for v in p.writes if ":saved" in v},
    )
    again = {v for p in parts_of(plan, "pp0", "R") for v in p.reads} & had
    assert (
        f"{keep}: " in text and f"keep {held(plan, kept)} and {held(plan, again)} of inputs" in text
    )
    before = {v for p in parts_of(whole.plan, "pp0", "F") for v in p.writes if ":saved" in v}
    assert f"in place of {held(whole.plan, before)}" in text
    waiting, as_before = (read_by_w(found, "pp0") for found in (plan, whole.plan))
    assert (
        f"a split backward keeps {held(plan, waiting)} from I to W, which recomputation does not change"
        in text
    )
    assert waiting == as_before, "zero bubble keeps from I to W what it kept without a policy"


def test_goals_that_are_missed_are_named() -> None:
    good = Policy("gpt3-175b", "inputs", 0, 0.223, 0.14, 0.17)
    assert missed([good]) == []
    assert missed([replace(good, flops=0.24)]) == ["gpt3-175b inputs: 24.0% of the FLOPs"]
    assert missed([replace(good, keep="products", flops=0.031)]) == [
        "gpt3-175b products: 3.1% of the FLOPs"
    ]
    assert missed([replace(good, peak=0.3)]) == ["gpt3-175b inputs: 0.30 x"]


@pytest.mark.long
def test_gpt3_meets_its_goals() -> None:
    found = [*measure("gpt3-175b")]
    assert [p.keep for p in found] == ["all", "attention", "products", "inputs"] and missed(
        found
    ) == []
    assert found[0].kept > found[2].kept > found[1].kept > found[3].kept == 0


@pytest.mark.long
def test_a_profile_ships_the_code_of_variants_beside_that_of_other_rows() -> None:
    job = dropout_job()
    target = piper.compile(
        job, Strategy(Mesh(pp=2), (*PIPELINES["1f1b"](), piper.recompute(where())))
    )
    alone = partial(
        profiling._one_replica, job, mesh=Mesh(), directives=(), options=piper.Options()
    )
    singles = [alone(rows) for rows in (1, target.plan.rows)]
    requests = profiling._requests(target, singles, [], [], 1)
    for request in requests.values():
        assert request.code[target.plan.rows].keys() == {
            c.code for c in (*target.plan.chunks, *target.plan.variants)
        }


def test_a_profile_measures_the_policies_of_a_strategy_where_it_has_them_and_those_asked_for() -> (
    None
):
    under = (
        piper.recompute(where(stage=0), keep="products"),
        piper.recompute(where(stage=1), group=2),
    )
    strategy = Strategy(Mesh(pp=2), (*PIPELINES["1f1b"](), *under))
    target = piper.compile(dropout_job(), strategy)
    first, second, third = profiling._policies(target, strategy, ("inputs", "attention"))
    assert (first.keep, second.keep, second.group, third.keep) == (
        "products",
        "inputs",
        2,
        "attention",
    )
    chunks = {
        keep: {p.op.chunk for p in parts_under(target.plan, keep)}
        for keep in ("products", "inputs")
    }
    assert first.selection == where(chunk=tuple(sorted(chunks["products"])))
    for policy in (first, second):
        plan = profiling._one_replica(dropout_job(), 2, Mesh(), (policy,), piper.Options()).plan
        assert {p.op.chunk for p in parts_under(plan, policy.keep)} == chunks[policy.keep]


def parts_under(plan: Plan, keep: str) -> list[Any]:
    parts = (p for role in plan.roles for i in role.program for p in i.parts)
    return [
        p
        for p in parts
        if isinstance(p.op, Compute) and p.op.step == "R" and p.op.keep.removesuffix("!") == keep
    ]


@pytest.mark.parametrize(
    ("schedule", "zero"),
    [
        ("1f1b", 3),
        ("zb_h1", 0),
        *(pytest.param(*c, marks=pytest.mark.long) for c in (("gpipe", 0), ("zb_h1", 2))),
    ],
)
def test_bounds_of_the_tuner_know_policies_and_are_never_above_a_plan(
    schedule: str, zero: int
) -> None:
    problem, more = problem_of(dropout_job(), Conditions(load_cluster("h100x8")))
    programs = Programs(problem, more["at_rows"], more["under"])
    sketches, here = Sketches(problem, programs), Here(problem, programs)
    filled: dict[str, int] = {}
    replicas = 2 if zero else 1
    rows = 2 // replicas
    for keep in ("inputs", "products", "all"):
        under = (
            piper.recompute(where(stage=0), keep=keep),
            piper.recompute(where(stage=1), keep="attention", apart=True),
        )
        shared = piper.recipes.data_parallel(zero=zero, bucket_mb=0.002) if zero else ()
        strategy = Strategy(Mesh(pp=2, dp=replicas), (*PIPELINES[schedule](), *under, *shared))
        sketch, scored = sketches.sketch(strategy), here.result(here.submit(strategy))
        assert sketch is not None and isinstance(scored, Scored), scored
        bounds = sketches.filled_bytes(sketch, rows)
        filled[keep] = bounds["pp0"][0]
        assert 0 < max(bounds.values())[0] <= scored.peak_bytes
        assert 0 < sketches.computing_s(strategy, sketch, rows)[0] <= scored.period_s
    assert (
        filled["inputs"] <= filled["products"] <= filled["all"] and filled["inputs"] < filled["all"]
    )
    some = Strategy(Mesh(pp=2), (*PIPELINES[schedule](), piper.recompute(where(mb=0))))
    assert sketches.sketch(some) is None, "microbatches differ"


def test_a_bound_of_the_tuner_leaves_out_outputs_that_are_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R makes the outputs of a group's chunks again, which backward reads. Control: a bound that has F's, too."""
    job = shared_jobs.job("gpt", rows=32)
    problem, more = problem_of(job, Conditions(load_cluster("h100x8")))
    gpipe = piper.recipes.gpipe(pp=2, microbatches=16)
    again = piper.shard(where(), cut=True), *gpipe, piper.recompute(where(), group=2)
    strategy = Strategy(Mesh(pp=2, tp=2), again)
    held = max(role.peak_bytes for role in piper.compile(job, strategy).plan.roles)

    def bound() -> int:
        sketches = Sketches(problem, Programs(problem, more["at_rows"], more["under"]))
        sketch = sketches.sketch(strategy)
        assert sketch is not None
        return max(nbytes for nbytes, _ in sketches.filled_bytes(sketch, 2).values())

    assert 0.8 * held < bound() <= held
    kept = ChunkRun.kept.fget

    def with_outputs(run: ChunkRun) -> dict[str, str]:
        assert kept is not None
        read = {port for step in run.steps for port in run.chunk.steps[step].reads}
        writes = [p for p in run.chunk.steps["F"].writes if p.startswith("out") and p in read]
        return {**kept(run), **{f"{run.chunk.id}:{port}": port for port in writes}}

    monkeypatch.setattr(ChunkRun, "kept", property(with_outputs))
    assert bound() > held


def test_a_strategy_says_what_is_shared_and_made_again() -> None:
    def schedule(**sharing: Any) -> str:
        again = piper.recipes.recomputation(keep=["products", "all", "inputs", "inputs"], group=2)
        stages = piper.recipes.one_f_one_b(pp=4, microbatches=8)
        mesh = Mesh(pp=4, dp=2, rep=2)
        return facts_of(
            Strategy(
                mesh, (*stages, *again, *piper.recipes.data_parallel(over=("dp", "rep"), **sharing))
            ),
            64,
        ).schedule

    assert schedule() == "4 stages, 8 microbatches, recompute inputs, products"
    assert schedule(zero=3) == "4 stages, 8 microbatches, zero=3, recompute inputs, products"
    shard = dict(grads=("dp",), optim=("dp",))
    assert (
        schedule(shard=shard)
        == "4 stages, 8 microbatches, zero=2 over dp, recompute inputs, products"
    )
