"""The command `piper tune`: what it prints and writes, and what it refuses before or in mid search."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

import piper
from piper import cli
from piper.api.running import tuning
from piper.views import study_view
from piper_ir.study.study import Row, limit_text
from piper_ir.tools import size_text
from piper_simulator import load_cluster

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
        "--cluster",
        "h100x8@hopper-torch",
        "--out",
        str(tmp_path / "out"),
    )
    assert done.exit_code == 0, done.output
    assert "80 % of published runs of hopper-torch fall inside" in " ".join(done.stdout.split())
    assert "within 1 GiB per device" in done.stdout
    assert re.search(
        r"^rules asked before compiling: skipped, devices, .*states", done.stdout, re.MULTILINE
    )
    best = tmp_path / "out" / "recipe-001" / "best.json"
    shown = CliRunner().invoke(cli.app, ["simulate", recipe, "--strategy", str(best)])
    assert shown.exit_code == 0, shown.output


def test_kernels_are_of_confirming_runs(recipe: str) -> None:
    done = command(recipe, "--kernels", "inductor")
    assert done.exit_code == 2 and "--kernels inductor: they are of confirming runs" in done.stderr
    assert "give --confirm 2" in done.stderr and "@inductor" in done.stderr


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
    assert "without contention" in found["warnings"][0]
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
