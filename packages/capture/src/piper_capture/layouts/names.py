"""Name the indexes of a chunk as people do, from where they stand in its graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import fx

import piper_ops  # noqa: F401 - registers the ops
from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts.indexes import Indexed, LoopIndex, OpIndexes, key_of
from piper_capture.values import aliasing
from piper_ir.program.layout import EXPERTS

Nested = tuple[LoopIndex, ...]
"""The indexes next to each other in a dimension, outermost first: a device takes the outer ones first."""
ParamNames = tuple[tuple[str, ...], ...]
"""The names of each input of a chunk in all chunks that are like this one."""
Spots = Mapping[LoopIndex, Sequence[tuple[int, int]]]
"""An index -> the inputs that are parameters and have it, each with the dimension."""
aten = torch.ops.aten
piper = torch.ops.piper
PRODUCTS = (aten.bmm.default, aten.baddbmm.default)
FORM = ("", "rows", "places", "width")
"""The names of the dimensions of tokens in the form in which devices exchange them; experts stand first."""
STACKED = 3
"""The dimensions of a weight that holds one matrix for each of several experts."""


def names_of(joint: Joint, indexes: Indexed, params: Sequence[str]) -> dict[LoopIndex, str]:
    """Return the names of indexes; `params` are the names of the chunk's inputs.

    "heads" (of keys), "groups" (queries for each head of keys) and "head_dim" are those of attention, "vocab" the
    classes of a cross-entropy and the rows that tokens choose of an embedding, "rows", "tokens" and "width" the
    dimensions of values. "hidden" is an index of two parameters and of no value. Any other is named after a
    parameter and its dimension, as "layers.0.up.weight:0".

    If attention is written out, "heads" and "groups" are the batch dimensions of its products, and "experts" is the
    first dimension of a stack of weights. Heads of queries that all share one head of keys are not
    seen to be heads there: they are "hidden". Several indexes may have the same name.
    """
    spots = spots_of(joint, indexes)
    name_by_index: dict[LoopIndex, str] = {}
    for name, index in (
        *_of_ops(joint, indexes),
        *_of_stacks(indexes, spots),
        *_of_values(joint, indexes),
        *_of_products(indexes, spots),
        *_of_params(indexes, spots, params),
    ):
        name_by_index.setdefault(index, name)
    return name_by_index


def spots_of(joint: Joint, indexes: Indexed) -> Spots:
    """Return the dimensions of parameters that have each index."""
    spots_by_index: dict[LoopIndex, list[tuple[int, int]]] = {}
    for k, node in enumerate(joint.inputs):
        if joint.kinds[k] == "param":
            for dim, inside in enumerate(indexes.tensors[node, 0]):
                for index in inside:
                    spots_by_index.setdefault(index, []).append((k, dim))
    return spots_by_index


def _of_ops(joint: Joint, indexes: Indexed) -> Iterator[tuple[str, LoopIndex]]:
    data_inputs = {n for k, n in enumerate(joint.inputs) if joint.kinds[k] in ("value", "batch")}
    for op in indexes.ops.values():
        match op.call.op:
            case piper.attention.default:
                yield from _of_attention(op)
            case piper.cross_entropy.default:
                yield from (("vocab", i) for i in op.tensors[op.call.number("logits")][1])
            case aten.embedding.default if _indices(op) in data_inputs:
                yield from (("vocab", i) for i in op.tensors[op.call.number("weight")][0])


def _indices(op: OpIndexes) -> fx.Node:
    """Return the node of an embedding's indices: tokens come from outside of the chunk, positions do not."""
    return aliasing.root(op.keys[op.call.number("indices")][0])


def _of_attention(op: OpIndexes) -> Iterator[tuple[str, LoopIndex]]:
    queries, keys, values = (op.tensors[op.call.number(name)] for name in ("q", "k", "v"))
    yield from zip(("heads", *("groups" for _ in keys[2])), keys[2] or queries[2], strict=False)
    yield from (("groups", index) for index in queries[2])
    yield from (
        ("head_dim", index) for index in (*queries[3], *keys[3], *values[3], *op.results[0][3])
    )


