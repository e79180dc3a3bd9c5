"""Define the number that stands in a graph for a device's place along an axis."""

from __future__ import annotations


class Coordinate(int):
    """Stand for a device's place along an axis; as a number it is the first place."""

    axis: str

    def __new__(cls, axis: str) -> Coordinate:
        made = super().__new__(cls, 0)
        made.axis = axis
        return made

    def __repr__(self) -> str:
        return f"Coordinate({self.axis!r})"
