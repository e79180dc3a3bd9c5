"""Measure `piper plan` of ten public config.json files, each as a first command in an empty folder without captures."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Goal, Row

NAMES = (
    "llama3.1-8b",
    "llama3-70b",
    "qwen2.5-7b",
    "qwen2.5-32b",
    "mistral-7b",
    "mixtral-8x7b",
    "deepseek-v2-lite",
    "qwen3-30b-a3b",
    "gemma-2-9b",
    "phi-3-mini",
)
CLUSTER, LARGE_CLUSTER = "h100x8*4", "h100x8*16"
LARGE = ("llama3-70b",)
"""The models on more devices."""
STEP = ("--length", "4096", "--tokens-per-step", "1M")
GOAL = Goal("below", 120)
MOST_GOAL, MOST_S = Goal("above", 5), 30
"""More than half of the models are planned in so many CPU seconds."""


def rows(quick: bool) -> Iterator[Row]:
    """Return the CPU seconds of each command, with its workers and imports, and how many stay below the half minute."""
    from tests.planning.public_configs import PUBLIC

    taken: list[float] = []
    for name in NAMES[-1:] if quick else NAMES:
        cluster = LARGE_CLUSTER if name in LARGE else CLUSTER
        seconds, first = planned(PUBLIC[name][0], cluster, ("--trials", "2") if quick else ())
        taken.append(seconds)
        yield Row("configs", f"{name} on {cluster}", seconds, "CPU s", goal=GOAL, note=first)
    quickly = sum(seconds < MOST_S for seconds in taken)
    note = f"of {len(taken)}, within {MOST_S} CPU s"
    yield Row("configs", "planned quickly", quickly, "", goal=MOST_GOAL, note=note)


def planned(
    config: object, cluster: str, more: tuple[str, ...] = (), python: str = sys.executable
) -> tuple[float, str]:
    """Return the CPU seconds of `piper plan` in a new folder, and its best strategy in words.

    Raises RuntimeError, with what was printed, if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        command = [python, "-m", "piper", "plan", str(path), "--cluster", cluster, *STEP, *more]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [*command, "--json"],
            cwd=folder,
            env=os.environ | {"PIPER_CACHE": str(Path(folder) / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)}: exit code {done.returncode}: {done.stderr[-500:]}"
        )
    best = json.loads(done.stdout)["strategies"][0]
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (
        seconds,
        f"{best['mesh']}, {best['schedule']}: {best['period_s']:.4g} s, MFU {best['mfu']:.1%}",
    )
