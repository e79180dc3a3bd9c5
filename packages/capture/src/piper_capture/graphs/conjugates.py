"""Let a joint graph compute conjugates and negations that torch keeps as a bit of a view.

Copies resolve these bits, and simplification removes copies; a tensor that crosses between steps has no such bits. So
the values are computed at once. The conjugate or negation of a Python number is put into the ops that read it.
"""

from __future__ import annotations

import torch
from torch import fx

from piper_capture.graphs.rewriting import new_node
from piper_capture.values import aliasing

aten = torch.ops.aten
COMPUTED = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}
"""The ops that make a view with such a bit, each with the op that computes its values."""


def compute_bits(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Let an op compute the values of a conjugate or negative view; a number is put into the ops that read it."""
    if node.target not in COMPUTED:
        return None
    number = node.args[0]
    if isinstance(number, fx.Node):
        values = new_node(graph, node, COMPUTED[node.target], (number,))
        values.meta["val"] = _alone(aliasing.tensor(node))
        return values
    assert isinstance(number, int | float | complex)
    value = complex(number).conjugate() if node.target is aten._conj.default else -number
    for user in list(node.users):
        _give(user, node, value)
    return None


def _give(user: fx.Node, node: fx.Node, value: complex) -> None:
    """Replace a node by a number in the arguments of one of its users."""
    user.args, user.kwargs = fx.node.map_arg(
        (user.args, user.kwargs), lambda n: value if n is node else n
    )


def _alone(value: torch.Tensor) -> torch.Tensor:
    """Return a (fake) tensor like a view, in a storage of its own and without bits."""
    mode = getattr(value, "fake_mode", None)
    if mode is None:
        return torch.empty_like(value)
    with mode:
        return torch.empty_like(value)
