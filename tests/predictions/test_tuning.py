"""The tuner's front door and command: a job captured once, confirmed on this machine, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import piper
from piper import cli
from piper.api.captures import capturing
from piper.api.running import tuning
from piper.views import study_view
from piper_autotune.scoring.evaluators import Processes
from piper_autotune.scoring.scoring import Scored
from piper_autotune.space.problem import Programs
from piper_ir.ground.errors import CompileError, JobError, TuneError
from piper_ir.study.study import Row, limit_text
from piper_ir.tools import size_text
from piper_simulator import cpu_local, load_cluster
from tests.helpers.cases import each_case

ROWS = 8


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch(step: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(0, 1, ROWS * 16).view(ROWS, 16)[rows.start : rows.stop] + step
    return x, x


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


@lru_cache
def job() -> piper.Job:
    return piper.Job(MLP, batch, nn.functional.mse_loss, adam, global_batch=ROWS)


def strategy(trial: Any) -> piper.Strategy:
    pp = trial.suggest_categorical("pp", [1, 2])
    m = trial.suggest_categorical("microbatches", [1, 2, 4, 8])
    return piper.Strategy(piper.Mesh(pp=pp), piper.recipes.one_f_one_b(pp=pp, microbatches=m))


def test_a_job_is_captured_once_and_its_candidates_score_as_simulate_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = Mock(wraps=capturing._capture)
    monkeypatch.setattr(capturing, "_capture", counted)
    monkeypatch.setattr(capturing, "_CAPTURES", {})
    study = piper.tune(job(), strategy, cluster=cpu_local(), trials=8, workers=0)
    assert counted.call_count == 1 and isinstance(study, piper.Study) and len(study.rows) == 8
    for row in study.table():
        predicted = piper.simulate(
            piper.compile(job(), study.strategies[row["number"]]).plan, cpu_local()
        )
        assert row["period_s"] == pytest.approx(predicted.period_s) and row[
            "step_s"
        ] == pytest.approx(predicted.step_s)
        assert (row["peak_bytes"], row["device_bytes"]) == (
            max(predicted.peak_bytes),
            max(predicted.device_bytes),
        )


def test_workers_of_a_job_score_alike_without_torch() -> None:
    problem, more = tuning.problem_of(job(), tuning.Conditions(cpu_local()))
    pool = Processes(problem, Programs(problem, more["at_rows"]), 1, 60.0, more["modules"])
    try:
        made = piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=8))
        found = pool.result(pool.submit(made))
        assert isinstance(found, Scored)
        assert found.peak_bytes == max(r.peak_bytes for r in piper.compile(job(), made).plan.roles)
        maps = Path(f"/proc/{pool._workers[0].process.pid}/maps")
        assert not maps.exists() or "libtorch" not in maps.read_text()
    finally:
        pool.close()


def test_the_best_are_confirmed_and_written(tmp_path: Path) -> None:
    study = piper.tune(
        job(),
        strategy,
        cluster=cpu_local(),
        trials=4,
        workers=0,
        confirm=2,
        launcher="inline",
        steps=3,
        out=tmp_path,
    )
    measured = [r for r in study.table() if r["measured_period_s"] is not None]
    assert (
        len(measured) == 2
        and study.best_row is not None
        and study.best_row.measured_period_s is not None
    )
    for row in measured:
        assert row["error"] == pytest.approx(row["period_s"] / row["measured_period_s"] - 1)
        assert row["measured_peak_bytes"] > 0
    (folder,) = tmp_path.iterdir()
    assert piper.load_strategy(folder / "best.json") == study.best == piper.Study.load(folder).best


@pytest.mark.parametrize("cluster", ["h100x8", load_cluster("a100x8")])
def test_another_machine_cannot_be_confirmed_here(cluster: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine may be that cluster")
    with pytest.raises(
        TuneError,
        match=r"confirm runs candidates on this machine, which is cpu-local; the cluster is \w100",
    ):
        piper.tune(job(), strategy, cluster=cluster, confirm=1)


def test_a_program_cannot_be_confirmed() -> None:
    program = piper.synthetic(stages=2, F=1, I=1, W=1)
    with pytest.raises(TuneError, match=r"only a piper\.Job can be run"):
        piper.tune(program, strategy, cluster=cpu_local(), confirm=1)


def test_a_program_of_given_durations_needs_no_cluster() -> None:
    program = piper.synthetic(stages=2, F=1, I=1, W=1)

    def own(trial: Any) -> piper.Strategy:
        return piper.Strategy(
            piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=trial.suggest_int("m", 1, 3))
        )

    study = piper.tune(program, own, cluster=None, trials=3, workers=0)
    assert study.best is not None and study.best.params == {"m": 1} and study.memory_limit is None


@each_case(
    ("text", "number"),
    [
        ("20GiB", 20 << 30),
        ("1.5 GB", 1_500_000_000),
        ("512 mib", 512 << 20),
        (7, 7),
        ("99", 99),
        ("3B", 3),
    ],
)
def test_sizes_are_read(text: int | str, number: int) -> None:
    assert tuning._limit(text, None) == number


@each_case("text", ["much", "", "-1GiB", 0, -5, True, "1 gallon"])
def test_what_is_no_size_is_named(text: Any) -> None:
    with pytest.raises(
        TuneError,
        match="a positive number of bytes, or text such as '20GiB' or '512MiB', is accepted",
    ):
        tuning._limit(text, None)


def test_the_limit_is_the_clusters_unless_said_otherwise() -> None:
    assert tuning._limit(None, load_cluster("h100x8")) == load_cluster("h100x8").device.memory_bytes


def test_other_sources_are_refused() -> None:
    with pytest.raises(CompileError, match="tune: the source is a str"):
        piper.tune("gpt", strategy, cluster=cpu_local())
    with pytest.raises(CompileError, match="global_batch is given with a Program only"):
        piper.tune(job(), strategy, cluster=cpu_local(), global_batch=3)
    with pytest.raises(JobError, match="at least 2 steps"):
        piper.tune(job(), strategy, cluster=cpu_local(), confirm=1, steps=1)


RECIPE = """
from tests.predictions.test_tuning import job as make, strategy
job = make()
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return str(path)


