"""A cost model of a user's own gives the durations of predictions, explanations, searches and emulated runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest

import piper
from piper.api.running.emulation import durations_on, emulate
from piper_autotune.scoring.scoring import Scored, score
from piper_autotune.space.problem import Programs, TuningProblem, Wanted
from piper_autotune.space.sketch import Sketches
from piper_ir.ground.errors import ClusterError, CostModelError
from piper_ir.plan.plan import Instr, Plan, RolePlan
from piper_ir.plan.plan_bytes import PlanBytes
from piper_ir.program.ops import Compute
from piper_ir.program.program import Cost, Kernel, Program
from piper_runtime.launch.processes.processes import Pool
from piper_simulator import DeviceModel, model_for
from tests.helpers.cases import each_case

CLUSTER = "h100x4"
LINK = 1e9
"""Bytes/s of the model's links."""


class ConstantRates(piper.CostModel):
    """Every device computes `flops_per_s`, every message moves at `LINK`, and nothing else takes time."""

    uniform = True
    bounds_steps = True

    def __init__(
        self,
        plan: Plan,
        cluster: piper.Cluster | None,
        costs: piper.Costs | None,
        flops_per_s: float = 1e12,
    ) -> None:
        self.plan, self.traffic, self.flops_per_s = plan, PlanBytes(plan), flops_per_s

    def work(self, role: RolePlan, instr: Instr) -> piper.Work:
        if instr.comm:
            part = instr.parts[0]
            nbytes = self.traffic.message_bytes(part.op, part)  # type: ignore[arg-type]  # a communication
            return piper.Work(nbytes / LINK, "formula", bytes=nbytes)
        steps = [part.op for part in instr.parts if isinstance(part.op, Compute)]
        flops = sum(self.plan.chunk(op.chunk).steps[op.step].cost.flops for op in steps)
        return piper.Work(flops / self.flops_per_s, "formula", flops=flops)

    @property
    def notes(self) -> tuple[str, ...]:
        return ("rates are constant",)


class Whole(ConstantRates):
    """The same, for a search that must not time outlines."""

    uniform = False


def program(stages: int = 2, flops: int = 10**12) -> Program:
    """A program whose stages have one kernel of `flops` per step, in place of given durations."""
    made = piper.synthetic(stages=stages, F=1.0, I=1.0, W=1.0, params=64)
    cost = Cost((Kernel("matmul", (1, 1, 1), "bfloat16", flops, 0),))
    chunks = [
        replace(c, steps={k: replace(s, cost=cost) for k, s in c.steps.items()})
        for c in made.chunks
    ]
    return replace(made, chunks=tuple(chunks))


def compiled(microbatches: int = 4, flops: int = 10**12) -> piper.Compiled:
    pipeline = piper.recipes.gpipe(pp=2, microbatches=microbatches)
    return piper.compile(program(flops=flops), piper.Strategy(piper.Mesh(pp=2), pipeline))


def test_a_prediction_rests_on_it() -> None:
    """GPipe: (m + p - 1) (F + B) of 1 and 2 s; the messages between stages are of no bytes."""
    plan = compiled().plan
    found = piper.simulate(plan, CLUSTER, model=ConstantRates)
    assert found.step_s == pytest.approx((4 + 1) * 3.0)
    assert {x.end - x.start for x in found.trace.spans if x.stream == "compute" and x.flops} == {
        1.0,
        2.0,
    }
    assert found.notes == ("rates are constant",) and found.summary()["sources"] == {"formula": 1.0}
    assert piper.simulate(plan, CLUSTER).step_s < 0.1 * found.step_s, (
        "an H100 computes several hundred TFLOP/s"
    )
    faster = piper.simulate(plan, CLUSTER, model=partial(ConstantRates, flops_per_s=2e12))
    assert faster.step_s == pytest.approx(found.step_s / 2)
    assert piper.simulate(plan, model=ConstantRates).step_s == found.step_s, (
        "this one asks for no cluster"
    )
    with pytest.raises(
        ClusterError, match="the plan runs on 2 ranks; h100-80g-sxm:1 has 1 devices"
    ):
        piper.simulate(plan, "h100x1", model=ConstantRates)


def test_an_explanation_rests_on_it() -> None:
    plan = compiled().plan
    found = piper.why(plan, CLUSTER, model=ConstantRates)
    assert found.step_s == piper.simulate(plan, CLUSTER, model=ConstantRates).step_s
    assert sum(p.seconds for p in found.path) == pytest.approx(found.step_s)
    rows = {w.name: w.step_s for w in found.what_if}
    assert rows["twice the peak FLOP/s"] == found.step_s and not found.sensitivities, (
        "it reads nothing of the cluster"
    )


class PeakRates(ConstantRates):
    """Computes at the peak of the cluster that it was made for."""

    def __init__(
        self, plan: Plan, cluster: piper.Cluster | None, costs: piper.Costs | None
    ) -> None:
        assert cluster is not None
        super().__init__(plan, cluster, costs, cluster.device.peak("bfloat16"))


