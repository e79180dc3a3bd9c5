"""Take fused bias additions apart from products, if the product is to be a partial sum.

Each device of an `addmm` whose inner loop is shared would add the bias: it would be there as often as there are
devices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts.rebuild import Copies, rebuilt
from piper_capture.torch_api._torch import OpOverload
from piper_capture.values import aliasing

aten = torch.ops.aten

FUSED: dict[OpOverload, OpOverload] = {
    aten.addmm.default: aten.mm.default,
    aten.baddbmm.default: aten.bmm.default,
}
"""An op that adds a product to a tensor -> the product alone."""


def unfused(joint: Joint, chosen: Callable[[fx.Node], bool]) -> Joint:
    """Return a chunk with the chosen fused ops taken apart; the given chunk stays as it is."""
    return rebuilt(joint, lambda n: n.target in FUSED and _plain(n) and chosen(n), _apart)


def _apart(graph: fx.Graph, node: fx.Node, env: Copies) -> tuple[fx.Node, ...]:
    assert isinstance(node.target, OpOverload)
    bias, *factors = fx.node.map_arg(node.args, env.__getitem__)
    product = graph.call_function(FUSED[node.target], tuple(factors))
    product.meta = {**node.meta, "val": torch.empty_like(aliasing.tensor(node))}
    added = graph.call_function(aten.add.Tensor, (product, bias))
    added.meta = dict(node.meta)
    return (added,)


def _plain(node: fx.Node) -> bool:
    """Return whether nothing is scaled: no beta and no alpha."""
    return len(node.args) == 3 and not node.kwargs
