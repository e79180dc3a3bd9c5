"""Draw a schedule as the coloured grid of the literature: a row per rank, a cell per instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from piper_ir.ground.errors import OutputError
from piper_ir.ground.trace import Span, Trace
from piper_ir.plan.phases import PHASES, InstrLabel
from piper_ir.plan.plan import COMPUTE, Plan
from piper_ir.tools import named_ranks, write_whole
from piper_report.facts.idle import makespan
from piper_report.facts.phases import chunk_numbers, chunks_of, kinds
from piper_report.figures.style import (
    GREY,
    INK,
    PHASE_COLOURS,
    TimeUnit,
    house_style,
    ink_on,
    new_figure,
    panels,
    rendered,
    time_unit,
    tint,
)

IDLE = "#F4F4F4"
WIDEST = 40.0
"""The largest width of the drawing in inches, however long the schedule is."""
TALLEST = 60.0
CELL = 0.3
"""The inches that three of four cells should have at least, so that their numbers can be read."""


PALEST = 0.45
"""The strength of the colour of a device's last chunk; its first has all of it."""


@dataclass(frozen=True)
class Drawing:
    """Hold a schedule to draw; the plan tells apart the chunks of a device, and I fused with I from I fused with W."""

    trace: Trace
    plan: Plan | None = None
    title: str = ""


def draw_schedule(trace: Trace, path: str | Path, plan: Plan | None = None) -> None:
    """Write a PNG: rows are ranks (alike ones share a row), colours are phases, numbers are microbatches.

    An overlapped pair is a cell of two halves, forward above. The later of a device's chunks (stages) are paler. Grey
    is idle. The plan tells apart the chunks, and I fused with I from I fused with W; without it the latter is assumed.
    Raises OutputError when the file cannot be written.
    """
    draw_schedules([Drawing(trace, plan)], path)


def draw_schedules(drawings: Sequence[Drawing], path: str | Path) -> None:
    """Write a PNG like `draw_schedule`, with several schedules below each other on one axis of time."""
    with house_style():
        png = _drawn(drawings)
    try:
        write_whole(Path(path), png)
    except OSError as e:
        raise OutputError(
            f"cannot write the schedule to {path}: {e.strerror}; choose another path"
        ) from None


def _drawn(drawings: Sequence[Drawing]) -> bytes:
    work = [_work(d) for d in drawings]
    length = max(makespan(d.trace) for d in drawings) or 1.0
    ranks = [len({s.rank for s in d.trace.spans}) for d in drawings]
    width = max(7.0, *(_width(labels, length) for labels in work))
    titles = sum(0.3 for d in drawings if d.title)
    figure = new_figure(min(TALLEST, 1.1 + titles + 0.32 * max(1, sum(ranks))), width)
    axes = panels(figure, len(drawings), sharex=True, heights=[max(1, n) for n in ranks])
    for ax, drawing, labels in zip(axes, drawings, work, strict=True):
        _schedule(ax, drawing, labels, length, width)
    unit = time_unit(length)
    axes[-1].set_xlabel(f"time since the step began ({unit.name})")
    halves = {h[0] for labels in work for k in labels.values() for h in k.halves}
    handles = [
        Patch(facecolor=PHASE_COLOURS[p], edgecolor=GREY, linewidth=0.4, label=PHASES[p])
        for p in PHASES
        if p in halves
    ]
    handles.append(Patch(facecolor=IDLE, edgecolor=GREY, linewidth=0.4, label="idle"))
    if any(len(c) > 1 for d in drawings if d.plan is not None for c in chunks_of(d.plan).values()):
        pale = tint(PHASE_COLOURS["F"], PALEST)
        handles.append(
            Patch(
                facecolor=pale,
                edgecolor=GREY,
                linewidth=0.4,
                label="paler: a later chunk of the device",
            )
        )
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), max(2, int(width / 2.2))),
        frameon=False,
    )
    return rendered(figure, "png")


