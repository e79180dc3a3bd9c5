"""Cut a captured model where devices begin and end to share its work, so that all-reduces stand between chunks.

An operation is *shared* if one of the ops of its joint graph is computed in parts. The shared operations of a region
become chunks of their own, with the coordinate `shared`. An output of such a chunk can be a partial sum, forward and
backward alike, and the chunks around it compute the same on all devices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import fx

from piper_capture.chunks.cut import cut
from piper_capture.layouts import PARTIAL, Parted, parted
from piper_capture.steps.draws import origin_of
from piper_capture.store.assemble import TRACE_ROWS, assembled
from piper_capture.store.captured import Captured
from piper_capture.store.codestore import TraceSpec
from piper_capture.torch_api import _torch
from piper_capture.trace.dynamo import Counted, Forward
from piper_ir.ground.errors import DirectiveError
from piper_ir.program.layout import Sharding


def with_seams(
    captured: Captured, asked: Sequence[Sharding], params: dict[str, tuple[tuple[str, ...], ...]]
) -> Captured:
    """Return the capture of the same model whose shared operations are chunks of their own.

    `asked` is how devices share its chunks, and `params` are for each code and input its names. Raises DirectiveError
    for a chunk that draws random numbers.
    """
    if random := next((c.id for c in captured.program.chunks if c.random), ""):
        raise DirectiveError(
            f"shard(over={asked[0].over!r}, cut=True): {random} draws random numbers, in the order of the whole "
            f"chunk; leave cut=True out, or train without dropout"
        )
    layers = captured.program.layers
    with _torch.capturing():
        pieces = {piece.region.id: piece for piece in cut(captured.forward, layers).pieces}
        shared: set[fx.Node] = set()
        ending: set[fx.Node] = set()
        known: dict[str, tuple[list[int], list[int]]] = {}
        for chunk in captured.program.chunks:
            if chunk.code not in params:
                continue
            recipe = captured.code.recipe(chunk.code)
            if chunk.code not in known:
                joint = captured.code.joint(chunk.code, TRACE_ROWS[0][0])
                known[chunk.code] = _places(parted(joint, asked, params=params[chunk.code]), recipe)
            body = list(recipe.cut.body(pieces[chunk.id]))
            for group, numbers in zip((shared, ending), known[chunk.code], strict=True):
                group.update(body[k] for k in numbers)
        forward, copies = _without_biases(captured.forward, [n for n in ending if _has_bias(n)])
        apart = frozenset(copies[node] for node in shared)
        return assembled(
            forward, cut(forward, layers, shared=apart), captured.reduce, layers, captured.code
        )


def _places(found: Parted, recipe: TraceSpec) -> tuple[list[int], list[int]]:
    """Return the operations of a piece that are shared, and the ones that make partial sums, by their place in it.

    An operation that left no node in the joint graph counts as shared if an input is shared and no partial sum.
    """
    body = list(recipe.cut.body(recipe.piece))
    left = {origin_of(node) for node in found.ops}
    along = [node for node in found.ops if any(node in d.along for d in found.decisions)]
    inside = {origin_of(node) for node in along}
    ending = {
        origin_of(node)
        for node in along
        if any(d.placement[node, 0] is PARTIAL for d in found.decisions)
    }
    for node in body:
        if node.name not in left and any(
            n.name in inside and n.name not in ending for n in node.all_input_nodes
        ):
            inside.add(node.name)
    return [k for k, n in enumerate(body) if n.name in inside], [
        k for k, n in enumerate(body) if n.name in ending
    ]


def _has_bias(node: fx.Node) -> bool:
    return (
        node.target is torch.nn.functional.linear
        and len(node.args) + len(node.kwargs) == 3
        and None not in _operands(node)
    )


def _operands(node: fx.Node) -> list[object]:
    return [
        *node.args,
        *(node.kwargs[name] for name in ("input", "weight", "bias") if name in node.kwargs),
    ]


def _without_biases(
    forward: Forward, nodes: Collection[fx.Node]
) -> tuple[Forward, dict[fx.Node, fx.Node]]:
    """Return a copy whose products `nodes` add their bias in an operation of its own, and each node's copy.

    A bias cannot be part of a partial sum: each device would add it.
    """
    graph = fx.Graph()
    read: dict[fx.Node, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    for node in forward.graph.nodes:
        if node in nodes:
            x, weight, bias = (read[n] for n in _operands(node) if isinstance(n, fx.Node))
            copies[node] = graph.call_function(torch.nn.functional.linear, (x, weight))
            read[node] = graph.call_function(torch.add, (copies[node], bias))
            copies[node].meta, read[node].meta = dict(node.meta), dict(node.meta)
        else:
            copies[node] = read[node] = graph.node_copy(node, read.__getitem__)
    counted = forward.counted
    rewritten = forward.with_graph(
        graph=graph,
        origins={read[n]: origin for n, origin in forward.origins.items()},
        loss=read[forward.loss],
        weight=None if forward.weight is None else read[forward.weight],
        rewrites={name: read[n] for name, n in forward.rewrites.items()},
        metrics=tuple(replace(m, node=read[m.node]) for m in forward.metrics),
        counted=counted
        and Counted(read[counted.totals], tuple(read[n] for n in counted.reductions)),
    )
    return rewritten, copies
