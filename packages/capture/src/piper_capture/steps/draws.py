"""Describe the random operations of a chunk's trace, and how their shapes grow with the rows.

A random tensor of the whole batch can be drawn in parts if all rows have equally many elements, contiguous or at equal
strides: [rows, ...], [rows * tokens, ...], [tokens, rows, ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from piper_ir.ground.draws import Draw
from piper_ops import is_draw, refusal_of_draw

ORIGIN = "piper_origin"
"""The key of an annotation (meta["custom"]) for the name of the node of the captured graph that a node comes from."""
DRAW = "piper_draw"
"""The key of a node's meta for the number of a random operation in its chunk."""
DRAWN_PART = "piper_drawn_part"
"""The key of a node's meta for a device's part of the drawn tensor: a `piper_ops.random.draws.DrawnPart`."""
WHOLE = frozenset({"randperm"})
"""The ops whose result elements depend on each other, so that no part of the rows can be drawn separately."""


@dataclass(frozen=True)
class Drawn:
    """Describe a random operation of a trace at one number of rows.

    Attributes:
        origin: the name of the node of the captured graph that draws.
        op: the name of the op of aten.
        shape: the shape of the random tensor.
        refused: why it cannot be drawn by row; "" if it can.
    """

    origin: str
    op: str
    shape: tuple[int, ...]
    refused: str = ""

    @staticmethod
    def of(
        origin: str, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Drawn:
        """Return the description of a call of a random operation, whose arguments may be nodes."""
        value = result[0] if isinstance(result, tuple | list) else result
        return Drawn(
            origin,
            op._schema.name.split("::")[1],
            tuple(value.shape),
            refusal_of_draw(op, args, kwargs, value.dtype),
        )


def number_draws(graph: fx.Graph) -> None:
    """Give each random operation of a joint graph a number, in the order of the program."""
    for number, node in enumerate(n for n in graph.nodes if is_draw(n.target, n.args, n.kwargs)):
        node.meta[DRAW] = number


def drawn_in(graph: fx.Graph) -> tuple[Drawn, ...]:
    """Return the random operations of a joint graph."""
    nodes = [n for n in graph.nodes if is_draw(n.target, n.args, n.kwargs)]
    return tuple(Drawn.of(origin_of(n), n.target, n.args, n.kwargs, n.meta["val"]) for n in nodes)


def origin_of(node: fx.Node) -> str:
    """Return the name of the node of the captured graph that a joint graph's node comes from; "" if there is none."""
    return str((node.meta.get("custom") or {}).get(ORIGIN, ""))


def draws_of(rows: Sequence[int], traces: Sequence[Sequence[Drawn]]) -> tuple[Draw, ...]:
    """Return the draws of a chunk's code, named by their origins, from traces at two or more numbers of rows."""
    return tuple(_fitted(rows, same) for same in zip(*traces, strict=True))


def _fitted(rows: Sequence[int], same: Sequence[Drawn]) -> Draw:
    first, second = same[:2]
    entries = tuple(
        (b - a) // (rows[1] - rows[0]) for a, b in zip(first.shape, second.shape, strict=True)
    )
    refused = first.refused
    if (
        any(e and size != e * rows[0] for e, size in zip(entries, first.shape))
        or len([e for e in entries if e]) > 1
    ):
        refused = refused or "the number of elements of what is drawn is no multiple of the rows"
    if any(entries) and first.op in WHOLE:
        refused = refused or "an order of the rows would be another one for each microbatch"
    return Draw(first.origin, entries, refused)