def _work(drawing: Drawing) -> dict[Span, InstrLabel]:
    """Return the computing spans that take time, with their labels."""
    return {
        s: k
        for s, k in kinds(drawing.trace, drawing.plan).items()
        if s.stream == COMPUTE and s.end > s.start
    }


def _width(work: Mapping[Span, InstrLabel], length: float) -> float:
    """Return the inches at which most of the cells have room for their number."""
    lengths = sorted(s.end - s.start for s, k in work.items() if k.mb >= 0) or [length]
    return min(WIDEST, 1.2 + CELL * length / lengths[len(lengths) // 4])


def _schedule(
    ax: Axes, drawing: Drawing, work: Mapping[Span, InstrLabel], length: float, width: float
) -> None:
    """Draw one schedule, on an axis of time that others may share."""
    ranks = sorted({s.rank for s in drawing.trace.spans})
    origin = min((s.start for s in drawing.trace.spans), default=0.0)
    unit = time_unit(length)
    ax.grid(False)
    row_of = {rank: y for y, rank in enumerate(ranks)}
    for y in row_of.values():
        ax.broken_barh(
            [(0, makespan(drawing.trace) * unit.scale)],
            (y - 0.45, 0.9),
            facecolor=IDLE,
            edgecolor="none",
        )
    axis = _TimeAxis(ax, origin, unit, width * 0.88 * 72 / length)
    strengths = _strengths(drawing, work)
    for span, kind in work.items():
        _cell(axis, span, kind, strengths[span], row_of[span.rank])
    alike = {same[0]: same for same in drawing.trace.alike}
    ax.set_yticks(range(len(ranks)), [named_ranks(alike.get(r, (r,))) for r in ranks])
    ax.set_ylim(len(ranks) - 0.45, -0.55)
    ax.set_xlim(0, length * unit.scale)
    ax.tick_params(axis="y", length=0)
    if drawing.title:
        ax.set_title(drawing.title, loc="left")


def _strengths(drawing: Drawing, work: Mapping[Span, InstrLabel]) -> dict[Span, tuple[float, ...]]:
    """Return the strength of the colour of each half of an instruction."""
    plan = drawing.plan
    if plan is None:
        return {s: (1.0,) * len(k.halves) for s, k in work.items()}
    chunks = chunks_of(plan)
    steps = {role: (1 - PALEST) / max(1, len(mine) - 1) for role, mine in chunks.items()}
    return {
        span: tuple(1 - steps[plan.role_of(span.rank).role] * (number or 0) for number in numbers)
        for span, numbers in chunk_numbers(work, plan, chunks).items()
    }


@dataclass(frozen=True)
class _TimeAxis:
    """Hold the axes of a schedule, and how times lie on them.

    Attributes:
        origin: the time at the left end, in seconds.
        unit: the unit of the labels.
        points: the printer's points per second.
    """

    ax: Axes
    origin: float
    unit: TimeUnit
    points: float


def _cell(
    axis: _TimeAxis, span: Span, kind: InstrLabel, strengths: Sequence[float], y: int
) -> None:
    """Draw one instruction, its halves above each other."""
    ax, scale, seconds = axis.ax, axis.unit.scale, span.end - span.start
    start, length = (span.start - axis.origin) * scale, seconds * scale
    each = 0.9 / len(kind.halves)
    for i, (phase, mb) in enumerate(kind.halves):
        low = y - 0.45 + i * each
        colour = tint(PHASE_COLOURS[phase], strengths[i])
        ax.broken_barh(
            [(start, length)], (low, each), facecolor=colour, edgecolor="white", linewidth=0.5
        )
        text, font = str(mb) if mb >= 0 else "", 8 if len(kind.halves) == 1 else 6
        if text and seconds * axis.points > 0.62 * font * len(text) + 1.5:
            ax.text(
                start + length / 2,
                low + each / 2,
                text,
                ha="center",
                va="center_baseline",
                fontsize=font,
                color=ink_on(colour),
            )
    if len(kind.halves) > 1:
        ax.broken_barh(
            [(start, length)], (y - 0.45, 0.9), facecolor="none", edgecolor=INK, linewidth=0.8
        )
