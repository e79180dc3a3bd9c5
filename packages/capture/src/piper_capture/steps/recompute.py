"""Decide which tensors F saves under a recomputation policy, and which ones R recomputes.

Of the tensors that backward needs, F saves the ones that the policy names:

    all          every one: there is no recomputation
    products     results of matrix products and of attention
    attention    results of attention
    inputs       none: R runs the forward again from the inputs
    mm+softmax   results of these ops

R recomputes the others, from inputs, saved tensors and outputs. With a "!" behind the policy it recomputes the outputs
as well, so that they need not be kept for the R of a later chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import fx

from piper_capture.graphs.closures import Closure, close
from piper_capture.steps.kernels import launched
from piper_capture.values import aliasing

POLICIES: Mapping[str, frozenset[str]] = {
    "products": frozenset({"matmul", "attention"}),
    "attention": frozenset({"attention"}),
    "inputs": frozenset(),
}
"""The kinds of kernels whose results each policy keeps."""
MERGES = ("context_merge",)
"""The ops that merge results of attention over the keys of several devices."""


def keeps(policy: str, node: fx.Node) -> bool:
    """Return whether F saves a tensor that backward needs."""
    kernel = aliasing.asked(launched, aliasing.producer(node))
    kinds = POLICIES.get(policy)
    if kinds is None:
        return kernel.op in policy.split("+")
    return kernel.kind in kinds or (kernel.op in MERGES and "attention" in kinds)


def made_again(wanted: Iterable[fx.Node], given: Collection[fx.Node]) -> Closure:
    """Return the nodes that R computes for `wanted`, and the nodes that it reads; it need not compute `given`.

    A random op draws the same numbers again, whatever else is drawn: they depend on its place (docs/random_numbers.md).
    """
    return close(wanted, lambda n: n not in given)
