"""Checkpoints at the command line: saved, resumed, shown, converted; what cannot be is one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import piper as pipers
from piper.cli.loading import load_file
from piper_runtime.checkpoint import complete_checkpoints
from tests.helpers.command_line import GOOD, RECIPE, fails
from tests.helpers.command_line import command as piper


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.py"
    path.write_text(RECIPE + GOOD + "steps = 6\n")
    return path


@pytest.fixture(scope="module")
def folder(recipe: Path) -> Path:
    """Return the folder of a training that was ended after 4 of its 6 steps."""
    folder = recipe.parent / "checkpoints"
    done = piper(
        "run",
        recipe,
        "--launcher",
        "inline",
        "--out",
        recipe.parent,
        "--checkpoint",
        folder,
        "--every",
        3,
        "--steps",
        4,
    )
    assert done.exit_code == 0, done.output
    assert list(complete_checkpoints(folder)) == [3, 4]
    return folder


def losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


@pytest.mark.long
def test_a_training_goes_on_to_its_end(recipe: Path, folder: Path, tmp_path: Path) -> None:
    whole = piper("run", recipe, "--launcher", "inline", "--out", tmp_path / "whole", "--json")
    copy = tmp_path / "checkpoints"
    copy.mkdir()
    for path in complete_checkpoints(folder).values():
        (copy / path.name).symlink_to(path)
    done = piper(
        "run",
        recipe,
        "--launcher",
        "inline",
        "--out",
        tmp_path / "rest",
        "--checkpoint",
        copy,
        "--resume",
    )
    assert done.exit_code == 0, done.output
    assert (
        "2 steps from step 4 on" in done.stdout
        and "step    4  loss" in done.stdout
        and "step    3" not in done.stdout
    )
    assert (
        losses(tmp_path / "rest" / "recipe-001" / "metrics.jsonl")
        == json.loads(whole.stdout)["measured"]["losses"][4:]
    )
    fails(
        piper(
            "run",
            recipe,
            "--launcher",
            "inline",
            "--out",
            tmp_path,
            "--checkpoint",
            copy,
            "--resume",
        ),
        "the training is complete: 6 of the file's 6 steps are done; give --steps to train more",
    )


def test_mistakes_are_one_message(recipe: Path, folder: Path, tmp_path: Path) -> None:
    run = ("run", recipe, "--launcher", "inline", "--out", tmp_path)
    fails(
        piper(*run, "--resume"),
        "--resume needs the folder of the checkpoints: give --checkpoint DIR",
    )
    fails(piper(*run, "--every", 5), "--every needs the folder")
    fails(
        piper(*run, "--checkpoint", tmp_path / "new", "--resume"),
        "holds no complete checkpoint; leave --resume out",
    )
    fails(
        piper(*run, "--checkpoint", folder),
        "holds a checkpoint of step 4, and this run begins with step 0",
        "with --resume",
    )
    fails(
        piper("run", recipe, "--emulate", "h100x8", "--resume"),
        "--emulate trains nothing: leave out",
    )
    fails(piper("checkpoint", "show", tmp_path / "nothing"), "there is no such folder")
    fails(
        piper("checkpoint", "convert", folder, tmp_path / "x.pt"),
        "one of them is a checkpoint, the other one a file",
    )
    fails(
        piper("checkpoint", "convert", folder, tmp_path / "x.safetensors"),
        "holds 2 checkpoints; give one of them, such as",
    )
    (tmp_path / "bad.safetensors").write_bytes(b"\x10" * 20)
    fails(
        piper("checkpoint", "convert", tmp_path / "bad.safetensors", tmp_path / "y"),
        "is no safetensors file",
    )


def test_launch_hands_the_options_on(recipe: Path) -> None:
    said = piper("launch", recipe, "--checkpoint", "ckpt", "--every", 5, "--resume").stdout
    assert said.count("--checkpoint ckpt --every 5 --resume") == 4
    fails(piper("launch", recipe, "--resume"), "--resume needs the folder")


def test_show_lists_and_tells(folder: Path) -> None:
    listed = piper("checkpoint", "show", folder).stdout
    assert (
        "step-00000003" in listed and "step-00000004" in listed and "pp 2, 2 microbatches" in listed
    )
    one = piper("checkpoint", "show", folder / "step-00000004").stdout
    assert (
        "after 4 steps" in one
        and "layers.0.weight" in one
        and "4 x 4" in one
        and "SGD" in one
        and "seed 0" in one
    )
    facts = json.loads(piper("checkpoint", "show", folder / "step-00000004", "--json").stdout)
    assert facts[0]["step"] == 4 and facts[0]["tensors"]["model.layers.1.bias"] == {
        "dtype": "float32",
        "shape": [4],
    }


def test_weights_go_out_and_come_in_again(recipe: Path, folder: Path, tmp_path: Path) -> None:
    file, begin = tmp_path / "w.safetensors", tmp_path / "begin"
    done = piper("checkpoint", "convert", folder / "step-00000004", file)
    assert done.exit_code == 0 and "4 tensors of step 4 are in" in done.stdout
    assert "4 tensors (float32) are in" in piper("checkpoint", "convert", file, begin).stdout
    out = piper(
        "run",
        recipe,
        "--launcher",
        "inline",
        "--out",
        tmp_path / "r",
        "--checkpoint",
        begin,
        "--resume",
        "--steps",
        1,
        "--json",
    )
    assert out.exit_code == 0, out.output
    trained = torch.load(tmp_path / "r" / "recipe-001" / "weights.pt", weights_only=True)
    assert trained.keys() == {
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
    }
    fails(piper("checkpoint", "convert", file, begin), "is there already; choose a new folder")


def test_help_has_examples() -> None:
    for command in ("show", "convert"):
        said = piper("checkpoint", command, "--help").stdout
        assert f"Example: piper checkpoint {command} " in " ".join(said.split())


def test_the_front_door_saves_and_resumes(recipe: Path, tmp_path: Path) -> None:
    loaded = load_file(recipe)
    compiled = pipers.compile(loaded.job, loaded.strategy)
    saved = pipers.Checkpoints(tmp_path / "c", every=2)
    whole = pipers.execute(compiled, steps=4, launcher="inline", memory=False)
    pipers.execute(compiled, steps=2, launcher="inline", checkpoint=saved)
    run = pipers.execute(
        compiled,
        steps=2,
        launcher="inline",
        checkpoint=saved,
        resume="latest",
        out=tmp_path / "out",
    )
    assert run.losses == whole.losses[2:] and run.first_step == 2
    assert [
        json.loads(s)["step"]
        for s in (tmp_path / "out" / "run-001" / "metrics.jsonl").read_text().splitlines()
    ] == [2, 3]
    by_path = pipers.execute(
        compiled, steps=2, launcher="inline", resume=tmp_path / "c" / "step-00000002"
    )
    assert by_path.losses == run.losses
    with pytest.raises(
        pipers.PiperError, match="there is nothing for log, on_step, checkpoint and resume"
    ):
        pipers.execute(compiled, steps=1, launcher="emulated", cluster="h100x8", resume="latest")
    with pytest.raises(pipers.PiperError, match="did you mean 'resume'"):
        pipers.execute(compiled, steps=1, resum="latest")
