"""Copy the joint graph of a chunk with some of its ops replaced by others."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from piper_capture.graphs.stepgraph import Joint

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
