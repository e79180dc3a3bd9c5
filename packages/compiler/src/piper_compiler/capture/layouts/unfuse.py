"""Take products apart from what is added to them, where the product is to be a sum over devices.

Each device of an `addmm` whose inner loop is shared would add the bias: it would be there as often as there are devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from piper_compiler.capture import aliasing
from piper_compiler.capture._torch import OpOverload
from piper_compiler.capture.stepgraph import Joint

aten = torch.ops.aten

FUSED: dict[OpOverload, OpOverload] = {
    aten.addmm.default: aten.mm.default,
    aten.baddbmm.default: aten.bmm.default,
}
"""An op that adds a product to a tensor -> the product alone."""


def unfused(joint: Joint, chosen: Callable[[fx.Node], bool]) -> Joint:
    """Return a chunk with the chosen ones among these ops taken apart; the given one stays as it is."""
    if not any(n.target in FUSED and _plain(n) and chosen(n) for n in joint.graph.nodes):
        return joint
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        if node.target in FUSED and _plain(node) and chosen(node):
            bias, *factors = (env[a] for a in node.args)
            product = graph.call_function(FUSED[node.target], tuple(factors))
            product.meta = {**node.meta, "val": torch.empty_like(aliasing.tensor(node))}
            env[node] = graph.call_function(aten.add.Tensor, (product, bias))
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta = dict(node.meta)
    return replace(
        joint,
        graph=graph,
        inputs=tuple(env[n] for n in joint.inputs),
        outputs=tuple(env[n] for n in joint.outputs),
        tangents={k: env[n] for k, n in joint.tangents.items()},
        grads={k: env[n] for k, n in joint.grads.items()},
        constant_names={env[n]: name for n, name in joint.constant_names.items()},
    )


def _plain(node: fx.Node) -> bool:
    """Return whether nothing is scaled: no beta and no alpha."""
    return len(node.args) == 3 and not node.kwargs
