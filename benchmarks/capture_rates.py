"""Measure capture: GPT-3 175B in a process of its own, and a hundred strategies from one capture."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import strategies
from benchmarks.measure import Goal, Row

SECONDS_GOAL, MEMORY_GOAL = Goal("below", 15.0), Goal("below", 1.0)
DEADLINE_S = 300.0


def rows(quick: bool) -> Iterator[Row]:
    """Return the rows of GPT-3 first; it takes as long with `quick`."""
    yield from gpt3_rows(gpt3())
    yield from strategies.rows(quick)


def gpt3() -> dict[str, float]:
    """Return what `benchmarks.capture_gpt3` prints when it runs alone.

    Raises RuntimeError with its output when it fails.
    """
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "benchmarks.capture_gpt3"]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr}"
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def gpt3_rows(found: dict[str, float]) -> list[Row]:
    """Return the rows of one capture."""
    what = f"GPT-3 175B on meta ({found['parameters'] / 1e9:.1f} B parameters)"
    pieces = (
        f"{found['chunks']:.0f} chunks with {found['codes']:.0f} different codes; "
        f"{found['cpu_seconds']:.1f} s of CPU time"
    )
    return [
        Row(
            "capture",
            f"{what}: capture and cut",
            found["seconds"],
            "s",
            goal=SECONDS_GOAL,
            note=pieces,
        ),
        Row(
            "capture",
            f"{what}: peak memory",
            found["peak_gib"],
            "GiB",
            goal=MEMORY_GOAL,
            note="of the process, torch included",
        ),
        Row(
            "capture",
            f"{what}: saved per layer and row",
            found["saved_gib_per_layer_and_row"],
            "GiB",
            note="bf16",
        ),
    ]
