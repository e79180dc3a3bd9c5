"""Say errors and warnings at the command line: arguments of Python functions as the flags that a user gave."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Container, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import typer

from piper.cli.interrupts import INTERRUPTED, is_terminated
from piper.cli.run_arguments import OF_EXECUTE
from piper_ir.ground.errors import PiperError, PiperWarning
from piper_ir.tools import clear_line, shown_while_working

ARGUMENTS = (
    *OF_EXECUTE,
    "cluster",
    "memory_limit",
    "confirm",
    "workers",
    "repeats",
    "storage",
    "seed",
    "objective",
    "rows",
    "kernels",
    "cuda_graph",
)
"""The arguments of functions whose messages reach the command line.

There, a message about a "cluster" is about Ray's, which is `--address`.
"""
QUOTES = "\"'"
PARAMETERS = {"cluster": "address"}
"""The arguments whose option has another name."""
_CALL = re.compile(
    rf"\b(?:execute|profile|tune|Options|space)\(({'|'.join(ARGUMENTS)}|precision)=(.*?)\)(?=:)"
)
_PARAMETER = re.compile(r"\bspace\((\w+)=(.*?)\)(?=:)")
"""A parameter of a space, which is given by `-p`."""
_SETTINGS = "|".join(name for name in ARGUMENTS if name not in ("steps", "rows"))
_SETTING = re.compile(rf"""\b({_SETTINGS})=(["']?)(-?\w[\w:.]*)\2""")
_NAME = re.compile(
    r"\b(memory_limit|timeout_s)\b|(?<=leave )(confirm|storage|resume|cuda_graph)(?= out)|(?<=give )"
    rf"({_SETTINGS})(?= of)"
)


def in_flags(message: str, options: Container[str] | None = None) -> str:
    """Return a Python function's message in the command line's words: `launcher="ray"` is `--launcher ray` there.

    `options` are the parameters of the command, by name; an unknown argument stays as it is. None stands for all.
    """

    def flag(match: re.Match[str], name: str, value: str) -> str:
        parameter = PARAMETERS.get(name, name)
        if options is not None and parameter not in options:
            return match[0]
        if name == "resume":
            return "--resume"  # which is always the newest one
        if (name, value) == ("launcher", "emulated"):
            return "--emulate CLUSTER"
        said = "" if value == "True" else value  # a flag without a value
        return f"--{parameter.replace('_', '-')} {said}".rstrip()

    message = _CALL.sub(lambda m: flag(m, m[1], m[2].strip("\"'")), message)
    message = _PARAMETER.sub(lambda m: f"-p {m[1]}={m[2].strip(QUOTES)}", message)
    message = _SETTING.sub(lambda m: flag(m, m[1], m[3]), message)
    return _NAME.sub(lambda m: flag(m, m[0], ""), message)


@contextmanager
def plain_warnings(options: Container[str] | None = None) -> Iterator[None]:
    """Print Piper's own warnings as lines, without a line of Piper's source; `options` are as in `in_flags`."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def shown(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: Any = None,
            line: str | None = None,
        ) -> None:
            clear_line()
            if issubclass(category, PiperWarning):
                print(f"warning: {in_flags(str(message), options)}", file=sys.stderr)
            else:
                others(message, category, filename, lineno, file, line)

        warnings.showwarning = shown
        yield


def _to_be_said(message: str) -> bool:
    """Return whether this process is the one to print an error, which all ranks may have under torchrun."""
    if "RANK" not in os.environ:  # importing the runtime takes seconds
        return True
    from piper_runtime.launch import is_first_to_say

    return is_first_to_say(message)


@contextmanager
def user_errors(options: Container[str] | None = None) -> Iterator[None]:
    """Print a PiperError as one message on stderr and exit with 2, since nobody wants a traceback for a typing mistake.

    `options` are the parameters of the command that its messages name.
    """
    try:
        first = (
            os.environ.get("RANK", "0") == "0"
        )  # under torchrun one of many ranks says what it does
        with shown_while_working() if first else nullcontext(), plain_warnings(options):
            yield
    except PiperError as e:
        if not e.told_by_another and _to_be_said(str(e)):
            said = f"{e}{e.line}" if e.line else in_flags(str(e), options)
            print(f"piper: {said}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        if not is_terminated():  # which is said already
            print("piper: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
