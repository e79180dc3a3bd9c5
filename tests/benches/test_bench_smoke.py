"""The benchmarks run: every module imports, and a tiny configuration of each gives rows. Nothing is said about time."""

from __future__ import annotations

import csv
import gc
import math
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import piper
from benchmarks import (
    capture_rates,
    communication,
    compare_trees,
    formula,
    gpu,
    gpu_check,
    gpu_sides,
    host_cost,
    kernel_table,
    noop,
    plan_rates,
    prediction,
    recipe_rates,
    run,
    saving,
    scale,
    scale_cell,
    score_rates,
    step_kinds,
    step_model,
    step_profile,
    step_sides,
    step_time,
    step_worker,
    strategies,
    tuner,
    tuner_space,
    zero_bubble_search,
    zero_prediction,
)
from benchmarks import loader as measure_loader
from benchmarks.measure import Goal, Row, machine, median_interval
from packages.runtime.tests.chains import chain
from packages.runtime.tests.fake_device import HostDevice
from packages.runtime.tests.handmade import CODE
from piper import models
from piper_ir.program.ops import Compute
from piper_ir.verify import verify
from piper_runtime.engine.inline import InlineEngine
from piper_runtime.launch.running.inline_run import rank_job
from piper_runtime.launch.running.run import execute
from piper_runtime.rank.binding.rank import Rank
from piper_runtime.rank.job.job import materialize
from piper_simulator import load_cluster

BENCHMARKS = Path(run.__file__).parent


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it takes a time, a benchmark collects garbage, half a second each time; no time matters here."""
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)


@pytest.mark.parametrize("name", run.SECTIONS)
def test_every_section_has_its_function(name: str) -> None:
    assert callable(run.section(name))


OTHERS = ("capture_time", "expert_costs", "predicted_folder", "simulate_llama")


def test_every_module_is_reached_by_a_section() -> None:
    for name in run.SECTIONS:
        run.section(name)
    assert callable(
        import_module("benchmarks.capture_gpt3").measure
    )  # runs in a process of its own
    assert callable(
        import_module("benchmarks.recompute_flops").main
    )  # run by hand; a part of it by test_recompute.py
    assert callable(import_module("benchmarks.gpu").main) and callable(
        gpu_check.main
    )  # run by hand
    assert callable(compare_trees.main)  # run by hand
    for name in (
        "layout_times",
        "shard_page",
        "shard_rates",
        "shard_sizes",
        "fsdp2_schedules",
        "exchanges",
        *OTHERS,
    ):  # run by hand
        assert callable(import_module(f"benchmarks.{name}").main)
    assert import_module("benchmarks.gathers")  # for test_gathers.py
    assert callable(
        import_module("benchmarks.plan_keys").main
    )  # run by hand; a part of it by test_plan_keys.py
    files = {
        p.stem for p in BENCHMARKS.glob("*.py")
    }  # those of paper/ are run by hand: test_paper_figures.py
    reached = {m.removeprefix("benchmarks.") for m in sys.modules if m.startswith("benchmarks.")}
    assert files == {m for m in reached if m.partition(".")[0] != "paper"}


class FixedSide:
    """Answers with these seconds, in turn, as a tree's process does."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = iter(seconds)

    def seconds(self, case: str) -> float:
        return next(self._seconds)


def test_trees_are_compared_by_pairs_after_a_run_that_does_not_count() -> None:
    sides: Any = FixedSide(9.0, 2.0, 4.0, 3.0), FixedSide(9.0, 1.0, 1.0, 1.0)
    assert compare_trees.compare(*sides, "a case", 3).split("a case")[1].split() == (
        ["3000.0", "ms", "1000.0", "ms", "ratio", "3.00", "(2.00", "to", "4.00)"]
    )
    assert 0 < compare_trees.CASES["compile 24 layers, m=32"]() < 60


def test_a_tree_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare_trees.main([str(tmp_path)])
    assert "give a tree of the other commit" in capsys.readouterr().err


def test_rates_of_a_small_plan_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_rates, "cases", lambda quick: [plan_rates.pipeline(2, 2)])
    rows = [*plan_rates.simulate_rows(True), *plan_rates.sweep_rows(True)]
    assert len(rows) == 8, "two of them under contention"
    assert all(r.low <= r.value <= r.high for r in rows)


def test_the_search_has_rows_of_cases_and_a_judgement() -> None:
    rows = list(zero_bubble_search._case_rows(2))
    assert [r.goal is not None for r in rows] == [False, False, True] and rows[-1].met


