"""`piper run --emulate`."""

from __future__ import annotations

import json
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from piper.sessions.emulated import emulated_session
from piper_ir.costs import Costs

if TYPE_CHECKING:
    from piper.cli.loading import JobFile


def emulated_run(
    job_file: JobFile, cluster: str, *, steps: int, out: Path | None, timeout_s: float, costs: Costs | None, as_json: bool
) -> None:
    """The session of a FILE.py; with `as_json` it prints JSON and nothing else."""
    with redirect_stdout(StringIO()) if as_json else nullcontext():
        simulated, emulated = emulated_session(
            job_file.job,
            job_file.strategy,
            cluster,
            steps=steps,
            out=out,
            name=job_file.path.stem,
            timeout_s=timeout_s,
            costs=costs,
        )
    if as_json:
        found = {"step_s": emulated.step_s, "period_s": emulated.period_s, **emulated.trace.notes}
        print(json.dumps({"predicted": simulated.summary(), "emulated": found}))
