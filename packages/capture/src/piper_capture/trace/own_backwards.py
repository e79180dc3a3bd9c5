"""Find the nodes of a captured graph whose backward may come from a user or another package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from piper_capture.torch_api import _torch
from piper_ops import as_written

TRUSTED = ("torch", "_operator", "operator", "math", "builtins", "piper_ops", "einops")
"""The packages whose functions have linear backwards."""
NAMESPACES = ("aten", "prims", "prim", "piper", "torchvision", "higher_order")


def has_own_backward(nodes: Iterable[fx.Node]) -> bool:
    """Return whether nodes of a captured graph may have a backward that is not torch's."""
    return next(own_backwards(nodes), None) is not None


def own_backwards(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes that may have a backward that is not torch's."""
    for node in nodes:
        if node.op != "call_function":
            continue
        space = getattr(node.target, "namespace", None)
        if isinstance(node.target, _torch.HigherOrderOperator) or node.target is as_written:
            yield node
        elif space is not None and space not in NAMESPACES:
            yield node
        elif (
            space is None
            and str(getattr(node.target, "__module__", "torch")).partition(".")[0] not in TRUSTED
        ):
            yield node
