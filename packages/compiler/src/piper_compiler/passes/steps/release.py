"""Decide at compile time when each value dies.

A value whose last reader computes dies right after it. A value that communication reads dies at a later compute
instruction, which waits for the communication: the first one that starts after its end in a run without frees under
canonical durations, so that the wait costs nothing there. A fixed distance in instructions would deadlock; reference
counts would leave the peak to chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from piper_compiler.passes.steps.arrays import Flags, Ints, run_starts
from piper_compiler.passes.steps.draft import Draft, WaitEdges
from piper_ir.fold.timing import Times


@dataclass(frozen=True)
class Uses:
    """Say which values parts use; values and parts are numbers.

    Attributes:
        values: how many values there are.
        value: an entry for each value that a part of a compute instruction writes or reads, in program order, a part's
            writes first.
        part: the part of each entry of `value`.
        instr: the instruction of each part.
        sent: an entry for each value that a communication instruction reads, in program order.
        sender: the instruction of each entry of `sent`.
    """

    values: int
    value: Ints
    part: Ints
    instr: Ints
    sent: Ints
    sender: Ints


@dataclass(frozen=True)
class Releases:
    """Say which values are freed, and by which part or instruction.

    Attributes:
        freed: an entry for each value that dies after a part, by part.
        after: the part of each entry of `freed`.
        early: an entry for each value that dies before an instruction, by instruction.
        before: the instruction of each entry of `early`.
        waits: the waits of the instructions that free sent values.
    """

    freed: Ints
    after: Ints
    early: Ints
    before: Ints
    waits: WaitEdges


def releases(
    draft: Draft,
    uses: Uses,
    times: Times,
    buffers: tuple[Ints, Ints],
    returns: tuple[Ints, Ints],
) -> Releases:
    """Return the frees of all roles and the waits that they need, given the times of a run without frees.

    `buffers` are the values for gradients that will be scattered, and the instruction that makes each. `returns` are
    the values that wait on the host, and the instruction that takes memory for each again: it has freed it by then,
    however long the copy takes.
    """
    last, first = np.full(uses.values, -1), np.full(uses.values, -1)
    last[uses.value] = uses.part  # of an index that is there twice, the last assignment counts
    first[uses.value[::-1]] = np.arange(len(uses.value))[::-1]

    sent, rank, many = np.unique(uses.sent, return_index=True, return_counts=True)
    by_value = np.argsort(uses.sent, kind="stable")
    starts = run_starts(many)
    ends = (
        np.maximum.reduceat(np.array(times.done)[uses.sender[by_value]], starts)
        if len(sent)
        else np.empty(0)
    )
    latest = uses.sender[by_value][starts + many - 1]
    dies = _first_after(draft, np.array(times.start), ends, latest)
    dies = np.minimum(dies, _bounded(draft, sent, latest, *buffers))
    returned = np.searchsorted(sent, returns[0])
    again = np.full(len(sent), np.iinfo(np.int64).max)
    again[returned] = returns[1]
    dies = np.where(again > latest, np.minimum(dies, again), dies)
    part = last[sent]
    own = np.where(part >= 0, uses.instr[part], -1)  # the instruction that uses it last
    kept: Flags = own >= dies
    dies = np.where(kept, own, dies)

    late, known = sent[~kept], np.ones(uses.values, np.bool_)
    known[late] = False
    freed = np.flatnonzero((last >= 0) & known)
    order = first[freed] + len(uses.value)  # sent values stand before the others
    order[np.searchsorted(freed, sent[kept])] = rank[kept] - len(uses.sent)
    by_part = np.lexsort((order, last[freed]))
    by_instr = np.lexsort((rank[~kept], dies[~kept]))
    waits = WaitEdges(np.repeat(dies, many), uses.sender[by_value])
    return Releases(
        freed[by_part], last[freed][by_part], late[by_instr], dies[~kept][by_instr], waits
    )


def _first_after(draft: Draft, start: np.ndarray, ends: np.ndarray, latest: Ints) -> Ints:
    """Return for each sent value the compute instruction that frees it.

    It is the first on its role that starts at or after `ends` (when the value's sends are done) and comes after
    `latest` (the last send). If there is none, the role's final Update frees it and waits.
    """
    freeing = np.empty(len(latest), np.int64)
    edges = np.searchsorted(draft.compute, draft.offsets)
    for a, b, first, end in zip(
        edges[:-1], edges[1:], draft.offsets[:-1], draft.offsets[1:], strict=True
    ):
        mine = (latest >= first) & (latest < end)
        compute = draft.compute[a:b]
        k = np.maximum(
            np.searchsorted(start[compute], ends[mine]), np.searchsorted(compute, latest[mine])
        )
        freeing[mine] = compute[np.minimum(k, len(compute) - 1)]
    return freeing


def _bounded(draft: Draft, sent: Ints, latest: Ints, buffer: Ints, maker: Ints) -> Ints:
    """Return for each sent value the instruction that it must die before, however long its scatter takes.

    A role has one scatter under way while it fills another buffer: a buffer dies before the first that is made when the
    next scatter has begun. Values other than buffers are not bounded.
    """
    bounds = np.full(len(sent), np.iinfo(np.int64).max)
    for first, end in pairwise(draft.offsets):
        mine = np.flatnonzero((latest >= first) & (latest < end) & np.isin(sent, buffer))
        mine = mine[np.argsort(latest[mine])]
        makers = np.sort(maker[(maker >= first) & (maker < end)])
        following = np.searchsorted(makers, latest[mine[1:]])
        there = following < len(makers)
        bounds[mine[:-1][there]] = makers[following[there]]
    return bounds
