"""The timeline of a step: per rank and stream, predicted above measured, on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from piper_ir.plan import COMPUTE, Plan
from piper_ir.trace import Span, Trace
from piper_report.idle import makespan
from piper_report.phases import PHASES, Kind, Phase, kinds
from piper_report.style import (
    DPI,
    GREY,
    INK,
    MICROBATCHES,
    PALE,
    WIDTH,
    Picture,
    TimeUnit,
    ink_on,
    new_figure,
    panels,
    picture,
    time_unit,
    tint,
)
from piper_report.summary import seconds
from piper_report.transfers import transfers

MOST_RANKS = 8
MOST_LABELS = 1200
STRENGTH = {"F": 0.3, "B": 1.0, "I": 0.8, "W": 1.0, "pair": 0.7, "comm": 0.3}
OUTLINED = ("F", "comm")
"""Pale phases, whose bars have an edge in the full colour."""
HATCH = {"I": "....", "W": "//////", "pair": "xxxx"}
WAITING = "#B0B0B0"
PLOT_SHARE = 0.84
"""Of a figure's width, about what the axes of a timeline have."""
Look = tuple[tuple[float, float, float], str, str]
"""Face colour, edge colour, hatch."""


@dataclass(slots=True)
class Row:
    """One stream of one rank in one trace: bars by look, and labels (middle in seconds, text, colour of what they stand on)."""

    name: str
    bars: dict[Look, list[tuple[float, float]]] = field(default_factory=dict)
    labels: list[tuple[float, str, tuple[float, float, float]]] = field(default_factory=list)
    drawn: int = 0
    hidden: int = 0


def gantt(traces: Sequence[Trace], plan: Plan | None) -> Picture:
    """`traces`: predicted, measured, or both in this order. Of more than 8 ranks, one per role comes first; of bars narrower than
    half a pixel one per half pixel is drawn."""
    ranks = shown_ranks(traces, plan)
    length = max(makespan(t) for t in traces)
    unit = time_unit(length)
    rows = {rank: _rows(traces, plan, rank, length) for rank in ranks}
    count = sum(map(len, rows.values()))
    figure = new_figure(0.75 + 0.2 * count + 0.42 * len(ranks))
    axes = panels(figure, len(ranks), sharex=True)
    for ax, rank in zip(axes, ranks):
        role = f" ({plan.role_of(rank).role})" if plan is not None else ""
        ax.set_title(f"rank {rank}{role}", loc="left", fontweight="bold")
        _draw(ax, rows[rank], unit)
    axes[-1].set_xlim(0, length * unit.scale * 1.005)
    axes[-1].set_xlabel(f"time since the step began ({unit.name})")
    found = {k for t in traces for k in kinds(t, plan).values()}
    figure.legend(handles=_legend(found), loc="outside lower center", ncols=7, frameon=False, handlelength=1.6)
    drawn = sum(r.drawn for rs in rows.values() for r in rs)
    hidden = sum(r.hidden for rs in rows.values() for r in rs)
    both = " over ".join("predicted" if t.kind == "simulated" else "measured" for t in traces)
    everyone = len({s.rank for t in traces for s in t.spans})
    return picture(
        figure, "timeline", "Timeline of a step",
        f"Gantt chart of one step, {both}: {len(ranks)} of {everyone} ranks, each with its streams, over {seconds(length)}.",
        _caption(traces, len(ranks), everyone, hidden), wide=900, marks=drawn,
    )  # fmt: skip


def shown_ranks(traces: Sequence[Trace], plan: Plan | None) -> list[int]:
    """At most MOST_RANKS ranks of the traces, ascending: the first of every role before any other."""
    ranks = sorted({s.rank for t in traces for s in t.spans})
    firsts = [min(role.ranks) for role in plan.roles] if plan is not None else []
    return sorted(sorted(ranks, key=lambda r: (r not in firsts, r))[:MOST_RANKS])


def _rows(traces: Sequence[Trace], plan: Plan | None, rank: int, length: float) -> list[Row]:
    """Streams in the plan's order (without one: compute, then the others by name); of each one row per trace."""
    used = {s.stream for t in traces for s in t.spans if s.rank == rank}
    known = [s for s in plan.role_of(rank).streams if s in used] if plan is not None else []
    streams = known + sorted(used - set(known), key=lambda name: (name != COMPUTE, name))
    column = length / (WIDTH * PLOT_SHARE * DPI) / 2
    found = [(t, kinds(t, plan), _begun(t, plan)) for t in traces]
    out = []
    for stream in streams:
        for i, (trace, kind, begun) in enumerate(found):
            word = ("predicted" if trace.kind == "simulated" else "measured") if len(traces) > 1 else ""
            row = Row(f"{stream}  {word}".strip() if i == 0 else word)
            spans = sorted((s for s in trace.spans if s.rank == rank and s.stream == stream), key=lambda s: s.start)
            for span in spans:
                _add(row, span, kind[span], begun.get(span, span.start), column)
            out.append(row)
    return out