def test_every_recipe_has_a_row_for_compiling_and_one_for_simulating(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipe_rates, "DEVICES", 2)
    monkeypatch.setattr(recipe_rates, "MICROBATCHES", 4)
    rows = list(recipe_rates.rows(True))
    assert len(rows) == 2 * len(piper.recipes.RECIPES)
    assert all(r.value > 0 and r.goal == recipe_rates.GOAL for r in rows)


def test_the_formula_of_an_all_reduce_is_fitted_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "QUICK_ITERATIONS", 2)
    rows = [*communication.rows(True)]
    assert [r.goal is not None for r in rows].count(True) == len([*communication.measured()]) == 2
    assert all(0 <= r.low <= r.value <= r.high for r in rows)
    assert [
        round(x, 2)
        for x in communication.minimum(lambda x: (x[0] - 3) ** 2 + (x[1] + 2) ** 2, 2, 80)
    ] == [3, -2]


def test_steps_by_formula_are_held_against_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    def setup(regime: step_model.Regime, precision: str, m: int) -> SimpleNamespace:
        return SimpleNamespace(
            plan=None,
            regime=replace(regime, rows=regime.rows * regime.microbatches // m, microbatches=m),
        )

    monkeypatch.setattr(formula, "with_microbatches", setup)
    monkeypatch.setattr(
        formula,
        "simulate",
        lambda plan, on: SimpleNamespace(period_s=0.1 if on.device.stack else 0.01),
    )
    monkeypatch.setattr(formula, "blocks", lambda quick: [("a block", None, 0.2, True)])
    known = formula.measured()
    assert len(known) == 9 and all(0.01 < s < 0.2 for s in known.values())
    *rows, goal, a, b, c, block = formula.rows(False)
    assert [r.name.rpartition(", ")[2] for r in rows] == [
        "h200x1",
        "h200x1@eager",
        "h200-eager.toml",
    ] * len(known)
    assert goal.value == pytest.approx(100 * (1 - 0.1 / 0.14257)) and block.value == pytest.approx(
        50
    )
    assert [r.value for r in (a, b, c)] == pytest.approx([-95, -50, -50])


def test_the_blocks_of_a_gpu_check_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"GPT": [80.30, 77.58], "Llama": [91.97, 87.19], "MoE": [85.48, 75.51]}
    rows = [gpu_check.ROWS // m for m in gpu_check.MICROBATCHES]
    known = formula.measured_blocks()
    assert known == {
        f"bfloat16, {name}, {n} x 1024 tokens, m={m}": pytest.approx(ms / 1e3)
        for name in gpu_check.BLOCKS
        for n, m, ms in zip(rows, gpu_check.MICROBATCHES, taken[name.partition(",")[0]])
    }
    monkeypatch.setattr(
        formula.piper,
        "compile",
        lambda work, s: SimpleNamespace(
            plan=SimpleNamespace(rows=32 // s.directives[0].microbatches)
        ),
    )
    assert [name for name, *_ in formula.blocks(False)] == [*known]
    assert [name for name, *_ in formula.blocks(True)] == [*known][:2]


def test_the_committed_table_of_kernels_is_what_the_script_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for the launch cost, whose plan is small here: 30.3 ms of issuing over what it launches."""
    found = load_cluster(kernel_table.OUT)
    said = tomllib.loads(kernel_table.OUT.read_text())["sources"]["launch_s"]
    assert kernel_table.text(found.device.launch_s, said) == kernel_table.OUT.read_text()
    assert {k.op for k in found.device.kernels if k.kind == "loss"} == {"cross_entropy"} and len(
        found.device.kernels
    ) == 17
    assert found.device.stack is not None
    assert found.each_device(
        lambda device: replace(device, kernels=(), launch_s=5e-6)
    ) == load_cluster("h200x1@eager")
    monkeypatch.setattr(
        kernel_table, "prepared", lambda regime, precision: SimpleNamespace(plan="plan")
    )
    monkeypatch.setattr(kernel_table, "launched", lambda plan, cluster: (1000, 2000))
    seconds, where = kernel_table.launch_seconds()
    assert (
        seconds == pytest.approx((30.3e-3 - 1000 * 1.1e-6) / 2000, rel=1e-2)
        and "1000 instructions, 2000 kernels" in where
    )
    with pytest.raises(ValueError, match="no kernel is known as 'sort, 7'"):
        kernel_table.kernel("sort, 7")


def test_what_is_judged_was_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: list[set[int]] = []
    monkeypatch.setattr(
        communication, "fit", lambda of, rows, n: fitted.append({r.group for r in rows}) or {}
    )
    of = next(communication.measured())
    rows = [*communication._fitted_rows(of, 1)]
    assert fitted[0] | fitted[1] == set(of.worlds) and not fitted[0] & fitted[1]
    assert [rows[k].name.endswith(", ".join(map(str, sorted(fitted[2 - k])))) for k in (1, 2)] == [
        True,
        True,
    ]


@pytest.mark.parametrize("split", [False, True])
def test_the_plan_that_computes_nothing_is_a_plan(split: bool) -> None:
    plan = noop.plan(2, 4, 3, split)
    verify(plan)
    chunks = [
        {p.op.chunk for p in i.parts if isinstance(p.op, Compute)}
        for r in plan.roles
        for i in r.program
    ]
    assert max(map(len, chunks)) == 1, "fused: an instruction would be several"
    assert execute(plan, noop.CODE, noop.job(plan), steps=2, launcher="inline").losses == [0.0, 0.0]


def test_a_rank_by_itself_runs_its_whole_program() -> None:
    plans = [noop.plan(4, 4, 3), noop.plan(4, 4, 3, split=True)]
    assert len(plans[1].role_of(1).program) > len(plans[0].role_of(1).program), (
        "a split backward is two instructions"
    )
    for wall, cpu in host_cost.lone_steps(plans, 1, steps=3):
        assert len(wall) == len(cpu) == 3


def test_rows_of_a_large_capture() -> None:
    found = {"seconds": 9.0, "cpu_seconds": 8.0, "peak_gib": 1.5, "chunks": 98.0, "codes": 3.0}
    found |= {"parameters": 175e9, "saved_gib_per_layer_and_row": 0.8}
    seconds, memory, _ = capture_rates.gpt3_rows(found)
    assert seconds.met is True and memory.met is False


def test_scale_of_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = models.GPTConfig(layers=4, width=16, heads=2, vocab=32, length=8)
    found = scale_cell.measure(tiny, 2, 2, 2, "h100x8")
    assert (found["ranks"], found["roles"]) == (4, 2) and found["peak_bytes"] > 0
    total, *phases, memory = scale.cell_rows("tiny", found)
    assert len(phases) == len(scale_cell.PHASES) and total.value == pytest.approx(
        sum(row.value for row in phases)
    )
    assert (total.goal, memory.goal) == (scale.SECONDS_GOAL, scale.MEMORY_GOAL)
    monkeypatch.setattr(scale.Size, "config", lambda self: tiny)
    small = scale.Size(layers=4, stages=2, replicas=2, microbatches=2)
    assert all(row.value > 0 for row in scale.growth_rows("microbatches", (2, 4), 1, small))
    assert [row.value > 0 for row in scale.node_rows((2, 4), 1)] == [True, True]


def test_growth_per_doubling() -> None:
    assert scale.per_doubling(10, 20, 1.0, 2.0) == pytest.approx(2)
    assert scale.per_doubling(10, 40, 1.0, 9.0) == pytest.approx(3)


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


def test_the_tuner_is_judged_in_the_space_that_was_evaluated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
        rows["regret, median"].value >= 0
        and rows["results that do not fit"].met
        and rows["candidates pruned that would fit"].met
    )


def test_the_space_of_the_tuner_has_2000_different_strategies() -> None:
    assert len(list(tuner_space.points())) == 2000
    for pp in (2, 4, 8):
        assert len(set(tuner_space.cuts(pp, tuner_space.SIZES.layers))) == tuner_space.BOUNDARIES


def test_there_are_a_hundred_strategies() -> None:
    assert len(set(strategies.strategies())) >= strategies.COUNT


@pytest.mark.parametrize("kind", step_kinds.KINDS)
def test_both_sides_of_a_comparison_cut_the_model_alike(kind: str) -> None:
    setup = step_time.prepared(kind, step_model.TINY)
    work = step_model.job(step_model.TINY, setup.global_batch)
    initial = materialize(work)
    ranks = [
        Rank(setup.plan, r, setup.code, rank_job(work), initial.params, initial.buffers)
        for r in range(2)
    ]
    model = step_sides.initial_model(setup)
    pipeline = step_kinds.PIPELINES.get(kind)
    for rank in ranks:
        modules = (
            [step_model.Stage(model, s, pipeline.stages) for s in pipeline.stages_of(rank.rank)]
            if pipeline
            else [model]
        )
        ids = {id(p) for module in modules for p in module.parameters()}
        assert {n for n, p in model.named_parameters() if id(p) in ids} == set(rank.store.params)
    InlineEngine(ranks).step(0)


@pytest.mark.long
def test_a_comparison_has_its_ratio_its_times_and_a_profile() -> None:
    rows = step_time.compared("1F1B", step_model.TINY, pairs=2)
    assert [r.unit for r in rows[:4]] == ["ratio", "ms/step", "ms/step", "ratio"]
    assert rows[0].low <= rows[0].value <= rows[0].high and rows[0].judged == rows[0].low
    assert {"matmul", step_profile.REST, step_profile.WAITING} <= {
        r.name.partition("profile, ")[2] for r in rows[4:]
    }


@pytest.mark.long
def test_predictions_have_a_row_each_and_three_goals() -> None:
    chosen = {"gpipe": piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=2))}
    *cases, error, single, order, memory = prediction.predicted(
        chosen, step_model.TINY, global_batch=4, rounds=1
    )
    assert [r.name for r in cases] == ["gpipe"] and "predicted" in cases[0].note
    assert error.value == single.value == pytest.approx(abs(cases[0].value)) and order.value == 1.0
    assert memory.met, "plans of this size are exact too"


def test_a_prediction_is_judged_by_the_fastest_rounds() -> None:
    strategy = piper.Strategy(piper.Mesh(pp=1), ())
    case = prediction.Case(
        "x",
        piper.compile(step_model.job(step_model.TINY, 2), strategy),
        [1.1, 1.0, 2.0],
        [1.25, 1.6, 2.0],
    )
    assert case.times == (1.0, 1.25) and case.error == pytest.approx(-0.2)
    assert case.errors == pytest.approx([-0.12, -0.375, 0.0])


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


def test_silence_ends_a_comparison_and_slowness_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "SILENCE_S", 0.01)
    (ours, its), answer = Pipe(duplex=False), step_worker.Measured()
    its.send(step_worker.ALIVE)
    its.send(answer)
    assert step_time.collected([ours]) == [answer]
    its.send(step_worker.ALIVE)
    with pytest.raises(RuntimeError, match="no rank got further"):
        step_time.collected([ours])


def test_two_sides_that_train_differently_are_refused() -> None:
    same, other = SimpleNamespace(losses=[2.0, 1.0]), SimpleNamespace(losses=[2.0, 1.001])
    step_worker.check_same_training(same, same, 1e-4)
    with pytest.raises(RuntimeError, match=r"the loss of step 1 is 1\.0 \(ours\) and 1\.001"):
        step_worker.check_same_training(same, other, 1e-4)


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


def test_a_slow_batch_function_is_measured_beside_a_quick_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of a made-up machine: what is not called beside compute is added to a step."""
    asked: list[tuple[bool, object]] = []

    def step_s(
        pool: object, subject: measure_loader.Subject, steps: int, batch: Any, loader: str | int
    ) -> float:
        nap_s = batch.args[0] if getattr(batch, "func", None) is measure_loader.napped else 0.0
        asked.append((nap_s > 0, loader))
        return 1.0 + (8 * nap_s if loader == "none" else 0.01)

    monkeypatch.setattr(measure_loader, "step_s", step_s)
    subject = measure_loader.waiting()
    base, *ratios = measure_loader.measured(None, subject, 3, 9)
    assert base.value == 1000 and [round(r.value, 3) for r in ratios] == [1.01, 1.01, 1.01, 1.5]
    assert [r.met for r in ratios] == [False, True, True, None]
    assert sorted(asked[1:6], key=str) == sorted(
        ((c.slow, c.loader) for c in measure_loader.CASES), key=str
    )
    assert asked[6] == (False, "thread"), "another case begins"
    monkeypatch.undo()
    assert measure_loader.gpt(step_model.TINY).plan.microbatches == step_model.TINY.microbatches
    ran = execute(subject.plan, subject.code, subject.job, steps=2, launcher="inline")
    assert min(ran.step_s) > 8 * 3 * measure_loader.COMPUTE_S


def test_a_section_that_fails_does_not_take_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Row("sweep", "a", 1.0, "x")

    def section(name: str) -> object:
        def rows(quick: bool) -> Iterator[Row]:
            yield found
            if name == "host":
                raise ValueError("no host")

        return rows

    monkeypatch.setattr(run, "section", section)
    assert run.main(["host", "sweep", "--csv", str(tmp_path / "rows.csv")]) == 1
    assert (tmp_path / "rows.csv").read_text().count("sweep,a,1,") == 2, (
        "what was measured before the failure counts"
    )
    assert run.main(["sweep", "--csv", str(tmp_path / "rows.csv")]) == 0


@pytest.mark.parametrize(
    ("script", "line"), [(gpu, "nothing was measured"), (gpu_check, "nothing was checked")]
)
def test_without_a_device_there_is_one_line(
    script: ModuleType,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 0
    assert capsys.readouterr().out.startswith(f"no CUDA device: {line}")


def test_the_check_of_a_device_has_its_rows_goals_and_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block on the CPU is checked; a section that fails does not take the others along."""
    monkeypatch.setattr(gpu_check, "MICROBATCHES", (2,))
    monkeypatch.setattr(gpu_check, "REPEATS", 1)
    sizes = {"tiny": models.GPTConfig(layers=1, width=16, heads=2, vocab=32, length=8)}

    def broken() -> Iterator[Row]:
        raise ValueError("no such section")

    blocks = partial(gpu_check.blocks, "cpu", load_cluster("cpu-local"), sizes, 4)
    rows, failed = gpu_check.checked([broken, blocks])
    assert failed == ["ValueError: no such section"]
    assert [(r.name.rpartition(": ")[2], r.goal.number) for r in rows] == [
        ("step, by formula", 25), ("step, by profile", 10), ("peak memory", 3),
    ]  # fmt: skip
    assert abs(rows[2].value) < 3, "a plan of this size is exact too"
    text = gpu_check.table({"device": "none"}, [replace(rows[0], judged=26.0), rows[2]], failed)
    assert (
        "**missed**" in text
        and "| met |" in text
        and text.endswith("**failed**: ValueError: no such section")
    )


def test_both_sides_on_a_device_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is made up: its streams are the host."""
    monkeypatch.setattr(gpu_sides, "CudaApi", lambda device: HostDevice())
    monkeypatch.setattr(gpu_sides, "upload", lambda rows, shape, dtype, device: rows.to(dtype))
    setup = gpu_sides.prepared(step_model.TINY, "float32")
    ours, theirs = (side(setup, torch.device("cpu")) for side in (gpu_sides.Ours, gpu_sides.Torch))
    for side in (ours, theirs) * 3:
        side.step()
    gpu.check_losses(ours, theirs, "float32")
    assert len(ours.losses) == len(theirs.losses) == len(ours.issued_s) == len(theirs.issued_s) == 3
    theirs.losses[2] += 1.0
    with pytest.raises(RuntimeError, match="the losses differ"):
        gpu.check_losses(ours, theirs, "float32")


def test_a_dozen_strategies_share_states_or_recompute() -> None:
    found = zero_prediction.strategies()
    assert len(found) >= 12
    for name, strategy in found.items():
        replicated = [d.zero for d in strategy.directives if isinstance(d, piper.replicate)]
        assert any(replicated) or any(
            isinstance(d, piper.recompute) for d in strategy.directives
        ), name


def test_steps_beside_a_save_are_found() -> None:
    """The save after step 3 ends within the sixth step, that after the last one is beside none."""
    heard = saving.Heard(
        {0: [1.0, 2, 3, 4, 6, 7], 1: [1.5, 2, 3, 5, 6, 7]},
        [(3, 1, 2, 5.0), (3, 1, 2, 6.5), (6, 1, 2, 9.0)],
    )
    assert heard.step_s() == [1, 1, 2, 2, 1] and heard.beside() == {2, 3, 4}


def test_saves_are_measured_beside_runs_without() -> None:
    plan, job = chain(pp=2)
    with saving.Listening(saving.Pool(2)) as workers:
        found = {
            row.name: row
            for row in saving.measured(workers, saving.Subject("chain", plan, CODE, job), 1, 9, 3)
        }
    assert len(found) == 5 and all(
        row.value > 0 and row.section == "saving" for row in found.values()
    )
    ratio, blocked = (
        next(row for name, row in found.items() if what in name)
        for what in ("without", "beyond the copy")
    )
    assert str(ratio.goal) == "< 1.1" and str(blocked.goal) == "< 5" and "2 shares" in blocked.note
