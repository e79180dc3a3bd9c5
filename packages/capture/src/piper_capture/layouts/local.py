"""Rewrite a joint graph into the local graph of a device: on its shards, with collectives that redistribute tensors.

The result is a joint graph again, and the same for all devices. They differ in a `Coordinate` only: the device's
coordinate along an axis, which generated code reads as a global.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor, fx

from piper_capture.graphs.closures import is_random
from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts.choice import Unshared
from piper_capture.layouts.context import ATTENTION, BLOCKS, ZIGZAG, tokens_of
from piper_capture.layouts.conversions import (
    Redistribution,
    convert,
    joined_axis,
    own_what_is_spoiled,
    place_in,
)
from piper_capture.layouts.decide import PARTIAL, Decision, Placement, SharedAxis, decided
from piper_capture.layouts.emit import Emitter, named_arguments
from piper_capture.layouts.indexes import Indexed, LoopIndex, OpIndexes, TensorKey, key_of
from piper_capture.layouts.loops import LoopPlace
from piper_capture.layouts.reasons import reason, title
from piper_capture.steps.draws import DRAWN_PART
from piper_capture.steps.kernels import SHARED
from piper_capture.steps.phases import backward_nodes
from piper_capture.values import aliasing
from piper_capture.values.coordinate import Coordinate
from piper_ir.program.layout import DimPart, Layout

Placements = tuple[Placement, ...]
"""The placement of a tensor along each axis."""


@dataclass(frozen=True)
class Sharded:
    """Hold the placements of a device's tensors, and its local graph, which is built when it is first asked for.

    Chunks that agree on shared parameters need the placements alone.

    Attributes:
        build: the function that builds the local graph.
        kinds: as in `Joint`.
        inputs: for each input of the chunk, its placement along each axis.
        outputs: for each output, its placement, which its gradient shares; the gradient of a partial sum is replicated.
        grads: input -> the placement of its gradient. A parameter's may be a partial sum, which its bucket all-reduces.
        axes: the axes.
        dims: for each input, for each dimension, its indexes.
        unshared: the dimensions of parameters that are replicated only because their sizes do not divide evenly.
    """

    build: Callable[[], Joint] = field(repr=False, compare=False)
    kinds: tuple[str, ...]
    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]
    grads: Mapping[int, Placements]
    axes: tuple[SharedAxis, ...]
    dims: tuple[tuple[tuple[LoopIndex, ...], ...], ...]
    unshared: tuple[Unshared, ...] = ()

    @cached_property
    def joint(self) -> Joint:
        """Return the local graph."""
        return self.build()

    def layout_of(self, number: int) -> Layout:
        """Return the layout of an input: the shard that each device has."""
        done: set[LoopIndex] = set()
        parts = []
        for placement, axis in zip(self.inputs[number], self.axes, strict=True):
            if isinstance(placement, LoopIndex):
                dim, outer = place_in(self.dims[number], placement, done)
                parts.append(DimPart(axis.name, dim, outer))
                done.add(placement)
        return tuple(parts)

    def summed(self, number: int) -> tuple[str, ...]:
        """Return the axes along which the gradient of an input is a partial sum."""
        return self._sums(self.grads.get(number, ()))

    @property
    def terms(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return the ports to other chunks that carry partial sums, each with the axes."""
        outputs = [(f"out{k}", self._sums(placement)) for k, placement in enumerate(self.outputs)]
        grads = [(f"gin{k}", self.summed(k)) for k in self.grads if self.kinds[k] == "value"]
        return tuple((port, axes) for port, axes in (*outputs, *grads) if axes)

    def _sums(self, placements: Placements) -> tuple[str, ...]:
        return tuple(
            axis.name
            for placement, axis in zip(placements, self.axes, strict=False)
            if placement is PARTIAL
        )


