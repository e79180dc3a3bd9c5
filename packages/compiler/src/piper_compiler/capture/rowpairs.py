"""Name the operation that compares the rows of a microbatch with each other, in a chunk not affine in the rows."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch import fx

from piper_compiler.capture.concrete import concrete_shape, line_of, tensors_of
from piper_ir.errors import CaptureError


def compares_rows(nodes: Iterable[fx.Node]) -> CaptureError | None:
    """Return the user's error for the first operation whose result grows faster than the rows; None without one."""
    node = next((n for n in nodes if any(_outgrows(n, k) for k in range(len(tensors_of(n))))), None)
    if node is None:
        return None
    return CaptureError(
        f"{line_of(node)}: compares the rows of a batch with each other: its result has rows x rows numbers, so that the chunk "
        "is not affine in the rows. A loss over all rows at once (contrastive, in-batch negatives) changes with the number of "
        "rows, and a microbatch has only some of them. Accepted is a loss in which each row counts by itself. Give the other "
        "side of each comparison as a tensor of the batch, [rows, ...], or let one row of Job.batch hold the whole set that is "
        "compared, [rows, set, ...], and compare within it"
    )


def _outgrows(node: fx.Node, which: int) -> bool:
    """Return whether the elements of a result are no affine function of the rows."""
    at2, at3, at5 = (prod(concrete_shape(tensors_of(node)[which], rows, node)) for rows in (2, 3, 5))
    return at5 - at3 != 2 * (at3 - at2)
