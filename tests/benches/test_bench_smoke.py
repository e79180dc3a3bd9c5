"""The benchmarks run: every module is reached, and a tiny configuration of each gives rows. Nothing is said about
time."""

from __future__ import annotations

import csv
import gc
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import piper
from benchmarks import (
    compare_trees,
    draw_rates,
    gpu_check,
    noop,
    prediction,
    recompute_flops,
    run,
    saving,
    scale,
    scale_cell,
    step_model,
    step_sides,
    step_time,
    step_worker,
    zero_bubble_search,
)
from benchmarks import loader as measure_loader
from benchmarks.measure import Goal, Row, machine, median_interval, pairs_row
from packages.runtime.tests.chains import chain
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


BY_HAND = {
    "compare_trees", "exchanges", "gathers", "gpu_check", "left_out", "library_step", "pieces", "plan_keys",
    "published_jobs",
}  # fmt: skip
"""Programs of their own; tests of their numbers or tables import the parts that they need."""


@pytest.mark.long
def test_every_module_is_reached_by_a_section_or_is_a_program() -> None:
    """Look in a process of its own, in which the imports of other tests do not count."""
    sections = {f"benchmarks.{of.partition(':')[0]}" for of in run.SECTIONS.values()}
    programs = {f"benchmarks.{name}" for name in BY_HAND}
    names = sorted({"benchmarks.run", *sections, *programs})
    text = (
        f"import importlib, sys; [importlib.import_module(n) for n in {names}]; "
        "print(*[n for n in sys.modules if n.startswith('benchmarks.')])"
    )
    listed = subprocess.run(
        [sys.executable, "-c", text], cwd=BENCHMARKS.parent, capture_output=True, text=True
    )
    assert listed.returncode == 0, listed.stderr
    files = {
        ".".join(p.relative_to(BENCHMARKS.parent).with_suffix("").parts)
        for p in BENCHMARKS.rglob("*.py")
    }
    folders = {"benchmarks.paper", "benchmarks.planned"}
    assert files == {*listed.stdout.split()} - folders
    for name in programs:
        source = BENCHMARKS / f"{name.partition('.')[2]}.py"
        assert 'if __name__ == "__main__":' in source.read_text()


def named_wrongly(text: str) -> list[str]:
    """The scripts and sections that a document names and that are not there; after a commit and ":" they are not."""
    scripts = re.findall(r"(?<!:)\bbenchmarks/([\w/]+)\.py", text)
    scripts += [name.replace(".", "/") for name in re.findall(r"-m benchmarks\.([\w.]*\w)", text)]
    missing = [name for name in scripts if not (BENCHMARKS / f"{name}.py").is_file()]
    lists = re.findall(r"bench(?:marks/run\.py| ARGS=\"?) ?([a-z][a-z ]*)", text)
    return missing + [s for names in lists for s in names.split() if s not in run.SECTIONS]


def test_documents_name_scripts_and_sections_that_are_there() -> None:
    """Those that answered a question once are named with the commit at which they are."""
    root = BENCHMARKS.parent
    documents = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("docs/*.py")]
    texts = {p: p.read_text() for p in documents if p.name != "CHANGELOG.md"}
    assert not {p.name: wrong for p, text in texts.items() if (wrong := named_wrongly(text))}
    control = "`make bench ARGS=host`, `python benchmarks/run.py step`, benchmarks/x.py, c0:benchmarks/y.py"
    assert named_wrongly(control) == ["x", "host"]


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


@pytest.mark.long
def test_the_search_has_rows_of_cases_and_a_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_bubble_search, "CASES", 2)
    rows = list(zero_bubble_search.rows(False))
    assert [r.goal is not None for r in rows] == [False, False, True] and rows[-1].met


