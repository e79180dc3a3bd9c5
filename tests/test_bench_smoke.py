"""The benchmarks run: every module imports, and a tiny configuration of each gives rows. Nothing is said about time."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator
from importlib import import_module
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

import piper
from benchmarks import (
    capture_rates,
    host_cost,
    noop,
    plan_rates,
    prediction,
    run,
    score_rates,
    step_model,
    step_profile,
    step_sides,
    step_time,
    step_worker,
    strategies,
    tuner,
    tuner_space,
)
from benchmarks.measure import Goal, Row, machine, median_interval
from piper_ir.ops import Compute
from piper_ir.verify import verify
from piper_runtime.inline import InlineEngine
from piper_runtime.job import materialize
from piper_runtime.rank import Rank
from piper_runtime.run import execute, trainee

BENCHMARKS = Path(run.__file__).parent


@pytest.mark.parametrize("name", run.SECTIONS)
def test_every_section_has_its_function(name: str) -> None:
    assert callable(run.section(name))


def test_every_module_is_reached_by_a_section() -> None:
    for name in run.SECTIONS:
        run.section(name)
    assert callable(import_module("benchmarks.capture_gpt3").measure)  # runs in a process of its own
    files = {p.stem for p in BENCHMARKS.glob("*.py")}
    assert files == {m.removeprefix("benchmarks.") for m in sys.modules if m.startswith("benchmarks.")}


def test_rates_of_a_small_plan_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_rates, "cases", lambda quick: [plan_rates.pipeline(2, 2)])
    rows = [*plan_rates.simulate_rows(True), *plan_rates.sweep_rows(True)]
    assert len(rows) == 6
    assert all(r.low <= r.value <= r.high for r in rows)


def test_the_plan_that_computes_nothing_is_a_plan() -> None:
    plan = noop.plan(2, 4, 3)
    verify(plan)
    chunks = [{p.op.chunk for p in i.parts if isinstance(p.op, Compute)} for r in plan.roles for i in r.program]
    assert max(map(len, chunks)) == 1, "fused: an instruction would be several"
    assert execute(plan, noop.CODE, noop.job(plan), steps=2, launcher="inline").losses == [0.0, 0.0]


def test_a_rank_by_itself_runs_its_whole_program() -> None:
    wall, cpu = host_cost.lone_steps(noop.plan(4, 4, 3), 1, steps=3)
    assert len(wall) == len(cpu) == 3


def test_rows_of_a_large_capture() -> None:
    found = {"seconds": 9.0, "cpu_seconds": 8.0, "peak_gib": 1.5, "chunks": 98.0, "codes": 3.0}
    found |= {"parameters": 175e9, "saved_gib_per_layer_and_row": 0.8}
    seconds, memory, _ = capture_rates.gpt3_rows(found)
    assert seconds.met is True and memory.met is False


def test_scoring_takes_each_of_its_stages_some_time() -> None:
    plain, replicated = score_rates.cases(8, 2)
    for case in (plain, replicated):
        seconds, instructions = score_rates.score(case)
        assert len(seconds) == len(score_rates.STAGES) and min(seconds) > 0
        assert instructions > 2 * 2 * 8, case.title


def test_strategies_share_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "QUICK_COUNT", 3)
    monkeypatch.setattr(strategies, "MODEL", step_model.TINY)
    captures, total, each = strategies.rows(True)
    assert captures.value == 1 and captures.met
    assert total.value > each.value > 0


def test_the_tuner_is_judged_in_the_space_that_was_evaluated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = {"schedule": ("gpipe", "1f1b"), "pp": (1, 2), "microbatches": (2,), "bucket_mb": (25,)}
    monkeypatch.setattr(tuner_space, "BOUNDARIES", 3)
    monkeypatch.setattr(tuner_space, "CHOICES", few)
    monkeypatch.setattr(tuner, "SIZES", tuner_space.TINY)
    monkeypatch.setattr(tuner, "RESULTS", tmp_path)
    monkeypatch.setattr(tuner, "TRIALS", 4)
    problem, programs, more = tuner_space.problem(tuner_space.TINY)
    table, row = tuner.exhaustive(problem, programs, more)
    assert len(table) == 2 * (1 + 3) and "taken now" in row.note
    again, row = tuner.exhaustive(problem, programs, more)
    assert again == table and "kept from an earlier run" in row.note
    rows = {r.name: r for r in tuner.regrets(problem, programs, table, 1)}
    assert (
        rows["regret, median"].value >= 0 and rows["results that do not fit"].met and rows["candidates pruned that would fit"].met
    )


def test_the_space_of_the_tuner_has_2000_different_strategies() -> None:
    assert len(list(tuner_space.points())) == 2000
    for pp in (2, 4, 8):
        assert len(set(tuner_space.cuts(pp, tuner_space.SIZES.layers))) == tuner_space.BOUNDARIES


def test_there_are_a_hundred_strategies() -> None:
    assert len(set(strategies.strategies())) >= strategies.COUNT


@pytest.mark.parametrize("kind", step_time.KINDS)
def test_both_sides_of_a_comparison_cut_the_model_alike(kind: step_sides.Kind) -> None:
    setup = step_time.prepared(kind, step_model.TINY)
    work = step_model.job(step_model.TINY, setup.global_batch)
    initial = materialize(work)
    ranks = [Rank(setup.plan, r, setup.code, trainee(work), initial.params, initial.buffers) for r in range(2)]
    model = step_sides.initial_model(setup)
    for rank in ranks:
        module = model if kind == "DDP" else step_model.Stage(model, rank.rank)
        ids = {id(p) for p in module.parameters()}
        assert {n for n, p in model.named_parameters() if id(p) in ids} == set(rank.store.params)
    InlineEngine(ranks).step(0)


def test_a_comparison_has_its_ratio_its_times_and_a_profile() -> None:
    rows = step_time.compared("1F1B", step_model.TINY, pairs=2)
    assert [r.unit for r in rows[:3]] == ["ratio", "ms/step", "ms/step"]
    assert rows[0].low <= rows[0].value <= rows[0].high and rows[0].judged == rows[0].low
    assert {"matmul", step_profile.REST, step_profile.WAITING} <= {r.name.partition("profile, ")[2] for r in rows[3:]}


def test_predictions_have_a_row_each_and_three_goals() -> None:
    chosen = {"gpipe": piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=2))}
    *cases, error, order, memory = prediction.predicted(chosen, step_model.TINY, global_batch=4, rounds=1)
    assert [r.name for r in cases] == ["gpipe"] and "predicted" in cases[0].note
    assert error.value == pytest.approx(abs(cases[0].value)) and order.value == 1.0
    assert memory.met, "plans of this size are exact too"


def test_there_are_a_dozen_strategies_to_predict() -> None:
    assert len(prediction.strategies()) >= 12


def test_the_order_of_pairs_that_are_close_does_not_count() -> None:
    assert prediction.rank_order([(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]) == (1.0, 3)
    assert prediction.rank_order([(3.0, 1.0), (2.0, 2.0), (1.0, 3.0)]) == (-1.0, 3)
    assert prediction.rank_order([(1.0, 1.00), (0.9, 1.04)]) == (1.0, 0)


def test_a_worker_that_fails_or_ends_is_named() -> None:
    pairs = [Pipe(duplex=False) for _ in range(2)]
    pairs[1][1].send("Traceback: no such thing")
    with pytest.raises(RuntimeError, match="rank 1 failed:\nTraceback: no such thing"):
        step_time.collected([ours for ours, _ in pairs])
    pairs[0][1].close()
    with pytest.raises(RuntimeError, match="rank 0 ended without an answer"):
        step_time.collected([ours for ours, _ in pairs])


def test_two_sides_that_train_differently_are_refused() -> None:
    same, other = SimpleNamespace(losses=[2.0, 1.0]), SimpleNamespace(losses=[2.0, 1.001])
    step_worker.check_same_training(same, same)
    with pytest.raises(RuntimeError, match=r"the loss of step 1 is 1\.0 \(ours\) and 1\.001"):
        step_worker.check_same_training(same, other)


def test_the_interval_of_a_median_holds_it_and_is_repeatable() -> None:
    values = [1.0 + 0.01 * (k % 7) for k in range(40)]
    middle, low, high = median_interval(values)
    assert low <= middle <= high < 1.06
    assert median_interval(values) == (middle, low, high)
    assert median_interval([2.0] * 5) == (2.0, 2.0, 2.0)


def test_a_goal_may_be_for_another_number_than_the_value() -> None:
    goal = Goal("above", 0.98)
    assert Row("s", "n", 1.0, "ratio", 0.9, 1.1, goal, judged=0.9).met is False
    assert Row("s", "n", 1.0, "ratio", goal=goal).met is True
    assert Row("s", "n", 1.0, "ratio").met is None


def test_the_csv_says_where_and_when(tmp_path: Path) -> None:
    where = machine()
    path = tmp_path / "deep" / "rows.csv"
    run.write(path, where, [Row("host", "a", 1.5, "us", 1.0, math.pi, Goal("below", 3), "n")])
    first, *rest = path.read_text().splitlines()
    assert where.torch in first and where.date in first
    (line,) = csv.DictReader(rest)
    assert list(line.values()) == ["host", "a", "1.5", "1", "3.14159", "us", "< 3", "yes", "n"]


def test_a_section_that_fails_does_not_take_the_others_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Row("sweep", "a", 1.0, "x")

    def section(name: str) -> object:
        def rows(quick: bool) -> Iterator[Row]:
            yield found
            if name == "host":
                raise ValueError("no host")

        return rows

    monkeypatch.setattr(run, "section", section)
    assert run.main(["host", "sweep", "--csv", str(tmp_path / "rows.csv")]) == 1
    assert (tmp_path / "rows.csv").read_text().count("sweep,a,1,") == 2, "what was measured before the failure counts"
    assert run.main(["sweep", "--csv", str(tmp_path / "rows.csv")]) == 0
