"""Rewrite a joint graph into the one that a device runs: with its parts of the tensors, and collectives between them.

The result is a joint graph again. It is the same for all devices: what differs between them is a `Coordinate`, the
device's place along an axis, which generated code reads as a global.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor, fx

from piper_compiler.capture.graphs.stepgraph import Joint
from piper_compiler.capture.layouts.choice import Unshared
from piper_compiler.capture.layouts.context import ATTENTION, BLOCKS, ZIGZAG, tokens_of
from piper_compiler.capture.layouts.conversions import (
    convert,
    joined_axis,
    joined_until,
    own_what_is_spoiled,
    place_in,
)
from piper_compiler.capture.layouts.decide import SUM, Along, Decision, SharedAxis, decided
from piper_compiler.capture.layouts.emit import Emitter, named_arguments
from piper_compiler.capture.layouts.indexes import Indexed, LoopIndex, OpIndexes, TensorKey, key_of
from piper_compiler.capture.layouts.loops import LoopPlace
from piper_compiler.capture.layouts.reasons import reason, title
from piper_compiler.capture.steps.kernels import SHARED
from piper_compiler.capture.steps.phases import backward_nodes
from piper_compiler.capture.values import aliasing
from piper_ir.program.layout import DimPart, Layout

Lying = tuple[Along, ...]
"""The way in which a tensor lies along each axis."""


@dataclass(frozen=True)
class Sharded:
    """Hold the graph of a device and how its tensors lie.

    Attributes:
        inputs: for each input of the chunk, how it lies along each axis.
        outputs: likewise for each output, and so its gradient; the gradient of a sum is whole.
        grads: input -> how its gradient lies. A parameter's may be a sum, which its bucket adds up.
        axes: the axes.
        dims: for each input, for each dimension, its indexes.
        unshared: the dimensions of parameters that devices would share if their sizes were others.
    """

    joint: Joint
    inputs: tuple[Lying, ...]
    outputs: tuple[Lying, ...]
    grads: Mapping[int, Lying]
    axes: tuple[SharedAxis, ...]
    dims: tuple[tuple[tuple[LoopIndex, ...], ...], ...]
    unshared: tuple[Unshared, ...] = ()

    def layout_of(self, number: int) -> Layout:
        """Return how an input is taken apart."""
        done: set[LoopIndex] = set()
        found = []
        for how, axis in zip(self.inputs[number], self.axes, strict=True):
            if isinstance(how, LoopIndex):
                dim, outer = place_in(self.dims[number], how, done)
                found.append(DimPart(axis.name, dim, outer))
                done.add(how)
        return tuple(found)

    def summed(self, number: int) -> tuple[str, ...]:
        """Return the axes along which the gradient of an input is a sum of what the devices make."""
        return self._sums(self.grads.get(number, ()))

    @property
    def terms(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return the ports for other chunks that hold terms of sums, each with the axes."""
        outputs = [(f"out{k}", self._sums(how)) for k, how in enumerate(self.outputs)]
        grads = [(f"gin{k}", self.summed(k)) for k in self.grads if self.joint.kinds[k] == "value"]
        return tuple((port, axes) for port, axes in (*outputs, *grads) if axes)

    def _sums(self, lying: Lying) -> tuple[str, ...]:
        return tuple(axis.name for how, axis in zip(lying, self.axes, strict=False) if how is SUM)


def sharded(
    joint: Joint,
    indexes: Indexed,
    axes: Sequence[SharedAxis],
    *,
    keep: bool = False,
    terms: Collection[int] = (),
) -> Sharded:
    """Return the graph that each device of `axes` runs.

    With `keep`, what the forward has gathered is kept for the backward, else it is gathered again. The gradients of the
    inputs `terms` are terms of sums.
    """
    decisions = [decided(joint, indexes, axis, terms) for axis in axes]
    builder = _Builder(joint, indexes, axes, decisions, keep)
    return builder.build()


