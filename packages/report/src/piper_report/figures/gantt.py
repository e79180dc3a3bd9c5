"""Draw the timeline of a step: per rank and stream, predicted above measured, on one axis of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from piper_ir.ground.trace import Span, Trace
from piper_ir.plan.phases import PHASES, InstrLabel, Phase
from piper_ir.plan.plan import COMPUTE, Plan
from piper_ir.tools import named_ranks, time_text
from piper_report.facts.alike import Groups, alike_ranks
from piper_report.facts.idle import makespan
from piper_report.facts.phases import kinds
from piper_report.facts.transfers import begun
from piper_report.figures.style import (
    DPI,
    PHASE_COLOURS,
    SHORTEST,
    WIDTH,
    Picture,
    TimeUnit,
    ink_on,
    new_figure,
    panels,
    picture,
    time_unit,
)

MOST_RANKS = 8
MOST_LABELS = 1200
AGAIN = "----"
"""The hatch of a backward that begins with recomputation."""
WAITING = "#B0B0B0"
LETTER, MARGIN = 5.2, 3.0
"""The points of a label's letter, and of the room beside a label; a bar without room for all of it has no label."""
PLOT_SHARE = 0.84
"""The approximate share of a figure's width that the axes of a timeline have."""
NARROW = 4
"""The pixels below which a bar has no edge, which would hide it."""
UNREADABLE, READABLE = 6, 34
"""The pixels of the median computing bar below which the middle of a step is drawn again, and there."""
Look = tuple[tuple[float, float, float], str, str]
"""A face colour, an edge colour, and a hatch."""


@dataclass(frozen=True, slots=True)
class Window:
    """Hold the stretch of time that is drawn, in seconds."""

    start: float
    end: float

    @property
    def column(self) -> float:
        """Return the seconds of half a pixel."""
        return (self.end - self.start) / (WIDTH * PLOT_SHARE * DPI) / 2


@dataclass(slots=True)
class _StreamRow:
    """Collect the drawing of one stream of one rank in one trace.

    Attributes:
        name: the label at the left.
        bars: (start, width) in seconds, by look.
        labels: (middle in seconds, text, colour of the bar below it, whether that has a hatch).
        reached: the end of the last bar, in seconds.
        drawn: how many bars are drawn.
        hidden: how many are too narrow to be drawn.
    """

    name: str
    bars: dict[Look, list[tuple[float, float]]] = field(default_factory=dict)
    labels: list[tuple[float, str, tuple[float, float, float], bool]] = field(default_factory=list)
    reached: float = -1.0
    drawn: int = 0
    hidden: int = 0


@dataclass(frozen=True)
class Timeline:
    """Hold the data that all drawings of one step share."""

    traces: Sequence[Trace]
    plan: Plan | None
    kinds: Sequence[Mapping[Span, InstrLabel]]
    begun: Sequence[Mapping[Span, float]]
    ranks: Groups
    length: float


