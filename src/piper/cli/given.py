"""Check values of the command line that need no torch: `-p` options, and the JSON of a model's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import isdir, isfile
from pathlib import Path

from piper_ir.ground.errors import JobError
from piper_ir.tools import json_fields


def pairs(
    params: Sequence[str] | None,
    flag: str = "-p",
    several: str = "compared by `piper simulate FILE.py ",
) -> dict[str, str]:
    """Return `-p` options by name; raise JobError for one without a name or value, and for a name given twice.

    `several` says in that message how several values are given.
    """
    values: dict[str, str] = {}
    for item in params or []:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise JobError(
                f"{flag} {item or repr(item)}: NAME=VALUE is expected, e.g. {flag} microbatches=8"
            )
        if name in values:
            raise JobError(
                f"{flag} {name}={values[name]} and {flag} {item}: give {name} once; several values are "
                f"{several}-p {name}={values[name]},{value}`"
            )
        values[name] = value
    return values


def check_config(source: Path) -> None:
    """Raise JobError for a config.json, or the one of a folder, that is broken; others are understood later."""
    file = source / "config.json" if isdir(source) else source
    if file.suffix != ".json" or not isfile(file):  # a text of options is longer than a path may be
        return
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return  # which the reader of the model says, with what to give instead
    json_fields(text, file, "an object with model_type")
