"""Folders of results: plans, traces and numbers on disk. No run overwrites another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from piper_ir.errors import OutputError
from piper_ir.plan import Plan

if TYPE_CHECKING:
    from piper_compiler import Strategy
    from piper_runtime import Run
    from piper_simulator import Simulation


def new_folder(out: Path, name: str) -> Path:
    """A folder NAME-001, NAME-002, ... below `out` that did not exist before. OutputError when it cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        endings = [p.name.rpartition("-")[2] for p in out.glob(f"{name}-*")]
        number = max([int(e) for e in endings if e.isdigit()], default=0) + 1
        while True:
            folder = out / f"{name}-{number:03d}"
            try:
                folder.mkdir()
            except FileExistsError:  # another run took the number meanwhile
                number += 1
                continue
            return folder
    except OSError as e:
        raise OutputError(f"cannot make a folder for results in {out}: {e.strerror}; choose another with --out") from None


def save_plan(folder: Path, plan: Plan, strategy: Strategy) -> None:
    """plan.json and strategy.json. OutputError when a file cannot be written."""
    from piper_ir.codec import dumps

    with _writing(folder):
        (folder / "plan.json").write_text(dumps(plan))
        (folder / "strategy.json").write_text(strategy.dumps())


def save_prediction(folder: Path, prediction: Simulation) -> None:
    """predicted.json and trace-predicted.json (Chrome's trace format). OutputError when a file cannot be written."""
    from piper_report.chrome import write_chrome

    with _writing(folder):
        (folder / "predicted.json").write_text(json.dumps(prediction.summary(), indent=1))
        write_chrome(prediction.trace, folder / "trace-predicted.json")


def save_run(folder: Path, run: Run) -> None:
    """measured.json, and trace-measured.json when spans were recorded. OutputError when a file cannot be written."""
    from piper_report.chrome import write_chrome

    with _writing(folder):
        numbers = {"losses": run.losses, "step_s": run.step_s, "period_s": run.period_s, "peak_bytes": dict(run.peak_bytes)}
        (folder / "measured.json").write_text(json.dumps(numbers, indent=1))
        if run.trace.spans:
            write_chrome(run.trace, folder / "trace-measured.json")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise OutputError(f"cannot write results to {folder}: {e.strerror}; choose another folder with --out") from None
