"""The commands of the loop: show, doctor, profile, tune, run with what they found, report; one small model through
all."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from piper.api.captures import capturing
from piper.api.ground.costs_file import save_costs
from piper.api.running import profiling, tuning
from piper.cli import app
from piper.cli.loading import JobFile, load_file, load_space
from piper.sessions import autopilot
from piper.sessions.autopilot import loop
from piper.sessions.training import Settings
from piper_autotune import Study
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import OutputError
from piper_ir.plan.plan import Plan
from piper_ir.plan.text import format_plan
from piper_ir.program.costs import Costs, Duration
from piper_ir.program.program import Chunk
from piper_runtime.launch import RunOptions
from tests.helpers.command_line import RECIPE, fails
from tests.helpers.command_line import command as piper

SPACE = """
params = {"m": 2}

def strategy(trial):
    m = trial.suggest_categorical("m", (1, 2, 4))
    return piper.Strategy(piper.Mesh(pp=2), piper.recipes.one_f_one_b(pp=2, microbatches=m))
"""


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loop") / "space.py"
    path.write_text(RECIPE + SPACE)
    return path


@pytest.fixture(scope="module")
def costs(space: Path) -> Path:
    """What `piper profile` writes, in the folder of the recipe."""
    out = space.with_name("costs.json")
    result = piper("profile", space, "--repeats", 1, "--out", out)
    assert result.exit_code == 0, result.output
    return out


def test_every_command_shows_an_example() -> None:
    for command in app.registered_commands:
        function = command.callback.__name__  # type: ignore[union-attr]  # every command has one
        name = function.rstrip("_")  # `import` is a word of Python
        text = piper(name, "--help").stdout
        assert re.search(rf"Example:\s+piper {name}\b", text), name


def test_params_of_the_file_answer_where_nobody_searches(space: Path) -> None:
    assert "microbatches=2" in piper("explain", space).stdout
    assert "microbatches=4" in piper("explain", space, "-p", "m=4").stdout
    fails(piper("explain", space, "-p", "k=4"), "no parameter of that name", "it has m")


def test_show_draws_the_schedule(space: Path, tmp_path: Path) -> None:
    png, slow = tmp_path / "schedule.png", tmp_path / "slow.toml"
    device = '[device]\nbase = "h100-80g-sxm"\nlaunch_s = 0\nmemory_bandwidth = 1e9\n'
    slow.write_text(f"{device}[nodes]\ndevices = 8\n")  # the model is too small for an H100
    result = piper("show", space, "--cluster", slow, "--png", png)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if line.startswith("rank ")]
    assert len(rows) == 2 and all("F0" in r and ("B0" in r or "W0" in r) for r in rows)
    assert png.read_bytes().startswith(b"\x89PNG")
    fails(piper("show", space, "--cluster", "h100x8", "--png", tmp_path / "no" / "x.png"), "x.png")


def test_show_prints_plan_and_graph(space: Path) -> None:
    plan = loads(Plan, piper("show", space, "--plan", "--json").stdout)
    assert piper("show", space, "--plan").stdout == format_plan(plan)
    assert "graph on Mesh(pp=2), 2 microbatches" in piper("show", space, "--graph").stdout
    fails(piper("show", space, "--plan", "--graph"), "one of them")


def test_doctor_says_who_else_owns_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names() -> dict[str, str]:
        return next(f for f in json.loads(piper("doctor", "--json").stdout) if f["name"] == "names")

    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert names()["state"] == "ok"
    other = tmp_path / "bin" / "piper"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    assert (
        names()["state"] == "missing"
        and f"the command piper on PATH is {other}, not of this Python" in names()["text"]
    )
    info = tmp_path / "piper_tts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: piper-tts\nVersion: 1.0\n")
    (info / "RECORD").write_text("piper/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        names()["state"] == "missing"
        and "pip uninstall piper-tts, then install piper-training again" in names()["text"]
    )


def test_doctor_says_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    result = piper("doctor")
    assert result.exit_code == 0, result.output
    assert "gloo" in result.stdout and "nothing is missing" in result.stdout
    found = {f["name"]: f["state"] for f in json.loads(piper("doctor", "--json").stdout)}
    assert found["torch"] == found["ray"] == "ok" and found["cuda"] in ("absent", "ok")


def test_a_profile_is_what_predictions_rest_on(space: Path, costs: Path) -> None:
    measured = loads(Costs, costs.read_text())
    assert measured.origin is not None and measured.origin.ranks == 2
    shares = json.loads(piper("simulate", space, "--costs", costs, "--json").stdout)["sources"]
    assert shares["measured"] > 0.5
    assert "measured" not in json.loads(piper("simulate", space, "--json").stdout)["sources"]
    fails(
        piper("simulate", space, "--costs", space.with_name("none.json")),
        "none.json",
        "piper profile",
    )


def test_costs_that_cannot_be_written_leave_the_older_file(
    costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "costs.json"
    kept.write_bytes(costs.read_bytes())
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        write(path, content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(OutputError, match="No space left on device; they are in"):
        save_costs(kept, loads(Costs, costs.read_text()))
    assert kept.read_bytes() == costs.read_bytes() and list(tmp_path.glob("*.unfinished")) == []


def test_costs_go_through_links_and_into_pipes(costs: Path, tmp_path: Path) -> None:
    measured, real, link = (
        loads(Costs, costs.read_text()),
        tmp_path / "real.json",
        tmp_path / "link.json",
    )
    real.write_text("older")
    link.symlink_to(real)
    save_costs(link, measured)
    assert link.is_symlink() and loads(Costs, real.read_text()) == measured
    save_costs(Path(os.devnull), measured)
    assert not Path(os.devnull).is_file()


def test_costs_that_can_go_nowhere_are_not_measured(
    space: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Mock()
    monkeypatch.setattr(profiling, "profile", measured)
    fails(piper("profile", space, "--out", tmp_path), str(tmp_path), "it is a folder", "--out")
    fails(
        piper("profile", space, "--out", space / "costs.json"), str(space / "costs.json"), "--out"
    )
    measured.assert_not_called()


def test_tune_finds_reports_and_leaves_a_strategy_to_run(
    space: Path, costs: Path, tmp_path: Path
) -> None:
    result = piper(
        "tune",
        space,
        "--costs",
        costs,
        "--trials",
        3,
        "--workers",
        0,
        "--confirm",
        1,
        "--launcher",
        "inline",
        "--out",
        tmp_path,
    )
    assert result.exit_code == 0, result.output
    (folder,) = tmp_path.iterdir()
    assert {"study.json", "best.json", "report"} <= {p.name for p in folder.iterdir()}
    best = json.loads((folder / "best.json").read_text())
    assert best["params"]["m"] in (1, 2, 4)
    ran = piper(
        "run",
        space,
        "--strategy",
        folder / "best.json",
        "--launcher",
        "inline",
        "--steps",
        2,
        "--out",
        tmp_path / "r",
        "--json",
    )
    assert ran.exit_code == 0, ran.output
    numbers = json.loads(ran.stdout)
    assert len(numbers["measured"]["losses"]) == 2 and numbers["predicted"]["step_s"] > 0
    assert (Path(numbers["folder"]) / "report" / "report.html").is_file()


def test_tune_warns_of_what_its_predictions_rest_on(
    space: Path, costs: Path, tmp_path: Path
) -> None:
    """It warns as simulate does: predictions from costs of another machine would else look like any others."""
    theirs = loads(Costs, costs.read_text())
    assert theirs.origin is not None
    other = tmp_path / "other.json"
    other.write_text(dumps(replace(theirs, origin=replace(theirs.origin, device="another CPU"))))
    result = piper(
        "tune", space, "--costs", other, "--trials", 3, "--workers", 0, "--out", tmp_path / "out"
    )
    assert (
        "warning: the costs were measured on another machine: another CPU; this is "
        in result.stdout
    )
    (folder,) = (tmp_path / "out").iterdir()
    assert (
        "measured on another machine: another CPU"
        in (folder / "report" / "report.html").read_text()
    )
    study = Study.load(folder)
    assert study.best_row is not None and any(
        "another CPU" in note for note in study.best_row.notes
    )
    drawn = piper("show", space, "--costs", other).stdout
    assert "\nwarning: the costs were measured on another machine: another CPU; this is " in drawn
    own = piper(
        "tune", space, "--costs", costs, "--trials", 3, "--workers", 0, "--out", tmp_path / "own"
    )
    assert own.exit_code == 0 and "another machine" not in own.stdout


def test_tune_names_no_strategy_that_it_has_not_written(
    space: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Study("cpu-local", None, 0, (), interrupted=True)  # Ctrl-C before the first candidate
    monkeypatch.setattr(tuning, "tune", lambda *args, **more: nothing)
    result = piper("tune", space, "--out", tmp_path)
    (folder,) = tmp_path.iterdir()
    assert result.exit_code == 130 and f"study.json is in {folder}" in result.stderr
    assert "best.json" not in result.stderr and not (folder / "best.json").exists()


@pytest.mark.long
def test_every_command_makes_one_plan_of_one_strategy(tmp_path: Path, costs: Path) -> None:
    """Costs decide where `at="cost"` cuts: who predicts, runs or draws must see the same ones. best.json says where it
    cut."""
    path = tmp_path / "cut.py"
    path.write_text(
        RECIPE.replace("range(2)", "range(5)")
        + "def strategy(trial):\n    m = trial.suggest_categorical('m', (2,))\n"
        + "    parts = (piper.partition(2, at='cost'), *piper.recipes.gpipe(pp=2, microbatches=m)[1:])\n"
        + "    return piper.Strategy(piper.Mesh(pp=2), parts)\nparams = {'m': 2}\n"
    )
    dear = tmp_path / "costs.json"
    measured = loads(Costs, costs.read_text())
    recipe = load_file(path)
    first = recipe_chunks(recipe)[0]
    dear.write_text(
        dumps(
            replace(
                measured,
                compute={first.id: {"F": Duration(1.0), "I": Duration(1.0), "W": Duration(1.0)}},
                steps=(),
            )
        )
    )
    more = ["--costs", dear, "--out", tmp_path / "o"]
    assert piper("simulate", path, *more).exit_code == 0
    assert piper("run", path, "--launcher", "inline", "--steps", 1, *more).exit_code == 0
    plans = {p.read_text() for p in (tmp_path / "o").glob("*/plan.json")}
    drawn = piper("show", path, "--plan", "--json", "--costs", dear).stdout
    assert len(plans) == 1
    plan = loads(Plan, drawn)
    assert (
        plan
        == loads(Plan, plans.pop())
        != loads(Plan, piper("show", path, "--plan", "--json").stdout)
    )
    search = [
        "--costs",
        dear,
        "--trials",
        1,
        "--workers",
        0,
        "--confirm",
        1,
        "--launcher",
        "inline",
        "--out",
        tmp_path / "t",
    ]
    assert piper("tune", path, *search).exit_code == 0
    best = next((tmp_path / "t").glob("*/best.json"))
    assert '"cost"' not in best.read_text()
    assert (
        piper(
            "run",
            path,
            "--strategy",
            best,
            "--launcher",
            "inline",
            "--steps",
            1,
            "--out",
            tmp_path / "b",
        ).exit_code
        == 0
    )
    assert loads(Plan, next((tmp_path / "b").glob("*/plan.json")).read_text()) == plan, (
        "without the costs"
    )


def recipe_chunks(recipe: JobFile) -> tuple[Chunk, ...]:
    return capturing.captured_job(recipe.job).program.chunks


def test_the_loop_profiles_searches_confirms_trains_and_reports(
    space: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one repeat of what it measures: how exact the costs are is not asked here."""
    monkeypatch.setattr(autopilot, "profile", partial(profiling.profile, repeats=1))
    found = load_space(space)
    done = loop(
        found.job,
        found.strategy,
        RunOptions(steps=4, launcher="processes"),
        baseline={"m": 2},
        trials=3,
        confirm=1,
        out=tmp_path,
        settings=Settings(name="loop"),
    )
    assert len(done.run.losses) == 4
    (folder,) = tmp_path.iterdir()
    made = {p.name for p in folder.iterdir()}
    assert {
        "costs.json",
        "study.json",
        "best.json",
        "plan.json",
        "predicted.json",
        "measured.json",
        "metrics.jsonl",
        "report",
    } <= made
    shares = done.prediction.summary()["sources"]
    assert shares["measured"] + shares.get("interpolated", 0) > 0.5, shares


