"""Choose which indexes of a chunk an axis of devices shares, and cut them so that each has one step per device.

Of a chunk's indexes those can be shared that its parameters have, that no op wants whole and that are not in what
crosses between chunks: of a transformer the heads, the hidden elements of the feed-forward part and the vocabulary.
Where an axis has more devices than there are heads of keys, each head is shared by the devices of its groups of
queries: the axis is split into one for the heads and one for the groups, and all other indexes are cut accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod

import torch
from torch import fx

from piper_compiler.capture.layouts.decide import TOKENS, SharedAxis
from piper_compiler.capture.layouts.indexes import Indexed, LoopIndex, TensorKey, indexed, key_of
from piper_compiler.capture.layouts.names import AskedIndexes, Nested, ParamNames
from piper_compiler.capture.layouts.unfuse import unfused
from piper_compiler.capture.stepgraph import Joint
from piper_ir.errors import DirectiveError
from piper_ir.layout import Sharding

HEADS = 2
"""The dimension of a query of attention that holds the heads."""


@dataclass(frozen=True)
class Unshared:
    """Say that devices do not share a dimension of a parameter, of `size` elements, and why."""

    input: int
    dim: int
    size: int
    why: str


@dataclass(frozen=True)
class SharedChunk:
    """Hold a chunk, its indexes, cut for the axes, these axes, and what they could share if its size were another."""

    joint: Joint
    indexes: Indexed
    axes: tuple[SharedAxis, ...]
    unshared: tuple[Unshared, ...] = ()


def shareable(joint: Joint, indexes: Indexed, kept: Collection[int] = ()) -> tuple[Nested, ...]:
    """Return the indexes that devices can share, those next to each other in a parameter together.

    The inputs `kept` are to stay whole.
    """
    crossing = in_crossing(joint, indexes)
    whole = {i for op in indexes.ops.values() for i in op.whole}
    whole |= {i for k in kept for dim in indexes.tensors[joint.inputs[k], 0] for i in dim}
    found: dict[LoopIndex, Nested] = {}
    for k, node in enumerate(joint.inputs):
        if joint.kinds[k] != "param":
            continue
        for dim in indexes.tensors[node, 0]:
            for run in _runs(dim, lambda i: i not in crossing and i not in whole):
                found[run[0]] = max(found.get(run[0], run), run, key=len)
    inner = {i for run in found.values() for i in run[1:]}
    return tuple(run for first, run in found.items() if first not in inner)


def _runs(dim: Sequence[LoopIndex], good: Callable[[LoopIndex], bool]) -> Iterator[Nested]:
    run: list[LoopIndex] = []
    for index in (*dim, None):
        if index is not None and good(index):
            run.append(index)
        elif run:
            yield tuple(run)
            run = []


def _crossing(joint: Joint) -> Iterator[fx.Node]:
    """Yield the nodes of what crosses between chunks: values in and out."""
    yield from (n for k, n in enumerate(joint.inputs) if joint.kinds[k] == "value")
    yield from joint.outputs


@dataclass(frozen=True)
class _Claim:
    """Say what the devices of one axis share of a chunk.

    Attributes:
        asked: the axis.
        weights: what parameters are in parts of.
        stream: the tokens of what crosses between chunks.
        inside: what an op is computed in parts of that needs all tokens: the heads of attention.
    """

    asked: Sharding
    weights: tuple[Nested, ...] = ()
    stream: tuple[Nested, ...] = ()
    inside: tuple[Nested, ...] = ()

    @property
    def nests(self) -> tuple[Nested, ...]:
        return (*self.weights, *self.stream, *self.inside)


@dataclass(frozen=True)
class _Chosen:
    """Hold a chunk and its indexes, what each axis claims of them, and what does not fit an axis by its size."""

    joint: Joint
    indexes: Indexed
    claims: tuple[_Claim, ...]
    others: tuple[tuple[Nested, int], ...]

    def of_nests(self) -> dict[Nested, list[int]]:
        """Return the numbers of the claims on each nest, in the order in which they take its steps.

        Tokens are shared along a context axis first, so that a device has neighbouring ones, and heads along a
        tensor axis.
        """
        found: dict[Nested, list[int]] = {}
        for number, claim in enumerate(self.claims):
            for nest in claim.nests:
                found.setdefault(nest, []).append(number)
        for nest, numbers in found.items():
            numbers.sort(key=lambda n: (nest in self.claims[n].inside, not self.claims[n].asked.context))
        return found


def split_degrees(joint: Joint, asked: Sequence[Sharding], params: ParamNames = ()) -> tuple[tuple[int, ...], ...]:
    """Return the degrees into which each axis must be split to share the indexes of a chunk."""
    chosen = _chosen(joint, asked, (), params)
    points: list[set[int]] = [{1, claim.asked.degree} for claim in chosen.claims]
    for nest, numbers in chosen.of_nests().items():
        steps = steps_of(nest, prod(chosen.claims[n].asked.degree for n in numbers)) or ()
        ends = [prod(steps[: k + 1]) for k in range(len(steps))]
        first = 1
        for number in numbers:
            degree = chosen.claims[number].asked.degree
            points[number] |= {end // first for end in ends if first < end < first * degree}
            first *= degree
    return tuple(tuple(b // a for a, b in pairwise(sorted(each))) or (1,) for each in points)


def common_degrees(each: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the degrees of an axis that serves all of these splits of it."""
    return refined(each, prod(each[0]))


