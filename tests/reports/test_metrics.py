"""Metrics of a run: complete lines while it goes on, libraries that are asked for and only those, and a full disk that
ends nothing.

tensorboard and wandb are faked where a test says so: modules in sys.modules with the few calls that are used, which
keep what they are given. The real ones are tried where they are installed."""

from __future__ import annotations

import importlib.util
import json
import re
import resource
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import piper
from piper.api.running import execution
from piper.api.running.metrics import Metrics, log_names, open_metrics, recorded
from piper.cli import app
from piper.cli.loading import load_file
from piper_ir.ground.errors import JobError, MissingPackageError, OutputError
from piper_ir.plan.plan import Plan
from piper_runtime.launch.ground.report import StepRecord


def plan(tokens: int | None = 32) -> Plan:
    from dataclasses import replace

    strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=2))
    return replace(
        piper.compile(piper.synthetic(stages=2, F=1, I=1, W=1), strategy).plan,
        tokens_per_row=tokens,
    )


def record(step: int) -> StepRecord:
    return StepRecord(step, 2.0 / (step + 1), 0.25, 0.125)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_a_line_as_soon_as_it_is_done(tmp_path: Path) -> None:
    with open_metrics(tmp_path, (), plan()) as metrics:
        for step in range(3):
            metrics(record(step))
            assert [line["step"] for line in lines(tmp_path)] == list(range(step + 1))
    last = lines(tmp_path)[-1]
    assert last.keys() == {"step", "loss", "step_s", "batch_s", "tokens_per_s", "time"}
    assert (last["loss"], last["step_s"], last["tokens_per_s"]) == (2 / 3, 0.25, 2 * 32 / 0.25)
    assert last["time"] > 1.7e9 and last["batch_s"] == 0.125


def test_tokens_per_second_are_null_when_nobody_says_how_many_a_row_has(tmp_path: Path) -> None:
    with open_metrics(tmp_path, (), plan(None)) as metrics:
        metrics(record(0))
    assert lines(tmp_path)[0]["tokens_per_s"] is None


def test_names_of_logs() -> None:
    assert log_names(()) == ("jsonl",)
    assert log_names(["wandb", " jsonl", "wandb"]) == ("jsonl", "wandb")
    with pytest.raises(JobError, match=r"'csv' is not known; there are jsonl, tensorboard, wandb"):
        log_names(["csv"])


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r'log "jsonl" cannot be opened in .*nowhere'):
        open_metrics(tmp_path / "nowhere", (), plan())


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file of this process may grow beyond some bytes: writes stop in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_nothing_leaves_no_half_line_and_is_one_warning(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path, (), plan())
    metrics(record(0))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with full_disk(size + size // 2), warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics(record(1))
        assert (tmp_path / "metrics.jsonl").stat().st_size == size
        metrics(record(2))
    metrics(record(3))  # somebody has made room
    with pytest.warns(
        RuntimeWarning, match=r"jsonl: 2 steps lost, first step 1: OSError: .*"
    ) as found:
        metrics.close()
    assert len(found) == 1
    assert [line["step"] for line in lines(tmp_path)] == [0, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.close()


def test_a_writer_that_fails_does_not_keep_the_others_from_writing(tmp_path: Path) -> None:
    class Broken:
        def write(self, metrics: object) -> None:
            raise ConnectionError("no network")

        def close(self) -> None:
            raise OSError("cannot close")

    found: list[Any] = []

    class Kept:
        def write(self, metrics: object) -> None:
            found.append(metrics)

        def close(self) -> None:
            found.append("closed")

    metrics = Metrics({"broken": Broken(), "kept": Kept()})
    metrics(record(0))
    with pytest.warns(
        RuntimeWarning, match="broken: 1 steps lost, first step 0: ConnectionError: no network$"
    ):
        metrics.close()
    assert len(found) == 2 and found[1] == "closed"


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_library_is_named_if_it_was_asked_for(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faked: that the package is not installed."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(MissingPackageError, match=f"`pip install {package}`") as error:
        open_metrics(tmp_path, [package], plan())
    assert isinstance(error.value, ImportError)
    with open_metrics(tmp_path, (), plan()) as metrics:  # and nobody hears of it otherwise
        metrics(record(0))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Faked: torch.utils.tensorboard and wandb. Calls in order."""
    calls: list[tuple[Any, ...]] = []

    class SummaryWriter:
        def __init__(self, log_dir: str, flush_secs: int) -> None:
            calls.append(("SummaryWriter", log_dir))

        def add_scalar(self, tag: str, value: float, step: int, walltime: float) -> None:
            calls.append(("add_scalar", tag, value, step))

        def close(self) -> None:
            calls.append(("close",))

    class WandbRun:
        def log(self, data: dict[str, float], step: int) -> None:
            calls.append(("log", data, step))

        def finish(self) -> None:
            calls.append(("finish",))

    def init(**options: Any) -> WandbRun:
        calls.append(("init", options))
        return WandbRun()

    tensorboard, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    vars(tensorboard)["SummaryWriter"], vars(wandb)["init"] = SummaryWriter, init
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return calls


def test_tensorboard_gets_scalars_by_step(fakes: list[tuple[Any, ...]], tmp_path: Path) -> None:
    with open_metrics(tmp_path, ["tensorboard"], plan()) as metrics:
        metrics(record(4))
    assert fakes == [
        ("SummaryWriter", str(tmp_path / "tensorboard")),
        ("add_scalar", "loss", 0.4, 4),
        ("add_scalar", "step_s", 0.25, 4),
        ("add_scalar", "tokens_per_s", 256.0, 4),
        ("add_scalar", "batch_s", 0.125, 4),
        ("close",),
    ]
    assert len(lines(tmp_path)) == 1


def test_weights_and_biases_get_a_run_with_the_facts_of_the_plan(
    fakes: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    with open_metrics(tmp_path, ["wandb"], plan(None)) as metrics:
        metrics(record(4))
    (started, options), *rest = fakes
    assert started == "init" and options["project"] == "piper" and options["name"] == tmp_path.name
    assert options["config"] | {"plan": ""} == {
        "plan": "",
        "mesh_pp": 2,
        "microbatches": 2,
        "rows": 1,
        "global_batch": 2,
    }
    assert rest == [("log", {"loss": 0.4, "step_s": 0.25, "batch_s": 0.125}, 4), ("finish",)]


def test_a_library_that_cannot_start_is_one_message_and_closes_the_others(
    fakes: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: Any) -> None:
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(OutputError, match=r'log "wandb" cannot be opened .*api_key not configured'):
        open_metrics(tmp_path, ["tensorboard", "wandb"], plan())
    assert fakes[-1] == ("close",)


def test_recorded_serves_the_folder_and_the_caller(tmp_path: Path) -> None:
    seen: list[StepRecord] = []
    with recorded(tmp_path, ("jsonl",), plan(), seen.append) as on_step:
        assert on_step is not None
        on_step(record(0))
    assert seen == [record(0)] and [line["step"] for line in lines(tmp_path)] == [0]
    with recorded(None, None, plan()) as nothing:
        assert nothing is None
    with (
        pytest.raises(JobError, match="'wandb' needs a folder: give out=DIR"),
        recorded(None, ["wandb"], plan()),
    ):
        pass


RECIPE = """
import torch
import piper

class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

def batch(step, rows):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))[rows.start : rows.stop]
    return x, 2 * x

def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.1)