def timelines(traces: Sequence[Trace], plan: Plan | None, length: float = 0.0) -> list[Picture]:
    """Draw the whole step, and if its bars are too narrow to be read, its middle once more.

    `traces` are predicted, measured, or both in this order. Ranks that are alike are drawn once. If bars are narrower
    than half a pixel, one per half pixel is drawn. The axis is at least `length` seconds long.
    """
    length = max(length, *(makespan(t) for t in traces)) or SHORTEST
    labels = [kinds(t, plan) for t in traces]
    since = [begun(plan, t) if plan is not None and t.kind == "executed" else {} for t in traces]
    line = Timeline(traces, plan, labels, since, shown_ranks(traces, plan), length)
    pictures = [_gantt(line, Window(0.0, length), "timeline", "Timeline of a step")]
    bars = sorted(
        s.end - s.start for k in labels for s in k if s.stream == COMPUTE and s.end > s.start
    )
    usual = bars[len(bars) // 2] if bars else length
    if usual < 2 * UNREADABLE * Window(0.0, length).column:
        half = usual / READABLE * WIDTH * PLOT_SHARE * DPI / 2
        middle = min(makespan(t) for t in traces) / 2
        pictures.append(
            _gantt(
                line,
                Window(middle - half, middle + half),
                "timeline_middle",
                "The middle of the step, enlarged",
            )
        )
    return pictures


def _gantt(line: Timeline, window: Window, name: str, title: str) -> Picture:
    unit = time_unit(window.end - window.start)
    rows = {rank: _rows(line, rank, window) for rank in line.ranks}
    figure = new_figure(0.75 + 0.2 * sum(map(len, rows.values())) + 0.42 * len(rows))
    axes = panels(figure, len(rows), sharex=True, heights=[len(r) + 1 for r in rows.values()])
    for ax, (rank, mine) in zip(axes, rows.items()):
        role = f" ({line.plan.role_of(rank).role})" if line.plan is not None else ""
        ax.set_title(f"{named_ranks(line.ranks[rank])}{role}", loc="left", fontweight="bold")
        _draw(ax, mine, unit)
    axes[-1].set_xlim(window.start * unit.scale, window.end * unit.scale)
    axes[-1].set_xlabel(f"time since the step began ({unit.name})")
    labels = {k for label_of in line.kinds for k in label_of.values()}
    handles = _legend(labels)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=5, frameon=False, handlelength=1.6
    )
    every = [row for some in rows.values() for row in some]
    both = " over ".join("predicted" if t.kind == "simulated" else "measured" for t in line.traces)
    everyone = len(
        {s.rank for t in line.traces for s in t.spans}
        | {rank for t in line.traces for rank in t.shown_as()}
    )
    alt = (
        f"Gantt chart of one step, {both}: {len(rows)} rows for {everyone} ranks, each with its streams, from "
        f"{time_text(window.start)} to {time_text(window.end)} after the step began."
    )
    shared = any(k.phase in ("gather", "scatter") for k in labels)
    caption = _caption(
        line.traces,
        sum(map(len, line.ranks.values())),
        everyone,
        sum(r.hidden for r in every),
        shared,
    )
    return picture(figure, name, title, alt, caption, least=900, marks=sum(r.drawn for r in every))


def shown_ranks(traces: Sequence[Trace], plan: Plan | None) -> Groups:
    """Return at most MOST_RANKS ranks of the traces, each with the ranks alike: one of each role before any other.

    Of more roles than that, some from the first to the last, evenly spaced.
    """
    groups = alike_ranks(traces, plan)
    firsts = (
        sorted({min(role.ranks) for role in plan.roles} & groups.keys()) if plan is not None else []
    )
    if len(firsts) > MOST_RANKS:
        firsts = [
            firsts[round(i * (len(firsts) - 1) / (MOST_RANKS - 1))] for i in range(MOST_RANKS)
        ]
    chosen = sorted(sorted(groups, key=lambda r: (r not in firsts, r))[:MOST_RANKS])
    return {rank: groups[rank] for rank in chosen}


def _rows(line: Timeline, rank: int, window: Window) -> list[_StreamRow]:
    """Return a row per stream and trace with spans of it, in the plan's order, or compute first, then by name."""
    owners = [t.shown_as().get(rank, rank) for t in line.traces]
    used = [
        {s.stream for s in (*t.spans, *t.waits) if s.rank == own}
        for t, own in zip(line.traces, owners)
    ]
    every = set().union(*used)
    known = (
        [s for s in line.plan.role_of(rank).streams if s in every] if line.plan is not None else []
    )
    streams = known + sorted(every - set(known), key=lambda name: (name != COMPUTE, name))
    rows: dict[tuple[str, int], _StreamRow] = {}
    for stream in streams:
        here = [i for i in range(len(used)) if stream in used[i]]
        for i in here:
            word = (
                ("predicted" if line.traces[i].kind == "simulated" else "measured")
                if len(line.traces) > 1
                else ""
            )
            rows[stream, i] = _StreamRow(f"{stream}  {word}".strip() if i == here[0] else word)
    for i, (trace, label_of, since, own) in enumerate(
        zip(line.traces, line.kinds, line.begun, owners)
    ):
        for span in sorted(
            (s for s in (*trace.spans, *trace.waits) if s.rank == own), key=lambda s: s.start
        ):
            if span.start <= window.end and span.end >= window.start:
                _add(
                    rows[span.stream, i], span, label_of[span], since.get(span, span.start), window
                )
    return list(rows.values())


