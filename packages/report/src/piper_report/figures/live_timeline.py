"""Describe timelines that readers zoom, filter and point at, as the JSON that the page's script draws.

Bars are columns of whole numbers, one set per stream of a rank, so that a plan of many thousand instructions is a page
of a few megabytes. Facts that many bars share, such as their name, are kept once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log10
from typing import Any

from piper_ir.ground.trace import Span, Trace
from piper_ir.plan.phases import PHASES, InstrLabel, Phase
from piper_ir.plan.plan import COMPUTE, Plan
from piper_ir.tools import named_ranks
from piper_report.facts.alike import alike_ranks
from piper_report.facts.phases import kinds
from piper_report.facts.transfers import begun, communication_axes
from piper_report.figures.gantt import shown_ranks
from piper_report.figures.style import PHASE_COLOURS, SHORTEST

MOST_BARS = 150_000
"""The most bars of a page, which are about 4 MB; of more, the last ranks are left out, and the page says so."""
FINEST_S = 1e-9
DIGITS = 9
"""The digits of the longest time: the unit of time is a power of ten of seconds, but never under FINEST_S."""
MARK = "\x01"
"""The letter that stands for the microbatch in names, so that the names of all microbatches are one."""
HOLLOW = "A measured communication is hollow while its rank waits for the other side."
JsonRow = dict[str, Any]
BarFacts = tuple[str, str, Phase, bool, str, int, int, str]
"""The name, label, phase, recomputation first, axes, bytes, FLOPs and source that many bars share."""


@dataclass(frozen=True)
class TimelineStep:
    """Hold the predicted and the measured trace of one step, with its plan, if that is known.

    Attributes:
        name: stands before the titles of its panels; "" where there is only one step.
    """

    name: str
    traces: Sequence[Trace]
    plan: Plan | None


@dataclass(frozen=True)
class LiveTimeline:
    """Hold the JSON of one interactive timeline; `note` explains hollow bars and says how many ranks are left out."""

    name: str
    title: str
    data: Mapping[str, Any]
    note: str


def live_timeline(steps: Sequence[TimelineStep]) -> LiveTimeline | None:
    """Return the timeline of all traces with spans, one panel above the other; None without any.

    Ranks that are alike are kept once. `data` has the unit `tick` in seconds, the tables `phases`, `axes`, `ranks` and
    `whats`, and `panels`; these have lanes, one per stream of a rank, of equally long columns: `gap`, the ticks since
    the bar before ended, `width`, `what`, `mb` (-1 without a microbatch), and `wait`, the ticks until all ends of a
    transfer were there, if any bar of the lane waited.
    """
    spanned = [replace(s, traces=[t for t in s.traces if t.spans]) for s in steps]
    lengths = [_end(t) for s in spanned for t in s.traces]
    if not lengths:
        return None
    draft = _Draft(tick=max(FINEST_S, 10.0 ** (ceil(log10(max(*lengths, SHORTEST))) - DIGITS)))
    panels = [panel for step in spanned for panel in draft.panels(step)]
    return LiveTimeline("steps", "Timeline of a step", draft.data(panels), draft.note())


@dataclass
class _Draft:
    """Collect the tables that all panels share.

    Attributes:
        tick: the unit of time, in seconds.
        whats: the index of the facts that bars share.
        ranks: the index of a rank, or of ranks that are alike, by name.
        first: the names of the ranks that are shown at first.
        bars: how many there are.
        left_out: how many ranks have no bars, because there were too many.
        waited: whether any bar is hollow at first.
    """

    tick: float
    whats: dict[BarFacts, int] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    first: set[str] = field(default_factory=set)
    bars: int = 0
    left_out: int = 0
    waited: bool = False

    def panels(self, step: TimelineStep) -> list[JsonRow]:
        """Return a panel per trace of a step; ranks that are shown at first are the last to be left out."""
        if not step.traces:
            return []
        groups, shown = alike_ranks(step.traces, step.plan), shown_ranks(step.traces, step.plan)
        spans = [_by_rank(t) for t in step.traces]
        room = MOST_BARS - self.bars
        kept: list[int] = []
        for rank in sorted(groups, key=lambda r: (r not in shown, r)):
            room -= sum(len(by_rank.get(rank, ())) for by_rank in spans)
            if room >= 0 or not kept:
                kept.append(rank)
            else:
                self.left_out += len(groups[rank])
        names = {rank: _name(groups[rank], step.plan) for rank in sorted(kept)}
        for rank, name in names.items():
            self.ranks.setdefault(name, len(self.ranks))
            self.first |= {name} if rank in shown else set()
        return [
            self._panel(step, trace, by_rank, names)
            for trace, by_rank in zip(step.traces, spans, strict=True)
        ]

    def _panel(
        self,
        step: TimelineStep,
        trace: Trace,
        spans: Mapping[int, Sequence[Span]],
        names: Mapping[int, str],
    ) -> JsonRow:
        plan, label_of = step.plan, kinds(trace, step.plan)
        axes = communication_axes(plan) if plan is not None else {}
        since = begun(plan, trace) if plan is not None and trace.kind == "executed" else {}
        lanes = []
        for rank, name in names.items():
            role = plan.role_of(rank) if plan is not None else None
            streams = role.streams if role is not None else ()
            for stream, own in _by_stream(spans.get(rank, ()), streams):
                over = [axes.get((role.role, s.instr), "") if role is not None else "" for s in own]
                columns = self._columns(own, label_of, over, since)
                lanes.append({"rank": self.ranks[name], "stream": stream, **columns})
        word = "predicted" if trace.kind == "simulated" else "measured"
        return {
            "title": f"{step.name}, {word}" if step.name else word,
            "length": max(1, self._ticks(_end(trace))),
            "lanes": lanes,
        }

    def _ticks(self, seconds: float) -> int:
        return round(seconds / self.tick)

    def _columns(
        self,
        spans: Sequence[Span],
        label_of: Mapping[Span, InstrLabel],
        over: Sequence[str],
        since: Mapping[Span, float],
    ) -> JsonRow:
        columns: dict[str, list[int]] = {
            name: [] for name in ("gap", "width", "what", "mb", "wait")
        }
        before = 0
        for s, axes in zip(spans, over, strict=True):
            start, end = self._ticks(s.start), self._ticks(s.end)
            moving = min(max(since.get(s, s.start), s.start), s.end)
            what = self._what(s, label_of[s], axes)
            values = start - before, end - start, what, label_of[s].mb, self._ticks(moving) - start
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
            before = end
        self.bars += len(spans)
        if any(columns["wait"]):
            self.waited = True
        else:
            del columns["wait"]
        return dict(columns)

    def _what(self, s: Span, kind: InstrLabel, axes: str) -> int:
        name, label = s.name, kind.label
        if kind.mb >= 0:
            name = name.replace(f"@{kind.mb}", f"@{MARK}")
            label = label.replace(str(kind.mb), MARK)
        facts = name, label, kind.phase, kind.again, axes, s.bytes, s.flops, s.source
        return self.whats.setdefault(facts, len(self.whats))

    def data(self, panels: Sequence[JsonRow]) -> JsonRow:
        """Return the whole of the JSON."""
        phases = [p for p in PHASES if any(w[2] == p for w in self.whats)]
        axes = sorted({w[4] for w in self.whats if w[4]})
        whats = [
            {
                "name": name,
                "label": label,
                "phase": phases.index(phase),
                "again": again,
                "axis": axes.index(over) if over else -1,
                "bytes": nbytes,
                "flops": flops,
                "source": source,
            }
            for name, label, phase, again, over, nbytes, flops, source in self.whats
        ]
        return {
            "tick": self.tick,
            "mark": MARK,
            "phases": [{"name": PHASES[p], "colour": PHASE_COLOURS[p]} for p in phases],
            "axes": axes,
            "ranks": [{"name": name, "shown": name in self.first} for name in self.ranks],
            "whats": whats,
            "panels": panels,
        }

    def note(self) -> str:
        """Return the sentences for readers about hollow bars and about ranks that are left out; "" for neither."""
        sentences = [HOLLOW] if self.waited else []
        if self.left_out:
            sentences.append(
                f"{self.bars:,} bars are here; {self.left_out:,} ranks are not, since the page would be too large: "
                "the traces for Chrome's viewer have all."
            )
        return " ".join(sentences)


def _end(trace: Trace) -> float:
    """Return the seconds until the last bar ends; measured ones may begin later than at 0."""
    return max(s.end for s in (*trace.spans, *trace.waits))


def _name(ranks: Sequence[int], plan: Plan | None) -> str:
    return named_ranks(ranks) + (f" ({plan.role_of(ranks[0]).role})" if plan is not None else "")


def _by_rank(trace: Trace) -> dict[int, list[Span]]:
    """Return the spans and the waits of every rank, also of ranks that are like another."""
    spans_by_rank: dict[int, list[Span]] = {}
    for s in (*trace.spans, *trace.waits):
        spans_by_rank.setdefault(s.rank, []).append(s)
    shared = {r: spans_by_rank.get(like, []) for r, like in trace.shown_as().items()}
    return spans_by_rank | shared


def _by_stream(spans: Sequence[Span], order: Sequence[str]) -> Iterator[tuple[str, list[Span]]]:
    """Yield streams with their spans by start: in the plan's order, then compute first, then by name."""
    spans_by_stream: dict[str, list[Span]] = {}
    for s in spans:
        spans_by_stream.setdefault(s.stream, []).append(s)
    rest = sorted(spans_by_stream.keys() - set(order), key=lambda name: (name != COMPUTE, name))
    for stream in (*(name for name in order if name in spans_by_stream), *rest):
        yield stream, sorted(spans_by_stream[stream], key=lambda s: (s.start, s.end))
