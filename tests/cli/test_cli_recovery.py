"""Restarts at the command line: a file whose data fail once, and workers that are killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.command_line import GOOD, RECIPE, fails
from tests.helpers.command_line import command as piper

FAILING = """
def _read(step, rows, whole=batch):
    mark = pathlib.Path(__file__).with_name("failed")
    if step == 3 and not mark.exists():
        mark.touch()
        {what}
    return whole(step, rows)

job = dataclasses.replace(job, batch=_read)
steps = 6
"""
SEARCHED = """
params = {"pp": 2, "dp": 2}
def strategy(trial):
    pp, dp = (trial.suggest_categorical(name, (1, 2)) for name in ("pp", "dp"))
    m = 8 // dp
    made = piper.recipes.gpipe(pp=pp, microbatches=m) if pp > 1 else (piper.split(where(), microbatches=m),)
    return piper.Strategy(piper.Mesh(pp=pp, dp=dp), (*made, *(piper.recipes.data_parallel() if dp > 1 else ())))
"""


def recipe(folder: Path, what: str, strategy: str = GOOD) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "recipe.py"
    path.write_text(
        "import dataclasses, os, pathlib, signal\n" + RECIPE + FAILING.format(what=what) + strategy
    )
    return path


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(6))
    return [line["loss"] for line in lines]


def line_of(path: Path) -> int:
    """Return the line that raises."""
    return next(k for k, line in enumerate(path.read_text().splitlines(), 1) if "is away" in line)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("flag", "source"),
    [
        ("--every", "step 2, from the checkpoint"),
        ("--snapshot", "step 2, from the host snapshots of ranks 0, 1"),
    ],
)
def test_a_training_goes_on_by_itself(flag: str, source: str, tmp_path: Path) -> None:
    path = recipe(tmp_path / "r", "raise OSError('the disk is away')")
    saved = ("--checkpoint", tmp_path / "saved", flag, 2)
    done = piper(
        "run", path, "--launcher", "inline", "--out", tmp_path / "runs", *saved, "--restarts", 1
    )
    assert done.exit_code == 0, done.output
    assert (
        f"recipe.py:{line_of(path)}). Restart 1 of 1: the run goes on with {source}" in done.stderr
    )
    again = piper("run", path, "--launcher", "inline", "--out", tmp_path / "runs")
    assert again.exit_code == 0 and losses(tmp_path / "runs" / "recipe-001") == losses(
        tmp_path / "runs" / "recipe-002"
    )
    page = (tmp_path / "runs" / "recipe-001" / "report" / "report.html").read_text()
    assert (
        "Restarts" in page and "the disk is away" in page and source.partition("from ")[2] in page
    )


def test_mistakes_are_one_message(tmp_path: Path) -> None:
    path = recipe(tmp_path / "r", "raise OSError('the disk is away')")
    run = ("run", path, "--out", tmp_path / "runs")
    fails(
        piper(*run, "--launcher", "inline", "--on-loss", "replan"),
        "--on-loss replan: a run that may not be started again",
    )
    fails(
        piper(*run, "--launcher", "inline", "--on-loss", "replan", "--restarts", 1),
        "inline",
        "has no devices to lose",
    )
    fails(piper(*run, "--on-loss", "wait", "--restarts", 1), "--on-loss wait")
    fails(
        piper(*run, "--launcher", "inline", "--snapshot", 1),
        "--snapshot needs the folder of the checkpoints",
    )
    fails(
        piper(*run, "--launcher", "inline", "--spares", 1),
        "--spares 1",
        '"inline" runs on this machine',
    )
    for option in (("--restarts", 1), ("--on-loss", "replan"), ("--spares", 1)):
        fails(
            piper(*run, "--emulate", "h100x8", *option),
            "--emulate trains nothing: leave out",
            option[0],
        )
    fails(
        piper(*run, "--launcher", "inline", "--checkpoint", ""),
        "--checkpoint",
        "a folder is needed; the present one is .",
    )
    path.with_name("failed").unlink(missing_ok=True)
    fails(piper(*run, "--launcher", "inline"), "the disk is away")
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/measured.json"))


def test_torchrun_is_told_to_start_ranks_again(tmp_path: Path) -> None:
    path = recipe(tmp_path / "r", "pass")
    lines = json.loads(piper("launch", path, "--checkpoint", "c", "--restarts", 3, "--json").stdout)
    assert all(
        "--max-restarts 3" in lines[name] for name in ("torchrun", "torchrun-nodes", "slurm")
    )
    assert "--max-restarts" not in lines["ray"] and all(
        "--restarts 3" in line for line in lines.values()
    )
    assert "--max-restarts" not in piper("launch", path).stdout
    lines = json.loads(
        piper(
            "launch", path, "--restarts", 3, "--on-loss", "replan", "--spares", 1, "--json"
        ).stdout
    )
    with_loss = [name for name, line in lines.items() if "--on-loss replan --spares 1" in line]
    assert with_loss == ["ray"], "torchrun starts as many ranks as before, and refuses them"


RECIPE_OF_FOUR = """
made = (*piper.recipes.gpipe(pp=2, microbatches=4), *piper.recipes.data_parallel())
strategy = piper.Strategy(piper.Mesh(pp=2, dp=2), made)
"""


@pytest.mark.long
@pytest.mark.parametrize("strategy", [SEARCHED, RECIPE_OF_FOUR], ids=["searched", "recipe"])
def test_a_training_goes_on_with_fewer_workers(strategy: str, tmp_path: Path) -> None:
    path = recipe(tmp_path / "r", "os.kill(os.getpid(), signal.SIGKILL)", strategy)
    saved = ("--checkpoint", tmp_path / "saved", "--every", 1)
    options = ("--launcher", "processes", "--out", tmp_path / "runs")
    done = piper("run", path, *options, *saved, "--restarts", 1, "--on-loss", "replan", "--json")
    assert done.exit_code == 0, done.output
    numbers = json.loads(done.stdout)["measured"]
    assert numbers["restarts"][0]["ranks"] < 4 and numbers["restarts"][0]["lost"]
    again = piper("run", path, "--launcher", "inline", "--out", tmp_path / "runs")
    assert again.exit_code == 0
    assert losses(tmp_path / "runs" / "recipe-001") == pytest.approx(
        losses(tmp_path / "runs" / "recipe-002"), rel=1e-5
    )
    plan = json.loads((tmp_path / "runs" / "recipe-001" / "plan.json").read_text())
    assert (
        plan["mesh"]
        != json.loads((tmp_path / "runs" / "recipe-002" / "plan.json").read_text())["mesh"]
    )
