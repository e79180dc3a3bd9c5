"""Find idle time: when a role computes nothing, and the causes that it waits for then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from piper_ir.fold.timing import Prepared, Times
from piper_simulator.explanation.critical import Chains, NodeMoment, PathPiece


@dataclass(frozen=True, slots=True)
class Gap:
    """Hold the seconds in which a role computes nothing.

    Attributes:
        role: its index.
        node: the role's next instruction, -1 at the end of the step.
        pieces: the causes of its delay, in order of time, from `start` to `end` without a gap.
    """

    role: int
    start: float
    end: float
    node: int
    pieces: tuple[PathPiece, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.start


def idle_gaps(prepared: Prepared, times: Times, chains: Chains) -> list[list[Gap]]:
    """Return for each role its gaps between 0 and the makespan, in order of time.

    The gap after a role's last compute is explained by the chain that ends the step.
    """
    makespan = times.makespan
    last = max(range(len(prepared)), key=times.done.__getitem__, default=-1)
    gaps_by_role = []
    for r, (first, end) in enumerate(pairwise(prepared.offsets)):
        gaps: list[Gap] = []
        reached = 0.0
        for node in range(first, end):
            if prepared.group_of[node] >= 0:
                continue
            if times.start[node] > reached:
                causes = _causes(chains, reached, node, "start")
                gaps.append(Gap(r, reached, times.start[node], node, causes))
            reached = max(reached, times.end[node])
        if makespan > reached:
            causes = _causes(chains, reached, last, "done")
            gaps.append(Gap(r, reached, makespan, -1, causes))
        gaps_by_role.append(gaps)
    return gaps_by_role


def _causes(chains: Chains, start: float, node: int, moment: NodeMoment) -> tuple[PathPiece, ...]:
    """Return the part of the chain to a moment of a node that lies in the gap from `start` on."""
    pieces = []
    for piece in chains.back(node, moment):
        pieces.append(
            piece if piece.start >= start else PathPiece(start, piece.end, piece.holder, piece.node)
        )
        if piece.start <= start:
            break
    return tuple(pieces[::-1])


@dataclass(frozen=True, slots=True)
class Share:
    """Hold the seconds of a role's activities in a step, which add up to the makespan.

    Attributes:
        computing: it computes.
        bubble: it is idle until another role has computed.
        waiting: it is idle until a message is there.
        host: it is idle until a host has issued.
    """

    computing: float
    bubble: float
    waiting: float
    host: float


def time_shares(makespan: float, gaps: Sequence[Sequence[Gap]]) -> list[Share]:
    """Return the shares of each role, from `idle_gaps`."""
    shares = []
    for own in gaps:
        seconds_by_holder = {"compute": 0.0, "communication": 0.0, "latency": 0.0, "host": 0.0}
        for piece in (p for gap in own for p in gap.pieces):
            seconds_by_holder[piece.holder] += piece.seconds
        computing = makespan - sum(seconds_by_holder.values())
        shares.append(
            Share(
                computing,
                seconds_by_holder["compute"],
                seconds_by_holder["communication"] + seconds_by_holder["latency"],
                seconds_by_holder["host"],
            )
        )
    return shares
