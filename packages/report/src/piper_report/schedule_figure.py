"""A schedule as the coloured grid of the literature: one row per rank, a cell per instruction, numbers of microbatches."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from piper_ir.errors import OutputError
from piper_ir.plan import COMPUTE, Plan
from piper_ir.trace import Span, Trace
from piper_report.idle import makespan
from piper_report.phases import PHASES, Kind, Phase, kinds
from piper_report.style import (
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
)

IDLE = "#F4F4F4"
WIDEST = 40.0
"""Inches of the drawing, however long the schedule is."""
TALLEST = 60.0
CELL = 0.3
"""Inches that three of four cells should have at least, so that their numbers can be read."""


def draw_schedule(trace: Trace, path: str | Path, plan: Plan | None = None) -> None:
    """Write a PNG: rows are ranks, colours phases, the numbers microbatches; an overlapped pair is a cell of two halves, forward
    above; what stays pale is idle. The plan tells I fused with I from I fused with W; without it the latter is assumed.
    OutputError when the file cannot be written."""
    with house_style():
        png = _drawn(trace, plan)
    try:
        Path(path).write_bytes(png)
    except OSError as e:
        raise OutputError(f"cannot write the schedule to {path}: {e.strerror}; choose another path") from None


def _drawn(trace: Trace, plan: Plan | None) -> bytes:
    work = {s: k for s, k in kinds(trace, plan).items() if s.stream == COMPUTE and s.end > s.start}
    ranks = sorted({s.rank for s in trace.spans})
    origin, length = min((s.start for s in trace.spans), default=0.0), makespan(trace) or 1.0
    unit = time_unit(length)
    lengths = sorted(s.end - s.start for s, k in work.items() if k.mb >= 0) or [length]
    width = min(WIDEST, max(7.0, 1.2 + CELL * length / lengths[len(lengths) // 4]))
    height = min(TALLEST, 1.1 + 0.32 * max(1, len(ranks)))
    figure = new_figure(height, width)
    (ax,) = panels(figure, 1)
    ax.grid(False)
    row_of = {rank: y for y, rank in enumerate(ranks)}
    for y in row_of.values():
        ax.broken_barh([(0, length * unit.scale)], (y - 0.45, 0.9), facecolor=IDLE, edgecolor="none")
    points = width * 0.88 * 72 / length  # per second
    for span, kind in work.items():
        _cell(ax, span, kind, row_of[span.rank], origin, unit, (span.end - span.start) * points)
    ax.set_yticks(range(len(ranks)), [f"rank {r}" for r in ranks])
    ax.set_ylim(len(ranks) - 0.45, -0.55)
    ax.set_xlim(0, length * unit.scale)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(f"time since the step began ({unit.name})")
    phases: list[Phase] = [p for p in PHASES if p != "pair" and any(p in (h[0] for h in k.halves) for k in work.values())]
    handles = [Patch(facecolor=PHASE_COLOURS[p], edgecolor=GREY, linewidth=0.4, label=PHASES[p]) for p in phases]
    handles.append(Patch(facecolor=IDLE, edgecolor=GREY, linewidth=0.4, label="idle"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), max(2, int(width / 1.8))), frameon=False)
    return rendered(figure, "png")


def _cell(ax: Axes, span: Span, kind: Kind, y: int, origin: float, unit: TimeUnit, points: float) -> None:
    """One instruction, its halves above each other."""
    start, length = (span.start - origin) * unit.scale, (span.end - span.start) * unit.scale
    each = 0.9 / len(kind.halves)
    for i, (phase, mb) in enumerate(kind.halves):
        low = y - 0.45 + i * each
        colour = PHASE_COLOURS[phase]
        ax.broken_barh([(start, length)], (low, each), facecolor=colour, edgecolor="white", linewidth=0.5)
        text, font = str(mb) if mb >= 0 else "", 8 if len(kind.halves) == 1 else 6
        if text and points > 0.62 * font * len(text) + 1.5:
            ax.text(
                start + length / 2, low + each / 2, text, ha="center", va="center_baseline", fontsize=font, color=ink_on(colour)
            )
    if len(kind.halves) > 1:
        ax.broken_barh([(start, length)], (y - 0.45, 0.9), facecolor="none", edgecolor=INK, linewidth=0.8)
