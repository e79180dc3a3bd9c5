"""Define the options of `piper trace`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from piper.cli import options as flags

TraceFilesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE.json.gz...",
        help="traces of torch.profiler, one of each rank that counts",
    ),
]
JobFileOption = Annotated[
    Path | None,
    typer.Option("--job", metavar="FILE.py", help="the job and strategy that was traced"),
]
StepOption = Annotated[
    int | None,
    typer.Option("--step", min=0, help="the number of the step (ProfilerStep#N in the trace)"),
]
CalibrateOption = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        metavar="COSTS.json",
        help="write the measured durations there, for `piper simulate --costs`",
    ),
]
TraceOutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="write a folder there that `piper report` draws"),
]


@dataclass(frozen=True, kw_only=True)
class TraceArguments:
    """Hold the options of `piper trace`."""

    files: TraceFilesArgument
    job: JobFileOption = None
    params: flags.ParamsOption = None
    strategy: flags.StrategyFileOption = None
    cluster: flags.ClusterNameOption = "cpu-local"
    step: StepOption = None
    calibrate: CalibrateOption = None
    out: TraceOutOption = None
    as_json: flags.AsJsonOption = False
