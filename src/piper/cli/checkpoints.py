"""Define `piper checkpoint`: look at checkpoints, and convert them from and to safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from piper.cli.messages import user_errors
from piper.cli.options import AsJsonOption
from piper.cli.pipes import show_json

checkpoint = typer.Typer(
    name="checkpoint", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Look at the checkpoints of `piper run --checkpoint DIR`; convert them from and to safetensors.",
)  # fmt: skip


@checkpoint.command()
def show(
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="a checkpoint, or the folder of --checkpoint")
    ],
    as_json: AsJsonOption = False,
) -> None:
    """Print what a checkpoint holds and which run has made it, or list the complete ones of a folder.

    Example: piper checkpoint show checkpoints/step-00000100
    """
    with user_errors(locals()):
        from piper.views.checkpoint_view import (
            checkpoint_facts,
            checkpoint_table,
            folder_table,
            opened,
        )
        from piper.views.display import show as show_table

        saved_runs = opened(path)
        if as_json:
            show_json([checkpoint_facts(s) for s in saved_runs])
        else:
            show_table(
                checkpoint_table(saved_runs[0])
                if saved_runs[0].path == path
                else folder_table(saved_runs)
            )


@checkpoint.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FROM", help="a checkpoint, or a file whose name ends in .safetensors"
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(metavar="TO", help="the file to write, or a new folder for --checkpoint"),
    ],
) -> None:
    """Write a checkpoint's weights into a safetensors file; or make a checkpoint to begin with of such a file.

    Example: piper checkpoint convert checkpoints/step-00000100 weights.safetensors
    """
    with user_errors(locals()):
        from piper_runtime.checkpoint import convert as converted

        print(converted(source, target))