def command(*words: str) -> Any:
    return CliRunner().invoke(cli.app, ["tune", *words])


def test_the_command_prints_the_best_and_writes_a_strategy_that_runs(
    recipe: str, tmp_path: Path
) -> None:
    done = command(
        recipe,
        "--trials",
        "4",
        "--workers",
        "0",
        "--memory-limit",
        "1GiB",
        "--out",
        str(tmp_path / "out"),
    )
    assert done.exit_code == 0, done.output
    assert "within 1 GiB per device" in done.stdout
    assert re.search(
        r"^rules asked before compiling: skipped, devices, .*states", done.stdout, re.MULTILINE
    )
    best = tmp_path / "out" / "recipe-001" / "best.json"
    shown = CliRunner().invoke(cli.app, ["simulate", recipe, "--strategy", str(best)])
    assert shown.exit_code == 0, shown.output


def test_the_command_gives_json(recipe: str, tmp_path: Path) -> None:
    done = command(
        recipe, "--trials", "2", "--workers", "0", "--json", "--out", str(tmp_path / "out")
    )
    found = json.loads(done.stdout)
    assert (
        found["state"] == "complete"
        and found["number"] in (0, 1)
        and found["folder"] == str(tmp_path / "out" / "recipe-001")
    )
    assert (found["candidates"], found["rejected"], found["interrupted"]) == (2, {}, False)
    assert any(
        "assumed, not measured" in text and not text.startswith("warning")
        for text in found["warnings"]
    )


SPACE_WITH_RULES = """
def strategy(trial):
    pp = trial.suggest_categorical("pp", (1, 2, 4096))
    m = trial.suggest_categorical("microbatches", (1, 2, 4))
    stages = min(pp, 2)
    directives = piper.recipes.one_f_one_b(pp=stages, microbatches=m)
    return piper.Strategy(piper.Mesh(pp=pp), directives)
"""


