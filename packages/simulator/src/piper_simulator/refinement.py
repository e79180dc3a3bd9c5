"""The coarsest partition of the nodes of a graph whose classes see the same: colour refinement, by what has changed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence


def refined(
    first: Iterable[Hashable], neighbours: Sequence[Sequence[int]], seen: Callable[[int, Sequence[int]], Hashable]
) -> list[int]:
    """Per node its colour, the same for nodes that cannot be told apart. `first`: what each node is by itself. `neighbours`: the
    nodes that it looks at, which look at it. `seen(node, colours)`: what it sees there; it must differ where a neighbour's colour
    is one that it did not see before, and must not depend on the order of neighbours of equal colour.

    A round looks at the neighbours of what got a new colour. Of a class that falls apart those that saw nothing new, else the
    most numerous, keep the colour: their neighbours need not be looked at again."""
    known: dict[Hashable, int] = {}
    colours = [known.setdefault(thing, len(known)) for thing in first]
    size = [0] * len(known)
    for colour in colours:
        size[colour] += 1
    looking: Iterable[int] = range(len(colours))
    while looking:
        changed: list[tuple[int, list[int]]] = []
        for colour, nodes in _by_colour(looking, colours, size).items():
            views: dict[Hashable, list[int]] = {}
            for node in nodes:
                views.setdefault(seen(node, colours), []).append(node)
            groups = list(views.values())
            if len(nodes) == size[colour]:
                groups.remove(max(groups, key=len))
            changed.extend((colour, group) for group in groups)
        for colour, group in changed:
            size[colour] -= len(group)
            size.append(len(group))
            for node in group:
                colours[node] = len(size) - 1
        looking = dict.fromkeys(n for _, group in changed for node in group for n in neighbours[node])
    return colours


def _by_colour(nodes: Iterable[int], colours: Sequence[int], size: Sequence[int]) -> dict[int, list[int]]:
    """Without nodes that are alone in their class."""
    out: dict[int, list[int]] = {}
    for node in nodes:
        if size[colours[node]] > 1:
            out.setdefault(colours[node], []).append(node)
    return out