def test_what_makes_no_sense_together_is_said(space: Path, tmp_path: Path) -> None:
    fails(
        piper("run", space, "--emulate", "h100x8", "--log", "tensorboard"),
        "--emulate trains nothing",
    )
    fails(piper("run", space, "--nodes", 2), "--nodes belongs to --print-launch")
    fails(piper("tune", space, "--workers", "abc"), "--workers abc")
    fails(piper("tune", space, "--launcher", "mpi", "--out", tmp_path), "'mpi' is not known")
    fails(piper("show", space, "--graph", "--png", tmp_path / "x.png"), "one of them")


def test_json_for_programs_everywhere(space: Path) -> None:
    assert json.loads(piper("explain", space, "--json").stdout)["microbatches"] == 2
    assert json.loads(piper("verify", space, "--json").stdout)["equal"] is True


def test_a_shell_can_complete_commands() -> None:
    script = CliRunner().invoke(app, [], prog_name="piper", env={"_PIPER_COMPLETE": "source_bash"})
    assert "piper" in script.stdout and "complete" in script.stdout


def test_a_space_is_a_function(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text(RECIPE + "strategy = 3\n")
    fails(piper("tune", path), "a `strategy` that is a int", "def strategy(trial)")


def test_a_limit_that_nothing_fits_names_the_smallest_that_does(
    space: Path, tmp_path: Path
) -> None:
    result = piper(
        "tune",
        space,
        "--trials",
        3,
        "--workers",
        0,
        "--memory-limit",
        "1KiB",
        "--cluster",
        "h100x8",
        "--out",
        tmp_path,
    )
    fails(result, "memory", "smallest")
    (folder,) = tmp_path.iterdir()
    assert (folder / "study.json").is_file()  # the reasons are not lost


def test_report_of_a_folder_without_results(tmp_path: Path) -> None:
    fails(piper("report", tmp_path), "holds no results")
    fails(piper("report", tmp_path / "absent"), "absent")