def test_what_if_asks_the_model_of_the_changed_cluster() -> None:
    found = piper.why(compiled().plan, CLUSTER, model=PeakRates)
    rows = {w.name: w.step_s for w in found.what_if}
    assert rows["twice the peak FLOP/s"] == pytest.approx(found.step_s / 2)
    (only,) = found.sensitivities
    assert only.name == "peak_flops[bfloat16]" and only.per_percent == pytest.approx(-1 / 1.01)


def strategy(trial: Any) -> piper.Strategy:
    microbatches = trial.suggest_categorical("microbatches", [2, 4])
    return piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=microbatches))


@pytest.mark.parametrize(
    ("model", "workers"),
    [(ConstantRates, 0), (Whole, 0), (partial(ConstantRates, flops_per_s=5e11), 1)],
)
def test_a_search_rests_on_it(model: Any, workers: int) -> None:
    """Sweep and engine use it, in this process and in a worker that gets the class by value."""
    study = piper.tune(program(), strategy, cluster=CLUSTER, trials=4, workers=workers, model=model)
    rate = model.keywords["flops_per_s"] if isinstance(model, partial) else 1e12
    rows = {row["params"]["microbatches"]: row for row in study.table()}
    for m, row in rows.items():
        plan = piper.compile(
            program(), piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=m))
        ).plan
        found = piper.simulate(plan, CLUSTER, model=model)
        assert row["period_s"] == pytest.approx(found.period_s) and found.step_s == pytest.approx(
            (m + 1) * 3e12 / rate
        )
    assert rows[2]["source"] == rows[4]["source"] == "engine" and set(rows) == {2, 4}


def test_the_bounds_and_the_sweep_of_a_search_rest_on_it() -> None:
    """Neither asks Piper's formulas: a bound that is higher than what the model says would reject good candidates."""
    problem = TuningProblem(program(), cluster=piper.load_cluster(CLUSTER), model=ConstantRates)
    chosen = piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=4))
    sketches = Sketches(problem, Programs(problem, None))
    sketch = sketches.sketch(chosen)
    assert sketch is not None and sketches.computing_s(chosen, sketch, 1)[0] == pytest.approx(
        5 * 3.0
    )
    for model in (ConstantRates, Whole):  # by outline, and by the whole plan
        scored = score(replace(problem, model=model), chosen, {Wanted(1): None})
        assert (
            isinstance(scored, Scored)
            and scored.source == "sweep"
            and scored.step_s == pytest.approx(5 * 3.0)
            and scored.period_s == pytest.approx(5 * 3.0)
        )


class Joined(ConstantRates):
    """Every instruction of compute takes a second, whatever it holds: joined steps take less than they do alone."""

    bounds_steps = False

    def work(self, role: RolePlan, instr: Instr) -> piper.Work:
        return piper.Work(float(not instr.comm), "formula")


class OfRoles(Joined):
    """Asks a plan for its roles, and knows no others."""

    def __init__(
        self, plan: Plan, cluster: piper.Cluster | None, costs: piper.Costs | None
    ) -> None:
        self.first, self.roles = plan.roles[0], {role.role for role in plan.roles}

    def work(self, role: RolePlan, instr: Instr) -> piper.Work:
        return piper.Work(float(not instr.comm) if role.role in self.roles else 1e9, "formula")


class Lucky(DeviceModel):
    """Piper's own, with less time for what is joined."""


@pytest.mark.parametrize("model", [Joined, OfRoles, Lucky])
def test_a_search_does_not_ask_a_model_about_single_steps_unless_it_promises_a_bound(
    model: Any,
) -> None:
    problem = TuningProblem(program(), cluster=piper.load_cluster(CLUSTER), model=model)
    chosen = piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=4))
    sketches = Sketches(problem, Programs(problem, None))
    sketch = sketches.sketch(chosen)
    assert sketch is not None and sketches.computing_s(chosen, sketch, 1)[0] == 0.0
    promised = replace(problem, model=partial(DeviceModel))
    assert Sketches(promised, Programs(promised, None)).computing_s(chosen, sketch, 1)[0] > 0.0


def many(trial: Any) -> piper.Strategy:
    microbatches = trial.suggest_categorical("microbatches", list(range(2, 26)))
    return piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=microbatches))


def test_no_candidate_is_rejected_for_a_bound_that_a_model_does_not_promise() -> None:
    kinds = {}
    for model in (OfRoles, Whole):
        study = piper.tune(program(), many, cluster=CLUSTER, trials=24, workers=0, model=model)
        kinds[model] = {row.kind for row in study.rows}
    assert kinds == {OfRoles: {None}, Whole: {None, "slower"}}, (
        "the other promises a bound, by which some are rejected"
    )


