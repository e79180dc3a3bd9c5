"""Name calls by how they treat the rows of a batch: those that bend, choose, join, or combine along a dimension."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from piper_compiler.capture import _torch
from piper_compiler.capture.batch_loss.reductions import call_name

FILLED = frozenset({"full", "full_like", "new_full", "fill"})
"""The calls that make a tensor of one number, the second argument."""
TENSORS = frozenset({"tensor", "scalar_tensor", "as_tensor"}) | FILLED
"""The calls that make a tensor of a number."""
OF_NUMBERS = frozenset({"add", "sub", "mul", "div"}) | TENSORS - FILLED
"""The calls that compute with a size of the batch; elsewhere a size only says the shape of a result."""
JOINED = frozenset({"stack", "cat", "concat", "hstack"})
CHOSEN = frozenset({"where", "masked_fill"})
_ALONG = "softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin flip sort argsort"
ALONG = dict.fromkeys(_ALONG.split(), 1) | dict.fromkeys(("roll", "topk", "normalize"), 2)
"""The calls that combine the numbers along a dimension and keep it, and the place of that argument."""
_BENT = (
    "clamp clip clamp_min clamp_max relu relu6 leaky_relu threshold hardtanh abs absolute max min maximum minimum fmax fmin "
    "amax amin where masked_fill sign round floor ceil trunc floor_divide fmod remainder gt ge lt le eq ne greater less"
)
BENT = frozenset(_BENT.split())
"""The calls that are straight on each side of a bend: a trial may see one side, and microbatches both."""
EXTREMES = BENT | {"any", "all", "argmax", "argmin", "aminmax", "median", "nanmedian", "mode", "quantile", "unique"}
"""The reductions of integers and conditions that a trial may find equal in all parts by chance."""


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
        return size is (node.args[position] if len(node.args) > position else node.kwargs.get("fill_value"))
    return name in OF_NUMBERS


def is_multiple_of_rows(size: Any) -> bool:
    """Return whether a size is a number of rows, or so many in each row."""
    at = [_torch.size_at(size, rows) for rows in (2, 3, 5)]
    return bool(at[0] * 3 == at[1] * 2 and at[1] * 5 == at[2] * 3)


def along_rows(node: fx.Node, name: str) -> bool:
    """Return whether a call combines the numbers along a dimension of rows, and keeps it."""
    if name not in ALONG or not isinstance(node.args[0], fx.Node) or not has_rows(node.args[0]):
        return False
    named: dict[Any, Any] = {**dict(enumerate(node.args)), **node.kwargs}
    dims = named.get("dim", named.get("dims", named.get(ALONG[name], 1 if name == "normalize" else -1)))
    shape = node.args[0].meta["example_value"].shape
    return any(_torch.is_symbolic(shape[d]) for d in (dims if isinstance(dims, tuple | list) else (dims,)) if d is not None)