def _chosen(joint: Joint, asked: Sequence[Sharding], kept: Collection[int], params: ParamNames) -> _Chosen:
    """Return what devices can share of a chunk; raise DirectiveError where they cannot share the tokens evenly."""
    joint, first = taken_apart(joint)
    nests, heads = shareable(joint, first, kept), _heads(first)
    tensor = prod(s.degree for s in asked if not s.context)
    claims, others = [], []
    for one in asked:
        stream = tuple(_tokens(joint, first)) if one.stream or one.context else ()
        if one.context:
            inside = tuple(nest for nest in heads if steps_of(nest, tensor * one.degree) is not None)
            claims.append(_Claim(one, (), stream, inside))
            continue
        if one.experts:
            claims.append(_Claim(one, experts_of(joint, first, one, params, kept)))
            continue
        wanted = AskedIndexes(one.index, params).among(joint, first, nests)
        fitting = tuple(n for n in wanted if steps_of(n, one.degree) is not None)
        others += [(n, one.degree) for n in wanted if n not in fitting]
        claims.append(_Claim(one, fitting, stream))
    chosen = _Chosen(joint, first, tuple(claims), tuple(others))
    _check_tokens(chosen)
    return chosen


def experts_of(
    joint: Joint, indexes: Indexed, asked: Sharding, params: ParamNames, kept: Collection[int] = ()
) -> tuple[Nested, ...]:
    """Return the experts of a chunk, whose weights have them and which what crosses between chunks may have, too.

    The inputs `kept` are to stay whole.
    """
    whole = {i for op in indexes.ops.values() for i in op.whole}
    whole |= {i for k in kept for dim in indexes.tensors[joint.inputs[k], 0] for i in dim}
    wanted = AskedIndexes(asked.index, params)
    named = {i for name in asked.index for i in wanted.named(joint, indexes, name)}
    found = {
        run
        for k, node in enumerate(joint.inputs)
        if joint.kinds[k] == "param"
        for dim in indexes.tensors[node, 0]
        for run in _runs(dim, lambda i: i in named and i not in whole)
    }
    return tuple(sorted(found, key=lambda run: run[0].number))


def _check_tokens(chosen: _Chosen) -> None:
    for nest, numbers in chosen.of_nests().items():
        degree, size = prod(chosen.claims[n].asked.degree for n in numbers), prod(i.size for i in nest)
        if any(nest in claim.stream for claim in chosen.claims) and steps_of(nest, degree) is None:
            raise DirectiveError(
                f"{size} tokens cannot be shared by {degree} devices; {gcd(size, degree)} devices can share them"
            )


def _heads(indexes: Indexed) -> tuple[Nested, ...]:
    """Return the heads of queries of each attention."""
    ops = [op for op in indexes.ops.values() if op.call.op is torch.ops.piper.attention.default]
    return tuple(dict.fromkeys(op.tensors[op.call.number("q")][HEADS] for op in ops))


def share(joint: Joint, asked: Sequence[Sharding], kept: Collection[int] = (), params: ParamNames = ()) -> SharedChunk:
    """Return the chunk's indexes, cut for axes that are split as asked; the inputs `kept` are to stay whole.

    `params` are for each input its names in all chunks that are like this one, by which indexes may be asked for.
    """
    chosen = _chosen(joint, asked, kept, params)
    first, of_nests = chosen.indexes, chosen.of_nests()
    places: dict[tuple[Nested, int], list[_Place]] = {}
    for nest, numbers in of_nests.items():
        degrees = [(n, size) for n in numbers for _, size in asked[n].axes]
        for place, (number, _) in zip(_places(first, nest, [size for _, size in degrees]), degrees, strict=True):
            places.setdefault((nest, number), []).append(place)
    cuts: dict[tuple[TensorKey, int], set[int]] = {}
    for place in (p for each in places.values() for p in each):
        cuts.setdefault((place.key, place.dim), set()).update({place.inner, place.inner * place.size} - {1})
    cut = indexed(chosen.joint, {at: {c for c in points if c < _size(first, at)} for at, points in cuts.items()})
    axes = []
    for number, claim in enumerate(chosen.claims):
        for k, (name, size) in enumerate(claim.asked.axes):
            weights, stream, inside = (
                frozenset(_found(cut, places[n, number][k]) for n in nests)
                for nests in (claim.weights, claim.stream, claim.inside)
            )
            axes.append(SharedAxis(name, size, weights, stream, inside, claim.asked.experts))
    unshared = tuple(u for nest, degree in chosen.others for u in _unshared(chosen.joint, first, nest, degree))
    return SharedChunk(chosen.joint, cut, tuple(axes), unshared)


