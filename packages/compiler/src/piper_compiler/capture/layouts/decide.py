"""Decide along one axis of devices which indexes each op of a joint graph is computed in parts of.

It is one pass in the order of the graph. An op is computed in parts of an index if one of its tensors is in parts of
it already, or if it makes the gradient of a parameter that is; weights' indexes come before the stream's. The tensors
that lack the index must be whole then, and results that lack it are sums of what the devices make. A sum goes on
through ops that are linear in it; the first op that is not makes it settle: into parts of the stream's index where the
tensor has it, else whole on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from torch import fx

from piper_compiler.capture.layouts.indexes import Index, Indexed, OpIndexes, TensorKey, key_of
from piper_compiler.capture.stepgraph import Joint


class Sum(Enum):
    """Mark a tensor of which every device holds a term, and that is the sum of them."""

    SUM = "sum"


SUM = Sum.SUM
Along = Index | Sum | None
"""How a tensor lies along an axis: in parts of an index, as a sum, or None: equal on all devices."""


@dataclass(frozen=True)
class Axis:
    """Describe an axis of devices that share the work of a chunk.

    Attributes:
        name: as generated code and messages know it.
        degree: the number of devices; each index below has as many steps.
        weights: the indexes that parameters are in parts of.
        stream: the indexes that what crosses between layers is in parts of; empty where it is whole.
    """

    name: str
    degree: int
    weights: frozenset[Index]
    stream: frozenset[Index] = frozenset()


@dataclass
class Decision:
    """Hold how the tensors of a graph lie along one axis.

    Attributes:
        made: how each tensor is made.
        settled: how its users find it, where that is another way: a sum that had to settle.
        wanted: for each op, how it wants the tensors among its arguments.
        results: how the graph's outputs and gradients must lie, by node.
    """

    made: dict[TensorKey, Along] = field(default_factory=dict)
    settled: dict[TensorKey, Along] = field(default_factory=dict)
    wanted: dict[fx.Node, tuple[Along, ...]] = field(default_factory=dict)
    results: dict[fx.Node, Along] = field(default_factory=dict)

    def of(self, key: TensorKey) -> Along:
        """Return how users find a tensor."""
        return self.settled.get(key, self.made[key])


def decided(joint: Joint, indexes: Indexed, axis: Axis) -> Decision:
    """Return how the tensors of a chunk lie along an axis."""
    settled: dict[TensorKey, Along] = {}
    while True:
        found = _Pass(joint, indexes, axis, settled)
        found.run()
        if not found.new:
            return found.decision
        settled |= found.new


class _Pass:
    """Go through the graph once; `new` are the sums that must settle."""

    def __init__(self, joint: Joint, indexes: Indexed, axis: Axis, settled: Mapping[TensorKey, Along]) -> None:
        self.decision = Decision(settled=dict(settled))
        self.new: dict[TensorKey, Along] = {}
        self._joint, self._indexes, self._axis = joint, indexes, axis
        self._params = {n: k for k, n in enumerate(joint.inputs) if joint.kinds[k] == "param"}
        self._gradients = {key_of(n): joint.inputs[k] for k, n in joint.grads.items() if joint.kinds[k] == "param"}

    def run(self) -> None:
        self._place_inputs()
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
                made[node, 0] = self._first(self._axis.stream, node)
        for k, node in self._joint.tangents.items():
            made[node, 0] = self._boundary(self._joint.outputs[k])

    def _boundary(self, output: fx.Node) -> Along:
        return self._first(self._axis.stream, output)

    def _first(self, wanted: frozenset[Index], node: fx.Node) -> Index | None:
        """Return the first index of a node's tensor that is among `wanted`."""
        return next((i for dim in self._indexes.tensors[key_of(node)] for i in dim if i in wanted), None)

    def _place(self, node: fx.Node, op: OpIndexes) -> None:
        lying = [self.decision.of(key) for key in op.keys]
        index = self._index(node, op, lying)
        wants: list[Along]
        if index is not None:
            has = op.parts(index)
            assert has is not None
            wants = [index if any(index in dim for dim in dims) else None for dims in op.tensors]
            made: list[Along] = [index if there else SUM for there in has]
        elif (sums := self._sums(lying)) and sums in op.loops.linear and not self._ends_in_parameter(node, op):
            wants = [SUM if k in sums else None for k in range(len(lying))]
            made = [SUM for _ in op.results]
        else:
            wants, made = [None for _ in lying], [None for _ in op.results]
        self.decision.wanted[node] = tuple(wants)
        self.decision.made |= {(node, k): how for k, how in enumerate(made)}
        for key, how, want in zip(op.keys, lying, wants, strict=True):
            if how is SUM and want is not SUM:
                self._settle(key, want)

    def _index(self, node: fx.Node, op: OpIndexes, lying: list[Along]) -> Index | None:
        """Return the index that an op is computed in parts of, if any."""
        present = [how for how in lying if isinstance(how, Index)]
        for k in range(len(op.results)):
            parameter = self._gradients.get((node, k))
            how = self.decision.made[parameter, 0] if parameter is not None else None
            present += [how] if isinstance(how, Index) else []
        present.sort(key=lambda i: i not in self._axis.weights)
        return next((i for i in present if op.parts(i) is not None), None)

    def _sums(self, lying: list[Along]) -> frozenset[int]:
        return frozenset(k for k, how in enumerate(lying) if how is SUM)

    def _ends_in_parameter(self, node: fx.Node, op: OpIndexes) -> bool:
        """Return whether an op makes the gradient of a parameter: as a sum it would be added up once more each step."""
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
            results[node] = SUM if self._joint.kinds[k] == "param" and given is None and how is not None else given
        for node, want in results.items():
            if self.decision.of(key_of(node)) is SUM and want is not SUM:
                self._settle(key_of(node), want)
