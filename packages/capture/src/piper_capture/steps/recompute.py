"""Decide which tensors F saves under a recomputation policy, and which ones R recomputes.

Of the tensors that backward needs, F saves the ones that the policy names:

    all          every one: there is no recomputation
    products     results of matrix products and of attention
    attention    results of attention
    inputs       none: R runs the forward again from the inputs
    no_scores    all but those of attention that is written out, which are as large as its softmax: selective
                 recomputation of arXiv 2205.05198, section 4.2
    mm+softmax   results of these ops

R recomputes the others, from inputs, saved tensors and outputs. With a "!" behind the policy it recomputes the outputs
as well, so that they need not be kept for the R of a later chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx

from piper_capture.graphs.closures import Closure, close
from piper_capture.steps.kernels import launched
from piper_capture.values import aliasing

_SOFTMAX = torch.ops.aten._softmax.default
POLICIES: Mapping[str, frozenset[str]] = {
    "products": frozenset({"matmul", "attention"}),
    "attention": frozenset({"attention"}),
    "inputs": frozenset(),
}
"""The kinds of kernels whose results each policy keeps."""
NO_SCORES = "no_scores"
"""The policy that keeps all but the scores of attention."""
MERGES = ("context_merge",)
"""The ops that merge results of attention over the keys of several devices."""


def keeps(policy: str, node: fx.Node) -> bool:
    """Return whether F saves a tensor that backward needs."""
    if policy == NO_SCORES:
        return _shape(node) not in _scores(node.graph)
    kernel = aliasing.asked(launched, aliasing.producer(node))
    kinds = POLICIES.get(policy)
    if kinds is None:
        return kernel.op in policy.split("+")
    return kernel.kind in kinds or (kernel.op in MERGES and "attention" in kinds)


def _scores(graph: fx.Graph) -> set[torch.Size]:
    """Return the shapes of a graph's softmaxes over the tokens of rows, with and without rows and heads apart."""
    shapes = {_shape(n) for n in graph.find_nodes(op="call_function", target=_SOFTMAX)}
    of_heads = {s for s in shapes if s is not None and len(s) == 4}
    return of_heads | {torch.Size((s[0] * s[1], *s[2:])) for s in of_heads}


def _shape(node: fx.Node) -> torch.Size | None:
    value = node.meta.get("val")
    return value.shape if isinstance(value, torch.Tensor) else None


def made_again(wanted: Iterable[fx.Node], given: Collection[fx.Node]) -> Closure:
    """Return the nodes that R computes for `wanted`, and the nodes that it reads; it need not compute `given`.

    A random op draws the same numbers again, whatever else is drawn: they depend on its place (docs/random_numbers.md).
    """
    return close(wanted, lambda n: n not in given)