def sharded(
    joint: Joint,
    indexes: Indexed,
    axes: Sequence[SharedAxis],
    *,
    keep: bool = False,
    partial_grads: Collection[int] = (),
) -> Sharded:
    """Return the graph that each device of `axes` runs.

    With `keep`, tensors that the forward has all-gathered are saved for the backward, else they are gathered again. The
    gradients of the inputs `partial_grads` stay partial sums.
    """
    decisions = [decided(joint, indexes, axis, partial_grads) for axis in axes]

    def made_in(node: fx.Node) -> Placements:
        return tuple(d.placement[(node, 0)] for d in decisions)

    def result(node: fx.Node) -> Placements:
        return tuple(d.results[node] for d in decisions)

    return Sharded(
        lambda: _Builder(joint, indexes, axes, decisions, keep).build(),
        joint.kinds,
        tuple(map(made_in, joint.inputs)),
        tuple(map(result, joint.outputs)),
        {k: result(n) for k, n in joint.grads.items()},
        tuple(axes),
        tuple(indexes.tensors.get((n, 0), ()) for n in joint.inputs),
    )


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
        first = [*joint.inputs, *joint.outputs][0]  # a mask made of constants has no input
        mode = first.meta["val"].fake_mode
        self._emit = Emitter(fx.Graph(), mode)
        self._backward = backward_nodes(joint)
        self._keep = keep
        self._at: dict[tuple[TensorKey, Placements, bool], fx.Node] = {}
        """A tensor with its placements, in the forward or the backward, -> its node."""
        self._names: dict[fx.Node, str] = {}

    def build(self) -> Joint:
        for node in self._joint.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._input(node)
            elif node in self._indexes.ops:
                self._op(node, self._indexes.ops[node])
        results = {
            node: self._result(node) for node in (*self._joint.outputs, *self._joint.grads.values())
        }
        returned = [results[n] for n in (*self._joint.outputs, *self._joint.grads.values())]
        self._emit.graph.output(returned)
        own_what_is_spoiled(self._emit)
        self._emit.graph.eliminate_dead_code(
            is_impure_node=lambda n: n.op in ("placeholder", "output")
        )
        aliasing.show_whole_storages(self._emit.graph)
        return self._local_joint(results)

    def _local_joint(self, results: Mapping[fx.Node, fx.Node]) -> Joint:
        joint = self._joint
        return replace(
            joint,
            graph=self._emit.graph,
            inputs=tuple(self._made(n) for n in joint.inputs),
            outputs=tuple(results[n] for n in joint.outputs),
            tangents={k: self._made(n) for k, n in joint.tangents.items()},
            grads={k: results[n] for k, n in joint.grads.items()},
            constant_names={self._made(n): name for n, name in joint.constant_names.items()},
        )

    def _made(self, node: fx.Node) -> fx.Node:
        return self._at[(node, 0), self._placements((node, 0)), False]

    def _placements(self, key: TensorKey) -> Placements:
        """Return the placements in which a tensor is produced."""
        return tuple(d.placement[key] for d in self._decisions)

    def _required_result(self, node: fx.Node) -> Placements:
        return tuple(d.results[node] for d in self._decisions)

    def _input(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):  # a placeholder that nothing reads
            self._at[(node, 0), (None,) * len(self._axes), False] = self._emit.input(node, value)
            return
        key = (node, 0)
        self._at[key, self._placements(key), False] = self._emit.input(
            node, self._emit.empty(self._shape(key, value.shape), value.dtype)
        )

    def _shape(self, key: TensorKey, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a device's shard of a tensor, in the placements in which it is produced."""
        placements = self._placements(key)
        return _local(shape, self._indexes.tensors[key], zip(placements, self._axes, strict=True))

    def _op(self, node: fx.Node, op: OpIndexes) -> None:
        late = node in self._backward
        required = list(zip(*(d.required[node] for d in self._decisions), strict=True))
        nodes = iter(
            [self._find(key, want, late, node) for key, want in zip(op.keys, required, strict=True)]
        )
        shapes = [self._shape((node, k), tuple(r.shape)) for k, r in enumerate(op.call.results)]
        changed = op.loops.localize(op.call, shapes)
        named = {
            name: _with_nodes(value, nodes) for name, value in named_arguments(node).items()
        } | dict(changed)
        for k, result in enumerate(
            self._rewritten(node, op, named) or self._emitted(node, op, named)
        ):
            if result is not None:
                self._at[(node, k), self._placements((node, k)), False] = result

    def _emitted(
        self, node: fx.Node, op: OpIndexes, named: Mapping[str, Any]
    ) -> list[fx.Node | None]:
        """Add an op, and return the nodes of its results, None for unused ones."""
        emitted = self._emit.op(node, op.call.op, named)
        emitted.meta[SHARED] = self._shared(node)
        if is_random(emitted) and (part := self._drawn(node, op)):
            emitted.meta[DRAWN_PART] = part
        if not isinstance(node.meta["val"], list | tuple):
            return [emitted]
        used = {u.args[1] for u in node.users if u.target is operator.getitem}
        return [
            self._emit.item(emitted, k) if k in used else None for k in range(len(node.meta["val"]))
        ]

    def _drawn(self, node: fx.Node, op: OpIndexes) -> tuple[Any, ...]:
        """Return the device's part of the tensor that an op draws, by dimension and loop; () if it is all of it."""
        placed = {
            placement: (Coordinate(a.name), Coordinate(a.name, mirrored=placement in a.halves))
            for placement, a in zip(self._placements((node, 0)), self._axes, strict=True)
            if isinstance(placement, LoopIndex)
        }
        dims = op.results[0]
        loops = tuple(tuple((i.size, *placed.get(i, (None, None))) for i in dim) for dim in dims)
        return loops if placed else ()

    def _shared(self, node: fx.Node) -> int:
        """Return the number of devices that share the work of an op; devices with rows of their own share none."""
        return self._shared_by((node, 0))

    def _shared_by(self, key: TensorKey) -> int:
        """Return the number of devices that share the work on a tensor; devices with rows of their own share none."""
        placements = zip(self._axes, self._placements(key), strict=True)
        return prod(
            [
                axis.degree
                for axis, placement in placements
                if placement is not None and not axis.expert_chunk
            ]
        )

    def _rewritten(
        self, node: fx.Node, op: OpIndexes, named: Mapping[str, Any]
    ) -> Sequence[fx.Node]:
        """Add the ops that replace an op to shard it, if any; return the nodes of its results."""
        indexes = [d.rewritten.get(node) for d in self._decisions]
        pairs = zip(self._axes, indexes, strict=True)
        (rewrite,) = {axis.rewrite(op, i) for axis, i in pairs if i is not None} or {None}
        if rewrite is None:
            return ()
        shared = self._shared(node) if op.call.op in ATTENTION else 1
        with self._emit.like(node, node in self._backward, f"in {title(node)}", shared):
            return rewrite.emit(self._emit, named, list(self._places(op, indexes)))

    def _places(self, op: OpIndexes, indexes: Sequence[LoopIndex | None]) -> Iterator[LoopPlace]:
        """Yield the block of the indexes that a device has along each axis, or along the parts of a split axis."""
        done: set[LoopIndex] = set()
        whole, number = [None] * len(indexes), 0
        while number < len(indexes):
            last = number + 1
            if (index := indexes[number]) is not None:
                inside = op.dim(op.rewritten[index]) if index in op.rewritten else tokens_of(op)
                move = Redistribution([inside], self._axes, indexes, whole)
                last = move.joined_until(number)
                axis = joined_axis(self._axes, number, last)
                done.update(i for i in indexes[number:last] if i is not None)
                rest = prod(i.size for i in inside[inside.index(index) + 1 :] if i not in done)
                yield LoopPlace(
                    axis.name, axis.degree, rest, ZIGZAG if index in axis.halves else BLOCKS
                )
            number = last

    def _result(self, node: fx.Node) -> fx.Node:
        return self._find(key_of(node), self._required_result(node), node in self._backward, node)

    def _find(self, key: TensorKey, want: Placements, late: bool, user: fx.Node) -> fx.Node:
        """Return the node of a tensor in the required placements, redistributed at its first use in a phase."""
        have = self._placements(key)
        if want == have:
            return self._at[key, have, False]
        late = late and not (
            (self._keep or self._exchanged(have, want)) and (key, want, False) in self._at
        )
        node = self._at.get((key, want, late))
        if node is None:
            node = self._at[key, want, late] = self._converted(key, want, late, user)
        return node

    def _exchanged(self, made: Placements, want: Placements) -> bool:
        """Return whether a tensor is resharded along another index, which keeps its size: the result is saved."""
        return any(
            isinstance(a, LoopIndex) and isinstance(b, LoopIndex) and a != b
            for a, b in zip(made, want, strict=True)
        )

    def _converted(self, key: TensorKey, want: Placements, late: bool, user: fx.Node) -> fx.Node:
        redistributed = tuple(d.of(key) for d in self._decisions)
        have = self._placements(key)
        if redistributed not in (have, want):
            before, source = (
                redistributed,
                self._find(key, redistributed, late=key[0] in self._backward, user=user),
            )
        else:
            before, source = have, self._at[key, have, False]
        base = self._of_base(key, before, want, late, user)
        if base is not None:
            return base
        with self._emit.like(user, late, reason(key, user, summed=PARTIAL in before)):
            move = Redistribution(self._indexes.tensors[key], self._axes, before, want)
            source = convert(self._emit, source, move)
        return source

    def _of_base(
        self, key: TensorKey, before: Placements, want: Placements, late: bool, user: fx.Node
    ) -> fx.Node | None:
        """Return an all-gathered view as a view of the all-gathered base: views of one tensor share one message."""
        node, _ = key
        op = self._indexes.ops.get(node)
        if (
            op is None
            or len(op.keys) != 1
            or not aliasing.is_view(node)
            or isinstance(node.meta["val"], list | tuple)
        ):
            return None
        if (
            not all(w is None or w == b for b, w in zip(before, want, strict=True))
            or PARTIAL in before
        ):
            return None
        wanted = tuple(d.required[node][0] for d in self._decisions)
        if tuple(d.placement[key] for d in self._decisions) != wanted:
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
    shape: Sequence[int], dims: Sequence[tuple[LoopIndex, ...]], placements: Any
) -> tuple[int, ...]:
    """Return the shape of a device's shard; an index that is in two dimensions is sharded in the first."""
    sizes = list(shape)
    for placement, axis in placements:
        if isinstance(placement, LoopIndex):
            sizes[next(d for d, inside in enumerate(dims) if placement in inside)] //= axis.degree
    return tuple(sizes)


def _with_nodes(value: Any, nodes: Any) -> Any:
    return fx.node.map_arg(value, lambda n: next(nodes))
