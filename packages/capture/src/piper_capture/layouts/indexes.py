"""Find the indexes of a joint graph: each is a loop that runs through dimensions of many of its tensors.

Each op says which nests of its loops run over the same steps (`loops`). A view says it of its argument's dimensions and
its result's, so a dimension may be a nest of several factors. The sizes of the inner nests of a dimension are its cuts:
a dimension of 32 elements that a view makes [8, 4] has the cut 4. Cuts go from nest to nest until nothing changes.
Between its cuts lie the factors of a dimension, and factors at equal places of equal nests are one index.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod

from torch import Tensor, fx

from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts.loops import DimOf, Inner, LoopRewrite, Loops, Nest, OpCall
from piper_capture.layouts.rules.rules import loops_of
from piper_capture.torch_api._torch import OpOverload

TensorKey = tuple[fx.Node, int]
"""A tensor of a graph: the op that makes it, and the number among its results."""


@dataclass(frozen=True)
class LoopIndex:
    """Name a loop through a graph by its number; `size` is its number of steps."""

    number: int
    size: int


@dataclass(frozen=True)
class OpIndexes:
    """Hold the indexes of one op.

    Attributes:
        keys: the tensors among the arguments, in the order of the schema.
        tensors: for each tensor among the arguments, for each dimension, its indexes, outermost first.
        results: likewise.
        whole: the indexes along which the op cannot be sharded.
        summed: the indexes that the op reduces by a sum in results that lack them.
        known: whether the op has a rule; without one it is computed replicated.
        rewritten: the indexes along which the op can be sharded only if other ops replace it, each with a dimension
            that has the index.
    """

    call: OpCall
    keys: tuple[TensorKey, ...]
    loops: Loops
    tensors: tuple[tuple[tuple[LoopIndex, ...], ...], ...]
    results: tuple[tuple[tuple[LoopIndex, ...], ...], ...]
    whole: frozenset[LoopIndex]
    summed: frozenset[LoopIndex]
    known: bool = True
    rewritten: Mapping[LoopIndex, DimOf] = field(default_factory=dict)

    def parts(self, index: LoopIndex) -> tuple[bool, ...] | None:
        """Return, for each result, whether it has the index; the others are partial sums if the op is sharded along it.

        None says that the op cannot be sharded along this index.
        """
        everywhere = (*self.tensors, *self.results)
        if (
            index in self.whole
            or index in self.rewritten
            or any(sum(index in dim for dim in dims) > 1 for dims in everywhere)
        ):
            return None
        if not any(index in dim for dims in everywhere for dim in dims):
            return None
        has = tuple(any(index in dim for dim in dims) for dims in self.results)
        lack = [
            dims
            for dims, there in zip(self.results, has, strict=True)
            if not there and not _empty(dims)
        ]
        return has if not lack or index in self.summed else None

    def rewrite(self, index: LoopIndex) -> LoopRewrite | None:
        """Return the ops that replace the op so that it can be sharded along an index, or None."""
        at = self.rewritten.get(index)
        return None if at is None or index in self.whole else self.loops.rewrites[at]

    def dim(self, at: DimOf) -> tuple[LoopIndex, ...]:
        """Return the indexes of a dimension, outermost first."""
        return (self.tensors[at.tensor] if at.tensor >= 0 else self.results[-1 - at.tensor])[at.dim]


def _empty(dims: tuple[tuple[LoopIndex, ...], ...]) -> bool:
    """Return whether a tensor has no elements: a sum of such is one."""
    return any(index.size == 0 for dim in dims for index in dim)


@dataclass(frozen=True)
class Indexed:
    """Hold the indexes of a graph.

    Attributes:
        tensors: for each tensor, for each dimension, its indexes, outermost first. A dimension of size 1 has none.
        ops: the indexes of each op.
        indexes: every index of the graph, by number.
    """

    tensors: Mapping[TensorKey, tuple[tuple[LoopIndex, ...], ...]]
    ops: Mapping[fx.Node, OpIndexes]
    indexes: tuple[LoopIndex, ...]


class OverlappingCuts(Exception):
    """Say that the cuts that are given do not fit into each other, so that no index has the steps between them."""


def key_of(node: fx.Node) -> TensorKey:
    """Return the key of the tensor that a node stands for: an item belongs to the op that made it."""
    if node.op == "call_function" and node.target is operator.getitem:
        producer, number = node.args
        assert isinstance(producer, fx.Node) and isinstance(number, int)
        return producer, number
    return node, 0


def call_of(node: fx.Node) -> tuple[OpCall, tuple[TensorKey, ...]]:
    """Return the call that an op's node makes, and the tensors among its arguments in the order of the schema."""
    assert isinstance(node.target, OpOverload)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    names = [a.name for a in node.target._schema.arguments]
    by_name = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    keys: list[TensorKey] = []
    fx.node.map_arg([by_name[n] for n in names if n in by_name], lambda n: keys.append(key_of(n)))
    return OpCall.of(node.target, args, kwargs, node.meta["val"]), tuple(keys)


SPACE = "piper_space"
"""The attribute of a graph that holds its dimensions and the nests that run alike."""