def test_the_table_says_mesh_schedule_rows_and_how_many_were_scored(
    recipe: str, tmp_path: Path
) -> None:
    """Of 9 points 3 have more ranks than the cluster has devices; a rule rejects them, and they cost no trial."""
    path = Path(recipe)
    path.write_text(f"import piper\n{RECIPE}{SPACE_WITH_RULES}")
    args = (
        "--trials",
        "30",
        "--workers",
        "0",
        "--cluster",
        "h100x8",
        "--out",
        str(tmp_path / "out"),
    )
    text = command(recipe, *args).stdout
    counted = re.search(
        r"best of (\d) candidates \((\d) more rejected by rules before compiling; .*the space has "
        r"no others\), s/step",
        text,
    )
    assert counted is not None and int(counted[1]) + int(counted[2]) == 9 and int(counted[2]) >= 3
    assert re.search(
        r"^pp=2, microbatches=2 +pp=2 +2 stages, 2 microbatches +4 ", text, re.MULTILINE
    )
    assert re.search(
        r"^pp=1, microbatches=1 +1 device +1 stage, whole batch +8 ", text, re.MULTILINE
    )
    found = json.loads(command(recipe, *args, "--json").stdout)
    assert (found["candidates"], found["scored"]) == (9, int(counted[1]))
    assert found["mesh"] and found["schedule"] and found["rows"]


def test_a_prediction_far_from_what_was_measured_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shown(error: float | None) -> str:
        row = Row(
            0,
            "complete",
            period_s=1.0,
            step_s=1.0,
            device_bytes=1,
            measured_period_s=1.0,
            error=error,
        )
        study_view.show_study(piper.Study("c", None, 0, (row,)), "f.py")
        return capsys.readouterr().out

    assert "predicted / measured is 0.11: run `piper profile FILE.py" in shown(-0.89)
    assert "predicted / measured is 2.00" in shown(1.0)
    assert "piper profile" not in shown(0.2) + shown(None)


