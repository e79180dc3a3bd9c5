"""Count the microbatches that are in flight at one moment of an order: between a chunk's forward and its backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from piper_compiler import directives
from piper_ir.graph.graph import Graph
from piper_ir.ground.select import Where

ChunkGroup = tuple[str, tuple[str, ...], int]
"""A role, some of its chunks, and how many microbatches of all of them are in flight at one moment, at least."""


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


def chunk_groups(
    graph: Graph,
    roles: Mapping[str, Iterable[str]],
    orders: Sequence[directives.Ordered],
    *,
    weights: bool = False,
) -> tuple[ChunkGroup, ...]:
    """Return the chunks of each role whose microbatches are in flight at the same moment, with how many are.

    With `weights` it is the microbatches whose weight gradient waits that count, and chunks without any are left out.
    """
    used = sorted(
        {name for o in orders for s in o.selections for name, _ in s.terms} - {"phase", "mb"}
    )
    least = Flight(0) if weights else Flight()
    moments = [_moments(order, weights=weights) for order in orders]
    flights: dict[tuple[int | str | None, ...], Flight] = {}
    groups: dict[tuple[str, Flight], list[str]] = {}
    for role, chunks in roles.items():
        for id in chunks:
            coords = graph.compute(id, "F")[0].coords
            key = tuple([coords.get(name) for name in used])
            if key not in flights:
                found = [_fullest(each, coords, weights=weights) for each in moments]
                flights[key] = max([least, *found], key=lambda f: f.most)
            groups.setdefault((role, flights[key]), []).append(id)
    return tuple((role, tuple(ids), f.most) for (role, f), ids in groups.items() if f.most)


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
    _, *closes = _phases(weights)
    at = [m for rest, those in moments.items() if rest.matches(coords) for m in those]
    begun = {mb for *_, mb, phase in at if phase in closes}
    opened: set[int] = set()
    most = 0
    for _, opening, _, mb, _ in sorted(at):
        if opening and mb in begun:
            opened.add(mb)
            most = max(most, len(opened))
        elif not opening:
            opened.discard(mb)
            begun.discard(mb)  # what comes after its end opens nothing
    return Flight(most, (id(moments), *sorted(place for _, _, place, _, _ in at)))
