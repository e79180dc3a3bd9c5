"""Define the options of `piper accuracy` as a record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from piper.cli import options as flags

TableArgument = Annotated[
    Path, typer.Argument(metavar="TABLE.csv", help="published runs, one per row (docs/accuracy.md)")
]
StackOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="a software stack, or its TOML file, for all rows in place of their own",
    ),
]
CasesOption = Annotated[
    str, typer.Option("--rows", metavar="GLOB", help="the rows whose case fits this pattern")
]
ScoredFileOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE.csv", help="write the rows with their predictions"),
]
CaseOption = Annotated[
    str | None,
    typer.Option(
        "--why",
        metavar="CASE",
        help="what the step of one row consists of, and how it depends on each constant",
    ),
]
AtMostOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="exit code 1 if the macro mean of the errors is larger, such as 0.1, or there is none: "
        "no measured row is predicted. Refused rows are counted, and fail nothing",
    ),
]
FitOption = Annotated[
    Path | None,
    typer.Option(
        "--fit", metavar="STACK.toml", help="fit constants of --stack to the rows, and write them"
    ),
]
FreeOption = Annotated[
    str,
    typer.Option("--free", help="the constants that --fit may change, separated by commas"),
]


@dataclass(frozen=True, kw_only=True)
class AccuracyArguments:
    """Hold the options of `piper accuracy`."""

    table: TableArgument
    stack: StackOption = None
    rows: CasesOption = "*"
    out: ScoredFileOption = None
    why: CaseOption = None
    at_most: AtMostOption = None
    fit: FitOption = None
    free: FreeOption = "matmul,memory"
    as_json: flags.AsJsonOption = False
