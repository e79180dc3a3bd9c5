"""Describe the random operations of a chunk, so that random numbers do not depend on how a model is cut."""

from __future__ import annotations

from dataclasses import dataclass

ANY_NUMBER = "#*"
"""The end of the place of a module that runs as it is, whose draws depend on values in number and size."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Describe a random operation of a chunk's forward.

    Attributes:
        place: the module that draws and the number of the draw among its own in a forward: "layers.3.drop#0".
        rows: how many entries a row has in each dimension of the random tensor, 0 if that does not depend on the rows.
        refused: why it cannot be drawn by row, with the user's line; "" if it can.
    """

    place: str
    rows: tuple[int, ...] = ()
    refused: str = ""
