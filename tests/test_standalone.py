"""piper_ir and piper_simulator alone, beside simpy and the standard library, simulate a plan that was saved elsewhere."""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest
import simpy

import piper
from piper_ir import codec

ROOT = Path(__file__).resolve().parents[1]
ALONE = ("ir", "simulator")
ABSENT = ("torch", "ray", "pandas", "numpy", "piper", "piper_ops", "piper_compiler", "piper_runtime")

# Run by an interpreter that sees nothing but its own arguments: argv[1] is the saved plan, argv[2:] extend the module path.
SCRIPT = f"""
import importlib.util, json, sys
sys.path[:0] = sys.argv[2:]
found = [name for name in {ABSENT!r} if importlib.util.find_spec(name)]
assert not found, f"the environment is not empty: {{found}}"
from piper_ir import codec
from piper_ir.plan import Plan
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
    path.write_text(codec.dumps(piper.compile(program, strategy, global_batch=4).plan), encoding="utf-8")
    return path


def run_alone(python: str, flags: Sequence[str], plan: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [python, *flags, "-c", SCRIPT, str(plan), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=plan.parent, env=env)


def check_simulated(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["step_s"] == (4 + 2 - 1) * (1.0 + 2.0)  # GPipe: (m + p - 1)(F + B)
    assert result["spans"] >= 2 * 4 * 2


@pytest.fixture
def only_simpy(tmp_path: Path) -> Path:
    """A folder with simpy alone: its own site-packages holds torch too."""
    shutil.copytree(Path(simpy.__file__).parent, tmp_path / "site" / "simpy")
    return tmp_path / "site"


def sources() -> list[Path]:
    return [ROOT / "packages" / name / "src" for name in ALONE]


def test_ir_and_simulator_work_without_site_packages(saved_plan: Path, only_simpy: Path) -> None:
    check_simulated(run_alone(sys.executable, ("-I", "-S"), saved_plan, *sources(), only_simpy))


def test_negative_control_the_environment_is_really_empty(saved_plan: Path, only_simpy: Path) -> None:
    without = run_alone(sys.executable, ("-I", "-S"), saved_plan, *sources())
    assert "No module named 'simpy'" in without.stderr
    site_packages = Path(simpy.__file__).parents[1]
    everything = run_alone(sys.executable, ("-I", "-S"), saved_plan, *sources(), site_packages)
    assert "the environment is not empty" in everything.stderr


@pytest.mark.long
def test_ir_and_simulator_install_alone(saved_plan: Path, tmp_path: Path) -> None:
    """As a user gets them: wheels of the two packages in a new environment, and nothing else but what they require."""
    packages = [shutil.copytree(ROOT / "packages" / name, tmp_path / name) for name in ALONE]  # a build leaves files in its tree
    pip = ("-m", "pip", "--disable-pip-version-check", "-q")
    wheels = tmp_path / "wheels"
    build = [sys.executable, *pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), *map(str, packages)]
    subprocess.run(build, check=True, timeout=300)
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    install = [python, *pip, "install", "-c", str(ROOT / "constraints.txt"), *map(str, sorted(wheels.glob("*.whl")))]
    subprocess.run(install, check=True, timeout=300)
    check_simulated(run_alone(python, ("-I",), saved_plan))
