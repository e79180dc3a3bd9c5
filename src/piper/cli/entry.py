"""Run the `piper` command as a process: its output, its signals, and its end."""

from __future__ import annotations

import sys

import typer

from piper.cli.commands import app
from piper.cli.interrupts import INTERRUPTED, TERMINATED, hear, leave, left_in_native_code
from piper.cli.messages import user_errors
from piper.cli.pipes import open_output


def main() -> None:
    """Run the `piper` command."""
    open_output()
    hear()
    try:
        app()
    except SystemExit as e:
        try:
            with user_errors():
                sys.stdout.flush()
        except typer.Exit as lost:  # what was printed is written here, unless it is unbuffered; typer has ended already
            sys.exit(lost.exit_code)
        if e.code in (INTERRUPTED, TERMINATED) or (
            isinstance(e.code, int) and e.code and left_in_native_code()
        ):
            leave(e.code)
        raise