def indexed(
    joint: Joint, cuts: Mapping[tuple[TensorKey, int], Collection[int]] | None = None
) -> Indexed:
    """Return the indexes of a chunk; an output has those of its gradient, an input likewise.

    `cuts` are further ones of dimensions of tensors, given as the sizes of the inner nests.
    Raises OverlappingCuts if they do not fit into each other.
    """
    kept = vars(joint.graph)  # which stays as it is; layouts of many degrees are made of one graph
    if SPACE not in kept:
        kept[SPACE] = _space(joint)
    space: _Space = kept[SPACE]
    return space.whole if not cuts else space.cut(cuts)


def _space(joint: Joint) -> _Space:
    space = _Space()
    for node in joint.graph.nodes:
        if node.op == "output" or node.target is operator.getitem:
            continue
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            call, keys = call_of(node)
            space.add_op(node, call, keys)
        elif isinstance(node.meta.get("val"), Tensor):
            space.add_tensors(node, (node.meta["val"],))
    pairs = [(joint.outputs[k], n) for k, n in joint.tangents.items()] + [
        (joint.inputs[k], n) for k, n in joint.grads.items()
    ]
    for a, b in pairs:
        space.unite(key_of(a), key_of(b))
    return space


@dataclass(frozen=True)
class _Op:
    call: OpCall
    keys: tuple[TensorKey, ...]
    loops: Loops | None
    numbers: Mapping[DimOf | Inner, int]
    """A dimension or inner loop -> its number in the space."""
    links: tuple[int, ...]


