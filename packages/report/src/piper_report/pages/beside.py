"""Write one page of two result folders, beside each other: the facts that differ, and the changes in their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from pandas import DataFrame

from piper_report.facts.idle import makespan
from piper_report.facts.results import Results, load
from piper_report.facts.summary import ABSENT, FIRST_STEP, Table
from piper_report.figures.gantt import timelines
from piper_report.figures.live_timeline import TimelineStep, live_timeline
from piper_report.figures.style import BLUE, RED, Picture, house_style, one_panel, picture
from piper_report.figures.training_figures import steps_of
from piper_report.pages.page import PageSection, page
from piper_report.pages.report import Report, facts_of, with_aligned_clocks, with_spans, write_files
from piper_report.tables.stage_tables import stage_sheet
from piper_report.tables.tables import Sheet, headline, line_sheet, signed_percent

SIDES = ("a", "b")
COLOURS = (BLUE, RED)
MOST_PERCENT = 9.0
"""The change, as a part, from which on per cent are hard to read."""
NOT_COMPARED = ("at", "command")
"""The facts that always differ, and say nothing about the results."""


@dataclass(frozen=True)
class Side:
    """Hold one of the two folders under its name on the page."""

    name: str
    results: Results


def write_beside(a: str | Path, b: str | Path, *, out: str | Path | None = None) -> Report:
    """Write one page of two folders into `out` (default: a folder in `b`), with its figures and tables beside it.

    Raises:
        FormatError: see `piper_report.load`.
        OutputError: they cannot be written.
    """
    names = _names(Path(a), Path(b))
    sides = [
        Side(name, with_aligned_clocks(load(folder)))
        for name, folder in zip(names, (a, b), strict=True)
    ]
    target = Path(out) if out is not None else Path(b) / f"report-beside-{Path(a).resolve().name}"
    with house_style():
        sections = _sections(sides)
    title = f"Piper: {names[0]} beside {names[1]}"
    facts = [
        (name, str(Path(folder).resolve())) for name, folder in zip(names, (a, b), strict=True)
    ]
    items = [x for s in sections for x in (*s.items, *s.folded)]
    return write_files(target, page(title, facts, sections), items)


def _names(a: Path, b: Path) -> tuple[str, str]:
    names = a.resolve().name, b.resolve().name
    return names if names[0] != names[1] else (str(a), str(b))


def _sections(sides: Sequence[Side]) -> list[PageSection]:
    stages = [
        _named(stage_sheet(side.results), "stages", side, key)
        for side, key in zip(sides, SIDES, strict=True)
    ]
    steps = [_step(side) for side in sides]
    live = live_timeline(steps)
    loss = _losses(sides)
    figures = _figures("headline", "Figures", [headline(side.results) for side in sides], sides)
    lines = [line_sheet(side.results) for side in sides]
    memory = (
        []
        if None in lines
        else [_figures("memory_lines", "Memory of the fullest device, predicted", lines, sides)]
    )
    return [
        PageSection("summary", "Headline", (), [figures]),
        PageSection("training", "Training", (), [loss] if loss is not None else []),
        PageSection("facts", "What differs", (), [_differences(sides)]),
        PageSection("stages", "Stages", (), [x for x in stages if x is not None]),
        PageSection(
            "timeline",
            "Timeline of a step",
            (),
            [live] if live is not None else [],
            _timelines(steps),
        ),
        PageSection("memory", "Memory", (), memory),
    ]


def _named(found: Sheet | None, name: str, side: Side, key: str) -> Sheet | None:
    if found is None:
        return None
    return replace(
        found,
        name=f"{name}_{key}",
        table=replace(found.table, title=f"{found.table.title} of {side.name}"),
    )


def _differences(sides: Sequence[Side]) -> Sheet:
    """Return the facts that differ; a note names the others."""
    a, b = (dict(facts_of(side.results)) for side in sides)
    names = [n for n in dict.fromkeys((*a, *b)) if n not in NOT_COMPARED]
    rows = tuple((n, a.get(n, ABSENT), b.get(n, ABSENT)) for n in names if a.get(n) != b.get(n))
    same = [f"{n}: {a[n]}" for n in names if a.get(n) == b.get(n)]
    notes = (f"the same in both: {'; '.join(same)}",) if same else ()
    columns = ("", *(side.name for side in sides))
    frame = DataFrame(list(rows), columns=["fact", *SIDES], dtype=object)
    return Sheet("differences", frame, Table("What differs", columns, rows, notes))


def _figures(name: str, title: str, sheets: Sequence[Sheet | None], sides: Sequence[Side]) -> Sheet:
    """Return the figures of two sheets beside each other, each kind (predicted, measured) with its change."""
    side_numbers = [_numbers(s) for s in sheets if s is not None]
    kinds = [
        k
        for k in ("predicted", "measured", "bytes")
        if any(k in row for side in side_numbers for row in side.values())
    ]
    columns, texts, numbers = [""], [], []
    for kind in kinds:
        word = "" if kind == "bytes" else f", {kind}"
        columns += [f"{side.name}{word}" for side in sides] + [f"change{word}"]
    for figure in dict.fromkeys(key for side in side_numbers for key in side):
        text: list[str] = [figure]
        number: list[Any] = [figure]
        for kind in kinds:
            pair = [side.get(figure, {}).get(kind, (None, ABSENT)) for side in side_numbers]
            change = (
                _change(*(value for value, _ in pair))
                if figure != FIRST_STEP or kind == "predicted"
                else None
            )
            text += [*(shown for _, shown in pair), ABSENT if change is None else _told(change)]
            number += [*(value for value, _ in pair), change]
        texts.append(tuple(text))
        numbers.append(number)
    keep = [k for k in range(len(columns)) if not texts or any(row[k] != ABSENT for row in texts)]
    rows = tuple(tuple(row[k] for k in keep) for row in texts)
    heads = ["figure", *(f"{what}_{kind}" for kind in kinds for what in (*SIDES, "change"))]
    return Sheet(
        name,
        DataFrame(numbers, columns=heads, dtype=object),
        Table(title, tuple(columns[k] for k in keep), rows),
    )


def _numbers(sheet: Sheet) -> Mapping[str, Mapping[str, tuple[Any, str]]]:
    """Return by row and kind the number and its text."""
    shown = {
        row[0]: dict(zip(sheet.table.columns[1:], row[1:], strict=True)) for row in sheet.table.rows
    }
    words = {"predicted": "predicted", "measured": "measured", "bytes": "size"}
    numbers = {}
    for record in sheet.frame.to_dict("records"):
        name = record[sheet.frame.columns[0]]
        numbers[name] = {
            k: (record[k], shown.get(name, {}).get(word, ABSENT))
            for k, word in words.items()
            if k in record
        }
    return numbers


def _change(a: float | None, b: float | None) -> float | None:
    return b / a - 1 if a and b is not None else None


def _told(change: float) -> str:
    """Return a change as text: in per cent, or as a factor if it is ten times as much or more."""
    return signed_percent(change) if change < MOST_PERCENT else f"{change + 1:,.3g} times"


def _timelines(steps: Sequence[TimelineStep]) -> list[Picture]:
    """Return a timeline of each side, all on the same scale of time."""
    length = max([makespan(t) for step in steps for t in step.traces], default=0.0)
    pictures = []
    for step, key in zip(steps, SIDES, strict=True):
        for drawn in timelines(step.traces, step.plan, length)[:1] if step.traces else ():
            pictures.append(replace(drawn, name=f"{drawn.name}_{key}", title=step.name))
    return pictures


def _step(side: Side) -> TimelineStep:
    return TimelineStep(side.name, with_spans(side.results), side.results.plan)


def _losses(sides: Sequence[Side]) -> Picture | None:
    """Draw the loss of both sides by step; None when neither was trained."""
    curves = [
        [(step, loss) for step, loss, _ in steps_of(side.results) if isfinite(loss)]
        for side in sides
    ]
    if not any(curves):
        return None
    figure, ax = one_panel(3.0, "step", "loss")
    for side, points, colour, dash in zip(sides, curves, COLOURS, ("-", "--"), strict=True):
        if points:
            ax.plot(*zip(*points), color=colour, linestyle=dash, linewidth=1.4, label=side.name)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    said = "; ".join(
        f"{side.name} ends at {points[-1][1]:.4g}"
        for side, points in zip(sides, curves, strict=True)
        if points
    )
    caption = "Over the global batch of each step."
    return picture(
        figure, "loss", "Loss", f"Loss by step: {said}.", caption, marks=sum(map(len, curves))
    )
