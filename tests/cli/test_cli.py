"""The command line: what a user gets wrong ends with one message, exit code 2, no traceback; what is right prints and
loses nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from piper.api.reference import reference
from piper.cli.loading import load_file
from tests.helpers.cases import each_case
from tests.helpers.command_line import GOOD, RECIPE, fails
from tests.helpers.command_line import command as piper


def with_strategy(path: Path, text: str) -> Path:
    path.write_text(RECIPE + text)
    return path


def test_simulate_prints_and_gives_json(recipe: Path) -> None:
    assert "first step, alone" in piper("simulate", recipe, "--cluster", "h100x8").stdout
    numbers = json.loads(piper("simulate", recipe, "--cluster", "h100x8", "--json").stdout)
    assert numbers["step_s"] > 0


@pytest.mark.long
def test_what_a_file_prints_is_no_part_of_the_json(recipe: Path, tmp_path: Path) -> None:
    """The file prints where it is read, and its batches in worker processes."""
    text = recipe.read_text() + "print('read')\n"
    recipe.write_text(
        text.replace("    x = torch.randn", "    print('batch', flush=True)\n    x = torch.randn")
    )
    more = ["--launcher", "processes", "--steps", "1", "--json"]
    command = [sys.executable, "-m", "piper", "run", str(recipe), *more]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["measured"] and "read\n" in done.stderr
    assert done.stderr.count("batch\n") >= 2


def test_a_prediction_warns_of_constants_that_nobody_measured(recipe: Path) -> None:
    assert (
        "warning: h100-80g-sxm:8: public constants"
        in piper("simulate", recipe, "--cluster", "h100x8").stdout
    )
    text = piper("simulate", recipe).stdout
    assert "warning: cpu-local: assumed, not measured: link_bandwidth, link_latency\n" in text, (
        "the rest is measured"
    )


def test_run_writes_results_and_a_second_run_loses_nothing(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    for _ in range(2):
        result = piper("run", recipe, "--launcher", "inline", "--steps", 2, "--out", out)
        assert result.exit_code == 0, result.output
    first, second = sorted(out.iterdir())
    for folder in (first, second):
        measured = json.loads((folder / "measured.json").read_text())
        assert len(measured["losses"]) == 2
        names = {p.name for p in folder.iterdir()}
        assert {
            "plan.json",
            "strategy.json",
            "predicted.json",
            "trace-predicted.json",
            "trace-measured.json",
        } <= names
    assert json.loads((first / "measured.json").read_text())["losses"] == measured["losses"]


def test_a_run_keeps_its_weights_for_a_next_one(recipe: Path, tmp_path: Path) -> None:
    result = piper("run", recipe, "--launcher", "inline", "--steps", 2, "--out", tmp_path / "runs")
    weights = tmp_path / "runs" / "recipe-001" / "weights.pt"
    assert f"weights are in {weights}" in result.stdout
    found = torch.load(weights, weights_only=True)
    job = load_file(recipe, {}).job
    model = job.model()
    model.load_state_dict(found)
    torch.manual_seed(job.seed)
    started = job.model().state_dict()
    assert found.keys() == started.keys() and any(
        not torch.equal(t, started[n]) for n, t in found.items()
    )
    assert not list(weights.parent.glob("*.unfinished"))


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["processes", "inline"])
@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        (signal.SIGINT, 130, "piper: interrupted\n"),
        (signal.SIGTERM, 143, "piper: ended by SIGTERM\n"),
    ],
)
def test_an_interrupted_run_keeps_its_weights(
    launcher: str, asked: signal.Signals, code: int, said: str, recipe: Path, tmp_path: Path
) -> None:
    more = ["--launcher", launcher, "--steps", "1000000", "--out", str(tmp_path / "runs")]
    command = [sys.executable, "-m", "piper", "run", str(recipe), *more]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = subprocess.Popen(command, cwd=tmp_path, **pipes)
    assert started.stdout is not None
    while not started.stdout.readline().startswith("step    3"):
        assert started.poll() is None
    started.send_signal(asked)
    out, errors = started.communicate(timeout=60)
    assert started.returncode == code and errors.endswith(said), errors
    folder = tmp_path / "runs" / "recipe-001"
    weights = folder / "weights.pt"
    assert f"weights are in {weights}" in out and torch.load(weights, weights_only=True)
    assert f"results are in {folder}; `piper report` shows them" in out
    measured = json.loads((folder / "measured.json").read_text())
    assert len(measured["step_s"]) >= 3 and measured["steps_asked"] == 1000000


def test_weights_that_find_no_room_leave_no_half_and_exit_code_1(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/2: file write failed")

    monkeypatch.setattr(torch, "save", full)
    result = piper("run", recipe, "--launcher", "inline", "--steps", 1, "--out", tmp_path / "runs")
    assert result.exit_code == 1 and "The weights of this run are lost" in result.stderr
    folder = tmp_path / "runs" / "recipe-001"
    assert (folder / "measured.json").exists() and not list(folder.glob("weights*"))


def test_a_saved_strategy_is_used(recipe: Path, tmp_path: Path) -> None:
    piper("simulate", recipe, "--cluster", "h100x8", "--out", tmp_path / "a")
    saved = next((tmp_path / "a").glob("*/strategy.json"))
    bare = with_strategy(tmp_path / "bare.py", "strategy = None\n")
    assert piper("explain", bare, "--strategy", saved).exit_code == 0
    fails(piper("explain", bare), "no `strategy`")


def test_explain_and_verify(recipe: Path) -> None:
    text = piper("explain", recipe).stdout
    assert "pp0>pp1.act" in text and "partition(stages=2)" in text
    result = piper("verify", recipe)
    assert result.exit_code == 0, result.output
    assert "equal" in result.stdout


def test_verify_ends_with_1_where_a_plan_trains_something_else(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reference._Trainer._loss
    monkeypatch.setattr(
        reference._Trainer, "_loss", lambda self, *given: 1.01 * right(self, *given)
    )
    result = piper("verify", recipe)
    assert (
        result.exit_code == 1
        and "NOT what one device computes" in result.stdout
        and "step 0, loss" in result.stdout
    )
    assert json.loads(piper("verify", recipe, "--json").stdout)["equal"] is False


def test_parameters_of_a_strategy_function(tmp_path: Path) -> None:
    path = with_strategy(
        tmp_path / "f.py",
        "def strategy(trial):\n    m = trial.suggest_int('m', 1, 8)\n    return piper.Strategy(piper.Mesh(pp=2), "
        "piper.recipes.gpipe(pp=2, microbatches=m))\n",
    )
    assert "microbatches=4" in piper("explain", path, "-p", "m=4").stdout
    fails(piper("explain", path), "'m'", "-p m=VALUE", "1..8")
    fails(piper("explain", path, "-p", "m=99"), "1..8")
    fails(piper("explain", path, "-p", "m=2", "-p", "n=3"), "no parameter", "m")
    fails(piper("explain", path, "-p", "m"), "NAME=VALUE")


def test_a_strategy_function_that_fails_and_steps_that_are_none(
    recipe: Path, tmp_path: Path
) -> None:
    path = with_strategy(tmp_path / "f.py", "def strategy(trial):\n    return trial['m']\n")
    fails(piper("explain", path), "strategy(trial) raised TypeError", "f.py:")
    fails(
        piper("explain", with_strategy(tmp_path / "g.py", GOOD + "steps = 'ten'\n")),
        "steps = 'ten'",
        "integer",
    )
    fails(piper("explain", recipe, "--strategy", "s.json", "-p", "m=2"), "one of the two")


def test_missing_and_broken_files(tmp_path: Path) -> None:
    fails(piper("simulate", tmp_path / "nowhere.py"), "nowhere.py", "no such file")
    fails(piper("simulate", tmp_path), str(tmp_path), "a folder; give a Python file")
    broken = tmp_path / "broken.py"
    broken.write_text("import piper\nx = (\n")
    fails(piper("simulate", broken), "broken.py", "SyntaxError", "line 2")
    raising = tmp_path / "raising.py"
    raising.write_text("import piper\n\n1 / 0\n")
    fails(piper("simulate", raising), "ZeroDivisionError", "line 3")
    empty = tmp_path / "empty.py"
    empty.write_text("import piper\n")
    fails(piper("simulate", empty), "no `job`", "piper.Job")


def test_a_batch_that_does_not_divide(tmp_path: Path) -> None:
    text = (
        "strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=3))\n"
    )
    fails(
        piper("simulate", with_strategy(tmp_path / "f.py", text)),
        "8 rows",
        "3 microbatches",
        "e.g. 9",
    )


@each_case(
    ("directives", "mesh", "words"),
    [
        (
            "[piper.partition(2), piper.place(where(stage=0), dict(pp=0))]",
            "pp=2",
            ["is not placed", "layer1"],
        ),
        (
            "[piper.partition(2), piper.place(where(stage=0), dict(pp=0)), piper.place(where(stage=(0, 1)), "
            "dict(pp=1))]",
            "pp=2",
            ["placed on pp0 already", "f.py:"],
        ),
        (
            "[piper.partition(2), piper.place(where(stage=0), dict(pp=0)), piper.place(where(stage=1), dict(pp=2))]",
            "pp=2",
            ["pp=2 is outside"],
        ),
        ("[piper.place(where(stage=7), dict(pp=0))]", "pp=2", ["no coordinate 'stage'"]),
        ("[]", "pp=2", ["no directive uses pp"]),
    ],
)
def test_strategies_that_cannot_be(
    tmp_path: Path, directives: str, mesh: str, words: list[str]
) -> None:
    path = with_strategy(
        tmp_path / "f.py", f"strategy = piper.Strategy(piper.Mesh({mesh}), {directives})\n"
    )
    fails(piper("explain", path), *words)


@each_case(
    ("change", "words"),
    [
        (lambda t: t.replace('"is": "Split"', '"is": "Splitt"'), ["'Splitt'", "Split"]),
        (lambda t: t.replace('"microbatches"', '"microbatchs"'), ["'microbatchs'"]),
        (lambda t: t.replace('"version": 1', '"version": 99'), ["99", "version 1"]),
        (lambda t: t[: len(t) // 2], ["truncated"]),
        (lambda t: "[]", ["JSON object is expected"]),
    ],
)
def test_strategy_files_that_do_not_parse(
    recipe: Path, tmp_path: Path, change, words: list[str]
) -> None:
    piper("simulate", recipe, "--cluster", "h100x8", "--out", tmp_path / "a")
    saved = next((tmp_path / "a").glob("*/strategy.json"))
    bad = tmp_path / "bad.json"
    bad.write_text(change(saved.read_text()))
    fails(piper("explain", recipe, "--strategy", bad), "bad.json", *words)


def test_unknown_cluster_and_flag(recipe: Path) -> None:
    fails(piper("simulate", recipe, "--cluster", "z9000x8"), "z9000", "h100")
    assert piper("simulate", recipe, "--clutser", "h100x8").exit_code == 2


@each_case(
    ("text", "words"),
    [
        (
            'device = "h100-80g-sxm"\n[links.inter]\nbandwidth = 0\n',
            ["links.inter.bandwidth", "a number from 1 on"],
        ),
        (
            'device = "h100-80g-sxm"\n[nodes]\ncount = "four"\n',
            ["nodes.count", "'four'", "a whole number"],
        ),
        ("[nodes]\ncount = 2\n", ["device is missing", "h100-80g-sxm"]),
        (
            'device = "h100-80g-sxm"\n[links.intra]\nlatency = -1\n',
            ["links.intra.latency", "from 0 on"],
        ),
        (
            'device = "h100-80g-sxm"\nslow_links = [{ nodes = [0, 1], factor = 2 }]\n',
            ["node 1 is not there"],
        ),
        ('device = "h100-80g-sxm"\nsize = 2\n', ["size: no such key", "known here"]),
        ('device = "h900"\n', ["device: no device 'h900'", "h100-80g-sxm"]),
        (
            'device = "h100-80g-sxm"\nslow_ranks = [{ rank = 1, factor = 2 }]\n',
            ["rank 1 is not there", "0 to 0"],
        ),
        (
            'device = "h100-80g-sxm"\n[links.inter]\noversubscription = 0\n',
            ["oversubscription: 0", "from 1 on"],
        ),
        ("[[nodes]]\ncount = 2\n", ["nodes[0]: device is missing"]),
        (
            'device = "h100-80g-sxm"\n[[nodes]]\ndevices = 8\n[[nodes]]\ndevices = 4\n',
            ["4 devices per node", "the same number"],
        ),
    ],
)
def test_cluster_files_that_are_not_right(
    recipe: Path, tmp_path: Path, text: str, words: list[str]
) -> None:
    (tmp_path / "c.toml").write_text(text)
    fails(piper("simulate", recipe, "--cluster", tmp_path / "c.toml"), "c.toml", *words)


def test_a_cluster_from_a_file(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        'name = "lab"\ndevice = "h100-80g-sxm"\n[nodes]\ndevices = 8\n'
    )
    (tmp_path / "small.toml").write_text('name = "small"\ndevice = "h100-80g-sxm"\n')
    numbers = [
        json.loads(piper("simulate", recipe, "--cluster", c, "--json").stdout)
        for c in ("h100x8", tmp_path / "c.toml")
    ]
    assert numbers[0]["step_s"] == numbers[1]["step_s"]
    assert numbers[1]["notes"][0].startswith("lab: public constants")
    fails(
        piper("simulate", recipe, "--cluster", tmp_path / "small.toml"),
        "the plan runs on 2 ranks; small has 1 devices",
    )
    fails(
        piper("simulate", recipe, "--cluster", tmp_path / "none.toml"),
        "cannot read the cluster file",
    )


def test_an_output_folder_that_cannot_be(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fails(piper("run", recipe, "--launcher", "inline", "--out", tmp_path / "file"), "--out")


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    text = GOOD + (
        "def bad(step, rows):\n    x, y = batch(step, rows)\n    return (x, y * float('nan')) if step == 1 and "
        "rows.start == 4 else (x, y)\nfrom dataclasses import replace\njob = replace(job, batch=bad)\n"
    )
    path, more = with_strategy(tmp_path / "f.py", text), ["--steps", 3, "--out", tmp_path / "o"]
    result = piper("run", path, "--launcher", "inline", *more)
    fails(result, "step 1", "rank 1", "microbatch 1")


@each_case(
    ("launcher", "words"),
    [
        ("emulated", ["emulated", "--emulate CLUSTER"]),
        ("mpi", ["'mpi' is not known", "processes"]),
    ],
)
def test_a_launcher_that_cannot_be(
    recipe: Path, tmp_path: Path, launcher: str, words: list[str]
) -> None:
    fails(piper("run", recipe, "--launcher", launcher, "--out", tmp_path / "o"), *words)


def test_print_launch_prints_lines_and_runs_nothing(recipe: Path, tmp_path: Path) -> None:
    result = piper("run", recipe, "--print-launch", "--steps", 5)
    assert result.exit_code == 0
    given = ["--out", tmp_path / "o", "--log", "wandb", "--ranges", "--costs", "c.json"]
    more = piper("run", recipe, "--print-launch", "--cuda-graph", *given).output
    assert (
        f"{recipe} --cuda-graph --costs c.json --log wandb --out {tmp_path / 'o'} --ranges --launcher"
        in more
    )
    assert not (tmp_path / "o").exists()
    start = "torchrun --standalone --nproc-per-node 2"
    assert f"{start} -m piper run {recipe} --steps 5 --launcher processes\n" in result.output
    assert "#SBATCH --nodes 2" in result.output and "ray start --head" in result.output
    fails(
        piper("run", recipe, "--print-launch", "--nodes", 3), "2 ranks do not divide over 3 nodes"
    )
    lines = json.loads(piper("run", recipe, "--print-launch", "--json").stdout)
    assert lines.keys() == {"torchrun", "torchrun-nodes", "slurm", "ray"} and lines[
        "torchrun"
    ].startswith(start)
    fails(
        piper("run", recipe, "--print-launch", "--address", "h:1", "--emulate", "h100x8"),
        "leave out --address and --emulate",
    )


def test_steps_are_cuda_graphs_on_cuda_devices_only(recipe: Path) -> None:
    assert "launches them as one" in piper("explain", recipe, "--cuda-graph").output
    predicted = piper("simulate", recipe, "--cuda-graph", "--cluster", "h100x8")
    assert predicted.exit_code == 0 and "predicted as CUDA graphs" in predicted.output
    fails(piper("simulate", recipe, "--cuda-graph"), "(--cuda-graph)", "leave --cuda-graph out")


def test_launch_prints_what_print_launch_does(recipe: Path) -> None:
    more = "--nodes 2 --steps 5 --log wandb --timeout-s 9 --ranges --costs c.json --out o"
    given = [recipe, *more.split()]
    printed = piper("launch", *given)
    assert (
        printed.exit_code == 0 and printed.output == piper("run", "--print-launch", *given).output
    )
    assert (
        f"{recipe} --steps 5 --costs c.json --log wandb --timeout-s 9.0 --out o --ranges --launcher"
        in printed.output
    )
    assert (
        piper("launch", recipe, "--json").output
        == piper("run", recipe, "--print-launch", "--json").output
    )
    fails(piper("launch", recipe, "--nodes", 3), "2 ranks do not divide over 3 nodes")


@pytest.mark.parametrize(("command", "collects"), [("plan", False), ("run", True)])
def test_predictions_collect_no_garbage_and_the_end_walks_none(
    command: str, collects: bool
) -> None:
    script = (
        "import gc, sys\nfrom piper.cli import entry\n"
        "entry.app = lambda: print(gc.isenabled())\n"
        f"sys.argv = ['piper', {command!r}]\nentry.main()\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 10_000)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert said.stdout.split() == [str(collects), "True", "True"], said.stderr
