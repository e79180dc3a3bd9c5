"""Costs files: what `piper profile` writes, `--costs` reads, and a person sees of it."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from piper_ir.codec import dumps, encode, loads
from piper_ir.costs import Costs, Duration
from piper_ir.errors import FormatError, OutputError
from piper_ir.tools import check_writable, time_text, write_whole
from piper_report import Table, percent


def save_costs(path: Path, costs: Costs) -> None:
    """Write a costs file. When it cannot be written, the costs go to a file among the temporary ones, and OutputError says where:
    they took minutes to measure."""
    text = dumps(costs, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as e:
        raise OutputError(f"cannot write the costs to {path}: {e.strerror}; {_kept(text)}") from None


def _kept(text: str) -> str:
    """Write costs to a temporary file, and say where they are; if that cannot be, print them."""
    try:
        with NamedTemporaryFile("w", prefix="piper-costs-", suffix=".json", delete=False) as file:
            file.write(text)
    except OSError:
        print(text)
        return "they are printed to standard output"
    return f"they are in {file.name} instead"


def check_costs_path(path: Path) -> None:
    """Before minutes of measuring: OutputError when costs cannot go there."""
    if path.is_dir():
        raise OutputError(f"cannot write the costs to {path}: it is a folder; choose a file with --out")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
    except OSError as e:
        raise OutputError(f"cannot write the costs to {path}: {e.strerror}; choose another file with --out") from None


def load_costs(path: Path) -> Costs:
    """Read a costs file. FormatError when there is none, or when it is something else."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise FormatError(f"cannot read the costs file {path}: {e}; `piper profile FILE.py --out {path}` makes one") from None
    costs = loads(Costs, text, str(path))
    if not all(map(isfinite, _numbers(encode(costs)))):
        raise FormatError(f"{path}: NaN or Infinity among the durations; finite numbers are expected: measure again")
    return costs


def _numbers(value: Any) -> Iterator[float]:
    """Yield all numbers of a JSON value."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)


def costs_table(costs: Costs, *, title: str) -> Table:
    """Steps of chunks by rows, then messages and other ops by size, each with its spread."""
    rows = [(f"{s.chunk} {s.step}, {s.rows} rows", *_cells(s.duration)) for s in costs.steps]
    rows += [(f"{c.op} of {c.bytes} bytes, {c.group} ranks", *_cells(c.duration)) for c in costs.comm]
    rows += [(f"{p.op}, {p.amount} {'rows' if p.op == 'Batch' else 'bytes'}", *_cells(p.duration)) for p in costs.parts]
    notes = []
    if costs.host is not None:
        host = costs.host
        rows.append(("issue of an instruction", *_cells(Duration(host.issue_s, spread=host.issue_spread_s))))
        rows.append(("issue of a communication", *_cells(Duration(host.comm_s, spread=host.comm_spread_s))))
    if (o := costs.origin) is not None:
        notes.append(
            f"{o.device}; {o.ranks} ranks at once over {o.backend}, {o.threads} thread each; Python {o.python}, torch {o.torch}; "
            f"{o.date}; median of {o.repeats} repeats, spread: median absolute deviation"
        )
    return Table(title, ("", "time", "spread"), tuple(rows), tuple(notes))


def _cells(duration: Duration) -> tuple[str, str]:
    return time_text(duration.seconds), percent(duration.spread / duration.seconds if duration.seconds else None)