def test_a_search_with_profiled_costs_names_what_it_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It does not advise a profile that was just made; what was proposed again and what could not be run is said."""
    far = Row(
        0,
        "complete",
        {"m": 2},
        period_s=1.0,
        step_s=1.0,
        device_bytes=1,
        measured_period_s=3.0,
        error=-0.67,
    )
    failed = Row(
        1, "rejected", {"m": 4}, kind="confirmation", reason="running it failed: rank 1 died"
    )
    study_view.show_study(
        piper.Study("c", None, 0, (far, failed), repeated=21, exhausted=True), "f.py", profiled=True
    )
    text = capsys.readouterr().out
    assert "piper profile" not in text and "which may have had other work then" in text
    assert (
        "best of 2 candidates (21 proposals were plans known already; the space has no others)"
        in text
    )
    assert "warning: m=4: running it failed: rank 1 died" in text


def test_where_nothing_was_found_json_has_the_reasons() -> None:
    rows = (
        Row(0, "rejected", kind="memory"),
        Row(1, "rejected", kind="memory"),
        Row(2, "rejected", kind="illegal"),
    )
    found = study_view.as_numbers(piper.Study("c", None, 0, rows, interrupted=True), None)
    assert found["number"] is found["state"] is found["folder"] is None and found["interrupted"]
    assert found["rejected"] == {"memory": 2, "illegal": 1} and found["candidates"] == 3


def test_devices_of_several_types_have_limits_of_their_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = piper.synthetic(stages=2, F=1, I=1, W=1)

    def own(trial: Any) -> piper.Strategy:
        return piper.Strategy(
            piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=trial.suggest_int("m", 1, 1))
        )

    study = piper.tune(
        program, own, cluster="a100-40g-sxm:1+h100-80g-sxm:1", trials=1, workers=0, out=tmp_path
    )
    study_view.show_study(piper.Study.load(tmp_path / "tune-001"), "f.py")
    sizes = [
        f"{size_text(load_cluster(f'{c}:1').device.memory_bytes)} per {c}"
        for c in ("h100-80g-sxm", "a100-40g-sxm")
    ]
    assert f"within {', '.join(sizes)}: best of" in capsys.readouterr().out
    assert limit_text(study.memory_limit, {"a": 5, "b": 5}) == f"{size_text(5)} per device", (
        "a smaller one was given"
    )


def test_a_search_that_finds_nothing_ends_with_one_message_and_leaves_its_study(
    recipe: str, tmp_path: Path
) -> None:
    done = command(
        recipe,
        "--trials",
        "2",
        "--workers",
        "0",
        "--memory-limit",
        "1KiB",
        "--out",
        str(tmp_path / "out"),
    )
    assert (
        done.exit_code == 2
        and "the smallest needs" in done.stderr
        and "Traceback" not in done.output
    )
    assert piper.Study.load(tmp_path / "out" / "recipe-001").best is None


@pytest.mark.parametrize("wrong", [("--memory-limit", "20foo"), ("--cluster", "h1000x8")])
def test_a_search_that_is_refused_leaves_no_folder(
    recipe: str, tmp_path: Path, wrong: tuple[str, str]
) -> None:
    done = command(
        recipe, "--trials", "2", "--workers", "0", *wrong, "--out", str(tmp_path / "out")
    )
    assert done.exit_code == 2 and wrong[1] in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--workers", "ray"), ["--workers ray needs Ray", "or use --workers 1"]),
        (("--workers", "127.0.0.1:1"), ["--workers 127.0.0.1:1 needs Ray", "or use --workers 1"]),
        (("--confirm", "1"), ['launcher "ray" needs Ray', "or use --launcher processes"]),
    ],
)
def test_without_ray_a_search_that_needs_it_does_not_begin(
    recipe: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, str],
    words: list[str],
) -> None:
    searched = Mock()
    monkeypatch.setattr(tuning, "search", searched)
    monkeypatch.setitem(sys.modules, "ray", None)
    done = command(recipe, *options, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2 and all(word in done.stderr for word in words), done.output
    assert not searched.called and list((tmp_path / "out").iterdir()) == []


def test_a_ray_that_does_not_answer_is_said_before_searching(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    searched = Mock()
    monkeypatch.setattr(tuning, "search", searched)
    done = command(recipe, "--workers", "127.0.0.1:1", "--out", str(tmp_path / "out"))
    assert "--workers local starts a Ray for this run only, --workers 1 needs none" in done.stderr
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    done = command(recipe, "--confirm", "1", "--out", str(tmp_path / "out"))
    assert (
        "no Ray cluster at 127.0.0.1:1" in done.stderr
        and "--launcher processes needs none" in done.stderr
    )
    assert not searched.called


def test_a_storage_that_gets_locked_in_mid_search_leaves_its_study(
    recipe: str, tmp_path: Path
) -> None:
    path = Path(recipe)
    path.write_text(LOCKING.format(db=str(tmp_path / "study.db")))
    url = f"sqlite:///{tmp_path / 'study.db'}?timeout=0.1"
    done = command(
        recipe, "--trials", "4", "--workers", "0", "--storage", url, "--out", str(tmp_path / "out")
    )
    assert (
        done.exit_code == 2
        and "is locked by another process" in done.stderr
        and "Traceback" not in done.output
    )
    study = piper.Study.load(tmp_path / "out" / "recipe-001")
    assert study.interrupted and study.best is not None and len(study.table()) >= 1


LOCKING = (
    RECIPE
    + """
import sqlite3
CALLS = []
holder = sqlite3.connect({db!r}, isolation_level=None)
free = strategy
def strategy(trial):
    CALLS.append(trial)
    if len(CALLS) == 3:
        holder.execute("BEGIN EXCLUSIVE")
    return free(trial)
"""
)


def test_a_file_whose_strategy_is_no_function_is_named(tmp_path: Path) -> None:
    path = tmp_path / "fixed.py"
    path.write_text(RECIPE + "import piper\nstrategy = piper.Strategy(piper.Mesh())\n")
    done = command(str(path))
    assert done.exit_code == 2 and "defines a `strategy` that is a Strategy" in done.stderr


def test_the_progress_bar_says_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    program = piper.synthetic(stages=2, F=1, I=1, W=1)
    with study_view.bar(2) as progress:
        piper.tune(
            program,
            lambda t: piper.Strategy(
                piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=t.suggest_int("m", 1, 2))
            ),
            cluster=None,
            trials=2,
            workers=0,
            progress=progress,
        )
        assert study_view._best_text(None) == "no candidate fits yet"
    assert "best" in capsys.readouterr().err
