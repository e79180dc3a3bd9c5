"""A score by the tables of a plan is that of its instructions by name, to the last bit; what is wrong has the same
reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packages.autotune.tests.tuner_spaces import problem
from packages.compiler.tests.compile_cases import SCHEDULES, RandomProgram, random_case
from piper_autotune import TuningProblem, Wanted
from piper_autotune.scoring import scoring
from piper_autotune.scoring.scoring import Refused, Scored, score
from piper_compiler import CompileRequest, Lowered, Strategy, Training, lowered, recipes, synthetic
from piper_ir.fold.memory import with_peaks
from piper_ir.fold.timing import prepare
from piper_ir.graph.graph import Graph
from piper_ir.ground.errors import PlanError
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import AllocatorCosts, Costs, Duration, PartDuration
from piper_simulator import Cluster, load_cluster

SLOW = replace(load_cluster("h100x1*8"), slow_ranks={0: 3.0})
MIXED = load_cluster("a100x1*3+h100x1*5")
CLUSTERS = (
    None,
    MIXED,
    load_cluster("h100x8"),
    load_cluster("a100x1*8"),
    load_cluster("cpu-local"),
    SLOW,
)


def by_name(graph: Graph, rows: int, request: CompileRequest) -> Lowered:
    """The plan with nothing but instructions by name, its peaks and waits found from those."""
    plan = lowered(graph, rows, request)
    roles = tuple(
        [
            replace(r, program=tuple(r.program), peak_bytes=0, peak_by_category={})
            for r in plan.plan.roles
        ]
    )
    plain = with_peaks(replace(plan.plan, roles=roles, values=dict(plan.plan.values)))
    return Lowered(plan.graph, plain, lambda: prepare(plain))


def both(
    of: TuningProblem, chosen: Strategy, rows: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[object, object]:
    """The score, and that of the plan by name."""
    quick = score(of, chosen, {Wanted(rows): None})
    with monkeypatch.context() as patch:
        patch.setattr(scoring, "lowered", by_name)
        return quick, score(of, chosen, {Wanted(rows): None})


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(draw=st.data())
def test_scores_of_tables_are_scores_of_plans_by_name(
    draw: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, microbatches = draw.draw(st.integers(1, 4)), draw.draw(st.integers(1, 9))
    dp = draw.draw(st.integers(1, 2))
    each, recipe = SCHEDULES[draw.draw(st.sampled_from(sorted(SCHEDULES)))]
    stages = devices * each
    directives = (
        *recipe(pp=devices, microbatches=microbatches),
        *recipes.data_parallel(bucket_mb=0.0005),
    )
    seconds = st.floats(0.1, 9) | st.integers(1, 3)
    if draw.draw(st.booleans()):
        program = synthetic(
            stages=stages, F=draw.draw(seconds), I=draw.draw(seconds), W=1, params=99, hop=0.5
        )
    else:
        drawn = RandomProgram(draw.draw(st.randoms(use_true_random=False)), stages)
        program = replace(drawn.build(), source="captured")
    rows = draw.draw(st.integers(1, 3))
    of = TuningProblem(
        program,
        rows * microbatches * dp,
        Training(clip=draw.draw(st.sampled_from((None, 2.0)))),
        draw.draw(st.sampled_from(CLUSTERS)),
        draw.draw(
            st.sampled_from((None, Costs(allocator=AllocatorCosts(1000, 1.25)), batch_costs()))
        ),
        draw.draw(st.sampled_from((None, 3000, 20_000))),
    )
    quick, plain = both(of, Strategy(Mesh(pp=devices, dp=dp), directives), rows, monkeypatch)
    assert quick == plain


def batch_costs() -> Costs:
    return Costs(
        parts=(
            PartDuration("Batch", 1, Duration(0.25, "measured")),
            PartDuration("Batch", 3, Duration(0.5, "measured")),
        )
    )


@pytest.mark.long
def test_scores_of_any_strategy_are_those_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case has two of five numbers of rows, the next case two others."""
    for seed in range(90):
        case = random_case(seed)
        of = TuningProblem(case.program, case.global_batch, case.training, load_cluster("h100x8"))
        for rows in (1 + seed % 5, 1 + (seed + 2) % 5):
            quick, plain = both(of, case.strategy, rows, monkeypatch)
            assert quick == plain, case.text


def test_a_candidate_whose_plan_breaks_a_rule_is_refused_by_the_engines_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=2))
    assert isinstance(score(problem(), chosen, {Wanted(1): None}, engine=True), Scored)

    def refuse(plan: Plan) -> None:
        raise PlanError("R00: broken")

    monkeypatch.setattr(scoring, "verify", refuse)
    assert score(problem(), chosen, {Wanted(1): None}, engine=True) == Refused(
        "illegal", "R00: broken"
    )


def test_negative_control_a_table_with_another_peak_scores_differently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(graph: Graph, rows: int, request: CompileRequest) -> Lowered:
        found = lowered(graph, rows, request)
        roles = tuple([replace(r, peak_bytes=r.peak_bytes + 1) for r in found.plan.roles])
        return replace(found, plan=replace(found.plan, roles=roles))

    monkeypatch.setattr(scoring, "lowered", wrong)
    chosen = Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=2))
    quick = score(problem(), chosen, {Wanted(1): None})
    monkeypatch.setattr(scoring, "lowered", by_name)
    assert quick != score(problem(), chosen, {Wanted(1): None})


def test_buckets_of_two_sizes_that_make_the_same_plan_are_lowered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lowerings: list[Graph] = []

    def counted(graph: Graph, rows: int, request: CompileRequest) -> Lowered:
        lowerings.append(graph)
        return lowered(graph, rows, request)

    def scored(
        bucket_mb: float, zero: int = 1, known: dict[object, Scored | Refused] | None = None
    ) -> object:
        shared = recipes.data_parallel(zero=zero, bucket_mb=bucket_mb)
        made = Strategy(Mesh(pp=2, dp=2), [*recipes.gpipe(pp=2, microbatches=2), *shared])
        return score(of, made, {Wanted(1): None}, known=known)

    of = replace(problem(), global_batch=4)
    known: dict[object, Scored | Refused] = {}
    monkeypatch.setattr(scoring, "lowered", counted)
    sizes = 100.0, 200.0, 1e-6
    outcomes = [scored(mb, known=known) for mb in sizes]
    assert len(lowerings) == len(known) == 2  # the last one has a bucket for each parameter
    assert outcomes == [scored(mb) for mb in sizes]
    assert scored(100.0, zero=0, known=known) == scored(100.0, zero=0)
    assert len(known) == 3


def test_each_rank_must_fit_its_own_type_of_device() -> None:
    chosen = Strategy(Mesh(pp=2), recipes.gpipe(pp=2, microbatches=2))
    large, small = (
        load_cluster("h100x1"),
        load_cluster("a100x1").each_device(lambda d: replace(d, memory_bytes=1000)),
    )
    for rank, cluster in enumerate(
        (Cluster.joined((small, large)), Cluster.joined((large, small)))
    ):
        for limit in (None, large.device.memory_bytes):
            found = score(replace(problem(limit), cluster=cluster), chosen, {Wanted(1): None})
            assert isinstance(found, Scored) and found.reason.startswith(
                f"rank {rank} (pp{rank}) needs "
            )
            assert "more than the limit of 1000 B" in found.reason
    fits = score(
        replace(problem(large.device.memory_bytes), cluster=load_cluster("h100x1+a100x1")),
        chosen,
        {Wanted(1): None},
    )
    assert isinstance(fits, Scored) and fits.reason == ""
