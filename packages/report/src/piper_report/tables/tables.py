"""Make the tables of a report: numbers for a CSV file, and the same as text for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pandas import DataFrame

from piper_ir.fold.memory_owners import owners
from piper_ir.ground.codec import encode
from piper_ir.tools import ranks_text, size_text, time_text
from piper_report.facts.idle import RankIdle, busy_note, idle_ranks
from piper_report.facts.results import Results
from piper_report.facts.summary import (
    ABSENT,
    CATEGORY_NAMES,
    COUNTED,
    FIRST_STEP,
    HFU,
    INSIDE,
    MFU,
    ON_HOST,
    WAITING,
    WARM_UP,
    Table,
    memory_line,
    percent,
)
from piper_report.figures.training_figures import steps_of

Form = Callable[[Any], str]
TOP_OWNERS = 10
MOST_NOTES = 8
MOST_ROWS = 200
"""The most rows of a table on the page; its CSV file has all."""


@dataclass(frozen=True)
class Sheet:
    """Hold a table twice: as a `frame` of plain numbers, with units in the columns' names, and as text in `table`."""

    name: str
    frame: DataFrame
    table: Table


@dataclass(frozen=True, slots=True)
class Column:
    """Describe a column: `name` in the CSV file, with its unit; `title` on the page; `form` makes text of a value."""

    name: str
    title: str
    form: Form = str


def sheet(
    name: str,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Any]],
    notes: tuple[str, ...] = (),
) -> Sheet:
    """Return a sheet of rows of plain values; None is a dash on the page and an empty cell in the file.

    A column without any value is in the file only.
    """
    frame = DataFrame([list(r) for r in rows], columns=[c.name for c in columns], dtype=object)
    known = [k for k in range(len(columns)) if any(r[k] is not None for r in rows)]
    columns = [columns[k] for k in known]
    texts = tuple(
        tuple(ABSENT if r[k] is None else columns[n].form(r[k]) for n, k in enumerate(known))
        for r in rows[:MOST_ROWS]
    )
    if len(rows) > MOST_ROWS:
        notes = (*notes, f"{MOST_ROWS} of {len(rows)} rows are shown; {name}.csv has all.")
    return Sheet(name, frame, Table(title, tuple(c.title for c in columns), texts, notes))


def error_of(predicted: float | None, measured: float | None) -> float | None:
    """Return predicted / measured - 1."""
    return predicted / measured - 1 if predicted is not None and measured else None


def signed_percent(value: float) -> str:
    return f"{value * 100:+.1f} %"


def headline(results: Results) -> Sheet:
    """Return the figures of `Simulation.summary` for the worst rank, predicted beside measured."""
    p, m = results.predicted, results.measured
    gaps = (
        idle_ranks(results.measured_trace, results.plan)
        if results.measured_trace is not None
        else []
    )
    period = m.period_s if m else None
    most = max(m.peak_bytes.values(), default=None) if m else None
    mfu, hfu = (None, None) if period is None else _used(results, period)

    def predicted(name: str) -> float | None:
        return getattr(p, name) if p is not None else None

    rows: list[tuple[str, str, Form, float | None, float | None]] = [
        ("step in steady state", "s", time_text, predicted("period_s"), period),
        (FIRST_STEP, "s", time_text, predicted("step_s"), m.step_s[0] if m and m.step_s else None),
        ("tokens per second", "1/s", lambda v: f"{v:,.0f}", predicted("tokens_per_s"), m.tokens_per_s if m else None),
        (MFU, "1", percent, predicted("mfu"), mfu),
        (HFU, "1", percent, predicted("hfu"), hfu),
        ("exposed communication", "s", time_text, predicted("exposed_comm_s"), _worst(gaps, "exposed")),
        (INSIDE, "s", time_text, predicted("inside_comm_s") or None, None),
        ("bubble, global", "s", time_text, predicted("global_bubble_s"), _worst(gaps, "global_bubble")),
        ("bubble, span", "s", time_text, predicted("span_bubble_s"), _worst(gaps, "span_bubble")),
        ("peak memory, allocated", "B", size_text, predicted("allocated_bytes") or predicted("peak_bytes"), most),
        ("peak memory, device", "B", size_text, predicted("device_bytes"), None),
        (ON_HOST, "B", size_text, predicted("host_bytes") or None, None),
    ]  # fmt: skip
    shown = [r for r in rows if r[3] is not None or r[4] is not None]
    errors = [None if r[0] == FIRST_STEP else error_of(r[3], r[4]) for r in shown]
    notes = {
        r[0]: COUNTED.get(r[0], WARM_UP if r[0] == FIRST_STEP and r[4] is not None else None)
        for r in shown
    }
    text = tuple(
        (
            name,
            *(ABSENT if v is None else form(v) for v in (a, b)),
            ABSENT if error is None else signed_percent(error),
        )
        for (name, _, form, a, b), error in zip(shown, errors)
    )
    frame = DataFrame(
        [(name, unit, a, b, error, notes[name]) for (name, unit, _, a, b), error in zip(shown, errors)],
        columns=["figure", "unit", "predicted", "measured", "error", "note"], dtype=object,
    )  # fmt: skip
    below = (
        *(note for note in notes.values() if note is not None),
        *busy_note(results.measured_trace),
    )
    return Sheet(
        "headline",
        frame,
        _without_dashes(Table("Headline", ("", "predicted", "measured", "error"), text, below)),
    )


