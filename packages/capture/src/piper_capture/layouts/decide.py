"""Decide, along one axis of devices, the placement of each tensor of a joint graph: sharding propagation.

It is one pass in the order of the graph. An op is sharded along an index if one of its tensors already is, or if it
makes the gradient of a parameter that is; indexes of weights come before those of the activations' tokens. Its tensors
that lack the index must be replicated then, and its results that lack the index are partial sums. A partial sum goes
through ops that are linear in it. The first op that is not linear makes it redistribute: it is reduce-scattered along
the index of tokens if the tensor has one, else all-reduced and so replicated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import fx

from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts import context
from piper_capture.layouts.indexes import Indexed, LoopIndex, OpIndexes, TensorKey, key_of
from piper_capture.layouts.loops import LoopRewrite


class Partial(Enum):
    """Mark a tensor of which each device holds a partial sum: the tensor is the sum over the devices."""

    PARTIAL = "partial"


PARTIAL = Partial.PARTIAL
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
Placement = LoopIndex | Partial | None
"""The placement of a tensor along one axis: sharded along an index, `PARTIAL` (a partial sum), None (replicated)."""


@dataclass(frozen=True)
class SharedAxis:
    """Describe an axis of devices that share the work of a chunk.

    Attributes:
        name: as generated code and messages know it.
        degree: the number of devices; each index below has as many steps.
        weights: the indexes along which parameters are sharded.
        stream: the indexes along which activations between layers are sharded; empty if they are replicated.
        inside: the indexes along which ops are sharded that cannot be sharded along the tokens, such as the heads of
            attention; their results are redistributed along the tokens.
        attention: how attention over sharded tokens is computed, as a `Sharding` says it.
        halves: for each index that devices take in zigzag order, the one of two halves right outside of it: in the
            second half the places are counted from behind.
        replicated: values between layers that stay replicated though activations are sharded: masks, position tables.
        expert_chunk: whether the chunk holds experts: its inputs and outputs are sharded along `weights`, nothing else
            is shared.
        partial: values between chunks that may pass as partial sums.
    """

    name: str
    degree: int
    weights: frozenset[LoopIndex]
    stream: frozenset[LoopIndex] = frozenset()
    inside: frozenset[LoopIndex] = frozenset()
    attention: str = context.HEADS
    halves: Mapping[LoopIndex, LoopIndex] = field(default_factory=dict)
    replicated: frozenset[fx.Node] = frozenset()
    expert_chunk: bool = False
    partial: frozenset[fx.Node] = frozenset()

    def in_order(self, op: OpIndexes, index: LoopIndex) -> bool:
        """Return whether the index of halves is right outside of `index` in all tensors of an op.

        Else an op would treat tokens as neighbours that are far apart in the sequence.
        """
        half = self.halves.get(index)
        dims = [dim for tensor in (*op.tensors, *op.results) for dim in tensor if index in dim]
        return half is None or all(
            dim.index(index) and dim[dim.index(index) - 1] == half for dim in dims
        )

    def rewrite(self, op: OpIndexes, index: LoopIndex) -> LoopRewrite | None:
        """Return the ops that replace an op so that it can be sharded along an index, or None."""
        half = self.halves.get(index)
        first = (index,) if half is None else (half, index)
        context_rewrite = (
            context.rewrite_of(op, first, self.attention) if index in self.stream else None
        )
        return op.rewrite(index) if context_rewrite is None else context_rewrite


@dataclass
class Decision:
    """Hold the placements of a graph's tensors along one axis.

    Attributes:
        placement: the placement in which each tensor is produced.
        redistributed: the placement that its users see, if it is another one: partial sums that were reduced.
        required: for each op, the placements that it requires of its tensor arguments.
        results: the placement that each output and gradient of the graph must have, by node.
        rewritten: the ops that are replaced to be sharded, each with the index.
        along: the sharded ops, each with the index.
    """

    placement: dict[TensorKey, Placement] = field(default_factory=dict)
    redistributed: dict[TensorKey, Placement] = field(default_factory=dict)
    required: dict[fx.Node, tuple[Placement, ...]] = field(default_factory=dict)
    results: dict[fx.Node, Placement] = field(default_factory=dict)
    rewritten: dict[fx.Node, LoopIndex] = field(default_factory=dict)
    along: dict[fx.Node, LoopIndex] = field(default_factory=dict)

    def of(self, key: TensorKey) -> Placement:
        """Return the placement of a tensor that its users see."""
        return self.redistributed.get(key, self.placement[key])


def decided(
    joint: Joint, indexes: Indexed, axis: SharedAxis, partial_grads: Collection[int] = ()
) -> Decision:
    """Return the placements of a chunk's tensors along an axis.

    The gradients of the inputs `partial_grads` stay partial sums."""
    redistributed: dict[TensorKey, Placement] = {}
    while True:
        attempt = _Pass(joint, indexes, axis, redistributed, partial_grads)
        attempt.run()
        if not attempt.new:
            return attempt.decision
        redistributed |= attempt.new


class _Pass:
    """Go through the graph once; `new` are the partial sums that turn out to need redistribution."""

    def __init__(
        self,
        joint: Joint,
        indexes: Indexed,
        axis: SharedAxis,
        redistributed: Mapping[TensorKey, Placement],
        partial_grads: Collection[int],
    ) -> None:
        self.decision = Decision(redistributed=dict(redistributed))
        self.new: dict[TensorKey, Placement] = {}
        self._joint, self._indexes, self._axis, self._partial_grads = (
            joint,
            indexes,
            axis,
            partial_grads,
        )
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
        placements = self.decision.placement
        for node in self._joint.graph.nodes:
            if node.op in ("placeholder", "get_attr") and (node, 0) in self._indexes.tensors:
                placements[node, 0] = None
        for node in self._params:
            placements[node, 0] = self._first(self._axis.weights, node)
        for k, node in enumerate(self._joint.inputs):
            if self._joint.kinds[k] == "value":
                placements[node, 0] = self._boundary(node)
        for k, node in self._joint.tangents.items():
            placements[node, 0] = self._boundary(self._joint.outputs[k])

    def _ask_for_gradients(self) -> None:
        """Ask that the gradient of a sharded parameter is produced with the placement of the parameter."""
        for k, node in self._joint.grads.items():
            placement = self.decision.placement[self._joint.inputs[k], 0]
            if self._joint.kinds[k] == "param" and isinstance(placement, LoopIndex):
                self._ask(key_of(node), placement)

    def _ask(self, key: TensorKey, index: LoopIndex) -> None:
        """Ask that a tensor is sharded along an index, and so the tensors that only it is computed from."""
        self._asked[key] = index
        op = self._indexes.ops.get(key[0])
        if op is None or op.parts(index) is None or not self._axis.in_order(op, index):
            return
        for argument, dims in zip(op.keys, op.tensors, strict=True):
            if any(index in dim for dim in dims) and len(argument[0].users) == 1:
                self._ask(argument, index)

    def _boundary(self, node: fx.Node) -> Placement:
        """Return the placement of a value between chunks: sharded along its tokens, so that all chunks see it alike.

        Inputs and outputs of experts are sharded along the index of experts.
        """
        if self._axis.expert_chunk:
            return self._first(self._axis.weights, node)
        if node in self._exchanged:
            return None
        dims = self._indexes.tensors[key_of(node)]
        if node in self._axis.replicated:
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
        placements = [self.decision.of(key) for key in op.keys]
        index = self._index(node, op, placements)
        required: list[Placement]
        produced: list[Placement]
        rewrite = None if index is None else self._axis.rewrite(op, index)
        if index is not None:
            whole = frozenset[int]() if rewrite is None else rewrite.whole
            having = [
                any(index in dim for dim in dims) and k not in whole
                for k, dims in enumerate(op.tensors)
            ]
            required = [index if has else None for has in having]
            produced = _made_along(op, index, rewrite)
            self.decision.along[node] = index
            if op.parts(index) is None:
                self.decision.rewritten[node] = index
        elif (
            (sums := self._sums(placements))
            and sums in op.loops.linear
            and not self._ends_in_parameter(node, op, sums)
        ):
            required = [PARTIAL if k in sums else None for k in range(len(placements))]
            produced = [PARTIAL for _ in op.results]
        else:
            required, produced = [None for _ in placements], [None for _ in op.results]
        self.decision.required[node] = tuple(required)
        self.decision.placement |= {(node, k): placement for k, placement in enumerate(produced)}
        if index in self._axis.inside:
            self._go_back(node, op)
        if rewrite is not None and index is not None:
            self.decision.redistributed |= {(node, k): index for k in rewrite.partial_results}
        for key, placement, want in zip(op.keys, placements, required, strict=True):
            if placement is PARTIAL and want is not PARTIAL:
                self._redistribute(key, want)

    def _index(self, node: fx.Node, op: OpIndexes, placements: list[Placement]) -> LoopIndex | None:
        """Return the index along which an op is sharded, if any."""
        present = [placement for placement in placements if isinstance(placement, LoopIndex)]
        present += [
            self._asked[node, k] for k in range(len(op.results)) if (node, k) in self._asked
        ]
        present.sort(key=lambda i: i not in self._axis.weights)
        chosen = next((i for i in present if self._can(op, i)), None)
        if chosen is None and any(i in self._axis.stream for i in present):
            there = [
                i
                for dims in (*op.tensors, *op.results)
                for dim in dims
                for i in dim
                if i in self._axis.inside
            ]
            chosen = next((i for i in there if op.parts(i) is not None), None)
        return chosen

    def _can(self, op: OpIndexes, index: LoopIndex) -> bool:
        """Return whether an op can be sharded along an index."""
        there = op.parts(index) is not None or self._axis.rewrite(op, index) is not None
        return there and self._axis.in_order(op, index)

    def _go_back(self, node: fx.Node, op: OpIndexes) -> None:
        """Redistribute results that are sharded along other indexes, so that their users see them along tokens."""
        for k, dims in enumerate(op.results):
            stream = [i for dim in dims for i in dim if i in self._axis.stream]
            if stream and self.decision.placement[node, k] != stream[0]:
                self.decision.redistributed[node, k] = stream[0]

    def _sums(self, placements: list[Placement]) -> frozenset[int]:
        return frozenset(k for k, placement in enumerate(placements) if placement is PARTIAL)

    def _ends_in_parameter(self, node: fx.Node, op: OpIndexes, sums: frozenset[int]) -> bool:
        """Return whether an op makes a parameter's gradient of a partial sum and of a replicated tensor, as norms do.

        A partial gradient is reduced once more in each step. That pays only for the large gradients of products.
        """
        if op.call.op in PRODUCTS or len(sums) == len(op.keys):
            return False
        return any((node, k) in self._gradients for k in range(len(op.results)))

    def _redistribute(self, key: TensorKey, want: Placement) -> None:
        stream = [i for dim in self._indexes.tensors[key] for i in dim if i in self._axis.stream]
        self.new.setdefault(key, stream[0] if stream else want)

    def _place_results(self) -> None:
        results = self.decision.results
        for node in self._joint.outputs:
            results[node] = self._boundary(node)
        for k, node in self._joint.grads.items():
            input_placement = self.decision.placement[self._joint.inputs[k], 0]
            placement = self.decision.of(key_of(node))
            summed = (
                self._joint.kinds[k] == "param"
                and input_placement is None
                and (placement is not None or k in self._partial_grads)
            )
            results[node] = PARTIAL if summed else input_placement
        results |= {
            node: PARTIAL
            for node in self._axis.partial & results.keys()
            if self.decision.of(key_of(node)) is PARTIAL
        }
        for node, want in results.items():
            if self.decision.of(key_of(node)) is PARTIAL and want is not PARTIAL:
                self._redistribute(key_of(node), want)


def _made_along(op: OpIndexes, index: LoopIndex, rewrite: LoopRewrite | None) -> list[Placement]:
    """Return the placements of the results of an op that is sharded along an index."""
    without: Placement = PARTIAL if rewrite is None or rewrite.partial else None
    placements: list[Placement] = [
        index if any(index in dim for dim in dims) else without for dims in op.results
    ]
    return (
        placements
        if rewrite is None
        else [
            PARTIAL if k in rewrite.partial_results else placement
            for k, placement in enumerate(placements)
        ]
    )
