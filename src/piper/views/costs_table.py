"""Show measured costs as a table."""

from __future__ import annotations

from piper_ir.program.costs import Costs, Duration
from piper_ir.tools import count_text, time_text
from piper_report import Table, percent


def costs_table(costs: Costs, *, title: str) -> Table:
    """Return a table of chunks by rows, then of messages and other ops by size, each with its spread."""
    rows = [
        (f"{s.chunk} {s.step}, {count_text(s.rows, 'row')}", *_cells(s.duration))
        for s in costs.steps
    ]
    rows += [
        (f"{c.op} of {c.bytes} bytes, {c.group} ranks", *_cells(c.duration)) for c in costs.comm
    ]
    rows += [
        (f"{p.op}, {p.amount} {'rows' if p.op == 'Batch' else 'bytes'}", *_cells(p.duration))
        for p in costs.parts
    ]
    notes = []
    if costs.host is not None:
        host = costs.host
        rows.append(
            ("issue of an instruction", *_cells(Duration(host.issue_s, spread=host.issue_spread_s)))
        )
        rows.append(
            ("issue of a communication", *_cells(Duration(host.comm_s, spread=host.comm_spread_s)))
        )
    if (o := costs.origin) is not None:
        notes.append(
            f"{o.device}; {count_text(o.ranks, 'rank')} at once over {o.backend}, {count_text(o.threads, 'thread')} each; "
            f"Python {o.python}, torch {o.torch}; {o.date}; median of {o.repeats} repeats, spread: median absolute deviation"
        )
    return Table(title, ("", "time", "spread"), tuple(rows), tuple(notes))


def _cells(duration: Duration) -> tuple[str, str]:
    return time_text(duration.seconds), percent(
        duration.spread / duration.seconds if duration.seconds else None
    )
