"""Adds into a term that nothing needs any more instead of into new memory, as autograd does with its own buffers.

`a + b` becomes `a.add_(b)`, or `b.add_(a)`, when the term was made in this step, is whole (not a part of a storage, not
expanded), has the sum's spec and strides, shares no bytes with the other term, and is used last here. Addition commutes
exactly, so the result is the same to the bit.
"""

from __future__ import annotations

import torch
from torch import fx

from piper_compiler.capture import aliasing
from piper_compiler.capture.stepgraph import StepGraph

aten = torch.ops.aten


def reuse_dying_terms(step: StepGraph) -> None:
    """Rewrite the sums of a step in place."""
    rank = {n: i for i, n in enumerate(step.graph.nodes)}
    last: dict[fx.Node, int] = {}
    for node in step.graph.nodes:
        for argument in node.all_input_nodes:
            last[aliasing.root(argument)] = rank[node]
    for node in step.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        terms = node.args
        if node.kwargs or not all(isinstance(t, fx.Node) for t in terms):
            continue
        for mine, other in ((terms[0], terms[1]), (terms[1], terms[0])):
            base = aliasing.root(mine)
            if last[base] == rank[node] and base is not aliasing.root(other) and _holds(mine, base, node):
                node.target, node.args = aten.add_.Tensor, (mine, other)
                # From here on the sum lives in the term's storage.
                last[base] = last[node]
                break


def _holds(term: fx.Node, base: fx.Node, total: fx.Node) -> bool:
    """Can `term`, whose storage `base` owns, take the sum?"""
    before, after = aliasing.tensor(term), aliasing.tensor(total)
    same = before.shape == after.shape and before.dtype == after.dtype and before.stride() == after.stride()
    return base.op == "call_function" and same and aliasing.fills_storage(before)
