"""Count the microbatches that are in flight at one moment of an order: between a chunk's forward and its backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from piper_compiler import directives
from piper_ir.graph.graph import Graph
from piper_ir.ground.select import Where

NamedCoords = tuple[tuple[str, int | str], ...]
"""The coordinates of a chunk that orders name."""
ChunkGroup = tuple[tuple[str, ...], int]
"""The ids of chunks, and how many microbatches of all of them are in flight at one moment, at least."""
FullMoment = tuple[str, tuple[ChunkGroup, ...]]
"""A role, and groups of its chunks whose microbatches are in flight at the same moment."""


@dataclass(frozen=True)
class Flight:
    """Describe the fullest moment of microbatches in flight.

    Attributes:
        most: how many have at one moment done their forward and not begun their backward.
        where: chunks that the same selections of an order match are at that moment together; without any order it is
            the moment when the loss is computed.
    """

    most: int = 1
    where: tuple[int, ...] = ()


def full_moments(
    graph: Graph,
    roles: Mapping[str, Iterable[str]],
    orders: Sequence[directives.Ordered],
    *,
    weights: bool = False,
) -> tuple[FullMoment, ...]:
    """Return the fullest moments of each role: of chunks that are alike in the orders, and of all that are in an order.

    With `weights` it is the microbatches whose weight gradient waits that count, and chunks without any are left out.
    """
    used = sorted(
        {name for o in orders for s in o.selections for name, _ in s.terms} - {"phase", "mb"}
    )
    least = Flight(0) if weights else Flight()
    by_order = [_moments(order, weights=weights) for order in orders]
    flights: dict[NamedCoords, Flight] = {}
    alike: dict[tuple[str, Flight], list[str]] = {}
    every: dict[str, dict[NamedCoords, list[str]]] = {}
    for role, chunks in roles.items():
        for id in chunks:
            coords = graph.compute(id, "F")[0].coords
            key = tuple([(name, coords[name]) for name in used if name in coords])
            if key not in flights:
                found = [_fullest(each, coords, weights=weights) for each in by_order]
                flights[key] = max([least, *found], key=lambda f: f.most)
            alike.setdefault((role, flights[key]), []).append(id)
            every.setdefault(role, {}).setdefault(key, []).append(id)
    own = tuple((role, ((tuple(ids), f.most),)) for (role, f), ids in alike.items() if f.most)
    return own + tuple(
        (role, together)
        for role, groups in every.items()
        for moments in by_order
        if len(together := _together(moments, groups, weights=weights)) > 1
    )


def in_flight(
    order: directives.Ordered, coords: Mapping[str, int | str], *, weights: bool = False
) -> Flight:
    """Return the fullest moment of an order for a chunk with these coordinates (without phase and mb).

    Only microbatches count whose forward and backward (of a split one: the input gradient) are both in the order; with
    `weights` the ones with an input gradient and no weight gradient yet. In an overlap a later phase may be first.
    """
    return _fullest(_moments(order, weights=weights), coords, weights=weights)


OrderEvent = tuple[int, bool, int, int, str]
"""A selection of an order: its item, whether it opens a microbatch, its place, the microbatch and the phase."""


def _moments(order: directives.Ordered, *, weights: bool) -> dict[Where, list[OrderEvent]]:
    """Return the selections that open or close microbatches, by the rest of their terms."""
    opens, *others = _phases(weights)
    together = {first + k: first for first, number in order.overlaps for k in range(number)}
    moments: dict[Where, list[OrderEvent]] = {}
    for place, selection in enumerate(order.selections):
        terms = dict(selection.terms)
        phase, mb = terms.pop("phase", None), terms.pop("mb", None)
        if isinstance(mb, int) and isinstance(phase, str) and phase in (opens, *others, "W"):
            moment = (together.get(place, place), phase == opens, place, mb, phase)
            moments.setdefault(Where.of(tuple(terms.items())), []).append(moment)
    return moments


def _phases(weights: bool) -> tuple[str, ...]:
    """Return the phase that opens a microbatch, and the phases that close it."""
    return ("I", "W") if weights else ("F", "B", "I")


def _fullest(
    moments: Mapping[Where, Iterable[OrderEvent]], coords: Mapping[str, int | str], *, weights: bool
) -> Flight:
    at = _events(moments, coords)
    (most,) = _most(at=[at], sizes=[1], weights=weights)
    return Flight(most, (id(moments), *sorted(place for _, _, place, _, _ in at)))


def _together(
    moments: Mapping[Where, Iterable[OrderEvent]],
    groups: Mapping[NamedCoords, Sequence[str]],
    *,
    weights: bool,
) -> tuple[ChunkGroup, ...]:
    """Return the groups of a role in flight at the moment when most chunks are, each with its microbatches."""
    at = [_events(moments, dict(key)) for key in groups]
    counts = _most(at, list(map(len, groups.values())), weights=weights)
    return tuple((tuple(ids), n) for ids, n in zip(groups.values(), counts, strict=True) if n)


def _events(
    moments: Mapping[Where, Iterable[OrderEvent]], coords: Mapping[str, int | str]
) -> list[OrderEvent]:
    return [m for rest, those in moments.items() if rest.matches(coords) for m in those]


def _most(
    at: Sequence[Sequence[OrderEvent]], sizes: Sequence[int], *, weights: bool
) -> tuple[int, ...]:
    """Return how many of each group are in flight when the sum of them, times the sizes of the groups, is largest."""
    _, *closes = _phases(weights)
    begun = [{mb for *_, mb, phase in events if phase in closes} for events in at]
    opened: list[set[int]] = [set() for _ in at]
    total, most, fullest = 0, 0, (0,) * len(at)
    # in an item of an order, what closes comes first: its steps may run in any order
    for (_, opening, _, mb, _), group in sorted((e, k) for k, own in enumerate(at) for e in own):
        before = len(opened[group])
        if not opening:
            opened[group].discard(mb)
            begun[group].discard(mb)  # what comes after its end opens nothing
        elif mb in begun[group]:
            opened[group].add(mb)
        total += sizes[group] * (len(opened[group]) - before)
        if total > most:
            most, fullest = total, tuple(map(len, opened))
    return fullest