class _Space:
    """Collect dimensions and the nests that run alike, and cut them into factors."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._dims: dict[TensorKey, list[int]] = {}
        self._links: list[tuple[list[int], list[int]]] = []
        self._ops: dict[fx.Node, _Op] = {}

    @cached_property
    def whole(self) -> Indexed:
        """Return the indexes with the cuts of ops alone."""
        return self._indexed({})

    def cut(self, cuts: Mapping[tuple[TensorKey, int], Collection[int]]) -> Indexed:
        """Return the indexes with dimensions cut also where no op does."""
        given: dict[int, set[int]] = {}
        for (key, dim), more in cuts.items():
            given.setdefault(self._dims[key][dim], set()).update(more)
        return self._indexed(given)

    def add_tensors(self, node: fx.Node, tensors: Sequence[Tensor]) -> None:
        for k, tensor in enumerate(tensors):
            self._dims[node, k] = [self._dim(size) for size in tensor.shape]

    def add_op(self, node: fx.Node, call: OpCall, keys: tuple[TensorKey, ...]) -> None:
        """Add an op and its results; its arguments are there."""
        self.add_tensors(node, call.results)
        loops = loops_of(call)
        numbers: dict[DimOf | Inner, int] = {}
        for tensor in call.every():
            key = keys[tensor] if tensor >= 0 else (node, -1 - tensor)
            numbers |= dict(zip(call.dims(tensor), self._dims[key], strict=True))
        first = len(self._links)
        for left, right in loops.same if loops is not None else ():
            assert prod(map(call.size, left)) == prod(map(call.size, right)), (
                f"{call.op}: {left} and {right} differ in size"
            )
            self._links.append((self._nest(left, numbers), self._nest(right, numbers)))
        self._ops[node] = _Op(call, keys, loops, numbers, tuple(range(first, len(self._links))))

    def unite(self, a: TensorKey, b: TensorKey) -> None:
        """Say that two tensors have equal dimensions."""
        self._links += [([x], [y]) for x, y in zip(self._dims[a], self._dims[b], strict=True)]

    def _nest(self, nest: Nest, numbers: dict[DimOf | Inner, int]) -> list[int]:
        for loop in nest:
            if isinstance(loop, Inner) and loop not in numbers:
                numbers[loop] = self._dim(loop.size)
        return [numbers[loop] for loop in nest]

    def _dim(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def _indexed(self, given: Mapping[int, set[int]]) -> Indexed:
        cuts, broken = _cuts(self._sizes, self._links, given)
        factors = [_factors(size, cut) for size, cut in zip(self._sizes, cuts, strict=True)]
        firsts = [0]
        for sizes in factors:
            firsts.append(firsts[-1] + len(sizes))
        classes = _Classes(firsts[-1])
        for k, (left, right) in enumerate(self._links):
            if k not in broken:
                for a, b in zip(
                    *(list(_places(nest, factors, firsts)) for nest in (left, right)), strict=True
                ):
                    classes.unite(a, b)
        number: dict[int, LoopIndex] = {}
        per_dim: list[tuple[LoopIndex, ...]] = []
        for dim, sizes in enumerate(factors):
            roots = [classes.root(firsts[dim] + k) for k in range(len(sizes))]
            per_dim.append(
                tuple(
                    number.setdefault(r, LoopIndex(len(number), s))
                    for r, s in zip(roots, sizes, strict=True)
                )
            )
        tensors = {key: tuple(per_dim[d] for d in dims) for key, dims in self._dims.items()}
        ops = {
            node: self._op_indexes(node, op, per_dim, tensors, broken)
            for node, op in self._ops.items()
        }
        return Indexed(tensors, ops, tuple(number.values()))

    def _op_indexes(
        self,
        node: fx.Node,
        op: _Op,
        per_dim: Sequence[tuple[LoopIndex, ...]],
        tensors: Mapping[TensorKey, tuple[tuple[LoopIndex, ...], ...]],
        broken: set[int],
    ) -> OpIndexes:
        def of(loops: Iterable[DimOf | Inner]) -> set[LoopIndex]:
            return {index for loop in loops for index in per_dim[op.numbers[loop]]}

        loops = op.loops or Loops(whole=frozenset(op.numbers))
        whole = of(loops.whole - loops.rewrites.keys()) | {
            i
            for k in op.links
            if k in broken
            for nest in self._links[k]
            for d in nest
            for i in per_dim[d]
        }
        arguments = tuple(tensors[key] for key in op.keys)
        results = tuple(tensors[node, k] for k in range(len(op.call.results)))
        summed = frozenset(of(loops.summed))
        rewritten = {index: at for at in loops.rewrites if at in loops.whole for index in of([at])}
        known = op.loops is not None
        return OpIndexes(
            op.call, op.keys, loops, arguments, results, frozenset(whole), summed, known, rewritten
        )


def _cuts(
    sizes: Sequence[int],
    links: Sequence[tuple[list[int], list[int]]],
    given: Mapping[int, set[int]],
) -> tuple[list[set[int]], set[int]]:
    """Return the cuts of each dimension, and the links between nests that do not fit into each other.

    A dimension of 6 that is [2, 3] in one view and [3, 2] in another has no factors; it is left whole, with all nests
    that it is part of. Raises OverlappingCuts where those that are given to one dimension do not fit into each other.
    """
    tangled: set[int] = set()
    while True:
        broken = {
            k for k, nests in enumerate(links) if any(d in tangled for nest in nests for d in nest)
        }
        cuts = _spread(sizes, [nests for k, nests in enumerate(links) if k not in broken], given)
        clashing = {d for d, cut in enumerate(cuts) if not _chain(sizes[d], cut)}
        if not clashing:
            return cuts, broken
        if clashing <= tangled:
            raise OverlappingCuts
        tangled |= clashing


def _spread(
    sizes: Sequence[int],
    links: Sequence[tuple[list[int], list[int]]],
    given: Mapping[int, set[int]],
) -> list[set[int]]:
    """Return the cuts of each dimension after they have gone through all links."""
    cuts: list[set[int]] = [set(given.get(d, ())) for d in range(len(sizes))]
    of_dim: dict[int, list[int]] = {}
    for k, nests in enumerate(links):
        for dim in {d for nest in nests for d in nest}:
            of_dim.setdefault(dim, []).append(k)
    work = list(range(len(links)))[::-1]
    waiting = set(work)
    while work:
        k = work.pop()
        waiting.discard(k)
        points = {p for nest in links[k] for p in _points(nest, sizes, cuts)}
        for nest in links[k]:
            for dim, new in _points_of_dims(nest, sizes, points):
                if not new <= cuts[dim]:
                    cuts[dim] |= new
                    again = [other for other in of_dim[dim] if other not in waiting]
                    work += again
                    waiting.update(again)
    return cuts


def _points(nest: Sequence[int], sizes: Sequence[int], cuts: Sequence[set[int]]) -> Iterator[int]:
    """Yield the sizes of the inner nests of a nest."""
    inner = 1
    for dim in reversed(nest):
        yield inner
        yield from (inner * cut for cut in cuts[dim])
        inner *= sizes[dim]


def _points_of_dims(
    nest: Sequence[int], sizes: Sequence[int], points: set[int]
) -> Iterator[tuple[int, set[int]]]:
    """Yield the dimensions of a nest, each with the points that fall inside of it, as cuts of it.

    A point that is no whole number of inner steps becomes a cut 0, which fits into nothing.
    """
    inner = 1
    for dim in reversed(nest):
        outer = inner * sizes[dim]
        yield dim, {p // inner if p % inner == 0 else 0 for p in points if inner < p < outer}
        inner = outer


def _chain(size: int, cuts: Iterable[int]) -> bool:
    ordered = [1, *sorted(cuts), size]
    return size == 0 or (ordered[1] > 0 and all(b % a == 0 for a, b in pairwise(ordered)))


def _factors(size: int, cuts: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes of the factors between cuts, outermost first."""
    ordered = [1, *sorted(cuts), size]
    return tuple(b // a for a, b in pairwise(ordered) if b != a)[::-1]


def _places(
    nest: Sequence[int], factors: Sequence[tuple[int, ...]], firsts: Sequence[int]
) -> Iterator[int]:
    """Yield the numbers of the factors of a nest, outermost first."""
    for dim in nest:
        yield from range(firsts[dim], firsts[dim] + len(factors[dim]))


class _Classes:
    """Unite numbers into classes."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def root(self, number: int) -> int:
        while self._parents[number] != number:
            self._parents[number] = number = self._parents[self._parents[number]]
        return number

    def unite(self, a: int, b: int) -> None:
        self._parents[self.root(a)] = self.root(b)