def _of_values(joint: Joint, indexes: Indexed) -> Iterator[tuple[str, LoopIndex]]:
    """Yield the indexes of values, most dimensions first, since a table of positions has no rows."""
    values = [n for k, n in enumerate(joint.inputs) if joint.kinds[k] in ("value", "batch")]
    exchanged = {key_of(node)[0] for node in joint.exchanged}
    keys = [k for k in map(key_of, (*values, *joint.outputs)) if k in indexes.tensors]
    for key in sorted(keys, key=lambda k: -len(indexes.tensors[k])):
        dims = indexes.tensors[key]
        names = FORM if key[0] in exchanged else _stream(dims, real=_is_real(key[0]))
        for name, dim in zip(names, dims, strict=False):
            yield from ((name, index) for index in dim if name)


def _stream(dims: Sequence[Nested], *, real: bool) -> tuple[str, ...]:
    if len(dims) == 2:
        return ("rows", "width" if real else "tokens")
    return ("rows", "tokens", "width") if len(dims) == 3 else ("rows",)


def _is_real(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _of_products(indexes: Indexed, spots: Spots) -> Iterator[tuple[str, LoopIndex]]:
    """Yield the batch dimensions of products that parameters have."""
    for op in indexes.ops.values():
        if op.call.op in PRODUCTS:
            stacks = _stacked(op)
            heads = [i for i in op.results[0][0] if i in spots and i not in stacks]
            yield from zip(("heads", *("groups" for _ in heads)), heads, strict=False)


def _of_stacks(indexes: Indexed, spots: Spots) -> Iterator[tuple[str, LoopIndex]]:
    """Yield the experts: batch dimensions of products that are the first dimension of stacks of weights."""
    for op in indexes.ops.values():
        if op.call.op in PRODUCTS:
            stacks = _stacked(op)
            yield from ((EXPERTS, i) for i in op.results[0][0] if i in spots and i in stacks)


def _stacked(op: OpIndexes) -> set[LoopIndex]:
    return {
        i
        for key, dims in zip(op.keys, op.tensors, strict=True)
        if _is_weight(key[0])
        for i in dims[0]
    }


def _is_weight(node: fx.Node) -> bool:
    """Return whether a tensor is an input of the chunk, of which there is one matrix for each step."""
    return aliasing.root(node).op == "placeholder" and aliasing.tensor(node).dim() == STACKED


def _of_params(
    indexes: Indexed, spots: Spots, params: Sequence[str]
) -> Iterator[tuple[str, LoopIndex]]:
    whole = {i for op in indexes.ops.values() for i in op.whole}
    for index, where in spots.items():
        k, dim = where[0]
        yield "hidden" if len(where) > 1 and index not in whole else f"{params[k]}:{dim}", index


@dataclass(frozen=True)
class AskedIndexes:
    """Select indexes of a chunk by name; without a name, all that can be shared.

    Attributes:
        index: names, or "parameter:dimension" with the wildcards of file names in the parameter.
        params: for each input of the chunk, its names in the chunks that are like this one.
    """

    index: tuple[str, ...] = ()
    params: ParamNames = ()

    def among(self, joint: Joint, indexes: Indexed, nests: Sequence[Nested]) -> tuple[Nested, ...]:
        """Return the nests from the first index on that is asked for."""
        if not self.index:
            return tuple(nests)
        asked = {i for name in self.index for i in self.named(joint, indexes, name)}
        firsts = (
            (nest, next((k for k, i in enumerate(nest) if i in asked), None)) for nest in nests
        )
        return tuple(nest[k:] for nest, k in firsts if k is not None)

    def named(self, joint: Joint, indexes: Indexed, name: str) -> frozenset[LoopIndex]:
        """Return the indexes that a name stands for."""
        spots = spots_of(joint, indexes)
        names = names_of(joint, indexes, [each[0] if each else "" for each in self.params])
        meant = {index for index, known in names.items() if known == name}
        return frozenset(
            meant
            | {
                i
                for i, where in spots.items()
                if any(self._is_at(name, k, dim) for k, dim in where)
            }
        )

    def _is_at(self, name: str, number: int, dim: int) -> bool:
        return any(fnmatchcase(f"{param}:{dim}", name) for param in self.params[number])