class Given(ConstantRates):
    """Gives whatever stands in `computes` and `sends`."""

    computes: Any = 1.0
    sends: Any = 0.0

    def work(self, role: RolePlan, instr: Instr) -> piper.Work:
        made = self.sends if instr.comm else self.computes
        return made if isinstance(made, piper.Work | str) else piper.Work(made, "formula")


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"computes": float("nan")},
        r"work\(role 'pp0', instruction load\.inputs.*\) gave seconds=nan; finite seconds from 0 "
        r"on",
    ),
    ({"sends": float("nan")}, r"instruction send\..* gave seconds=nan"),
    ({"computes": -1.0}, "gave seconds=-1.0"),
    ({"computes": float("inf")}, "gave seconds=inf"),
    ({"computes": 10**5000}, "gave seconds=an integer of 16610 bits"),
    ({"computes": None}, "gave seconds=None"),
    ({"computes": True}, "gave seconds=True"),
    ({"computes": "x"}, "gave 'x'; a piper.Work is needed"),
    (
        {"computes": piper.Work(1.0, "formula", launch_s=float("nan"))},
        "gave launch_s=nan; finite seconds from 0 on are needed",
    ),
    ({"sends": piper.Work(1.0, "formula", launch_s=-1.0)}, "gave launch_s=-1.0"),
    ({"sends": piper.Work(1.0, "formula", bytes=-1)}, "gave bytes=-1; a whole number from 0 on"),
    ({"computes": piper.Work(1.0, "formula", flops=0.5)}, "gave flops=0.5"),
    ({"computes": piper.Work(1.0, "guess")}, "gave source='guess'; accepted are measured, table"),
    ({"issue_s": float("nan")}, "issue_s is nan"),
]


@each_case(("values", "says"), BAD, ids=[says for _, says in BAD])
def test_what_a_model_gives_is_checked(values: dict[str, Any], says: str) -> None:
    plan, bad = compiled().plan, type("Bad", (Given,), values)
    calls: list[Callable[[], Any]] = [
        lambda: piper.simulate(plan, CLUSTER, model=bad),
        lambda: piper.why(plan, CLUSTER, model=bad),
        lambda: durations_on(plan, piper.load_cluster(CLUSTER), None, bad),
    ]
    for call in calls:
        with pytest.raises(CostModelError, match=rf"model=Bad: .*{says}|model=Bad: {says}"):
            call()


def test_a_model_that_is_none_or_raises_is_named() -> None:
    plan = compiled().plan

    class Failing(ConstantRates):
        def work(self, role: RolePlan, instr: Instr) -> piper.Work:
            raise KeyError(role.role)

    cases: list[tuple[Any, str]] = [
        (3, r"model=3: a class that inherits from piper\.CostModel is needed"),
        (
            lambda plan, cluster, costs: 3,
            "made a int, which has no work, issue_s, uniform, notes; inherit from piper",
        ),
        (lambda plan: 3, r"TypeError: .* takes 1 positional argument"),
        (
            Failing,
            r"work\(role 'pp0', instruction load.* raised KeyError: 'pp0' "
            r"\(.*test_own_cost_model\.py:\d+\)",
        ),
    ]
    for model, says in cases:
        with pytest.raises(CostModelError, match=says):
            piper.simulate(plan, CLUSTER, model=model)


def test_the_own_model_is_not_asked_through_another() -> None:
    plan, cluster = compiled().plan, piper.load_cluster(CLUSTER)
    for factory in (DeviceModel, partial(DeviceModel), lambda *given: DeviceModel(*given)):
        assert type(model_for(plan, cluster, None, factory)) is DeviceModel
    assert type(model_for(plan, cluster, None, Lucky)) is not Lucky


OWN_FILE = """
from piper_simulator import CostModel, Work

class Second(CostModel):
    def __init__(self, plan, cluster, costs):
        pass

    def work(self, role, instr):
        return Work(1.0, "formula")
"""


def test_a_worker_that_cannot_import_its_file_gets_it_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("own_rates_of_a_script")
    exec(OWN_FILE, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    study = piper.tune(
        program(), strategy, cluster=CLUSTER, trials=2, workers=1, model=module.Second
    )
    assert all(row["period_s"] >= 1.0 for row in study.table()) and study.table(), (
        "no candidate failed in the worker"
    )


def test_an_emulated_run_rests_on_it(pool: Pool) -> None:
    """Every instruction sleeps in proportion to what the model says: seconds, where Piper's formulas say
    milliseconds."""
    case = compiled(microbatches=2)
    given = durations_on(case.plan, piper.load_cluster(CLUSTER), None, ConstantRates)
    assert {s for seconds in given.seconds.values() for s in seconds} == {0.0, 1.0, 2.0}
    simulated = piper.simulate(case.plan, CLUSTER, model=ConstantRates, contention=False)
    options: dict[str, Any] = dict(
        steps=1, cluster=CLUSTER, model=ConstantRates, pool=pool, trace=True
    )
    for emulated in (emulate(case, **options), piper.execute(case, launcher="emulated", **options)):
        assert emulated.trace is not None and emulated.step_s[0] > 0.9 * simulated.step_s
