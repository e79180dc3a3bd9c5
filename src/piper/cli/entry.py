"""Run the `piper` command as a process: its output, its signals, and its end."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext

import typer

from piper.cli.commands import app
from piper.cli.interrupts import (
    INTERRUPTED,
    TERMINATED,
    hear,
    is_terminated,
    leave,
    left_in_native_code,
)
from piper.cli.messages import user_errors
from piper.cli.pipes import keep_for_json, open_output
from piper_ir.tools import no_garbage_collection

PREDICTING = ("plan", "simulate")
"""The commands whose objects nearly all live until they end, so that collecting garbage finds little to free."""


def main() -> None:
    """Run the `piper` command."""
    open_output()
    if "--json" in sys.argv:
        keep_for_json()
    hear()
    predicts = len(sys.argv) > 1 and sys.argv[1] in PREDICTING
    with no_garbage_collection() if predicts else nullcontext():
        try:
            _run()
        finally:
            # Else the interpreter walks all objects twice on its way out: a second of CPU time with torch imported.
            gc.freeze()


def _run() -> None:
    try:
        app()
    except SystemExit as e:
        try:
            with user_errors():
                sys.stdout.flush()
        except typer.Exit as lost:  # what was printed is written here, unless it is unbuffered; typer has ended already
            sys.exit(lost.exit_code)
        code = TERMINATED if e.code == INTERRUPTED and is_terminated() else e.code
        if code in (INTERRUPTED, TERMINATED) or (
            isinstance(code, int) and code and left_in_native_code()
        ):
            leave(code)
        sys.exit(code)
