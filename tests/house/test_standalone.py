"""piper_ir and piper_simulator alone, beside the standard library, simulate a plan that was saved elsewhere."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest

import piper
from piper_ir.ground import codec

ROOT = Path(__file__).resolve().parents[2]
ALONE = ("ir", "simulator")
ABSENT = ("torch", "ray", "pandas", "numpy")
OTHERS = ("piper", "piper_ops", "piper_capture", "piper_compiler", "piper_runtime")

# Run by an interpreter that sees nothing but its own arguments: argv[1] is the saved plan, argv[2:] extend the module
# path.
SCRIPT = """
import importlib.util, json, sys
sys.path[:0] = sys.argv[2:]
found = [name for name in {absent!r} if importlib.util.find_spec(name)]
assert not found, f"the environment is not empty: {{found}}"
from piper_ir.ground import codec
from piper_ir.plan.plan import Plan
from piper_simulator import simulate
with open(sys.argv[1], encoding="utf-8") as file:
    result = simulate(codec.loads(Plan, file.read()))
print(json.dumps({{"step_s": result.step_s, "spans": len(result.trace.spans)}}))
"""


@pytest.fixture(scope="module")
def saved_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPipe on 2 devices with 4 microbatches, F = 1 s and B = 2 s."""
    program = piper.synthetic(stages=2, F=1.0, I=1.0, W=1.0)
    strategy = piper.Strategy(piper.Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=4))
    path = tmp_path_factory.mktemp("standalone") / "plan.json"
    path.write_text(
        codec.dumps(piper.compile(program, strategy, global_batch=4).plan), encoding="utf-8"
    )
    return path


def run_alone(
    python: str,
    flags: Sequence[str],
    plan: Path,
    *paths: Path,
    absent: Sequence[str] = (*ABSENT, *OTHERS),
) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [python, *flags, "-c", SCRIPT.format(absent=absent), str(plan), *map(str, paths)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=plan.parent, env=env
    )


def check_simulated(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["step_s"] == (4 + 2 - 1) * (1.0 + 2.0)  # GPipe: (m + p - 1)(F + B)
    assert result["spans"] >= 2 * 4 * 2


def sources() -> list[Path]:
    return [ROOT / "packages" / name / "src" for name in ALONE]


def test_ir_and_simulator_work_without_site_packages(saved_plan: Path) -> None:
    check_simulated(run_alone(sys.executable, ("-I", "-S"), saved_plan, *sources()))


def test_negative_control_the_environment_is_really_empty(saved_plan: Path) -> None:
    (ir, *_) = sources()
    without = run_alone(sys.executable, ("-I", "-S"), saved_plan, ir)
    assert "No module named 'piper_simulator'" in without.stderr
    site_packages = Path(numpy.__file__).parents[1]
    everything = run_alone(sys.executable, ("-I", "-S"), saved_plan, *sources(), site_packages)
    assert "the environment is not empty" in everything.stderr


@pytest.mark.long
def test_the_wheel_has_everything_and_simulates_without_torch(
    saved_plan: Path, tmp_path: Path
) -> None:
    """Install the wheel as a user does, in a new environment, with the command's two libraries beside it."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "src", "packages"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    sources = [
        name
        for name in tracked.stdout.split("\0")
        if "/tests/" not in name and (ROOT / name).is_file()
    ]
    for name in (
        *sources,
        "pyproject.toml",
        "VERSION",
        "LICENSE",
        "README.md",
    ):  # a build leaves files in its tree
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "tree" / name)
    pip = ("-m", "pip", "--disable-pip-version-check", "-q")
    build = [
        sys.executable,
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(tmp_path / "tree"),
    ]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("piper_training-*.whl")
    with zipfile.ZipFile(wheel) as file:
        packed = set(file.namelist())
    assert {name.partition("src/")[2] for name in sources if name.partition("src/")[2]} <= packed
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, *pip, "install", "--no-deps", str(wheel)], check=True, timeout=300)
    subprocess.run(
        [python, *pip, "install", "-c", str(ROOT / "constraints.txt"), "typer", "rich"],
        check=True,
        timeout=300,
    )
    check_simulated(run_alone(python, ("-I",), saved_plan, absent=ABSENT))
    command = [str(tmp_path / "venv" / "bin" / "piper"), "--version"]
    said = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"]},
        cwd=tmp_path,
    )
    assert said.stdout == f"piper {(ROOT / 'VERSION').read_text().strip()}\n", said.stderr
