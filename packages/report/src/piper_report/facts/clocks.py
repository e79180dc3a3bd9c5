"""Align the clocks of ranks on several machines, by the transfers that the ranks share.

No end of a transfer can be over before the other has begun: a Send is done when its peer has taken it, a collective
when all members gave their part. For two ranks a and b and the seconds o that must be added to b's clock to get a's,
each transfer says

    start_a <= end_b + o   and   start_b + o <= end_a.

All of them together are difference constraints. For each rank the shortest paths to and from the first rank are the
bounds that they leave to its offset (Cormen et al., Introduction to Algorithms, "Difference constraints and shortest
paths"). The offset used is the middle, which keeps every transfer in order, since the solutions are a convex set; its
error is half the distance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from piper_ir.ground.trace import Trace
from piper_ir.plan.plan import Plan
from piper_ir.tools import time_text
from piper_report.facts.transfers import transfers

Bounds = Mapping[tuple[int, int], float]
"""The largest o_b - o_a for each (a, b), where o_r is added to the clock of rank r."""
HALVINGS = 50
TOLERANCE = 1e-12
"""The part of the largest bound that counts as rounding."""
NOTE = "clock of rank {}"
"""The key of an aligned clock in a trace's notes."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Hold the correction of a rank's clock.

    Attributes:
        seconds: to be added to the rank's clock; true within +- `error`.
        error: in seconds; inf for a rank that shares no transfer, however indirectly, with the first one.
        slack: seconds by which the transfers contradict each other, because clocks drift or because an end of a
            transfer was over before the other began; 0 when they agree.
    """

    seconds: float
    error: float
    slack: float = 0.0

    def __str__(self) -> str:
        if self.error == inf:
            return "unknown: no transfer leads to it"
        doubt = (
            f"; the transfers contradict each other by {time_text(self.slack)}"
            if self.slack
            else ""
        )
        return f"offset {_signed(self.seconds)} +- {time_text(self.error)}{doubt}"

    @property
    def needed(self) -> bool:
        """Return whether a clock without an offset is outside of the range that the transfers allow."""
        return abs(self.seconds) > self.error


def offsets(plan: Plan, trace: Trace) -> dict[int, Offset]:
    """Return for each rank the offset that turns its times into times of the lowest rank."""
    ranks = sorted({s.rank for s in trace.spans})
    bounds = _bounds(plan, trace)
    slack, (after, before) = _least_slack(ranks, bounds)
    offset_of = {}
    for r in ranks:
        high, low = after[r], -before[r]
        known = high < inf and low > -inf
        offset_of[r] = (
            Offset((high + low) / 2, max(0.0, (high - low) / 2) + slack, slack)
            if known
            else Offset(0.0, inf, slack)
        )
    return offset_of


def aligned(plan: Plan, trace: Trace, found: Mapping[int, Offset] | None = None) -> Trace:
    """Return the trace on the clock of its lowest rank, from the first start of any rank.

    `notes` of the result hold each rank's offset and its error. When no offset is needed, as on one machine, whose
    processes share a clock, the times stay as they are. `found` has offsets that are known already.
    """
    found = offsets(plan, trace) if found is None else found
    needed = any(o.needed for o in found.values())
    notes = {
        NOTE.format(r): str(o if needed else _unmoved(o))
        for r, o in found.items()
        if r != min(found)
    }
    if not needed:
        return replace(trace, notes={**trace.notes, **notes})
    zero = min(s.start + found[s.rank].seconds for s in trace.spans)
    move = {r: o.seconds - zero for r, o in found.items()}
    spans, waits = (
        tuple(
            replace(
                s,
                start=s.start + move[s.rank],
                end=s.end + move[s.rank],
                ready=max(0.0, s.ready + move[s.rank]),
            )
            for s in found_spans
        )
        for found_spans in (trace.spans, trace.waits)
    )
    memory = tuple(replace(m, time=m.time + move[m.rank]) for m in trace.memory if m.rank in move)
    return replace(trace, spans=spans, waits=waits, memory=memory, notes={**trace.notes, **notes})


def _unmoved(o: Offset) -> Offset:
    return Offset(0.0, abs(o.seconds) + o.error, o.slack)


def _signed(value: float) -> str:
    sign = "" if value == 0 else "-" if value < 0 else "+"
    return sign + time_text(abs(value))


def _bounds(plan: Plan, trace: Trace) -> Bounds:
    bounds: dict[tuple[int, int], float] = {}
    for group in transfers(plan, trace):
        for a in group:
            for b in group:
                if a.rank != b.rank:  # b's start may not come after a's end
                    bounds[a.rank, b.rank] = min(bounds.get((a.rank, b.rank), inf), a.end - b.start)
    return bounds


Paths = tuple[Mapping[int, float], Mapping[int, float]]
"""The lengths of the shortest paths from the first rank to each, and from each to the first."""


def _least_slack(ranks: Sequence[int], bounds: Bounds) -> tuple[float, Paths]:
    """Return the least slack with which all bounds hold together, by halving, and the shortest paths with it.

    Either direction may find a cycle that is negative by rounding, so the slack must suit both.
    """
    if (paths := _paths(ranks, bounds, 0.0)) is not None:
        return 0.0, paths
    low, high = 0.0, -min(bounds.values())
    while paths is None:  # no length is negative, but for rounding
        high *= 1 + TOLERANCE
        paths = _paths(ranks, bounds, high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if (found := _paths(ranks, bounds, middle)) is None:
            low = middle
        else:
            high, paths = middle, found
    return high, paths


def _paths(ranks: Sequence[int], bounds: Bounds, slack: float) -> Paths | None:
    """Return the shortest paths; None when some cycle has a negative length."""
    after = _shortest(ranks, bounds, slack)
    before = _shortest(ranks, {(b, a): w for (a, b), w in bounds.items()}, slack)
    return None if after is None or before is None else (after, before)


def _shortest(ranks: Sequence[int], bounds: Bounds, slack: float) -> dict[int, float] | None:
    """Return the shortest paths from the first rank (Bellman-Ford); None when some cycle has a negative length."""
    reached = {r: 0.0 if r == ranks[0] else inf for r in ranks}
    tolerance = TOLERANCE * max((abs(w) for w in bounds.values()), default=0.0)
    for _ in range(len(ranks) + 1):
        changed = False
        for (a, b), w in bounds.items():
            if reached[a] + w + slack < reached[b] - tolerance:
                reached[b], changed = reached[a] + w + slack, True
        if not changed:
            return reached
    return None
