"""Name the operation that compares the rows of a microbatch with each other, in a chunk not affine in the rows."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch import fx

from piper_capture.values.concrete import concrete_shape, line_of, tensors_of
from piper_ir.ground.errors import CaptureError
from piper_ops import attention as ATTENTION


def compares_rows(nodes: Iterable[fx.Node]) -> CaptureError | None:
    """Return the user's error for the first operation that grows faster than the rows; None without one."""
    node = next(
        (
            n
            for n in nodes
            if _attends(n) or any(_outgrows(n, k) for k in range(len(tensors_of(n))))
        ),
        None,
    )
    if node is None:
        return None
    if _attends(node):
        return CaptureError(
            f"{line_of(node)}: attends to other rows of the batch, where tokens of the same row are meant. {FIRST}"
        )
    return CaptureError(
        f"{line_of(node)}: compares the rows of a batch with each other: its result has rows x rows numbers, so "
        f"that the chunk is not affine in the rows. A loss over all rows at once (contrastive, in-batch negatives) "
        f"changes with the number of rows, and a microbatch has only some of them. Accepted is a loss in which "
        f"each row counts by itself. Give the other side of each comparison as a tensor of the batch, [rows, ...], "
        f"or let one row of Job.batch hold the whole set that is compared, [rows, set, ...], and compare within "
        f"it. {FIRST}"
    )


FIRST = (
    "Attention modules of torch.nn take [T, rows, width], and [rows, T, width] if they are made with "
    "batch_first=True: make them so, or transpose their inputs in forward"
)
"""The way out for attention over the rows."""


def _attends(node: fx.Node) -> bool:
    """Return whether a call of attention takes rows of the batch for tokens."""
    shapes = (
        [concrete_shape(tensors_of(node)[0], rows, node) for rows in (2, 3)]
        if node.target is ATTENTION
        else []
    )
    return len(shapes) == 2 and shapes[0][1] != shapes[1][1]


def _outgrows(node: fx.Node, which: int) -> bool:
    """Return whether the elements of a result are no affine function of an even number of rows."""
    at2, at4, at6 = (
        prod(concrete_shape(tensors_of(node)[which], rows, node)) for rows in (2, 4, 6)
    )
    return at6 - at4 != at4 - at2
