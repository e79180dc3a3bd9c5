"""Hold the work of a plan's streams in each step, ready for the event engine."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from piper_ir.fold.issue import Issue
from piper_ir.fold.timing import Prepared, after_updates
from piper_simulator.contention.loads import TimedPiece
from piper_simulator.contention.rates import Flow
from piper_simulator.times.shared_activities import PieceProfile

Need = tuple[int, int, int]
"""A stream and the number that its counter must reach, which grows by the third entry with each step."""


InstrWork = tuple[int, tuple[Need, ...], int, float, Flow | None]


@dataclass(frozen=True, slots=True)
class StreamPart:
    """Hold the part of a step that one stream of a role runs.

    Attributes:
        work: by instruction its node, its needs, the group of several that it is a member of (-1 for none), its
            duration and its load on links.
    """

    role: int
    work: Sequence[InstrWork]


@dataclass(eq=False)
class StepWork:
    """Hold the work of each step; see `piper_simulator.times.engine.run_engine` for the fields. Engines share it.

    Attributes:
        parts: by stream, its instructions.
        profiles: node -> the pieces of an instruction with messages inside of its steps.
    """

    prepared: Prepared
    durations: Sequence[float]
    latency: float = 0.0
    issue: Issue | None = None
    flows: Sequence[Flow] | None = None
    inside: Mapping[int, Sequence[TimedPiece]] | None = None

    def __post_init__(self) -> None:
        prepared = self.prepared
        self.shares = self.flows is not None
        self._flows: Sequence[Flow | None] = self.flows or [None] * len(prepared.groups)
        self.profiles = self._profiles(self.inside or {})
        self._place = array("q", [0]) * len(prepared)  # of a node on its stream, counted from 1
        for nodes in prepared.streams:
            for k, node in enumerate(nodes, 1):
                self._place[node] = k
        before = after_updates(prepared)
        self.parts = [self._part(nodes, before.get(nodes[0])) for nodes in prepared.streams]

    def __deepcopy__(self, memo: Mapping[int, object]) -> Self:
        return self

    def _profiles(self, inside: Mapping[int, Sequence[TimedPiece]]) -> dict[int, PieceProfile]:
        known: dict[tuple[int, int], PieceProfile] = {}  # nodes with the same pieces share one
        profiles = {}
        for node, pieces in inside.items():
            key = id(pieces), bisect_right(self.prepared.offsets, node) - 1
            if key not in known:
                known[key] = PieceProfile(pieces, key[1])
            profiles[node] = known[key]
        return profiles

    def _part(self, nodes: Sequence[int], before: int | None) -> StreamPart:
        """Return the part of a stream; `before` is the node of the step before that its first waits for."""
        group_of, groups, durations = self.prepared.group_of, self.prepared.groups, self.durations
        waits, stream_of, streams = (
            self.prepared.waits,
            self.prepared.stream_of,
            self.prepared.streams,
        )
        place, own = self._place, [group_of[node] for node in nodes]
        needs = [
            tuple([(s := stream_of[w], place[w], len(streams[s])) for w in waits[node]])
            for node in nodes
        ]
        if before is not None:  # the last that is computed in the step before
            s = stream_of[before]
            needs[0] += ((s, 0, len(streams[s])),)
        role = bisect_right(self.prepared.offsets, nodes[0]) - 1
        several = [g if g >= 0 and len(groups[g]) > 1 else -1 for g in own]
        seconds = [durations[node if g < 0 else groups[g][0]] for node, g in zip(nodes, own)]
        flows = [None if g < 0 else self._flows[g] for g in own]
        work = list(zip(nodes, needs, several, seconds, flows, strict=True))
        return StreamPart(role, work)
