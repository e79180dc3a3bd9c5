"""Say in the user's terms what an op is, why devices exchange a tensor, and why they cannot share an index."""

from __future__ import annotations

import operator
from collections.abc import Set
from pathlib import Path

from torch import fx

from piper_capture.layouts.indexes import Indexed, LoopIndex, OpIndexes, TensorKey
from piper_capture.values import aliasing
from piper_capture.values.concrete import frame_of

LONGEST = 36
"""The number of letters of a line of code that are shown."""


def title(node: fx.Node) -> str:
    """Return an op with the user's line that it comes from: "mm (model.py:12: self.up(x))".

    The file is without its folders, so that it is the same on every machine.
    """
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    schema = getattr(node.target, "_schema", None)
    name = schema.name.split("::")[-1] if schema is not None else str(node.target)
    frame = frame_of(node)
    if frame is None:
        return str(name)
    file, line, code = frame
    shown = code if len(code) <= LONGEST else f"{code[: LONGEST - 3]}..."
    return f"{name} ({Path(file).name}:{line}: {shown})"


def reason(key: TensorKey, user: fx.Node, *, summed: bool) -> str:
    """Return why a tensor is redistributed.

    For a partial sum it is the op that made it, else the op that requires another placement.
    """
    source = aliasing.root(key[0])
    if summed:
        return f"after {title(source)}"
    return f"at the end, after {title(source)}" if user is key[0] else f"before {title(user)}"


def wants_whole(indexes: Indexed, index: LoopIndex) -> tuple[fx.Node, OpIndexes] | None:
    """Return the first op that cannot be sharded along an index."""
    return next(((node, op) for node, op in indexes.ops.items() if index in op.whole), None)


def obstacle(indexes: Indexed, crossing: Set[LoopIndex], index: LoopIndex) -> str:
    """Return why devices cannot share an index; "" if they can.

    `crossing` are the indexes of activations between chunks.
    """
    if index in crossing:
        return "it passes between chunks"
    blocker = wants_whole(indexes, index)
    if blocker is None:
        return ""
    node, op = blocker
    return f"{title(node)} {'wants it whole' if op.known else 'has no rule: it is computed whole'}"
