"""Read tables of measured messages: CSV files with COLUMNS, whose lines that begin with # name their source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from piper_ir.program.costs import CommDuration, Duration
from piper_ir.tools import unread
from piper_simulator.cluster.checks import COUNT, POSITIVE, KeyPath
from piper_simulator.cluster.network import OPS

COLUMNS = ("op", "ranks", "nodes", "bytes", "seconds")
"""The columns of a table of messages, a CSV file; lines that begin with # say where it comes from."""


def read_messages(path: Path, where: KeyPath) -> tuple[CommDuration, ...]:
    """Read a table of measured messages, a CSV file with COLUMNS; raise ClusterError with file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise where.error(
            unread("the table", path, e, "its path begins at the folder of the cluster file")
        ) from None
    rows = [
        (n, line)
        for n, line in enumerate(lines, start=1)
        if line.strip() and not line.startswith("#")
    ]
    if not rows or tuple(rows[0][1].split(",")) != COLUMNS:
        raise where.error(
            f"{path}: the first line is {rows[0][1] if rows else 'missing'}; {','.join(COLUMNS)} is needed"
        )
    message_by_key: dict[tuple[str, int, int, int], CommDuration] = {}
    for n, line in rows[1:]:
        message = _message(line, f"{path}, line {n}")
        key = (message.op, message.group, message.nodes, message.bytes)
        if key in message_by_key:
            raise KeyPath(f"{path}, line {n}").error(
                "measured on a line before; one of them is needed"
            )
        message_by_key[key] = message
    return tuple(message_by_key.values())


def _message(line: str, where: str) -> CommDuration:
    cells = line.split(",")
    at = KeyPath(where)
    if len(cells) != len(COLUMNS):
        raise at.error(f"{len(cells)} values; {len(COLUMNS)} are needed: {','.join(COLUMNS)}")
    if cells[0] not in OPS:
        raise at.at("op").error(f"{cells[0]!r} stands here; one of {', '.join(OPS)} is needed")
    ranks, nodes, nbytes = (COUNT(_number(c), at.at(k)) for k, c in zip(COLUMNS[1:4], cells[1:4]))
    seconds = POSITIVE(_number(cells[4]), at.at(COLUMNS[4]))
    return CommDuration(cells[0], nbytes, ranks, Duration(seconds, "table"), nodes)


def _number(cell: str) -> Any:
    """Return a cell as a number if it is one, else its text."""
    try:
        return int(cell) if cell.strip().isdecimal() else float(cell)
    except ValueError:
        return cell
