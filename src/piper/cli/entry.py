"""Run the `piper` command as a process: its output, its signals, and its end."""

from __future__ import annotations

import sys

from piper.cli.commands import app
from piper.cli.interrupts import INTERRUPTED, TERMINATED, hear, leave
from piper.cli.options import user_errors
from piper.cli.pipes import open_output


def main() -> None:
    """Run the `piper` command."""
    open_output()
    hear()
    try:
        app()
    except SystemExit as e:
        with user_errors():
            sys.stdout.flush()
        if e.code in (INTERRUPTED, TERMINATED):
            leave(e.code)
        raise
