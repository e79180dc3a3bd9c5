"""Interleave the members of an overlap so that one computes while messages of another are on their way.

A forward whose layers exchange tokens with other devices waits for each exchange; so does a backward. Side by side each
can compute while the other waits, as DualPipe does (DeepSeek-V3, arXiv 2412.19437). The order is found by a beam
search on a model of one device: one computation at a time, and one message at a time, in the order of their sends. Of
the states with equal progress of every member, one goes if another is no later in anything, and the first to be done of
the others are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod

from piper_ir.graph.graph import At, Graph, Node, OverlapGroup
from piper_ir.program.ops import Collective, Compute

WIDTH = 16
"""The number of states that are kept for equal progress of every member."""
MOST_STATES = 20_000
"""The most combinations of progress with which a group is searched: more would take seconds."""

MemberPlace = tuple[int, int]
"""A member of a group, and the number of a node in it."""
_STEPS = "FRBIW"
"""The steps of a chunk, in their order within one microbatch; B is I and W."""


@dataclass(frozen=True)
class GroupMessages:
    """Hold the waits of a group's nodes, other than for the nodes before them in their member.

    Attributes:
        seconds: (sending node, reading node) -> seconds of the message between them.
        first: (node, node of another member that comes after it).
    """

    seconds: Mapping[tuple[MemberPlace, MemberPlace], float]
    first: frozenset[tuple[MemberPlace, MemberPlace]]


def messages_to(graph: Graph, at: At) -> Iterator[tuple[At, At]]:
    """Yield the collectives whose result a node reads, each with a node that makes an input of it."""
    for message, mbs in _writers(graph, at):
        if isinstance(message.op, Collective):
            for node, _ in _writers(graph, (message.id, mbs)):
                yield (message.id, mbs), (node.id, mbs)


def messages_of(
    graph: Graph, group: OverlapGroup, seconds: Mapping[tuple[str, int], float]
) -> GroupMessages:
    """Return the waits of a group's nodes; `seconds` has the duration of each collective of a value."""
    place = {at: (m, k) for m, member in enumerate(group.members) for k, at in enumerate(member)}
    waits: dict[tuple[MemberPlace, MemberPlace], float] = {}
    for at in place:
        for sent, before in messages_to(graph, at):
            if before in place:
                pair = place[before], place[at]
                waits[pair] = max(waits.get(pair, 0.0), seconds[sent])
    return GroupMessages(waits, frozenset(_between_members(graph, place)))


def _writers(graph: Graph, at: At) -> Iterator[tuple[Node, int]]:
    node = graph.at(at)
    assert node is not None, f"a group has {at}"
    mbs = None if node.mbs is None else range(at[1], at[1] + 1)
    for value in node.reads:
        for writer, _ in graph.writers_of(value, mbs):
            yield writer, at[1]


def _between_members(
    graph: Graph, place: Mapping[At, MemberPlace]
) -> Iterator[tuple[MemberPlace, MemberPlace]]:
    """Yield pairs of nodes of different members that compute steps of one chunk in one microbatch, in their order."""
    of_chunk: dict[tuple[str, int], list[tuple[int, MemberPlace]]] = {}
    for at, mine in place.items():
        node = graph.at(at)
        if node is not None and isinstance(node.op, Compute):
            of_chunk.setdefault((node.op.chunk, at[1]), []).append(
                (_STEPS.index(node.op.step), mine)
            )
    for same in of_chunk.values():
        for (a, one), (b, other) in product(same, same):
            if a < b and one[0] != other[0]:
                yield one, other


def hidden(
    group: OverlapGroup, seconds: Mapping[At, float], messages: GroupMessages
) -> Sequence[At] | None:
    """Return the nodes of a group in the order found; None if nothing waits for a message, or it is too large."""
    sizes = tuple(map(len, group.members))
    if not messages.seconds or prod(n + 1 for n in sizes) > MOST_STATES:
        return None
    durations = tuple(tuple(seconds[at] for at in member) for member in group.members)
    picks = _searched(durations, tuple(sorted(messages.seconds.items())), messages.first)
    turns = [iter(member) for member in group.members]
    return [next(turns[m]) for m in picks]


@dataclass(frozen=True, slots=True)
class _State:
    """Hold how far the members have come, and when.

    Attributes:
        computed: when the device has computed the nodes so far.
        sent: when its last message has arrived.
        arrives: when the message that a node waits for arrives.
        picks: the member of each node so far, as a chain from the last: (member, chain before it).
    """

    computed: float
    sent: float
    arrives: Mapping[MemberPlace, float]
    picks: tuple[int, object] | None

    @property
    def key(self) -> tuple[float, float]:
        return self.computed, self.sent


@cache
def _searched(
    durations: tuple[tuple[float, ...], ...],
    messages: tuple[tuple[tuple[MemberPlace, MemberPlace], float], ...],
    first: frozenset[tuple[MemberPlace, MemberPlace]],
) -> tuple[int, ...]:
    """Return the member of each node, in the order that ends first."""
    sends: dict[MemberPlace, list[tuple[MemberPlace, float]]] = {}
    for (node, reader), taken in messages:
        sends.setdefault(node, []).append((reader, taken))
    after: dict[MemberPlace, list[MemberPlace]] = {}
    for node, later in first:
        after.setdefault(later, []).append(node)
    ends = tuple(map(len, durations))
    kept: dict[tuple[int, ...], list[_State]] = {(0,) * len(ends): [_State(0.0, 0.0, {}, None)]}
    for come in product(
        *(range(n + 1) for n in ends)
    ):  # successors of a state come later in this order
        for state in _best(kept.pop(come, ())) if come != ends else ():
            for m, k in enumerate(come):
                if k < ends[m] and all(come[a] > b for a, b in after.get((m, k), ())):
                    then = _after(state, (m, k), durations[m][k], sends.get((m, k), ()))
                    kept.setdefault((*come[:m], k + 1, *come[m + 1 :]), []).append(then)
    best = min(kept[ends], key=lambda s: s.key)
    picks: list[int] = []
    link: object = best.picks
    while isinstance(link, tuple):
        member, link = link
        picks.append(member)
    return tuple(reversed(picks))


def _best(states: Iterable[_State]) -> list[_State]:
    """Return the first states to be done; one that another state precedes in everything is left out."""
    best: list[_State] = []
    for state in sorted(states, key=lambda s: s.key):
        if not any(_no_later(one, state) for one in best):
            best.append(state)
            if len(best) == WIDTH:
                break
    return best


def _no_later(one: _State, other: _State) -> bool:
    """Return whether a state of equal progress is done no later, and so are its messages."""
    return (
        one.computed <= other.computed
        and one.sent <= other.sent
        and all(at <= max(other.arrives[n], other.computed) for n, at in one.arrives.items())
    )


def _after(
    state: _State, node: MemberPlace, seconds: float, sends: Sequence[tuple[MemberPlace, float]]
) -> _State:
    """Return the state once a node is computed, too."""
    computed = max(state.computed, state.arrives.get(node, 0.0)) + seconds
    sent, arrives = state.sent, dict(state.arrives)
    for reader, taken in sends:
        sent = max(sent, computed) + taken
        arrives[reader] = max(arrives.get(reader, 0.0), sent)
    arrives.pop(node, None)
    return _State(computed, sent, arrives, (node[0], state.picks))