job = piper.Job(MLP, batch, torch.nn.functional.mse_loss, optimizer, global_batch=8, tokens_per_row=3)
strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=2))
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def test_a_run_writes_its_steps(recipe: Path, tmp_path: Path) -> None:
    loaded = load_file(recipe)
    compiled = piper.compile(loaded.job, loaded.strategy)
    seen: list[StepRecord] = []
    run = piper.execute(
        compiled, steps=3, launcher="inline", out=tmp_path / "out", on_step=seen.append
    )
    written = lines(tmp_path / "out" / "run-001")
    assert [line["loss"] for line in written] == run.losses == [r.loss for r in seen]
    assert [line["tokens_per_s"] for line in written] == [8 * 3 / s for s in run.step_s]
    with pytest.raises(JobError, match="needs a folder"):
        piper.execute(compiled, steps=1, launcher="inline", log=("jsonl",))


def test_a_full_disk_does_not_end_a_run(recipe: Path, tmp_path: Path) -> None:
    loaded = load_file(recipe)
    compiled = piper.compile(loaded.job, loaded.strategy)
    with full_disk(50), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run = piper.execute(compiled, steps=3, launcher="inline", out=tmp_path / "out")
    assert len(run.losses) == 3 and run.state_dict()
    (folder,) = (tmp_path / "out").iterdir()
    assert {p.name for p in folder.iterdir()} == {"metrics.jsonl"}, (
        "half a file would look like a result"
    )
    metrics, report = (str(w.message) for w in found)
    assert (
        "jsonl: 3 steps lost, first step 0: OSError" in metrics
        and "The run is complete, but its report is not" in report
    )


def test_a_disk_that_fills_up_late_is_a_line_at_the_command_line_and_the_rest_is_reported(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = execution.save_run

    def full(*given: Any) -> None:
        with full_disk(600):  # room for measured.json, not for spans
            save(*given)

    monkeypatch.setattr(execution, "save_run", full)
    done = CliRunner().invoke(
        app,
        [
            "run",
            str(recipe),
            "--launcher",
            "inline",
            "--steps",
            "2",
            "--out",
            str(tmp_path / "out"),
        ],
    )
    assert done.exit_code == 0, done.output
    warned, reported = done.stderr.splitlines()
    assert re.fullmatch(
        r"warning: cannot write results to .*: File too large; .*its report is not", warned
    )
    assert reported.startswith("the report is ")
    (folder,) = (tmp_path / "out").iterdir()
    assert (folder / "measured.json").is_file() and not list(folder.glob("*-measured.json*"))


def test_the_command_takes_names_of_logs(
    fakes: list[tuple[Any, ...]], recipe: Path, tmp_path: Path
) -> None:
    def run(*more: str) -> Result:
        return CliRunner().invoke(
            app, ["run", str(recipe), "--launcher", "inline", "--out", str(tmp_path / "out"), *more]
        )

    done = run("--log", "tensorboard", "--ranges", "--steps", "2")
    assert done.exit_code == 0, done.output
    assert [call[3] for call in fakes if call[:2] == ("add_scalar", "loss")] == [0, 1]
    assert [line["step"] for line in lines(tmp_path / "out" / "recipe-001")] == [0, 1]
    wrong = run("--log", "csv")
    assert wrong.exit_code == 2 and "'csv' is not known" in wrong.stderr


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"the package {package} is not installed"
    )


@needs("tensorboard")
def test_the_real_tensorboard_writes_events(tmp_path: Path) -> None:
    with open_metrics(tmp_path, ["tensorboard"], plan()) as metrics:
        metrics(record(0))
    assert any(path.stat().st_size for path in (tmp_path / "tensorboard").iterdir())


@pytest.mark.long
@needs("wandb")
def test_the_real_weights_and_biases_write_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with open_metrics(tmp_path, ["wandb"], plan()) as metrics:
        metrics(record(0))
    assert list((tmp_path / "wandb").glob("offline-run-*"))
