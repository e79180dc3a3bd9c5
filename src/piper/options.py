"""Options that several commands have, so that they are called and explained the same everywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from piper_ir.errors import JobError, PiperError

SpaceFile = Annotated[
    Path, typer.Argument(metavar="FILE.py", help="defines `job` (a piper.Job) and `strategy`, a function of a trial")
]
File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE.py", help="defines `job` (a piper.Job) and `strategy` (a piper.Strategy or a function of a trial)"
    ),
]
Params = Annotated[
    list[str] | None, typer.Option("-p", metavar="NAME=VALUE", help="a parameter of a strategy that is a function of a trial")
]
StrategyFile = Annotated[
    Path | None,
    typer.Option("--strategy", metavar="FILE.json", help="use this saved strategy, such as a best.json, instead of the file's"),
]
ClusterName = Annotated[
    str, typer.Option("--cluster", help="e.g. h100x8, a100x8, h100-80g-sxm:8*4, cpu-local (this machine, measured now)")
]
CostsFile = Annotated[
    Path | None, typer.Option("--costs", metavar="FILE.json", help="measured durations, as `piper profile` writes them")
]
Launcher = Annotated[
    str,
    typer.Option(help="ray (one actor per rank), processes (one per rank; also under torchrun) or inline (all in one process)"),
]
Address = Annotated[
    str,
    typer.Option("--address", metavar="HOST:PORT", help="of a Ray cluster to join; auto: one that is there, else this machine"),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="results go to a new folder below DIR")]
Timeout = Annotated[float, typer.Option("--timeout-s", help="seconds without progress after which a rank counts as hung")]
Steps = Annotated[int | None, typer.Option(min=1, help="optimizer steps (default: the file's `steps`, else 3)")]
Trials = Annotated[int, typer.Option(min=1, help="candidates that are compiled and scored")]
Confirm = Annotated[int, typer.Option(min=0, help="run so many of the best on this machine, predicted beside measured")]
MemoryLimit = Annotated[str | None, typer.Option(help="per device, e.g. 20GiB (default: what the cluster's devices have)")]
Seed = Annotated[int, typer.Option(help="of the search; the same seed finds the same")]
Storage = Annotated[
    str | None, typer.Option(help="Optuna URL, e.g. sqlite:///study.db; a search of the same space goes on where it ended")
]
Searchers = Annotated[str, typer.Option("--workers", help='processes (0: this one), "ray", or the address of a Ray cluster')]
Rows = Annotated[
    list[int] | None, typer.Option("--rows", help="rows per microbatch to measure (again for more; default: what fits)")
]
Repeats = Annotated[int, typer.Option(min=1, help="passes of which each duration is the median")]
PrintLaunch = Annotated[
    bool, typer.Option("--print-launch", help="print the command lines for torchrun, Slurm and Ray, and run nothing")
]
Nodes = Annotated[int | None, typer.Option(min=1, help="machines in the lines of --print-launch")]
Emulate = Annotated[
    str | None,
    typer.Option(metavar="CLUSTER", help="sleep in real processes instead of training, as long as CLUSTER would compute"),
]
Log = Annotated[str, typer.Option(metavar="NAMES", help="where steps go beside metrics.jsonl: tensorboard,wandb")]
Ranges = Annotated[bool, typer.Option("--ranges", help="names of instructions in profilers (record_function, NVTX)")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs, and nothing else")]


INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


def searchers(workers: str) -> int | str:
    """`--workers`: a number of processes, "ray", or HOST:PORT. JobError otherwise."""
    if workers.isdigit():
        return int(workers)
    if workers == "ray" or ":" in workers:
        return workers
    raise JobError(f'--workers {workers}: a number of processes, "ray" or the address HOST:PORT of a Ray cluster is expected')


def pairs(params: list[str] | None) -> dict[str, str]:
    """`-p` options by name. JobError for one without a name or value."""
    out = {}
    for item in params or []:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise JobError(f"-p {item}: NAME=VALUE is expected, e.g. -p microbatches=8")
        out[name] = value
    return out


@contextmanager
def user_errors() -> Iterator[None]:
    """A PiperError becomes one message on stderr and exit code 2; nobody wants a traceback for a typing mistake."""
    try:
        yield
    except PiperError as e:
        print(f"piper: {e}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("piper: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
