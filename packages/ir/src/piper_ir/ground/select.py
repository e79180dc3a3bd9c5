"""Select graph nodes by coordinates, as in `where(stage=0, mb=(0, 2), phase="F")`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from piper_ir.ground.errors import SelectorError

Special = Literal["ANY", "NONE"]
ANY: Special = "ANY"
"""A term that matches a node that has the coordinate, with any value."""
NONE: Special = "NONE"
"""A term that matches a node that does not have the coordinate."""

Match = int | str | tuple[int | str, ...]

LONGEST_CHAIN = ("",)
"""The request for the longest chain of like modules as layers, in place of patterns of their names."""

EMPTY = "empty"
"""The coordinate of the chunk of a stage without layers: the number of the stage."""


@dataclass(frozen=True, init=False)
class Where:
    """Hold the coordinates of the wanted nodes.

    A term maps a coordinate's name to its wanted value: an int or name, one of several (a tuple or range), ANY, or
    NONE. A selection without terms selects everything. Names are names of regions (`layer`, `stage`, the user's own),
    `mb`, `phase` ("F", "B", "R", "I", "W"), and `op` ("compute", "send", "recv", "add"); communication is matched only
    when `op` asks for it.
    """

    terms: tuple[tuple[str, Match], ...]

    def __init__(self, terms: tuple[tuple[str, Match], ...] = (), **coords: Any) -> None:
        match_by_name = {name: _match(name, value) for name, value in coords.items()}
        if terms:
            match_by_name = dict(terms) | match_by_name
        object.__setattr__(self, "terms", tuple(sorted(match_by_name.items())))

    @staticmethod
    def of(terms: tuple[tuple[str, Match], ...]) -> Where:
        """Return the selection with these terms without checking them, because they come from another selection."""
        selection = object.__new__(Where)
        object.__setattr__(selection, "terms", terms)
        return selection

    def matches(self, coords: Mapping[str, int | str]) -> bool:
        """Return whether a node with these coordinates is selected."""
        for name, wanted in self.terms:
            if wanted == NONE:
                if name in coords:
                    return False
            elif name not in coords:
                return False
            elif wanted != ANY and coords[name] not in (
                wanted if isinstance(wanted, tuple) else (wanted,)
            ):
                return False
        return True

    def __str__(self) -> str:
        return (
            "where("
            + ", ".join(f"{n}={w if w in (ANY, NONE) else repr(w)}" for n, w in self.terms)
            + ")"
        )


def where(**coords: Any) -> Where:
    """Select nodes by coordinates; values are int | str | tuple | range | ANY | NONE."""
    return Where(**coords)


def _match(name: str, value: Any) -> Match:
    # First the types of nearly all values; a union of types in place of the tuple takes twice the time.
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    if isinstance(value, range):
        value = tuple(value)
    if isinstance(value, tuple | list) and value and all(isinstance(v, int | str) for v in value):
        return tuple(value)
    raise SelectorError(
        f"where({name}={value!r}): a value is an int, a name, a non-empty tuple or range of them, ANY or NONE"
    )
