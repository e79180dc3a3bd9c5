"""Replace ops of a joint graph: take fused bias additions apart from products that are to be partial sums.

Each device of an `addmm` whose inner loop is shared would add the bias: it would be there as often as there are
devices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import fx

from piper_capture.graphs.stepgraph import Joint
from piper_capture.torch_api._torch import OpOverload
from piper_capture.values import aliasing

aten = torch.ops.aten

FUSED: dict[OpOverload, OpOverload] = {
    aten.addmm.default: aten.mm.default,
    aten.baddbmm.default: aten.bmm.default,
}
"""An op that adds a product to a tensor -> the product alone."""
Copies = Mapping[fx.Node, fx.Node]
"""A node of the graph -> its copy; a replaced node with several results has none."""
Replace = Callable[[fx.Graph, fx.Node, Copies], "tuple[fx.Node, ...]"]
"""A function that adds the nodes that replace an op, and returns the nodes of its results."""


def rebuilt(joint: Joint, chosen: Callable[[fx.Node], bool], replaced: Replace) -> Joint:
    """Return a chunk with the chosen ops replaced; the given one stays as it is."""
    if not any(chosen(n) for n in joint.graph.nodes):
        return joint
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    results: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in joint.graph.nodes:
        if chosen(node):
            results[node] = replaced(graph, node, env)
            if len(results[node]) == 1:
                env[node] = results[node][0]
        elif node.target is operator.getitem and node.args[0] in results:
            env[node] = results[node.args[0]][node.args[1]]
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
