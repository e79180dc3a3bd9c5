"""Show the explanation of a step, and the comparison of two, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from piper_ir.tools import ranks_text, size_text, time_text
from piper_report import Table
from piper_simulator import Cause, Comparison, PathPiece, StepDifference, Why

MOST = 12
"""The most rows of a table; a note counts the others."""
NEGLIGIBLE = 1e-9
"""The part of the whole below which a difference is rounding."""


def why_tables(why: Why) -> Iterator[Table]:
    """Yield the tables of an explanation, the most important first, without empty ones."""
    yield _path(why)
    yield _path_in_order(why)
    yield _idle(why)
    if any(why.gaps):
        yield _gaps(why)
    yield _what_if(why)
    if why.sensitivities:
        yield _sensitivities(why)
    if why.formulas:
        yield _formulas(why)


def _path(why: Why) -> Table:
    pieces: dict[Cause, int] = {}
    for piece in why.path:
        owner = why.owners.of_piece(piece)
        pieces[owner] = pieces.get(owner, 0) + 1
    shares = [
        (o.text, time_text(s), _share(s, why.step_s), str(pieces[o]))
        for o, s in why.path_by_owner.items()
    ]
    rows, left = _most(shares)
    slowed = (
        (f"of it {time_text(why.slowed_s)} because of what runs beside it (interference)",)
        if why.case.interferes
        else ()
    )
    notes = (*_left(left, "owners"), *slowed, *_interval(why))
    return Table(
        f"critical path of the step ({time_text(why.step_s)}), by owner",
        ("", "time", "share", "pieces"),
        rows,
        notes,
    )


def _path_in_order(why: Why) -> Table:
    runs = [
        list(run) for _, run in groupby(why.path, key=lambda p: (p.holder, why.owners.of_piece(p)))
    ]
    rows = [_run(why, run) for run in runs]
    if len(rows) > MOST:
        dots = ("...", *[""] * (len(rows[0]) - 2), f"{len(rows) - MOST} more")
        rows = [*rows[: MOST // 2], dots, *rows[-MOST // 2 :]]
    return Table("critical path in order", ("", "from", "until", "instructions"), tuple(rows))


def _run(why: Why, run: Sequence[PathPiece]) -> tuple[str, ...]:
    """Return the row of neighbours on the path that have one owner."""
    first, last = why.owners.at(run[0].node)[1].name, why.owners.at(run[-1].node)[1].name
    names = first if first == last else f"{first} to {last}"
    owner = why.owners.of_piece(run[0]).text + (", latency" if run[0].holder == "latency" else "")
    return owner, time_text(run[0].start), time_text(run[-1].end), names


def _idle(why: Why) -> Table:
    by_idle = sorted(range(len(why.shares)), key=lambda r: why.shares[r].computing)[:MOST]
    rows = []
    for r in sorted(by_idle):
        share, by_cause = why.shares[r], why.idle_by_owner[r]
        seconds = (share.computing, share.bubble, share.waiting, share.host)
        rows.append(
            (ranks_text(why.plan.roles[r].ranks), *map(time_text, seconds), _most_of(by_cause))
        )
    columns = (
        "rank",
        "computes",
        "waits for compute",
        "for messages",
        "for its host",
        "most of all for",
    )
    return Table(
        "what ranks do in a step",
        columns,
        tuple(rows),
        _left(len(why.shares) - len(rows), "roles, less idle"),
    )


def _gaps(why: Why) -> Table:
    gaps = sorted((g for own in why.gaps for g in own), key=lambda g: (-g.seconds, g.role, g.start))
    rows = []
    for gap in gaps[:MOST]:
        before = why.owners.at(gap.node)[1].name if gap.node >= 0 else "the end of the step"
        by_cause = why.owners.totals(gap.pieces)
        times = time_text(gap.start), time_text(gap.end)
        rows.append(
            (ranks_text(why.plan.roles[gap.role].ranks), *times, before, _most_of(by_cause, 3))
        )
    columns = ("rank", "from", "until", "before", "waits for")
    return Table("longest idle gaps", columns, tuple(rows), _left(len(gaps) - len(rows), "gaps"))


def _most_of(by_cause: Mapping[Cause, float], most: int = 1) -> str:
    """Return the largest causes as text, as in "F of stage 0 (1 s)"."""
    texts = [f"{o.text} ({time_text(s)})" for o, s in by_cause.items()]
    return (
        ", ".join(texts[:most]) + (f", {len(texts) - most} more" if len(texts) > most > 1 else "")
        or "-"
    )


def _what_if(why: Why) -> Table:
    rows, notes = [], []
    for row in why.what_if:
        if row.step_s is None:
            rows.append((row.name, "-", "-", ""))
            notes.append(f"{row.name}: {row.note}")
        else:
            rows.append(
                (row.name, time_text(row.step_s), _change(why.step_s, row.step_s), row.note)
            )
    if why.case.costs is not None:
        notes.append("a measured duration changes by the factor by which its formula does")
    return Table("what if", ("", "step", "change", ""), tuple(rows), tuple(notes))


def _sensitivities(why: Why) -> Table:
    rows, left = _most(
        [(s.name, f"{s.value:.4g}", f"{s.per_percent:+.3f} %") for s in why.sensitivities]
    )
    columns = ("constant", "value", "step, when it grows by 1 %")
    return Table("sensitivity of the step", columns, rows, _left(left, "constants"))


def _formulas(why: Why) -> Table:
    rows, left = _most(
        [
            (c.owner.text, str(c.count), time_text(c.seconds), time_text(c.on_path))
            for c in why.formulas
        ]
    )
    return Table(
        "costs from formulas",
        ("", "instructions", "time alone", "on the critical path"),
        rows,
        _left(left, "owners"),
    )


def _interval(why: Why) -> tuple[str, ...]:
    interval = why.interval
    if interval is None:
        return ("no interval by the spread of costs: none has one (piper profile measures it)",)
    return (
        f"interval by the spread of the costs: {time_text(interval.low)} to {time_text(interval.high)} (5 to 95 %, "
        f"median {time_text(interval.median)}; {interval.draws} draws, seed {interval.seed}); all one spread "
        f"faster or slower at once: {time_text(interval.fast)} to {time_text(interval.slow)}",
        f"{_share(interval.covered, 1)} of all seconds have a spread; the others are held fixed",
    )


def comparison_tables(
    result: Comparison, names: tuple[str, str], cluster: str, note: str = ""
) -> Iterator[Table]:
    """Yield the steps, and the parts of their difference: on the critical path, of the mean rank, and of the memory."""
    notes = (note,) if note else ()
    head = (_difference(result.step, time_text), _difference(result.peak, size_text))
    yield Table(f"two strategies on {cluster}", ("", *names, "change", ""), head, notes)
    tables = (("critical path", result.path), ("the mean rank", result.device))
    for title, differences in tables:
        yield _differences(
            f"{title}: where the difference arises", names, differences, result.step, time_text
        )
    yield _differences(
        "memory at the peak of the fullest rank", names, result.memory, result.peak, size_text
    )


def _differences(
    title: str,
    names: tuple[str, str],
    differences: Sequence[StepDifference],
    total: StepDifference,
    as_text: Callable[[float], str],
) -> Table:
    """Return a table of the largest differences and their sum; the others and the unchanged are one row each."""
    changed = [d for d in differences if abs(d.change) > NEGLIGIBLE * max(total.a, total.b)]
    shown, others, same = (
        changed[:MOST],
        changed[MOST:],
        [d for d in differences if d not in changed],
    )
    rows = [*shown, *_sum(f"{len(others)} others", others), *_sum("unchanged", same), total]
    return Table(title, ("", *names, "change", ""), tuple(_difference(d, as_text) for d in rows))


def _sum(name: str, differences: Sequence[StepDifference]) -> list[StepDifference]:
    return (
        [StepDifference(name, sum(d.a for d in differences), sum(d.b for d in differences))]
        if differences
        else []
    )


def _difference(d: StepDifference, as_text: Callable[[float], str]) -> tuple[str, ...]:
    if abs(d.change) <= NEGLIGIBLE * max(d.a, d.b):
        return d.name, as_text(d.a), as_text(d.b), "0", ""
    return (
        d.name,
        as_text(d.a),
        as_text(d.b),
        ("+" if d.change > 0 else "") + as_text(d.change),
        _change(d.a, d.b),
    )


def _change(a: float, b: float) -> str:
    percent = (b / a - 1) * 100 if a else 0.0
    digits = 1 if abs(percent) >= 0.1 else 2
    return f"{round(percent, digits) + 0.0:+.{digits}f} %" if a else ""


def _share(part: float, whole: float) -> str:
    return f"{part / whole * 100:.1f} %"


def _most(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[tuple[str, ...], ...], int]:
    """Return the first rows, and how many are left out."""
    return tuple(rows[:MOST]), max(0, len(rows) - MOST)


def _left(count: int, what: str) -> tuple[str, ...]:
    return (f"and {count} more {what}",) if count > 0 else ()
