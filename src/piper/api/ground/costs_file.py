"""Read and write costs files, as `piper profile` and `--costs` use them."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from piper_ir.ground.codec import dumps, encode, loads
from piper_ir.ground.errors import FormatError, OutputError
from piper_ir.program.costs import Costs
from piper_ir.tools import check_writable, unread, write_whole

MADE = "`piper profile FILE.py --out costs.json` makes a costs file"


def save_costs(path: str | Path, costs: Costs) -> None:
    """Write a costs file; `path` is a Path or a text.

    Costs take minutes to measure. When the file cannot be written they go to a temporary file, and OutputError says
    where.
    """
    path = Path(path)
    text = dumps(costs, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as e:
        raise OutputError(
            f"cannot write the costs to {path}: {e.strerror}; {_kept(text)}"
        ) from None


def _kept(text: str) -> str:
    """Write costs to a temporary file, or print them if that is impossible, and return where they are."""
    try:
        with NamedTemporaryFile("w", prefix="piper-costs-", suffix=".json", delete=False) as file:
            file.write(text)
    except OSError:
        print(text)
        return "they are printed to standard output"
    return f"they are in {file.name} instead"


def check_costs_path(path: Path) -> None:
    """Raise OutputError when costs cannot be written to a path; this is checked before minutes of measuring."""
    if path.is_dir():
        raise OutputError(
            f"cannot write the costs to {path}: it is a folder; choose a file with --out"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
    except OSError as e:
        raise OutputError(
            f"cannot write the costs to {path}: {e.strerror}; choose another file with --out"
        ) from None


def load_costs(path: str | Path) -> Costs:
    """Read a costs file; raise FormatError when there is none, or when it is something else."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise FormatError(unread("the costs file", path, e, MADE)) from None
    try:
        costs = loads(Costs, text, str(path))
    except FormatError as e:
        raise FormatError(f"{e}; {MADE}") from None
    if not all(map(isfinite, _numbers(encode(costs)))):
        raise FormatError(
            f"{path}: NaN or Infinity among the durations; finite numbers are expected: measure again"
        )
    return costs


def _numbers(value: Any) -> Iterator[float]:
    """Yield all numbers of a JSON value."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
