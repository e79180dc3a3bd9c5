"""Define the number that stands in a graph for a device's coordinate along a mesh axis."""

from __future__ import annotations


class Coordinate(int):
    """Stand for a device's coordinate along a mesh axis; as a number it is the first one's.

    A mirrored one counts from the end with negative numbers: -1 for the first device.
    """

    axis: str
    mirrored: bool

    def __new__(cls, axis: str, mirrored: bool = False) -> Coordinate:
        coordinate = super().__new__(cls, -1 if mirrored else 0)
        coordinate.axis, coordinate.mirrored = axis, mirrored
        return coordinate

    def at(self, place: int) -> int:
        """Return its value on the device with this coordinate."""
        return -1 - place if self.mirrored else place

    def __repr__(self) -> str:
        return f"Coordinate({self.axis!r}{', mirrored=True' if self.mirrored else ''})"
