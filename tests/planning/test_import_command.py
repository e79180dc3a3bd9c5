"""`piper import` and `piper export` from a foreign file to a prediction and back, and plans that begin there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from packages.interop.tests.megatron_jobs import DENSE
from piper import cli
from tests.helpers.titan_answers import answer, model
from tests.planning.test_config_files import LLAMA, written

DEBUG = {"__class__": "torchtitan.config.configs.DebugConfig", "deterministic": True}


def piper(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [*map(str, arguments)])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small Llama of torchtitan: FSDP over 4 with 2 devices for each layer."""
    told = answer(parallelism__tensor_parallel_degree=2, debug=DEBUG)
    file = tmp_path / "small.json"
    file.write_text(json.dumps(told))
    return file


def test_a_job_is_written_predicted_and_goes_back(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "job.py"
    done = piper(
        "import", "torchtitan", source, "--gpus", 8, "--cluster", "h100x8@eager", "--out", out
    )
    assert done.exit_code == 0, done.stderr
    assert (
        "understood   8 rows of 128 tokens per step, bfloat16 over float32; dp=4, tp=2"
        in done.stdout
    )
    assert "as nearest   debug.deterministic=True" in done.stdout
    assert "prediction" in done.stdout and "fits" in done.stdout
    assert len(out.read_text().splitlines()) <= 40

    simulated = piper("simulate", out, "--cluster", "h100x8@eager")
    assert simulated.exit_code == 0, simulated.stderr
    assert "warning: debug.deterministic=True" in simulated.stderr  # at every later command
    back = piper("export", out, "--to", "torchtitan", "--json")
    (text,) = json.loads(back.stdout)["files"].values()
    assert "--parallelism.tensor_parallel_degree=2" in text.splitlines()


def test_a_file_that_is_written_is_named_where_its_prediction_is_refused(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "job.py"
    done = piper("import", "torchtitan", source, "--gpus", 8, "--cluster", "h100x4", "--out", out)
    assert done.exit_code == 2 and out.is_file() and f"written: {out}" in done.stderr


@pytest.mark.parametrize("compiled", [True, False])
def test_kernels_that_a_cluster_does_not_run_are_told(compiled: bool, tmp_path: Path) -> None:
    told = answer(compile__enable=compiled, compile__components=["model"])
    file, out = tmp_path / "small.json", tmp_path / "job.py"
    file.write_text(json.dumps(told))
    ask = ("import", "torchtitan", file, "--gpus", 8, "--cluster")
    right, wrong = "h100x8@eager", "h100x8@inductor"
    right, wrong = (wrong, right) if compiled else (right, wrong)
    assert "kernels, but" in piper(*ask, wrong).stderr
    assert "kernels, but" not in piper(*ask, right, "--out", out).stderr
    assert ("--cluster NAME@inductor" in out.read_text()) == compiled
    assert "kernels are not compiled there" in piper("export", out, "--to", "torchtitan").stderr
    out.write_text(out.read_text() + 'options = piper.Options(kernels="inductor")\n')
    back = piper("export", out, "--to", "torchtitan")
    assert "not compiled" not in back.stderr and "--compile.enable" in back.stdout


def test_the_numbers_of_an_import(source: Path) -> None:
    done = piper("import", "torchtitan", source, "--gpus", 8, "--cluster", "h100x8", "--json")
    told = json.loads(done.stdout)
    assert told["devices"] == 8 and told["prediction"]["fits"]
    assert [text.split("=")[0] for text in told["options"]["nearest"]] == ["debug.deterministic"]
    assert len(told["options"]["mapped"]) > 15 and len(told["warnings"]) == 1


@pytest.mark.long
def test_a_plan_begins_with_a_foreign_job_and_its_own_row(source: Path) -> None:
    asked = ["--gpus", 8, "--trials", 4, "--workers", 0, "--json", "--cluster", "h100x8@eager"]
    done = piper("plan", f"torchtitan:{source}", *asked)
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["own"]["mesh"] == "dp=4, tp=2"
    assert any("deterministic" in note for note in told["job"]["notes"])


@pytest.mark.parametrize(
    ("changes", "flags", "told"),
    [
        ({"loss": {"__class__": "titan.MSELoss.Config"}, "training__odd": 1}, [], ("2 options", "training.odd", "loss")),
        ({}, ["--cluster", "h100x8*2"], ("16 devices", "the job is for 8")),
        ({}, ["--as", "magic"], ("no such stand-in",)),
    ],
)  # fmt: skip
def test_what_stops_an_import_is_one_message(
    tmp_path: Path, changes: dict[str, Any], flags: list[str], told: tuple[str, ...]
) -> None:
    file = tmp_path / "small.json"
    file.write_text(json.dumps(answer(**changes)))
    done = piper("import", "torchtitan", file, "--gpus", 8, *flags)
    assert done.exit_code == 2 and "Traceback" not in done.stderr
    assert all(text in done.stderr for text in told), done.stderr


def test_a_model_of_other_parameters_is_not_written(tmp_path: Path) -> None:
    file, out = tmp_path / "small.json", tmp_path / "job.py"
    file.write_text(json.dumps({**answer(model(2)), "parameters": 12_345}))
    done = piper("import", "torchtitan", file, "--gpus", 1, "--out", out)
    assert done.exit_code == 2 and not out.exists()
    assert "counts 12,345 parameters" in done.stderr


def test_devices_are_whole_nodes(source: Path) -> None:
    done = piper("plan", f"torchtitan:{source}", "--gpus", 12)
    assert done.exit_code == 2 and "--gpus 12: nodes of h100x8 have 8 devices" in done.stderr
    done = piper("plan", f"torchtitan:{source}", "--gpus", 16, "--cluster", "h100x8*4")
    assert done.exit_code == 2 and "--gpus 16: h100x8*4 has 32 devices" in done.stderr


def test_a_system_that_is_not_known() -> None:
    done = piper("import", "nemo", "x.yaml", "--gpus", 8)
    assert done.exit_code == 2 and "known are torchtitan" in done.stderr


def test_a_preset_stands_for_the_model_that_a_file_lacks(tmp_path: Path) -> None:
    """And an optimizer on the host is a directive of the FILE.py."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    text = json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    (tmp_path / "ds.json").write_text(text)
    out = tmp_path / "job.py"
    done = piper(
        "import", "deepspeed", tmp_path / "ds.json", "--model", "llama3-8b", "--gpus", 8,
        "--length", 2048, "--out", out,
    )  # fmt: skip
    assert done.exit_code == 0 and 'piper.offload(where(), tensors="optim")' in out.read_text()


def test_a_file_without_a_model_is_planned_with_one(tmp_path: Path) -> None:
    """Options for jobs of other systems are refused beside other sources, as is a number of tokens beside its rows."""
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    text = json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    (tmp_path / "ds.json").write_text(text)
    config = written(tmp_path, LLAMA)
    source = [
        "plan",
        f"deepspeed:{tmp_path / 'ds.json'}",
        "--gpus",
        2,
        "--length",
        64,
        "--out",
        tmp_path,
    ]
    done = piper(*source, "--model", config, "--trials", 2, "--workers", 0, "--json")
    assert done.exit_code == 0, done.stderr
    own, *_ = found = json.loads(done.stdout)["own"], *json.loads(done.stdout)["strategies"]
    assert own["fits"] and "offload" in own["schedule"] and len(found) > 1
    without, tokens = piper(*source), piper(*source, "--model", config, "--tokens-per-step", "1M")
    assert without.exit_code == 2 and "give --model" in without.stderr
    assert tokens.exit_code == 2 and "give rows, --global-batch" in tokens.stderr
    other = piper("plan", "llama3-8b", "--global-batch", 8, "--model", config)
    assert other.exit_code == 2 and "llama3-8b is no job of another system" in other.stderr


@pytest.mark.parametrize("option", ["--length", "--global-batch", "--model"])
def test_a_job_that_says_its_sizes_refuses_others(option: str, tmp_path: Path) -> None:
    value = written(tmp_path, LLAMA) if option == "--model" else 16
    source = [f"megatron:{DENSE}", "--gpus", 8, "--out", tmp_path / "runs", option, value]
    done = piper("plan", *source, "--trials", 1, "--workers", 0)
    assert done.exit_code == 2 and f"{option}: a job of megatron says" in done.stderr, done.output
    tokens = piper("plan", f"megatron:{DENSE}", "--tokens-per-step", "1M")
    assert tokens.exit_code == 2 and "by --set" in tokens.stderr
