"""Ctrl-C at the terminal while a command runs on Ray: exit code 130, no traceback, nothing left running, what was found is
kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import piper
from packages.runtime.tests.instants import descendants, pids_alive
from tests.test_cli import GOOD, RECIPE

SPACE = """
import os, time
CALLS = []
def strategy(trial):
    CALLS.append(trial)
    if len(CALLS) == (os.cpu_count() or 1) + 3:  # more than are under way at once: some are done
        print("up", flush=True)
        time.sleep(600)
    m = trial.suggest_categorical("m", (1, 2, 4, 8))
    cut = trial.suggest_int("cut", 1, 63)
    return piper.Strategy(piper.Mesh(pp=2), (piper.partition(2, at=(cut,)), *piper.recipes.gpipe(pp=2, microbatches=m)[1:]))
"""


def interrupted(tmp_path: Path, recipe: str, up: str, *words: str) -> tuple[Path, str]:
    """Run a command until it prints a line that starts with `up`, and interrupt its group of processes, as a terminal does. The
    folder with its results, and its stderr."""
    file = tmp_path / "recipe.py"
    file.write_text(recipe)
    command = [sys.executable, "-m", "piper", words[0], str(file), *words[1:], "--out", str(tmp_path / "out")]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen(command, start_new_session=True, preexec_fn=_interruptible, env=environment, **pipes)
    assert driver.stdout is not None
    assert any(line.startswith(up) for line in driver.stdout), driver.communicate()[1]
    family = descendants(driver.pid)
    assert any("raylet" in Path(f"/proc/{p}/cmdline").read_text() for p in pids_alive(family)), "it runs on Ray"
    os.killpg(driver.pid, signal.SIGINT)
    told = driver.communicate(timeout=120)[1]
    assert driver.returncode == 130, (driver.returncode, told)
    assert "Traceback" not in told
    deadline = time.monotonic() + 60  # a shared machine
    while pids_alive(family) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not pids_alive(family)
    return next((tmp_path / "out").iterdir()), told


def _interruptible() -> None:
    """A suite that was started in the background of a shell ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_run_is_interrupted(tmp_path: Path) -> None:
    folder, told = interrupted(tmp_path, RECIPE + GOOD, "step    3", "run", "--steps", "1000000", "--address", "local")
    assert told == "piper: interrupted\n"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) >= 4 and (folder / "predicted.json").is_file()


def test_a_search_is_interrupted(tmp_path: Path) -> None:
    recipe = RECIPE.replace("range(2)", "range(64)") + SPACE
    folder, told = interrupted(tmp_path, recipe, "up", "tune", "--workers", "local", "--trials", "1000")
    study = piper.Study.load(folder)
    assert study.interrupted and study.rows and f"are in {folder}" in told
