"""Decide which tensors F saves under a recomputation policy, and which ones R recomputes.

Of the tensors that backward needs, F saves the ones that the policy names:

    all          every one: there is no recomputation
    products     results of matrix products and of attention
    products/2   results of every second matrix product, the first one included, and of attention
    attention    results of attention
    outputs      of modules (see below): the results that operations outside of them read
    inputs       none: R runs the forward again from the inputs
    mm+softmax   results of these ops

R recomputes the others, from inputs, saved tensors and outputs. With a "!" behind the policy it recomputes the outputs
as well, so that they need not be kept for the R of a later chunk.

With "@" and patterns behind it, the policy holds inside of the modules with matching names: F saves all tensors that
are made outside, and the ones that R reads there, although backward alone would not need them. With "&" between
them, several such policies hold beside each other, each for the modules that no earlier one has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import fx

from piper_capture.graphs.closures import Closure, close
from piper_capture.steps.draws import origin_of
from piper_capture.steps.kernels import launched
from piper_capture.values import aliasing
from piper_ir.program.ops import EVERY, WITHIN
from piper_ops import KernelInfo

OUTPUTS = "outputs"
"""The policy that keeps the results of modules."""
POLICIES: Mapping[str, frozenset[str]] = {
    "products": frozenset({"matmul", "attention"}),
    "attention": frozenset({"attention"}),
    OUTPUTS: frozenset(),
    "inputs": frozenset(),
}
"""The kinds of kernels whose results each policy keeps."""
MERGES = ("context_merge",)
"""The ops that merge results of attention over the keys of several devices."""


PIECE_OF = "piece_of"
"""The key of the meta of a product of some rows for the name of the product of all rows."""


class KeepPolicy:
    """Say which tensors F keeps under a policy, and which operations R computes.

    Args:
        policy: the policy's name, without others beside it.
        inside: the origins of the operations for which it holds; None for all.
        forward: the operations that F runs when it saves all tensors, in the order of the program.
    """

    def __init__(
        self, policy: str, inside: Collection[str] | None, forward: Sequence[fx.Node]
    ) -> None:
        self._name, _, every = policy.partition(WITHIN)[0].partition(EVERY)
        self._inside, self._numbered = inside, bool(every)
        products = [n for n in forward if every and self._holds(n) and _kernel(n).kind == "matmul"]
        names = {name: k for k, name in enumerate(dict.fromkeys(map(_product, products)))}
        self._left_out = {n for n in products if names[_product(n)] % int(every)}
        self._outside = {n for n in forward if not self._holds(n)}

    def keeps(self, saved: fx.Node) -> bool:
        """Return whether F keeps a tensor that backward needs."""
        if not self._holds(saved):
            return True
        if self._name == OUTPUTS:
            return _read_by(saved, self._outside)
        return self._names(saved)

    def repeats(self, node: fx.Node) -> bool:
        """Return whether R computes a tensor again that it needs, and F does not keep it for that.

        Of numbered products R computes none that F keeps, although backward itself may not need them.
        """
        return self._holds(node) and not (self._numbered and self._names(node))

    def _holds(self, node: fx.Node) -> bool:
        return self._inside is None or origin_of(aliasing.producer(node)) in self._inside

    def _names(self, node: fx.Node) -> bool:
        """Return whether the policy names the operation that makes a tensor."""
        kernel, kinds = _kernel(node), POLICIES.get(self._name)
        if aliasing.producer(node) in self._left_out:
            return False
        if kinds is None:
            return kernel.op in self._name.split("+")
        return kernel.kind in kinds or (kernel.op in MERGES and "attention" in kinds)


def _kernel(node: fx.Node) -> KernelInfo:
    return aliasing.asked(launched, aliasing.producer(node))


def _product(node: fx.Node) -> str:
    """Return the name of a product, which its pieces have in common."""
    return str(node.meta.get(PIECE_OF, node.name))


def _read_by(node: fx.Node, others: Collection[fx.Node]) -> bool:
    """Return whether one of these operations reads a tensor, or a view of it."""
    return any(
        user in others or (aliasing.is_view(user) and _read_by(user, others)) for user in node.users
    )


def made_again(
    wanted: Iterable[fx.Node],
    given: Collection[fx.Node],
    computed: Callable[[fx.Node], bool],
) -> Closure:
    """Return the nodes that R computes for `wanted`, and the nodes that it reads; it need not compute `given`.

    A random op draws the same numbers again, whatever else is drawn: they depend on its place (docs/random_numbers.md).
    """
    return close(wanted, lambda n: n not in given and computed(n))
