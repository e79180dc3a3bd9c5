"""A wrong word of a command line is one message with exit code 2: no traceback, and nothing is passed over in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.cases import each_case
from tests.helpers.command_line import GOOD, RECIPE, command, fails
from tests.planning.test_config_files import LLAMA

ROOT = Path(__file__).resolve().parents[2]
TABLE = str(ROOT / "benchmarks/published/own_runs.csv")
OWN, SEARCHED = str(ROOT / "examples/own_model.py"), str(ROOT / "examples/gpt_text.py")
PRESET = ("plan", "llama3-8b", "--global-batch", "8")
READ = (
    "import",
    "deepspeed",
    "empty.json",
    "--model",
    "llama3-8b",
    "--length",
    "64",
    "--gpus",
    "8",
)

WRONG: list[tuple[tuple[str, ...], str]] = [
    (("export", OWN, "--to", "torchtitan", "--out", OWN), "cannot make the folder"),
    ((*READ, "--global-batch", "8", "--out", "none/x.py"), "cannot write results to none"),
    ((*READ, "--set", "zero_optimization.stage=x"), "1 option has wrong values"),
    (("import", "deepspeed", ""), "cannot read the file ''"),
    (("import", "megatron", "--num-layers 4", "--gpus", "8"), "options: --seq-length is needed"),
    (("import", "megatron", "--num-layers 4", "--gpu", "8"), "No such option: --gpu"),
    (
        ("import", "megatron", "--set", "--num-layers 4", "--json", "--seq-length 8"),
        "the number of devices is not said; give --gpus",
    ),
    (("plan", "deepspeed:"), "deepspeed: names no job"),
    (("accuracy", TABLE, "--fit", "", "--stack", "hopper-nemo"), "Is a directory"),
    (("accuracy", TABLE, "--out", "folder"), "cannot write results to folder"),
    (("accuracy", TABLE, "--fit", "mine"), "--stack reads files that end in .toml"),
    (("accuracy", TABLE, "--free", "matmul"), "--free has no use without --fit"),
    (("accuracy", TABLE, "--fit", "x.toml", "--at-most", "1"), "--at-most has no use beside --fit"),
    (("accuracy", TABLE, "--why", "h100*"), "12 rows have such a case; name one"),
    (("accuracy", "none.csv", "--stack", "none"), "none.csv: there is no such file"),
    ((*PRESET, "--mtbf", "inf"), "leave it out if nothing fails"),
    ((*PRESET, "--length", str(10**12)), "less than or equal to 67108864"),
    (("plan", "llama3-8b", "--global-batch", str(10**20)), "less than or equal to 4294967296"),
    (("plan", "llama3-8b", "--tokens-per-step", ""), "--tokens-per-step '': a number such as"),
    (("plan", "deep.json", "--global-batch", "8"), "at most 65,536 is accepted"),
    (("plan", "wide.json", "--global-batch", "8"), "at most 268,435,456 is accepted"),
    (("tune", SEARCHED, "--memory-limit", "-1"), "--memory-limit -1: a positive number"),
    (("simulate", OWN, "-p", ""), "-p '': NAME=VALUE is expected"),
]


@each_case(("words", "says"), WRONG)
def test_a_wrong_word_is_one_message(
    words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("empty.json").write_text("{}")
    Path("deep.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 10**20}))
    Path("wide.json").write_text(json.dumps(LLAMA | {"vocab_size": 10**20}))
    fails(command(*words), says)


def test_one_is_no_plural(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(RECIPE + GOOD.replace("microbatches=2", "microbatches=8"))
    said = command("explain", path).stdout
    assert "per microbatch of 1 row\n" in said, said
    run = command("run", path, "--launcher", "inline", "--steps", "1", "--out", tmp_path).stdout
    assert "8 microbatches of 1 row, 1 step, launcher inline" in run, run