def taken_apart(joint: Joint) -> tuple[Joint, Indexed]:
    """Return the chunk without the ops that keep devices from sharing what a product sums over, and its indexes."""
    first = indexed(joint)
    crossing = in_crossing(joint, first)

    def chosen(node: fx.Node) -> bool:
        factor = first.ops[node].tensors[1]
        return not crossing.issuperset(factor[-1])

    apart = unfused(joint, chosen)
    return apart, first if apart is joint else indexed(apart)


def in_crossing(joint: Joint, indexes: Indexed) -> set[LoopIndex]:
    """Return the indexes of what passes between chunks."""
    return {i for node in _crossing(joint) for dim in indexes.tensors[key_of(node)] for i in dim}


def _size(indexes: Indexed, at: tuple[TensorKey, int]) -> int:
    return prod(i.size for i in indexes.tensors[at[0]][at[1]])


def _tokens(joint: Joint, indexes: Indexed) -> Iterator[Nested]:
    seen, exchanged = set[Nested](), joint.exchanged
    for k, node in enumerate(joint.inputs):
        if joint.kinds[k] in ("value", "batch") and node not in exchanged and len(indexes.tensors[node, 0]) > TOKENS:
            seen.add(indexes.tensors[node, 0][TOKENS])
    for node in joint.outputs:
        dims = indexes.tensors[key_of(node)]
        if node not in exchanged and len(dims) > TOKENS:
            seen.add(dims[TOKENS])
    yield from sorted((n for n in seen if n), key=lambda n: n[0].number)


def steps_of(nest: Nested, degree: int) -> tuple[int, ...] | None:
    """Return how many of `degree` places each index of a nest takes, or None where they do not fit evenly."""
    steps = []
    for index in nest:
        taken = gcd(degree, index.size)
        steps.append(taken)
        degree //= taken
        if taken < index.size:
            break
    return tuple(s for s in steps if s > 1) if degree == 1 else None


def refined(steps: Sequence[tuple[int, ...]], degree: int) -> tuple[int, ...]:
    """Return the degrees into which an axis is split so that each of `steps` is made of some of them."""
    points = {1, degree}
    for sizes in steps:
        points |= {prod(sizes[:k]) for k in range(1, len(sizes))}
    ordered = sorted(points)
    return tuple(b // a for a, b in pairwise(ordered))


@dataclass(frozen=True)
class _Place:
    """Name a factor of a dimension by what is inside of it."""

    key: TensorKey
    dim: int
    inner: int
    size: int


def _places(indexes: Indexed, nest: Nested, degrees: Sequence[int]) -> Iterator[_Place]:
    """Yield where each part of the axis cuts the nest."""
    key, dim = next((k, d) for k, dims in indexes.tensors.items() for d, inside in enumerate(dims) if _has(inside, nest))
    inside = indexes.tensors[key][dim]
    start = inside.index(nest[0])
    left = prod(i.size for i in inside[start:])
    for degree in degrees:
        left //= degree
        yield _Place(key, dim, left, degree)


def _has(inside: Nested, nest: Nested) -> bool:
    return any(inside[k : k + len(nest)] == nest for k in range(len(inside)))


def _found(indexes: Indexed, place: _Place) -> LoopIndex:
    inner = 1
    for index in reversed(indexes.tensors[place.key][place.dim]):
        if inner == place.inner and index.size == place.size:
            return index
        inner *= index.size
    raise AssertionError(f"no index at {place}")


def uneven(nest: Nested, degree: int) -> str:
    """Return that `degree` devices cannot share a nest evenly, with the nearest degree that can; "" where they can."""
    if steps_of(nest, degree) is not None:
        return ""
    size = prod(i.size for i in nest)
    others = [d for d in range(2, max(size, degree) + 1) if steps_of(nest, d) is not None]
    nearest = min(others, key=lambda d: (abs(d - degree), d), default=0)
    instead = f"; {nearest} can" if nearest else ""
    return f"{degree} devices cannot share {size} evenly{instead}"


def _unshared(joint: Joint, indexes: Indexed, nest: Nested, degree: int) -> Iterator[Unshared]:
    """Yield the dimensions of parameters that `degree` devices cannot share evenly."""
    for k, node in enumerate(joint.inputs):
        for dim, inside in enumerate(indexes.tensors.get((node, 0), ())):
            if joint.kinds[k] == "param" and _has(inside, nest):
                yield Unshared(k, dim, prod(i.size for i in inside), uneven(nest, degree))