@pytest.mark.long
def test_policies_of_recomputation_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of a tiny GPT, whose goals are those of GPT-3: they can be missed."""
    tiny = models.GPTConfig(layers=8, width=16, heads=2, vocab=32, length=8)
    monkeypatch.setattr(recompute_flops.models, "preset", lambda name: tiny)
    monkeypatch.setattr(recompute_flops, "MODELS", ("gpt3-175b",))
    rows = list(recompute_flops.rows(True))
    assert len(rows) == 3 * (1 + len(recompute_flops.POLICIES))
    assert sum(r.goal is not None for r in rows) == 3


@pytest.mark.long
def test_draws_are_measured_by_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(step_model.TINY, rows=1, microbatches=2)
    monkeypatch.setattr(draw_rates, "LARGE", tiny)
    (row,) = draw_rates.rows(True)
    assert row.goal is not None and row.value > 0 and row.note.startswith("2 interleaved pairs")


def test_the_plan_that_computes_nothing_is_a_plan() -> None:
    plan = noop.plan(2, 4, 3)
    verify(plan)
    chunks = [
        {p.op.chunk for p in i.parts if isinstance(p.op, Compute)}
        for r in plan.roles
        for i in r.program
    ]
    assert max(map(len, chunks)) == 1, "fused: an instruction would be several"
    assert execute(plan, noop.CODE, noop.job(plan), steps=2, launcher="inline").losses == [0.0, 0.0]


@pytest.mark.long
def test_scale_of_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = models.GPTConfig(layers=4, width=16, heads=2, vocab=32, length=8)
    found = scale_cell.measure(tiny, 2, 2, 2, "h100x8")
    assert (found["ranks"], found["roles"]) == (4, 2) and found["peak_bytes"] > 0
    total, *phases, rate, memory = scale.cell_rows("tiny", found, *scale.GOALS)
    of = dict(zip(scale_cell.PHASES, (row.value for row in phases), strict=True))
    assert total.value == pytest.approx(of["capture"] + of["compile"] + of["simulate"])
    assert rate.value == pytest.approx(found["instructions"] / of["verify"], rel=0.01)
    assert (total.goal, memory.goal) == scale.GOALS
    monkeypatch.setattr(scale.Size, "config", lambda self: tiny)
    small = scale.Size(layers=4, stages=2, replicas=2, microbatches=2)
    assert all(row.value > 0 for row in scale.growth_rows("microbatches", (2, 4), 1, small))
    assert 0 < scale.worst_row(1).value < 60


def test_growth_per_doubling() -> None:
    assert scale.per_doubling(10, 20, 1.0, 2.0) == pytest.approx(2)
    assert scale.per_doubling(10, 40, 1.0, 9.0) == pytest.approx(3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", [*step_sides.PIPELINES, step_sides.DATA_PARALLEL])
def test_both_sides_of_a_comparison_cut_the_model_alike(kind: str) -> None:
    pipeline = step_sides.PIPELINES.get(kind)
    tiny = step_model.TINY
    setup = step_time.pipeline(kind, tiny) if pipeline else step_time.replicas(tiny)
    initial = materialize(setup.job)
    ranks = [
        Rank(setup.plan, r, setup.code, rank_job(setup.job), initial.params, initial.buffers)
        for r in range(2)
    ]
    model = step_sides.initial_model(setup)
    for rank in ranks:
        modules = (
            [step_model.Stage(model, s, pipeline.stages) for s in pipeline.stages_of(rank.rank)]
            if pipeline
            else [model]
        )
        ids = {id(p) for module in modules for p in module.parameters()}
        assert {n for n, p in model.named_parameters() if id(p) in ids} == set(rank.store.params)
    InlineEngine(ranks).step(0)


def test_every_kind_of_comparison_has_torchs_side() -> None:
    kinds = {*step_sides.PIPELINES, step_sides.DATA_PARALLEL, *step_time.SHARDED, *step_time.TENSOR}
    assert {*kinds, step_time.EXPERTS, step_sides.PLAIN} == set(step_worker.SIDES)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["1F1B", "DDP", "Llama, sequence"])
def test_a_comparison_has_its_ratios_and_both_sides_train_the_same(kind: str) -> None:
    made = {
        "1F1B": lambda: step_time.pipeline("1F1B", step_model.TINY),
        "DDP": lambda: step_time.replicas(step_model.TINY),
    }
    setup = made.get(kind, lambda: step_time.tensor(kind, replace(step_model.TINY, heads=4)))()
    wall, cpu = step_time.compared("step", setup, pairs=2, quick=False)
    assert [r.unit for r in (wall, cpu)] == ["ratio", "ratio"] and cpu.goal is None
    assert wall.low <= wall.value <= wall.high and wall.judged == wall.low


def test_a_goal_of_pairs_is_for_the_end_that_is_nearer_to_it() -> None:
    above, below = [2.0, 3.0, 4.0], [1.0, 1.0, 2.0]
    at_least = pairs_row("s", "n", above, below, Goal("above", 2.5))
    at_most = pairs_row("s", "n", above, below, Goal("below", 2.5))
    assert (at_least.value, at_least.judged, at_most.judged) == (2.0, 2.0, 3.0)
    assert at_least.met is False and at_most.met is False
    assert pairs_row("s", "n", above, below, Goal("above", 1.9)).met is True


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


def test_there_are_two_dozen_strategies_to_predict_half_of_which_share_or_recompute() -> None:
    assert len(prediction.strategies()) >= 24 and len(prediction.sharing()) == 12
    for name, strategy in prediction.sharing().items():
        shared = [d.zero for d in strategy.directives if isinstance(d, piper.replicate)]
        again = [d for d in strategy.directives if isinstance(d, piper.recompute)]
        assert any(shared) or again, name


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
    row = Row("tune", "a", 1.0, "x")

    def section(name: str) -> object:
        def rows(quick: bool) -> Iterator[Row]:
            yield row
            if name == "step":
                raise ValueError("no such step")

        return rows

    monkeypatch.setattr(run, "section", section)
    assert run.main(["step", "tune", "--csv", str(tmp_path / "rows.csv")]) == 1
    assert (tmp_path / "rows.csv").read_text().count("tune,a,1,") == 2, (
        "what was measured before the failure counts"
    )
    assert run.main(["tune", "--csv", str(tmp_path / "rows.csv")]) == 0


def test_without_a_device_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 0
    assert capsys.readouterr().out.startswith("no CUDA device: nothing was checked")


def test_the_committed_table_of_kernels_is_a_cluster() -> None:
    """It is the H200 with eager kernels but for the launch cost and its own kernels (docs/clusters.md)."""
    cluster = load_cluster(BENCHMARKS / "measured" / "h200-eager.toml")
    assert len(cluster.device.kernels) == 17 and cluster.device.stack is not None
    plain = cluster.each_device(lambda device: replace(device, kernels=(), launch_s=5e-6))
    assert plain == load_cluster("h200x1@eager")


@pytest.mark.long
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
