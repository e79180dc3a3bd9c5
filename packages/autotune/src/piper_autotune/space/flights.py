"""Count the microbatches that are in flight at one moment of an order: between a chunk's forward and its backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from piper_compiler import directives
from piper_ir.graph.graph import Graph

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
    flights: dict[tuple[int | str | None, ...], Flight] = {}
    groups: dict[tuple[str, Flight], list[str]] = {}
    for role, chunks in roles.items():
        for id in chunks:
            coords = graph.compute(id, "F")[0].coords
            key = tuple([coords.get(name) for name in used])
            if key not in flights:
                found = [in_flight(order, coords, weights=weights) for order in orders]
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
    opens, closes = ("I", ("W",)) if weights else ("F", ("B", "I"))
    events: list[
        tuple[int, bool, int, int]
    ] = []  # the item, whether it opens, the selection, the microbatch
    begun: set[int] = set()
    together = {first + k: first for first, number in order.overlaps for k in range(number)}
    for place, selection in enumerate(order.selections):
        terms = dict(selection.terms)
        phase, mb = terms.get("phase"), terms.get("mb")
        if (
            phase in (opens, *closes, "W")
            and isinstance(mb, int)
            and selection.matches({**coords, "phase": str(phase), "mb": mb})
        ):
            events.append((together.get(place, place), phase == opens, place, mb))
            if phase in closes:
                begun.add(mb)
    opened: set[int] = set()
    most = 0
    for _, opening, _, mb in sorted(events):
        if opening and mb in begun:
            opened.add(mb)
            most = max(most, len(opened))
        elif not opening:
            opened.discard(mb)
            begun.discard(mb)  # what comes after its end opens nothing
    return Flight(most, (id(order), *(place for _, _, place, _ in events)))
