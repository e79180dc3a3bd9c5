"""The load of experts: drawn ones, those of a run's log, and what a prediction says without one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from piper_ir.ground.errors import PlanError
from piper_simulator import DeviceModel, Zipf, simulate
from piper_simulator.durations.checked import under_load
from piper_simulator.durations.expert_loads import Mixture, drawn, load_of, mixture_of
from piper_simulator.durations.expert_work import EVEN
from tests.helpers.cases import each_case
from tests.helpers.random_plans import PlanBuilder

MIXTURE = Mixture(experts=8, ranks=4, choices=4096, tokens=2048, padded=True)


def mean_and_worst(zipf: Zipf, mixture: Mixture = MIXTURE) -> tuple[float, float]:
    loads = drawn(zipf, mixture)
    return sum(loads) / len(loads), max(loads)


@each_case(
    ("mixture", "expected"),
    [
        (MIXTURE, {0.0: (1.03, 1.07), 0.3: (1.17, 1.33), 0.6: (1.38, 1.66)}),
        (
            Mixture(64, 8, 6 * 4096, 4096, False),
            {0.0: (1.02, 1.05), 0.3: (1.18, 1.40), 0.6: (1.45, 1.95)},
        ),
    ],
)
def test_draws_are_as_uneven_as_routers_that_choose_token_by_token(
    mixture: Mixture, expected: dict[float, Any]
) -> None:
    """Means and worst of 60 to 150 simulated routers, in which every token chose different experts."""
    for s, (mean, worst) in expected.items():
        found = mean_and_worst(Zipf(s), mixture)
        assert found == (pytest.approx(mean, abs=0.04), pytest.approx(worst, abs=0.13))


def test_draws_have_a_seed_and_limits() -> None:
    assert (
        drawn(Zipf(0.3), MIXTURE) == drawn(Zipf(0.3), MIXTURE) != drawn(Zipf(0.3, seed=1), MIXTURE)
    )
    assert drawn(Zipf(9.0, draws=3), replace(MIXTURE, ranks=1)) == [1.0] * 3, "each rank has all"
    assert 1 <= mean_and_worst(Zipf(0.0))[0] < mean_and_worst(Zipf(2.0))[1] <= 4, (
        "all tokens at one rank of four"
    )
    for wrong in (-1, float("nan"), True, "0.3"):
        with pytest.raises(PlanError, match="a number from 0 on is needed"):
            Zipf(wrong)  # type: ignore[arg-type]  # no number
    with pytest.raises(PlanError, match=r"Zipf\(draws=0\): an integer from 1 on"):
        Zipf(0.3, draws=0)


def test_a_plan_without_experts_takes_no_load() -> None:
    build = PlanBuilder(1)
    build.compute(0, 1.0)
    plan = build.plan()
    assert (
        mixture_of(plan) is None
        and load_of(plan, None) is None
        and simulate(plan).summary()["load"] is None
    )
    with pytest.raises(PlanError, match=r"load=1.3: this plan has no experts; leave the load out"):
        simulate(plan, load=1.3)


def test_a_model_of_durations_of_ones_own_decides_itself() -> None:
    assert under_load(DeviceModel, EVEN) is DeviceModel
    with pytest.raises(PlanError, match=r"load=1\.3: a cost model of your own decides itself"):
        under_load(lambda plan, cluster, costs: DeviceModel(plan, cluster, costs), ((1.3, 1.0),))


def line(tokens: list[int]) -> str:
    layer = {"mean": sum(tokens) / len(tokens), "max": max(tokens), "overflow": 0, "tokens": tokens}
    return (
        json.dumps({"step": 0, "loss": 1.0, "experts": {"layers.0": layer, "layers.1": layer}})
        + "\n"
    )


def test_a_runs_log_has_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts per rank: the fullest rank of the first step has 8 of 16 tokens, twice the mean of four; then all
    alike."""
    monkeypatch.setattr("piper_simulator.durations.expert_loads.mixture_of", lambda plan: MIXTURE)
    log = tmp_path / "metrics.jsonl"
    log.write_text(line([4, 4, 2, 2, 1, 1, 1, 1]) + line([2] * 8))
    plan: Any = None
    for where in (log, str(log), tmp_path):
        found = load_of(plan, where)
        assert found is not None and (found.mean, found.worst, found.source) == (
            1.5,
            2.0,
            "measured",
        )


def test_a_token_has_a_rank_of_one_expert_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token chooses two different experts, so one rank of eight can have half of the rows: four times the mean."""
    mixture = Mixture(experts=8, ranks=8, choices=32, tokens=16, padded=False)
    monkeypatch.setattr("piper_simulator.durations.expert_loads.mixture_of", lambda plan: mixture)
    plan: Any = None
    found = load_of(plan, 4)
    assert found is not None and found.mean == 4
    with pytest.raises(
        PlanError, match=r"to 4 \(of 2 different experts of a token a rank has 1 at"
    ):
        load_of(plan, 4.1)
    assert max(drawn(Zipf(5, draws=200), mixture)) <= 4


@each_case("load", [0.9, 4.1, float("nan"), float("inf")])
def test_a_load_lies_between_alike_and_all_at_one(
    load: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piper_simulator.durations.expert_loads.mixture_of", lambda plan: MIXTURE)
    with pytest.raises(
        PlanError,
        match=r"from 1 \(all ranks have equally many tokens\) to 4 \(one of 4 has them all\)",
    ):
        load_of(None, load)  # type: ignore[arg-type]  # no plan is asked
    for wrong in (True, [1.3]):
        with pytest.raises(
            PlanError, match=r"a number, piper.Zipf\(s\), or the metrics.jsonl of a run is needed"
        ):
            load_of(None, wrong)  # type: ignore[arg-type]  # no load
