"""Define the options of `piper import` and `piper export`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from piper.cli.completion import one_of


class TextCommand(TyperCommand):
    """A command with an argument that may be a text of options, such as '--num-layers 4 --hidden-size 512'."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments: one like an option with a blank in its name is a text, or the value of the option before."""
        taking = {name for p in self.params if not getattr(p, "is_flag", True) for name in p.opts}
        texts = [
            k
            for k, (before, a) in enumerate(pairwise(["", *args]))
            if a.startswith("-") and len(a.partition("=")[0].split()) > 1 and before not in taking
        ]
        if "--" in args or not texts:
            return super().parse_args(ctx, args)
        others = [a for k, a in enumerate(args) if k not in texts]
        return super().parse_args(ctx, [*others, "--", *(args[k] for k in texts)])


SystemArgument = Annotated[
    str,
    typer.Argument(
        metavar="SYSTEM",
        autocompletion=one_of("torchtitan", "megatron", "deepspeed", "accelerate"),
        help="torchtitan, megatron, deepspeed or accelerate",
    ),
]
ForeignSourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="a file of the system, a text of its options, or one of its configurations",
    ),
]
GpusOption = Annotated[
    int | None,
    typer.Option("--gpus", min=1, help="devices of the job, where its file does not say"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="OPTION=VALUE",
        help="a further option of the system, as its command line takes it",
    ),
]
SystemPythonOption = Annotated[
    str | None,
    typer.Option(
        "--python",
        help="the interpreter in which the system is installed, where its own parser is asked",
    ),
]
ModelFileOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="config.json|PRESET",
        help="the model, where the system's file has none",
    ),
]
StandInOption = Annotated[
    list[str] | None,
    typer.Option(
        "--as",
        metavar="NAME",
        help="accept a stand-in for what cannot be said, such as bf16; it is said every time",
    ),
]
SkipUnknownOption = Annotated[
    bool, typer.Option("--skip-unknown", help="pass over options that are not known")
]
PredictedClusterOption = Annotated[
    str | None, typer.Option("--cluster", help="predict the job there, such as 'h100x8*32@eager'")
]
WrittenFileOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE.py", help="the file to write (default: shown)")
]
IgnoredOption = Annotated[
    bool, typer.Option("--all", help="name every ignored option, with the reason")
]
TargetOption = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="SYSTEM",
        autocompletion=one_of("torchtitan", "megatron", "deepspeed", "accelerate"),
        help="torchtitan, megatron, deepspeed or accelerate",
    ),
]
ExportFolderOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="a folder for the files (default: shown)"),
]
