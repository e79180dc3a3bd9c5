"""Decide along one axis of devices which indexes each op of a joint graph is computed in parts of.

It is one pass in the order of the graph. An op is computed in parts of an index if one of its tensors is in parts of
it already, or if it makes the gradient of a parameter that is; weights' indexes come before the stream's. The tensors
that lack the index must be whole then, and results that lack it are sums of what the devices make. A sum goes on
through ops that are linear in it; the first op that is not makes it settle: into parts of the stream's index where the
tensor has it, else whole on every device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import fx

from piper_compiler.capture.graphs.stepgraph import Joint
from piper_compiler.capture.layouts import context
from piper_compiler.capture.layouts.indexes import Indexed, LoopIndex, OpIndexes, TensorKey, key_of
from piper_compiler.capture.layouts.loops import LoopRewrite


class Sum(Enum):
    """Mark a tensor of which every device holds a term, and that is the sum of them."""

    SUM = "sum"


SUM = Sum.SUM
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
Along = LoopIndex | Sum | None
"""The way in which a tensor lies along an axis: in parts of an index, as a sum, or None: equal on all devices."""


@dataclass(frozen=True)
class SharedAxis:
    """Describe an axis of devices that share the work of a chunk.

    Attributes:
        name: as generated code and messages know it.
        degree: the number of devices; each index below has as many steps.
        weights: the indexes that parameters are in parts of.
        stream: the indexes that what crosses between layers is in parts of; empty where it is whole.
        inside: the indexes of ops that cannot be computed in parts of the stream; their results go back into it.
        attention: how attention is computed in parts of the stream, as a `Sharding` says it.
        halves: for each index that devices take in zigzag order, the one of two halves right outside of it: in the
            second half the places are counted from behind.
        tables: what crosses between layers and is whole nevertheless.
        experts: whether what crosses between chunks is in parts of `weights`, and devices share no more than that.
        sums: what crosses between chunks as a sum where it is made as one.
    """

    name: str
    degree: int
    weights: frozenset[LoopIndex]
    stream: frozenset[LoopIndex] = frozenset()
    inside: frozenset[LoopIndex] = frozenset()
    attention: str = context.HEADS
    halves: Mapping[LoopIndex, LoopIndex] = field(default_factory=dict)
    tables: frozenset[fx.Node] = frozenset()
    experts: bool = False
    sums: frozenset[fx.Node] = frozenset()

    def in_order(self, op: OpIndexes, index: LoopIndex) -> bool:
        """Return whether the two halves stand right outside of an index in all tensors of an op, where it has halves.

        Else an op would take tokens for neighbours that are none.
        """
        half = self.halves.get(index)
        dims = [dim for tensor in (*op.tensors, *op.results) for dim in tensor if index in dim]
        return half is None or all(
            dim.index(index) and dim[dim.index(index) - 1] == half for dim in dims
        )

    def rewrite(self, op: OpIndexes, index: LoopIndex) -> LoopRewrite | None:
        """Return how other ops compute an op in parts of an index, if they do."""
        half = self.halves.get(index)
        first = (index,) if half is None else (half, index)
        found = context.rewrite_of(op, first, self.attention) if index in self.stream else None
        return op.rewrite(index) if found is None else found


@dataclass
class Decision:
    """Hold how the tensors of a graph lie along one axis.

    Attributes:
        made: how each tensor is made.
        settled: how its users find it, where that is another way: a sum that had to settle.
        wanted: for each op, how it wants the tensors among its arguments.
        results: how the graph's outputs and gradients must lie, by node.
        rewritten: the ops that others compute in parts, each with the index.
        along: the ops that are computed in parts, each with the index.
    """

    made: dict[TensorKey, Along] = field(default_factory=dict)
    settled: dict[TensorKey, Along] = field(default_factory=dict)
    wanted: dict[fx.Node, tuple[Along, ...]] = field(default_factory=dict)
    results: dict[fx.Node, Along] = field(default_factory=dict)
    rewritten: dict[fx.Node, LoopIndex] = field(default_factory=dict)
    along: dict[fx.Node, LoopIndex] = field(default_factory=dict)

    def of(self, key: TensorKey) -> Along:
        """Return how users find a tensor."""
        return self.settled.get(key, self.made[key])


def decided(
    joint: Joint, indexes: Indexed, axis: SharedAxis, terms: Collection[int] = ()
) -> Decision:
    """Return how the tensors of a chunk lie along an axis; the gradients of the inputs `terms` are to be sums."""
    settled: dict[TensorKey, Along] = {}
    while True:
        found = _Pass(joint, indexes, axis, settled, terms)
        found.run()
        if not found.new:
            return found.decision
        settled |= found.new


class _Pass:
    """Go through the graph once; `new` are the sums that must settle."""

    def __init__(
        self,
        joint: Joint,
        indexes: Indexed,
        axis: SharedAxis,
        settled: Mapping[TensorKey, Along],
        terms: Collection[int],
    ) -> None:
        self.decision = Decision(settled=dict(settled))
        self.new: dict[TensorKey, Along] = {}
        self._joint, self._indexes, self._axis, self._terms = joint, indexes, axis, terms
        self._exchanged = joint.exchanged
        self._params = {n: k for k, n in enumerate(joint.inputs) if joint.kinds[k] == "param"}
        self._asked: dict[TensorKey, LoopIndex] = {}
        self._gradients = {key_of(n) for k, n in joint.grads.items() if joint.kinds[k] == "param"}

    def run(self) -> None:
        self._place_inputs()
        self._ask_for_gradients()
        for node, op in self._indexes.ops.items():
            self._place(node, op)
        self._place_results()

    def _place_inputs(self) -> None:
        made = self.decision.made
        for node in self._joint.graph.nodes:
            if node.op in ("placeholder", "get_attr") and (node, 0) in self._indexes.tensors:
                made[node, 0] = None
        for node in self._params:
            made[node, 0] = self._first(self._axis.weights, node)
        for k, node in enumerate(self._joint.inputs):
            if self._joint.kinds[k] == "value":
                made[node, 0] = self._boundary(node)
        for k, node in self._joint.tangents.items():
            made[node, 0] = self._boundary(self._joint.outputs[k])

    def _ask_for_gradients(self) -> None:
        """Ask that the gradients of parameters are made in the parts that these are in."""
        for k, node in self._joint.grads.items():
            how = self.decision.made[self._joint.inputs[k], 0]
            if self._joint.kinds[k] == "param" and isinstance(how, LoopIndex):
                self._ask(key_of(node), how)

    def _ask(self, key: TensorKey, index: LoopIndex) -> None:
        """Ask that a tensor is made in parts of an index, and so what is made for it alone."""
        self._asked[key] = index
        op = self._indexes.ops.get(key[0])
        if op is None or op.parts(index) is None or not self._axis.in_order(op, index):
            return
        for argument, dims in zip(op.keys, op.tensors, strict=True):
            if any(index in dim for dim in dims) and len(argument[0].users) == 1:
                self._ask(argument, index)

    def _boundary(self, node: fx.Node) -> Along:
        """Return how what passes between chunks lies: by its dimension of tokens, so that all chunks see it alike.

        What experts take and give is in parts of their index.
        """
        if self._axis.experts:
            return self._first(self._axis.weights, node)
        if node in self._exchanged:
            return None
        dims = self._indexes.tensors[key_of(node)]
        if node in self._axis.tables:
            return None
        at = self._joint.tokens_of(node)
        return (
            next((i for i in dims[at] if i in self._axis.stream), None) if len(dims) > at else None
        )

    def _first(self, wanted: frozenset[LoopIndex], node: fx.Node) -> LoopIndex | None:
        """Return the first index of a node's tensor that is among `wanted`."""
        return next(
            (i for dim in self._indexes.tensors[key_of(node)] for i in dim if i in wanted), None
        )

    def _place(self, node: fx.Node, op: OpIndexes) -> None:
        lying = [self.decision.of(key) for key in op.keys]
        index = self._index(node, op, lying)
        wants: list[Along]
        made: list[Along]
        rewrite = None if index is None else self._axis.rewrite(op, index)
        if index is not None:
            whole = frozenset[int]() if rewrite is None else rewrite.whole
            having = [
                any(index in dim for dim in dims) and k not in whole
                for k, dims in enumerate(op.tensors)
            ]
            wants = [index if has else None for has in having]
            made = _made_along(op, index, rewrite)
            self.decision.along[node] = index
            if op.parts(index) is None:
                self.decision.rewritten[node] = index
        elif (
            (sums := self._sums(lying))
            and sums in op.loops.linear
            and not self._ends_in_parameter(node, op, sums)
        ):
            wants = [SUM if k in sums else None for k in range(len(lying))]
            made = [SUM for _ in op.results]
        else:
            wants, made = [None for _ in lying], [None for _ in op.results]
        self.decision.wanted[node] = tuple(wants)
        self.decision.made |= {(node, k): how for k, how in enumerate(made)}
        if index in self._axis.inside:
            self._go_back(node, op)
        if rewrite is not None and index is not None:
            self.decision.settled |= {(node, k): index for k in rewrite.sums}
        for key, how, want in zip(op.keys, lying, wants, strict=True):
            if how is SUM and want is not SUM:
                self._settle(key, want)

    def _index(self, node: fx.Node, op: OpIndexes, lying: list[Along]) -> LoopIndex | None:
        """Return the index that an op is computed in parts of, if any."""
        present = [how for how in lying if isinstance(how, LoopIndex)]
        present += [
            self._asked[node, k] for k in range(len(op.results)) if (node, k) in self._asked
        ]
        present.sort(key=lambda i: i not in self._axis.weights)
        found = next((i for i in present if self._can(op, i)), None)
        if found is None and any(i in self._axis.stream for i in present):
            there = [
                i
                for dims in (*op.tensors, *op.results)
                for dim in dims
                for i in dim
                if i in self._axis.inside
            ]
            found = next((i for i in there if op.parts(i) is not None), None)
        return found

    def _can(self, op: OpIndexes, index: LoopIndex) -> bool:
        """Return whether an op can be computed in parts of an index."""
        there = op.parts(index) is not None or self._axis.rewrite(op, index) is not None
        return there and self._axis.in_order(op, index)

    def _go_back(self, node: fx.Node, op: OpIndexes) -> None:
        """Let what is made in parts of other indexes than the stream's be found in parts of this by its users."""
        for k, dims in enumerate(op.results):
            stream = [i for dim in dims for i in dim if i in self._axis.stream]
            if stream and self.decision.made[node, k] != stream[0]:
                self.decision.settled[node, k] = stream[0]

    def _sums(self, lying: list[Along]) -> frozenset[int]:
        return frozenset(k for k, how in enumerate(lying) if how is SUM)

    def _ends_in_parameter(self, node: fx.Node, op: OpIndexes, sums: frozenset[int]) -> bool:
        """Return whether an op makes the gradient of a parameter of a sum and of what is none, as norms do.

        As a sum it would be added up once more in each step. That pays where a product makes a large gradient of it.
        """
        if op.call.op in PRODUCTS or len(sums) == len(op.keys):
            return False
        return any((node, k) in self._gradients for k in range(len(op.results)))

    def _settle(self, key: TensorKey, want: Along) -> None:
        stream = [i for dim in self._indexes.tensors[key] for i in dim if i in self._axis.stream]
        self.new.setdefault(key, stream[0] if stream else want)

    def _place_results(self) -> None:
        results = self.decision.results
        for node in self._joint.outputs:
            results[node] = self._boundary(node)
        for k, node in self._joint.grads.items():
            given = self.decision.made[self._joint.inputs[k], 0]
            how = self.decision.of(key_of(node))
            summed = (
                self._joint.kinds[k] == "param"
                and given is None
                and (how is not None or k in self._terms)
            )
            results[node] = SUM if summed else given
        results |= {
            node: SUM
            for node in self._axis.sums & results.keys()
            if self.decision.of(key_of(node)) is SUM
        }
        for node, want in results.items():
            if self.decision.of(key_of(node)) is SUM and want is not SUM:
                self._settle(key_of(node), want)


def _made_along(op: OpIndexes, index: LoopIndex, rewrite: LoopRewrite | None) -> list[Along]:
    """Return how the results of an op lie that is computed in parts of an index."""
    without: Along = SUM if rewrite is None or rewrite.terms else None
    made: list[Along] = [
        index if any(index in dim for dim in dims) else without for dims in op.results
    ]
    return (
        made
        if rewrite is None
        else [SUM if k in rewrite.sums else how for k, how in enumerate(made)]
    )