def _add(row: _StreamRow, span: Span, kind: InstrLabel, begun: float, window: Window) -> None:
    column = window.column
    if span.end - span.start < column and span.end < row.reached + column and row.drawn:
        row.hidden += 1
        return
    row.drawn += 1
    row.reached = span.end
    face, edge, hatch = _look(kind)
    moving = min(max(begun, span.start), span.end)
    if moving - span.start > column:
        hollow: Look = ((1.0, 1.0, 1.0), WAITING, "")
        row.bars.setdefault(hollow, []).append((span.start, moving - span.start))
    pixels = (span.end - moving) / column / 2
    look: Look = (face, edge, hatch) if pixels >= NARROW else (face, "none", "")
    row.bars.setdefault(look, []).append((moving, max(span.end - moving, 3 * column)))
    low, high = max(moving, window.start), min(span.end, window.end)
    points = (high - low) / column / 2 / DPI * 72
    if kind.label and points > LETTER * len(kind.label) + MARGIN:
        row.labels.append(((low + high) / 2, kind.label, face, bool(hatch)))


def _look(kind: InstrLabel) -> Look:
    return to_rgb(PHASE_COLOURS[kind.phase]), "white", AGAIN if kind.again else ""


def _draw(ax: Axes, rows: Sequence[_StreamRow], unit: TimeUnit) -> None:
    budget = MOST_LABELS
    for y, row in enumerate(rows):
        for (face, edge, hatch), bars in row.bars.items():
            corners = [_corners(start * unit.scale, width * unit.scale, y) for start, width in bars]
            drawn = PolyCollection(
                corners, facecolor=face, edgecolor=edge, hatch=hatch, linewidth=0.6
            )
            ax.add_collection(
                drawn, autolim=False
            )  # the limits are known, and finding them takes longer than drawing
        for middle, text, ground, hatched in row.labels[:budget]:
            box = {"facecolor": ground, "edgecolor": "none", "pad": 0.6} if hatched else None
            text_at = ax.text(
                middle * unit.scale,
                y,
                text,
                fontsize=7,
                color=ink_on(ground),
                bbox=box,
                clip_on=True,
            )
            text_at.set(ha="center", va="center_baseline")
        budget -= min(budget, len(row.labels))
    ax.set_yticks(range(len(rows)), [r.name for r in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)


def _corners(start: float, width: float, y: int) -> list[tuple[float, float]]:
    low, high = y - 0.42, y + 0.42
    return [(start, low), (start, high), (start + width, high), (start + width, low)]


def _legend(found: set[InstrLabel]) -> list[Patch]:
    """Return the phases that occur, in their colours."""
    phases: list[Phase] = [p for p in PHASES if any(k.phase == p for k in found)]
    patches = [
        Patch(facecolor=PHASE_COLOURS[p], edgecolor="white", label=PHASES[p]) for p in phases
    ]
    again = [p for p in phases if any(k.again and k.phase == p for k in found)]
    if again:
        text = "backward after recomputation"
        patches.append(
            Patch(facecolor=PHASE_COLOURS[again[0]], edgecolor="white", hatch=AGAIN, label=text)
        )
    return patches


def _caption(traces: Sequence[Trace], shown: int, everyone: int, hidden: int, shared: bool) -> str:
    parts = [
        "The number in a bar is its microbatch; bars without room for the whole label have none."
    ]
    if shared:
        parts.append(
            "Gathers and reduce-scatters of shared buckets have the colours that their buffers have in the memory "
            "figure."
        )
    if any(t.kind == "executed" for t in traces):
        parts.append(
            "A measured communication is hollow while its rank waits for the other side, and filled from when all "
            "were there."
        )
    if shown < everyone:
        parts.append(
            f"{shown} of {everyone} ranks are shown; the traces for Chrome's viewer have all."
        )
    if hidden:
        parts.append(f"Instructions that are narrower than half a pixel and not drawn: {hidden}.")
    return " ".join(parts)
