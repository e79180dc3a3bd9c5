"""What was measured, trained or found is not lost because a disk is full, a pipe is closed or a library is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from piper.api.ground.costs_file import load_costs
from piper.api.ground.results import unless_empty
from piper.api.running import metrics
from piper_ir.ground.codec import loads
from piper_ir.program.costs import Costs, HostCosts
from tests.helpers.command_line import command, fails

MEASURED = Costs(host=HostCosts(1e-6, 2e-6, 0.0, 0.0))


def closed(
    *args: object, stdout: bool = True, stderr: bool = False, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run the command with nobody at the other end of its pipes."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-m", "piper", *map(str, args)], cwd=cwd, text=True,
            stdout=writer if stdout else subprocess.PIPE, stderr=writer if stderr else subprocess.PIPE,
        )  # fmt: skip
    finally:
        os.close(writer)


def never(*args: Any, **more: Any) -> Costs:
    raise AssertionError("measured although the result cannot be kept")


@pytest.mark.parametrize("path", ["/proc/costs.json", "/proc/none/costs.json"])
def test_profile_finds_out_first_that_a_disk_is_read_only(
    recipe: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piper.cli.actions.measuring.profile", never)
    fails(command("profile", recipe, "--out", path), f"cannot write the costs to {path}", "--out")


def test_profile_finds_out_first_that_a_disk_is_full(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is one whose files can be opened but hold nothing, as far as the check can see."""
    monkeypatch.setattr("piper.cli.actions.measuring.profile", never)
    full = recipe.with_name("costs.json.unfinished")
    full.symlink_to("/dev/full")
    fails(
        command("profile", recipe, "--out", recipe.with_name("costs.json")),
        "No space left on device",
        "--out",
    )


def test_the_check_leaves_what_is_there(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper.cli.actions.measuring.profile", never)
    out = recipe.with_name("costs.json")
    out.write_text("older")
    result = command("profile", recipe, "--out", out)
    assert isinstance(result.exception, AssertionError)
    assert out.read_text() == "older"
    assert {p.name for p in recipe.parent.iterdir()} - {"__pycache__"} == {
        "costs.json",
        "recipe.py",
    }


def test_costs_that_cannot_be_written_after_all_are_kept(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piper.cli.actions.measuring.profile", lambda *_, **__: MEASURED)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = command("profile", recipe, "--out", "/dev/full")
    fails(
        result,
        "cannot write the costs to /dev/full: No space left on device; they are in",
        "instead",
    )
    (kept,) = tmp_path.glob("piper-costs-*.json")
    assert str(kept) in result.stderr and load_costs(kept) == MEASURED
    monkeypatch.setattr("tempfile.tempdir", "/proc/none")
    result = command("profile", recipe, "--out", "/dev/full")
    fails(result, "they are printed to standard output")
    assert loads(Costs, result.stdout) == MEASURED


def test_a_logger_that_is_not_installed_is_refused_before_the_file_is_run(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(metrics.LIBRARIES, "wandb", "no_such_module_of_tests")
    recipe.write_text("raise SystemExit('this file was run')")
    out = tmp_path / "runs"
    result = command("run", recipe, "--launcher", "inline", "--log", "wandb", "--out", out)
    fails(result, 'the log "wandb" needs the package wandb', "pip install wandb")
    assert not out.exists()


def test_a_logger_that_cannot_start_leaves_no_empty_folder(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> Any:
        raise RuntimeError("nobody is logged in")

    monkeypatch.setitem(metrics.WRITERS, "tensorboard", refuses)
    monkeypatch.setitem(metrics.LIBRARIES, "tensorboard", "json")
    from piper.api.compiling.compiling import compile
    from piper.api.running.execution import execute
    from piper.cli.loading import load_file
    from piper_ir.ground.errors import OutputError

    loaded = load_file(recipe)
    with pytest.raises(OutputError, match="nobody is logged in"):
        execute(
            compile(loaded.job, loaded.strategy),
            steps=1,
            launcher="inline",
            out=tmp_path / "runs",
            log=["tensorboard"],
        )
    assert [*(tmp_path / "runs").iterdir()] == []


def test_a_folder_with_something_in_it_stays(tmp_path: Path) -> None:
    for content in (None, "", "written"):
        folder = tmp_path / f"folder {content}"
        folder.mkdir()
        if content is not None:
            (folder / "file").write_text(content)
        with pytest.raises(KeyboardInterrupt), unless_empty(folder):
            raise KeyboardInterrupt
        assert folder.exists() == (content == "written")


@pytest.mark.long
def test_a_closed_pipe_ends_no_training(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    args = ("run", recipe, "--launcher", "inline", "--steps", 3, "--out", out)
    result = closed(*args, stderr=True, cwd=tmp_path)
    assert result.returncode == 0
    assert len(json.loads((out / "recipe-001" / "measured.json").read_text())["losses"]) == 3


def test_what_only_prints_ends_quietly(tmp_path: Path) -> None:
    result = closed("recipes", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    wrong = closed("show", "--recipe", "none", stderr=True, cwd=tmp_path)
    assert wrong.returncode == 2


def test_closed_streams_are_no_error(tmp_path: Path) -> None:
    """No stdout at all; a file that is written meanwhile does not take its place."""
    line = f"{sys.executable} -m piper show --recipe gpipe --pp 2 --microbatches 2 --csv out.csv >&- 2>&-"
    assert subprocess.run(["bash", "-c", line], cwd=tmp_path).returncode == 0
    assert "gpipe" not in (tmp_path / "out.csv").read_text()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_one_message(unbuffered: str, tmp_path: Path) -> None:
    line = f"PYTHONUNBUFFERED={unbuffered} {sys.executable} -m piper recipes > /dev/full"
    result = subprocess.run(["bash", "-c", line], cwd=tmp_path, text=True, capture_output=True)
    assert result.returncode == 2
    assert result.stderr == "piper: cannot write to standard output: No space left on device\n"
