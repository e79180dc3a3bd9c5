"""Find why an instruction ran when it did: chains of causes back to the start of the step.

The longest is the critical path. By each rule of `piper_ir.fold.timing` a node waits for something; the last to come is
its cause, and so on from there. Of two that come at the same moment, the predecessor on the same stream counts first,
then a wait, then the host: a chain leaves a device only if it must.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from piper_ir.fold.issue import Issue
from piper_ir.fold.timing import Prepared, Times

Holder = Literal["compute", "communication", "latency", "host"]
"""The kind of a cause. compute: an instruction runs. communication: a message occupies its streams.

latency: a message is under way and occupies nothing. host: a host issues its instructions, and launches their kernels.
"""
NodeMoment = Literal["start", "end", "done"]


@dataclass(frozen=True, slots=True)
class PathPiece:
    """Hold the seconds of a step in which one cause delayed the next instruction.

    Attributes:
        holder: the kind of the cause.
        node: the instruction (see `Prepared`) that ran or, of a host, the one that it issued at the end.
    """

    start: float
    end: float
    holder: Holder
    node: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Chains:
    """Follow the causes of one step from a common start, given the arguments and the result of `sweep`."""

    def __init__(
        self, prepared: Prepared, times: Times, *, latency: float = 0.0, issue: Issue | None = None
    ) -> None:
        self._prepared, self._times, self._latency = prepared, times, latency
        self._before = [-1] * len(prepared)
        for nodes in prepared.streams:
            for a, b in pairwise(nodes):
                self._before[b] = a
        self._issued = () if issue is None else issue.at

    def critical_path(self) -> tuple[PathPiece, ...]:
        """Return the pieces from the start of the step to its makespan, without a gap; none for a step without time."""
        done = self._times.done
        last = max(range(len(done)), key=done.__getitem__, default=-1)
        return () if last < 0 else tuple(self.back(last, "done"))[::-1]

    def back(self, node: int, moment: NodeMoment) -> Iterator[PathPiece]:
        """Yield the causes of a moment of a node, latest first, to 0 without a gap; pieces take time."""
        times = self._times
        now = {"start": times.start, "end": times.end, "done": times.done}[moment][node]
        while now > 0:
            if moment == "done":
                node = self._arrived(node)
                if times.end[node] < now:
                    yield PathPiece(times.end[node], now, "latency", node)
                    now = times.end[node]
            if moment != "start" and times.start[node] < now:
                yield PathPiece(
                    times.start[node],
                    now,
                    "compute" if self._prepared.group_of[node] < 0 else "communication",
                    node,
                )
                now = times.start[node]
            node, moment = self._cause(node)
            if moment == "start":  # nothing before it but the host
                if now > 0:
                    yield PathPiece(0.0, now, "host", node)
                return

    def _arrived(self, node: int) -> int:
        """Return the node on its stream by which a node is done: a transfer may arrive after a later one has ended."""
        done, before = self._times.done, self._before
        while before[node] >= 0 and done[before[node]] > self._arrival(node):
            node = before[node]
        return node

    def _arrival(self, node: int) -> float:
        g = self._prepared.group_of[node]
        return self._times.end[node] + (self._latency if g >= 0 and self._prepared.p2p[g] else 0.0)

    def _cause(self, node: int) -> tuple[int, NodeMoment]:
        """Return the moment that a node, or its whole group, waited for last: its own "start" if that was its host."""
        times, prepared = self._times, self._prepared
        g = prepared.group_of[node]
        cause: tuple[int, NodeMoment] = (node, "start")
        latest = 0.0
        for m in (node,) if g < 0 else prepared.groups[g]:
            before = self._before[m]
            if before >= 0 and times.end[before] > latest:
                cause, latest = (before, "end"), times.end[before]
            for w in prepared.waits[m]:
                if times.done[w] > latest:
                    cause, latest = (w, "done"), times.done[w]
            if self._issued and self._issued[m] > latest:
                cause, latest = (m, "start"), self._issued[m]
        return cause
