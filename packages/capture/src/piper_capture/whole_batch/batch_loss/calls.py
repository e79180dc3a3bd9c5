"""Name calls by how they treat the rows of a batch: bend, choose, join, or combine them along a dimension."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from piper_capture.torch_api import _torch
from piper_capture.values.concrete import tensors_of
from piper_capture.whole_batch.batch_loss.reductions import call_name
from piper_capture.whole_batch.batch_loss.writers import SAME, ancestors

FILLED = frozenset({"full", "full_like", "new_full", "fill"})
"""The calls that make a tensor of one number, the second argument."""
TENSORS = frozenset({"tensor", "scalar_tensor", "as_tensor"}) | FILLED
"""The calls that make a tensor of a number."""
OF_NUMBERS = frozenset({"add", "sub", "mul", "div"}) | TENSORS - FILLED
"""The calls that compute with a size of the batch; elsewhere a size only says the shape of a result."""
JOINED = frozenset({"stack", "cat", "concat", "hstack"})
NUMBERED = frozenset({"arange", "linspace"})
CHOSEN = frozenset({"where", "masked_fill"})
_ALONG = "softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin flip sort argsort"
_PICKED = ("gather", "index_select", "scatter", "scatter_add", "index_add", "index_copy")
ALONG = dict.fromkeys((*_ALONG.split(), *_PICKED), 1) | dict.fromkeys(
    ("roll", "topk", "normalize", "take_along_dim"), 2
)
"""The calls that combine the numbers along a dimension and keep it, and the place of that argument."""
_BENT = (
    "clamp clip clamp_min clamp_max relu relu6 leaky_relu threshold hardtanh abs absolute max min maximum minimum "
    "fmax fmin amax amin where masked_fill sign round floor ceil trunc floor_divide fmod remainder gt ge lt le eq "
    "ne greater less"
)
BENT = frozenset(_BENT.split())
"""The calls that are straight on each side of a bend: a trial may see one side, and microbatches both."""
EXTREMES = BENT | {
    "any",
    "all",
    "argmax",
    "argmin",
    "aminmax",
    "median",
    "nanmedian",
    "mode",
    "quantile",
    "unique",
}
"""The reductions of integers and conditions that a trial may find equal in all parts by chance."""


@lru_cache
def tags_of(name: str) -> frozenset[torch.Tag]:
    """Return the tags that any overload of torch's operator of this name has; none if there is no such operator."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet else []
    return frozenset(tag for overload in overloads for tag in overload.tags)


def is_drawn(node: fx.Node) -> bool:
    """Return whether a value may be made of random numbers, so that the same calls make another one."""
    seeded = torch.Tag.nondeterministic_seeded
    return any(seeded in tags_of(call_name(n)) for n in ancestors([node]))


def has_rows(node: fx.Node) -> bool:
    """Return whether a node makes a tensor with a dimension of rows."""
    value = node.meta.get("example_value")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(v, Tensor) and any(map(_torch.is_symbolic, v.shape)) for v in values)


def computes_with(node: fx.Node, size: fx.Node) -> bool:
    """Return whether a call computes with a size of the batch, and does not only make a tensor of that shape."""
    name = call_name(node)
    if name in FILLED:
        position = 2 if name == "new_full" else 1
        return size is (
            node.args[position] if len(node.args) > position else node.kwargs.get("fill_value")
        )
    return name in OF_NUMBERS


def rows_meet(node: fx.Node) -> bool:
    """Return whether a call mixes rows: a result row depends on several rows, or on a row in another place.

    So do results with another number of rows (halves, neighbours) or two dimensions of rows (each with each), an index
    of rows, row numbers, which begin anew in each microbatch, and reductions along the rows.
    """
    known = [
        t for t in tensors_of(node) if not _torch.data_dependent(t)
    ]  # another one is refused for that
    sizes = [[s for s in t.shape if _torch.is_symbolic(s)] for t in known]
    if any(len(dims) > 1 or not all(map(is_multiple_of_rows, dims)) for dims in sizes):
        return True
    if call_name(node) in NUMBERED:
        return any(sizes)
    return _along_rows(node, call_name(node)) or (
        call_name(node) == "getitem" and _picks_rows(node)
    )


def is_multiple_of_rows(size: Any) -> bool:
    """Return whether a size is a number of rows, or so many in each row."""
    try:
        at = [_torch.size_at(size, rows) for rows in (2, 3, 5)]
    except LookupError:  # it depends on values of tensors, which the cut refuses by line
        return False
    return bool(at[0] * 3 == at[1] * 2 and at[1] * 5 == at[2] * 3)


def _picks_rows(node: fx.Node) -> bool:
    """Return whether an index chooses rows by a tensor of numbers, other than one after the other."""
    whole, index = node.args
    if not isinstance(whole, fx.Node) or not isinstance(whole.meta["example_value"], Tensor):
        return False
    shape, parts = (
        whole.meta["example_value"].shape,
        [*index] if isinstance(index, tuple | list) else [index],
    )
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    dim = 0
    for part in parts:
        if part is Ellipsis:
            dim += len(shape) - taken
        elif part is not None:
            of_rows = dim < len(shape) and _torch.is_symbolic(shape[dim])
            if of_rows and isinstance(part, fx.Node) and tensors_of(part) and not counts_up(part):
                return True
            dim += 1
    return False


def counts_up(node: fx.Node) -> bool:
    """Return whether a node has the numbers of rows in their order, so that an index by it takes each row."""
    while call_name(node) in SAME and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return call_name(node) == "arange" and len(node.args) == 1


def _along_rows(node: fx.Node, name: str) -> bool:
    """Return whether a call combines the numbers along a dimension of rows, and keeps it."""
    if name not in ALONG or not isinstance(node.args[0], fx.Node) or not has_rows(node.args[0]):
        return False
    named: dict[Any, Any] = {**dict(enumerate(node.args)), **node.kwargs}
    dims = named.get(
        "dim", named.get("dims", named.get(ALONG[name], 1 if name == "normalize" else -1))
    )
    shape = node.args[0].meta["example_value"].shape
    return any(
        _torch.is_symbolic(shape[d])
        for d in (dims if isinstance(dims, tuple | list) else (dims,))
        if d is not None
    )