def _without_dashes(table: Table) -> Table:
    """Return a table without its empty columns."""
    known = [k for k in range(len(table.columns)) if any(row[k] != ABSENT for row in table.rows)]
    rows = tuple(tuple(row[k] for k in known) for row in table.rows)
    return replace(table, columns=tuple(table.columns[k] for k in known), rows=rows)


def _used(results: Results, period: float) -> tuple[float | None, float | None]:
    """Return the measured model and hardware utilisation, with the FLOPs and the peak of the predicted one."""
    p = results.predicted
    if p is None or not period:
        return None, None
    ratio = p.period_s / period
    return (
        p.mfu * ratio if p.mfu is not None else None,
        p.hfu * ratio if p.hfu is not None else None,
    )


def _worst(gaps: Sequence[RankIdle], name: str) -> float | None:
    values = [v for g in gaps if (v := getattr(g, name)) is not None]
    return max(values, default=None)


def rank_sheet(results: Results) -> Sheet | None:
    """Return by rank compute, bubble, exposed communication and peak memory, predicted and measured.

    Ranks of one role with the same figures have one row if nothing was measured.
    """
    before, same = {}, dict[int, int]()
    if results.predicted_trace:
        same = results.predicted_trace.shown_as()
        before = {g.rank: g for g in idle_ranks(results.predicted_trace, results.plan)}
    after = (
        {g.rank: g for g in idle_ranks(results.measured_trace, results.plan)}
        if results.measured_trace
        else {}
    )
    peaks = (
        {rank: r.peak_bytes for rank, r in results.predicted.by_rank().items()}
        if results.predicted
        else {}
    )
    held_by = (
        {int(r): b for r, b in results.measured.peak_bytes.items()} if results.measured else {}
    )
    columns = [Column("rank", "rank"), Column("role", "role")]
    for key, word in (
        ("busy", "compute"),
        ("global_bubble", "bubble"),
        ("exposed", "exposed comm."),
    ):
        columns += [
            Column(f"{key}_{w}_s", f"{word}, {w}", time_text) for w in ("predicted", "measured")
        ]
    columns += [
        Column(f"peak_{w}_bytes", f"peak, {w}", size_text) for w in ("predicted", "measured")
    ]
    columns += [Column("peak_error", "peak, error", signed_percent)]
    rows = []
    measured = after.keys() | held_by.keys()
    role_of = (
        {rank: role.role for role in results.plan.roles for rank in role.ranks}
        if results.plan
        else {}
    )
    for rank in sorted(before.keys() | measured | {r for r in peaks if r not in same}):
        row: list[Any] = [rank, role_of.get(rank)]
        for key in ("busy", "global_bubble", "exposed"):
            sides = before.get(same.get(rank, rank)), after.get(rank)
            row += [None if side is None else getattr(side, key) for side in sides]
        row += [peaks.get(rank), held_by.get(rank), error_of(peaks.get(rank), held_by.get(rank))]
        rows.append(row)
    if not measured:
        rows = _by_equal_figures(rows, same)
    return sheet("ranks", "By rank", columns, rows) if rows else None