class _Builder:
    def __init__(
        self,
        joint: Joint,
        indexes: Indexed,
        axes: Sequence[SharedAxis],
        decisions: Sequence[Decision],
        keep: bool,
    ) -> None:
        self._joint, self._indexes, self._axes, self._decisions = joint, indexes, axes, decisions
        mode = joint.inputs[0].meta["val"].fake_mode
        self._emit = Emitter(fx.Graph(), mode)
        self._backward = backward_nodes(joint)
        self._keep = keep
        self._at: dict[tuple[TensorKey, Lying, bool], fx.Node] = {}
        """A tensor as it lies, in the forward or the backward, -> its node."""
        self._names: dict[fx.Node, str] = {}

    def build(self) -> Sharded:
        for node in self._joint.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._input(node)
            elif node in self._indexes.ops:
                self._op(node, self._indexes.ops[node])
        results = {
            node: self._result(node) for node in (*self._joint.outputs, *self._joint.grads.values())
        }
        given = [results[n] for n in (*self._joint.outputs, *self._joint.grads.values())]
        self._emit.graph.output(given)
        own_what_is_spoiled(self._emit)
        self._emit.graph.eliminate_dead_code(
            is_impure_node=lambda n: n.op in ("placeholder", "output")
        )
        return self._sharded(results)

    def _sharded(self, results: Mapping[fx.Node, fx.Node]) -> Sharded:
        joint = self._joint
        found = replace(
            joint,
            graph=self._emit.graph,
            inputs=tuple(self._made(n) for n in joint.inputs),
            outputs=tuple(results[n] for n in joint.outputs),
            tangents={k: self._made(n) for k, n in joint.tangents.items()},
            grads={k: results[n] for k, n in joint.grads.items()},
            constant_names={self._made(n): name for n, name in joint.constant_names.items()},
        )
        inputs = tuple(self._lying((n, 0)) for n in joint.inputs)
        outputs = tuple(self._wanted_result(n) for n in joint.outputs)
        grads = {k: self._wanted_result(n) for k, n in joint.grads.items()}
        dims = tuple(self._indexes.tensors.get((n, 0), ()) for n in joint.inputs)
        return Sharded(found, inputs, outputs, grads, tuple(self._axes), dims)

    def _made(self, node: fx.Node) -> fx.Node:
        return self._at[(node, 0), self._lying((node, 0)), False]

    def _lying(self, key: TensorKey) -> Lying:
        """Return how a tensor is made."""
        return tuple(d.made[key] for d in self._decisions)

    def _wanted_result(self, node: fx.Node) -> Lying:
        return tuple(d.results[node] for d in self._decisions)

    def _input(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):  # a placeholder that nothing reads
            self._at[(node, 0), (None,) * len(self._axes), False] = self._emit.input(node, value)
            return
        key = (node, 0)
        self._at[key, self._lying(key), False] = self._emit.input(
            node, self._emit.empty(self._shape(key, value.shape), value.dtype)
        )

    def _shape(self, key: TensorKey, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a device's part of a tensor, as it is made."""
        lying = self._lying(key)
        return _local(shape, self._indexes.tensors[key], zip(lying, self._axes, strict=True))

    def _op(self, node: fx.Node, op: OpIndexes) -> None:
        late = node in self._backward
        wants = list(zip(*(d.wanted[node] for d in self._decisions), strict=True))
        nodes = iter(
            [self._find(key, want, late, node) for key, want in zip(op.keys, wants, strict=True)]
        )
        shapes = [self._shape((node, k), tuple(r.shape)) for k, r in enumerate(op.call.results)]
        changed = op.loops.localize(op.call, shapes)
        named = {
            name: _with_nodes(value, nodes) for name, value in named_arguments(node).items()
        } | dict(changed)
        for k, made in enumerate(
            self._rewritten(node, op, named) or self._emitted(node, op, named)
        ):
            if made is not None:
                self._at[(node, k), self._lying((node, k)), False] = made

    def _emitted(
        self, node: fx.Node, op: OpIndexes, named: Mapping[str, Any]
    ) -> list[fx.Node | None]:
        """Add an op, and return the nodes of those of its results that are used."""
        made = self._emit.op(node, op.call.op, named)
        made.meta[SHARED] = self._shared(node)
        if not isinstance(node.meta["val"], list | tuple):
            return [made]
        used = {u.args[1] for u in node.users if u.target is operator.getitem}
        return [
            self._emit.item(made, k) if k in used else None for k in range(len(node.meta["val"]))
        ]

    def _shared(self, node: fx.Node) -> int:
        """Return among how many devices the work of an op is shared; those with rows of their own share none."""
        return self._shared_by((node, 0))

    def _shared_by(self, key: TensorKey) -> int:
        """Return among how many devices the work on a tensor is shared; those with rows of their own share none."""
        lying = zip(self._axes, self._lying(key), strict=True)
        return prod([axis.degree for axis, how in lying if how is not None and not axis.experts])

    def _rewritten(
        self, node: fx.Node, op: OpIndexes, named: Mapping[str, Any]
    ) -> Sequence[fx.Node]:
        """Add the ops that compute an op in parts, if others do: return the nodes of its results."""
        indexes = [d.rewritten.get(node) for d in self._decisions]
        pairs = zip(self._axes, indexes, strict=True)
        (rewrite,) = {axis.rewrite(op, i) for axis, i in pairs if i is not None} or {None}
        if rewrite is None:
            return ()
        shared = self._shared(node) if op.call.op in ATTENTION else 1
        with self._emit.like(node, node in self._backward, f"in {title(node)}", shared):
            return rewrite.emit(self._emit, named, list(self._places(op, indexes)))

    def _places(self, op: OpIndexes, indexes: Sequence[LoopIndex | None]) -> Iterator[LoopPlace]:
        """Yield which steps of the indexes a device takes along each axis, or along all into which one is split."""
        done: set[LoopIndex] = set()
        whole, number = [None] * len(indexes), 0
        while number < len(indexes):
            last = number + 1
            if (index := indexes[number]) is not None:
                inside = op.dim(op.rewritten[index]) if index in op.rewritten else tokens_of(op)
                last = joined_until([inside], self._axes, indexes, whole, number)
                axis = joined_axis(self._axes, number, last)
                done.update(i for i in indexes[number:last] if i is not None)
                rest = prod(i.size for i in inside[inside.index(index) + 1 :] if i not in done)
                yield LoopPlace(
                    axis.name, axis.degree, rest, ZIGZAG if index in axis.halves else BLOCKS
                )
            number = last

    def _result(self, node: fx.Node) -> fx.Node:
        return self._find(key_of(node), self._wanted_result(node), node in self._backward, node)

    def _find(self, key: TensorKey, want: Lying, late: bool, user: fx.Node) -> fx.Node:
        """Return the node of a tensor as it is wanted, converted where it is needed first in its phase."""
        made = self._lying(key)
        if want == made:
            return self._at[key, made, False]
        late = late and not (
            (self._keep or self._exchanged(made, want)) and (key, want, False) in self._at
        )
        found = self._at.get((key, want, late))
        if found is None:
            found = self._at[key, want, late] = self._converted(key, want, late, user)
        return found

    def _exchanged(self, made: Lying, want: Lying) -> bool:
        """Return whether a tensor changes the index that it is in parts of: as large as before, so that it is kept."""
        return any(
            isinstance(a, LoopIndex) and isinstance(b, LoopIndex) and a != b
            for a, b in zip(made, want, strict=True)
        )

    def _converted(self, key: TensorKey, want: Lying, late: bool, user: fx.Node) -> fx.Node:
        settled = tuple(d.of(key) for d in self._decisions)
        made = self._lying(key)
        if settled not in (made, want):
            before, source = (
                settled,
                self._find(key, settled, late=key[0] in self._backward, user=user),
            )
        else:
            before, source = made, self._at[key, made, False]
        base = self._of_base(key, before, want, late, user)
        if base is not None:
            return base
        with self._emit.like(user, late, reason(key, user, summed=SUM in before)):
            source = convert(
                self._emit, source, self._indexes.tensors[key], self._axes, before, want
            )
        return source

    def _of_base(
        self, key: TensorKey, before: Lying, want: Lying, late: bool, user: fx.Node
    ) -> fx.Node | None:
        """Return a gathered view as a view of what was gathered, so that all views of one tensor share one message."""
        node, _ = key
        op = self._indexes.ops.get(node)
        if (
            op is None
            or len(op.keys) != 1
            or not aliasing.is_view(node)
            or isinstance(node.meta["val"], list | tuple)
        ):
            return None
        if not all(w is None or w == b for b, w in zip(before, want, strict=True)) or SUM in before:
            return None
        wanted = tuple(d.wanted[node][0] for d in self._decisions)
        if tuple(d.made[key] for d in self._decisions) != wanted:
            return None
        source = self._find(op.keys[0], want, late, user)
        shape = _local(
            tuple(op.call.results[0].shape),
            self._indexes.tensors[key],
            zip(want, self._axes, strict=True),
        )
        named = {name: _with_nodes(v, iter([source])) for name, v in named_arguments(node).items()}
        with self._emit.like(user, late):
            return self._emit.op(
                node, op.call.op, named | dict(op.loops.localize(op.call, [shape]))
            )


def _local(
    shape: Sequence[int], dims: Sequence[tuple[LoopIndex, ...]], lying: Any
) -> tuple[int, ...]:
    """Return the shape of a device's part; an index that stands in two dimensions is taken apart in the first."""
    found = list(shape)
    for how, axis in lying:
        if isinstance(how, LoopIndex):
            found[next(d for d, inside in enumerate(dims) if how in inside)] //= axis.degree
    return tuple(found)


def _with_nodes(value: Any, nodes: Any) -> Any:
    return fx.node.map_arg(value, lambda n: next(nodes))