def _begun(trace: Trace, plan: Plan | None) -> dict[Span, float]:
    """Span -> when its transfer had all its ends; what a rank waits before is drawn hollow."""
    if plan is None or trace.kind == "simulated":
        return {}
    return {s: max(x.start for x in group) for group in transfers(plan, trace) for s in group}


def _add(row: Row, span: Span, kind: Kind, begun: float, column: float) -> None:
    last = max((start + width for bars in row.bars.values() for start, width in bars[-1:]), default=-1.0)
    if span.end - span.start < column and span.end < last + column and row.drawn:
        row.hidden += 1
        return
    row.drawn += 1
    look = _look(kind)
    moving = min(max(begun, span.start), span.end)
    if moving - span.start > column:
        hollow: Look = ((1.0, 1.0, 1.0), WAITING, "")
        row.bars.setdefault(hollow, []).append((span.start, moving - span.start))
    row.bars.setdefault(look, []).append((moving, max(span.end - moving, column)))
    points = (span.end - moving) / column / 2 / DPI * 72
    text = next((t for t in (kind.label, str(kind.mb) if kind.mb >= 0 else "") if t and points > 5.2 * len(t) + 3), "")
    if text:
        row.labels.append(((moving + span.end) / 2, text, look[0]))


def _look(kind: Kind) -> Look:
    phase = kind.phase
    if kind.mb < 0 or phase == "other":
        return tint(GREY if phase != "comm" else PALE, 1.0 if phase in ("U", "comm") else 0.5), GREY, ""
    colour = MICROBATCHES[kind.mb % len(MICROBATCHES)]
    face = tint(colour, STRENGTH[phase])
    return face, (colour if phase in OUTLINED else "white"), HATCH.get(phase, "")


def _draw(ax: Axes, rows: Sequence[Row], unit: TimeUnit) -> None:
    budget = MOST_LABELS
    for y, row in enumerate(rows):
        for (face, edge, hatch), bars in row.bars.items():
            scaled = [(start * unit.scale, width * unit.scale) for start, width in bars]
            ax.broken_barh(scaled, (y - 0.42, 0.84), facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.6)
        for middle, text, ground in row.labels[:budget]:
            ax.text(
                middle * unit.scale, y, text, ha="center", va="center_baseline", fontsize=7, color=ink_on(ground), clip_on=True
            )
        budget -= min(budget, len(row.labels))
    ax.set_yticks(range(len(rows)), [r.name for r in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)


def _legend(found: set[Kind]) -> list[Patch]:
    """The phases that occur, in grey, then the colours of the microbatches."""
    phases: list[Phase] = [p for p in PHASES if any(k.phase == p for k in found)]
    out = []
    for p in phases:
        look = _look(Kind(((p, -1),)))[0] if p in ("U", "other") else tint(GREY, STRENGTH.get(p, 1.0))
        edge = GREY if p in (*OUTLINED, "other", "U") else "white"
        out.append(Patch(facecolor=look, edgecolor=edge, hatch=HATCH.get(p, ""), label=PHASES[p]))
    mbs = sorted({mb for k in found for _, mb in k.halves if mb >= 0})
    for i, colour in enumerate(MICROBATCHES):
        same = [mb for mb in mbs if mb % len(MICROBATCHES) == i]
        if same:
            text = ", ".join(map(str, same[:3])) + (", ..." if len(same) > 3 else "")
            out.append(Patch(facecolor=colour, edgecolor=INK, linewidth=0.3, label=f"microbatch {text}"))
    return out


def _caption(traces: Sequence[Trace], shown: int, everyone: int, hidden: int) -> str:
    parts = ["Colour is the microbatch, shade and hatch the phase; the number in a bar is the microbatch."]
    if any(t.kind == "executed" for t in traces):
        parts.append(
            "A measured communication is hollow while its rank waits for the other side, and filled from when all were there."
        )
    if shown < everyone:
        parts.append(f"{shown} of {everyone} ranks are shown, one of each role first; the traces for Chrome's viewer have all.")
    if hidden:
        parts.append(f"Instructions that are narrower than half a pixel and not drawn: {hidden}.")
    return " ".join(parts)