def _by_equal_figures(rows: Sequence[Sequence[Any]], same: Mapping[int, int]) -> list[list[Any]]:
    """Return rows of ranks, in one row for equal roles and figures; ranks of `same` have no row of their own."""
    others: dict[int, list[int]] = {}
    for rank, first in same.items():
        others.setdefault(first, []).append(rank)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank, *figures in rows:
        groups.setdefault(tuple(figures), []).extend([rank, *others.get(rank, ())])
    return [[ranks_text(sorted(ranks)), *figures] for figures, ranks in groups.items()]


def line_sheet(results: Results) -> Sheet | None:
    """Return the memory of the fullest device at its peak, by line."""
    lines = results.predicted.memory if results.predicted is not None else {}
    total = sum(lines.values())
    columns = [
        Column("line", "line"),
        Column("bytes", "size", size_text),
        Column("share", "share", percent),
    ]
    rows: list[tuple[Any, ...]] = [
        (memory_line(name), b, b / total) for name, b in lines.items() if b
    ]
    if rows and results.predicted is not None:
        by_rank = results.predicted.by_rank().values()
        limit = next(
            (r.limit_bytes for r in by_rank if r.device_bytes == results.predicted.device_bytes),
            None,
        )
        rows += [
            ("tensors of the plan", results.predicted.peak_bytes, None),
            ("in all on the device", total, 1.0),
        ]
        rows += [("what the device has", limit, None)] if limit is not None else []
    return (
        sheet("memory_lines", "Memory of the fullest device at its peak, predicted", columns, rows)
        if rows
        else None
    )


def owner_sheet(results: Results) -> Sheet | None:
    """Return the owners of memory at the peak of each role, the fullest first."""
    plan = results.plan
    if plan is None:
        return None
    columns = [
        Column("role", "role"),
        Column("category", "category", lambda v: str(CATEGORY_NAMES.get(v, v))),
        Column("owner", "owner"),
        Column("values", "values"),
        Column("microbatches", "microbatches"),
        Column("bytes", "size", size_text),
        Column("share", "share of the peak", percent),
    ]
    top: list[Sequence[Any]] = []
    rows: list[Sequence[Any]] = []
    notes = []
    for role in sorted(plan.roles, key=lambda r: -r.peak_bytes):
        role_owners = owners(plan, role)
        total = sum(o.bytes for o in role_owners)
        mine = [
            (
                role.role,
                o.category,
                o.name,
                o.count,
                _ranges(o.mbs) or None,
                o.bytes,
                o.bytes / total,
            )
            for o in role_owners
        ]
        top += mine[:TOP_OWNERS]
        rows += mine
        if len(role_owners) > TOP_OWNERS:
            rest = sum(o.bytes for o in role_owners[TOP_OWNERS:])
            notes.append(
                f"{role.role}: {len(role_owners) - TOP_OWNERS} further owners hold {size_text(rest)} together."
            )
    if not rows:
        return None
    shown = sheet("owners", "Owners of the peak", columns, top, tuple(notes[:MOST_NOTES]))
    return replace(shown, frame=sheet("owners", "", columns, rows).frame)


def _ranges(mbs: Sequence[int]) -> str:
    """Return numbers as text such as "0-3, 5"."""
    ranges: list[list[int]] = []
    for mb in mbs:
        if ranges and mb == ranges[-1][1] + 1:
            ranges[-1][1] = mb
        else:
            ranges.append([mb, mb])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in ranges)


def source_sheet(results: Results) -> Sheet | None:
    """Return the sources of the predicted durations, by share of all seconds."""
    if results.predicted is None or not results.predicted.sources:
        return None
    rows = sorted(results.predicted.sources.items(), key=lambda s: -s[1])
    return sheet("sources", "Where the predicted durations come from",
                 [Column("source", "source"), Column("share", "share of all "
                                                              "seconds", percent)], rows)  # fmt: skip


