"""Compare when ranks arrive at their common collectives: the last to arrive lets the others wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from piper_traces.breakdown import window
from piper_traces.events import DeviceEvent, RankEvents

RESOLUTION_S = 1e-9
"""The seconds that the profiler's clock can tell apart: it writes nanoseconds."""


@dataclass(frozen=True, slots=True)
class Straggling:
    """Hold how the ranks of one group arrive at its collectives.

    Attributes:
        count: the number of collectives that all of the given ranks took part in.
        spread_s: the mean of the seconds between the first arrival and the last.
        last: the rank that was most often the last.
        share: how often it was; 0 if all ranks always arrived at once.
    """

    group: str
    op: str
    count: int
    spread_s: float
    last: int
    share: float


def stragglers(ranks: Sequence[RankEvents], step: int | None = None) -> list[Straggling]:
    """Return the spread of arrivals by group and op, the largest first.

    The n-th collective of a group on one rank is the n-th of another. Clocks are compared by the ends of collectives,
    which all ranks leave together: times of a rank are shifted by the median difference of these.
    """
    by_group: dict[tuple[str, str], dict[int, list[DeviceEvent]]] = defaultdict(dict)
    for rank in ranks:
        (start, end), _ = window(rank, step)
        for e in rank.events:
            if e.message is not None and e.message.op != "p2p" and start <= e.start < end:
                key = e.message.label, e.message.op
                by_group[key].setdefault(rank.rank, []).append(e)
    rows = []
    for (group, op), events in by_group.items():
        counts = {len(sent) for sent in events.values()}
        if len(events) < 2 or len(counts) > 1:
            continue
        rows.append(_straggling(group, op, events))
    return sorted(rows, key=lambda s: -s.spread_s)


def _straggling(group: str, op: str, events: dict[int, list[DeviceEvent]]) -> Straggling:
    first = next(iter(events))
    shift = {
        rank: _median([a.end - b.end for a, b in zip(sent, events[first], strict=True)])
        for rank, sent in events.items()
    }
    spreads, last = [], []
    for meeting in zip(*events.values(), strict=True):
        arrivals = {rank: e.start - shift[rank] for rank, e in zip(events, meeting, strict=True)}
        spreads.append(max(arrivals.values()) - min(arrivals.values()))
        if spreads[-1] >= RESOLUTION_S:
            last.append(max(arrivals, key=lambda rank: arrivals[rank]))
    often = max(events, key=last.count)
    share = last.count(often) / len(spreads)
    return Straggling(group, op, len(spreads), mean(spreads), often, share)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