def step_sheet(results: Results) -> Sheet | None:
    """Return the time of each step; None when no steps are known."""
    rate = {m.step: m.tokens_per_s for m in results.metrics}
    waited = {m.step: m.batch_s for m in results.metrics}
    logged = _logged(results)
    more = [[of.get(step) for of in logged.values()] for step, *_ in steps_of(results)]
    rows = [
        (step, loss, s, waited.get(step), rate.get(step), *own)
        for (step, loss, s), own in zip(steps_of(results), more, strict=True)
    ]
    columns = [Column("step", "step"), Column("loss", "loss", lambda v: f"{v:.5g}"), Column("step_s", "time", time_text),
               Column("batch_s", WAITING, time_text),
               Column("tokens_per_s", "tokens per second", lambda v: f"{v:,.0f}"),
               *(Column(name.replace(" ", "_"), name, lambda v: f"{v:.5g}") for name in logged)]  # fmt: skip
    return sheet("steps", "Steps", columns, rows) if rows else None


def _logged(results: Results) -> dict[str, dict[int, float]]:
    """Return by name the values that a run logs beside loss and times, by step; names without any are left out."""
    series_by_name: dict[str, dict[int, float]] = {}
    for m in results.metrics:
        several = len(set(m.learning_rates)) > 1
        rates = {
            f"learning rate {k}" if several else "learning rate": rate
            for k, rate in enumerate(m.learning_rates)
        }
        norm = {} if m.gradient_norm is None else {"gradient norm": m.gradient_norm}
        evaluated = {f"eval {name}": value for name, value in m.evaluation.items()}
        for name, value in {**norm, **rates, **m.metrics, **evaluated}.items():
            series_by_name.setdefault(name, {})[m.step] = value
    return series_by_name


def restart_sheet(results: Results) -> Sheet | None:
    """Return the failures after which a run went on, and how it went on each time; None without any."""
    failures = results.measured.restarts if results.measured is not None else ()
    columns = [Column("step", "in step"), Column("resumed", "went on with step"), Column("ranks", "ranks"),
               Column("lost", "ranks that died"), Column("seconds", "to the next finished step", time_text),
               Column("source", "from"), Column("message", "failure")]  # fmt: skip
    rows = [
        (
            r.step,
            r.resumed,
            r.ranks,
            ", ".join(map(str, r.lost)) or None,
            r.seconds,
            r.source,
            r.message,
        )
        for r in failures
    ]
    return sheet("restarts", "Restarts", columns, rows) if rows else None


def cost_sheet(results: Results) -> Sheet | None:
    """Return every duration of a profile with its subject, and below it where and when they were measured."""
    if results.costs is None:
        return None
    document: dict[str, Any] = encode(results.costs)
    rows = [
        (kind, ", ".join(words), *cells)
        for kind, value in document.items()
        for words, *cells in _durations(value, ())
    ]
    columns = [
        Column("kind", "kind"),
        Column("of", "of"),
        Column("seconds", "time", time_text),
        Column("spread_s", "spread", time_text),
        Column("source", "source"),
    ]
    others = {k: v for k, v in document.items() if not any(True for _ in _durations(v, ()))}
    notes = tuple(f"{name}: {'; '.join(_scalars(value))}" for name, value in others.items())
    return sheet("costs", "Measured durations", columns, rows, notes) if rows else None


def _durations(
    value: Any, words: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], float, float | None, str]]:
    """Yield the entries with seconds of a document of Costs: (subject, seconds, spread, source)."""
    if isinstance(value, list):
        for item in value:
            yield from _durations(item, words)
    elif isinstance(value, dict) and "seconds" in value:
        yield words, value["seconds"], value.get("spread"), value.get("source", "measured")
    elif isinstance(value, dict):
        own = tuple(f"{k} {v}" for k, v in value.items() if isinstance(v, str | int | float))
        for key, inner in value.items():
            yield from _durations(inner, (*words, *own) if key == "duration" else (*words, key))


def _scalars(value: Any) -> list[str]:
    """Return the facts in a document beside durations, one text per value."""
    if isinstance(value, dict):
        return [f"{k} {text}" for k, v in value.items() for text in _scalars(v)]
    if isinstance(value, list):
        return [text for v in value for text in _scalars(v)]
    return [str(value)]
