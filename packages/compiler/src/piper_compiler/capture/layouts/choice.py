"""Choose which indexes of a chunk an axis of devices shares, and cut them so that each has one step per device.

Of a chunk's indexes those can be shared that its parameters have, that no op wants whole and that are not in what
crosses between chunks: of a transformer the heads, the hidden elements of the feed-forward part and the vocabulary. Where
an axis has more devices than there are heads of keys, each head is shared by the devices of its groups of queries: the
axis is split into one for the heads and one for the groups, and all other indexes are cut accordingly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod

from torch import fx

from piper_compiler.capture.layouts.decide import Axis
from piper_compiler.capture.layouts.indexes import Index, Indexed, TensorKey, indexed, key_of
from piper_compiler.capture.layouts.unfuse import unfused
from piper_compiler.capture.stepgraph import Joint
from piper_ir.errors import DirectiveError

Nested = tuple[Index, ...]
"""Indexes next to each other in a dimension, outermost first: a device takes the outer ones first."""
TOKENS = 1
"""The dimension of a value or batch tensor that holds the tokens."""


@dataclass(frozen=True)
class Shared:
    """Hold a chunk, its indexes, cut for the axes, and these axes."""

    joint: Joint
    indexes: Indexed
    axes: tuple[Axis, ...]


def shareable(joint: Joint, indexes: Indexed) -> tuple[Nested, ...]:
    """Return the indexes that devices can share, those next to each other in a parameter together."""
    crossing = _in_crossing(joint, indexes)
    whole = {i for op in indexes.ops.values() for i in op.whole}
    found: dict[Index, Nested] = {}
    for k, node in enumerate(joint.inputs):
        if joint.kinds[k] != "param":
            continue
        for dim in indexes.tensors[node, 0]:
            for run in _runs(dim, lambda i: i not in crossing and i not in whole):
                found[run[0]] = max(found.get(run[0], run), run, key=len)
    inner = {i for run in found.values() for i in run[1:]}
    return tuple(run for first, run in found.items() if first not in inner)


def _runs(dim: Sequence[Index], good: object) -> Iterator[Nested]:
    run: list[Index] = []
    for index in (*dim, None):
        if index is not None and good(index):  # type: ignore[operator]
            run.append(index)
        elif run:
            yield tuple(run)
            run = []


def _crossing(joint: Joint) -> Iterator[fx.Node]:
    """Yield the nodes of what crosses between chunks: values in and out."""
    yield from (n for k, n in enumerate(joint.inputs) if joint.kinds[k] == "value")
    yield from joint.outputs


def split_degrees(joint: Joint, degree: int, *, stream: bool) -> tuple[int, ...]:
    """Return the degrees into which an axis must be split to share the indexes of a chunk."""
    _, _, fitting, tokens = _chosen(joint, degree, stream)
    return refined([steps for n in (*fitting, *tokens) if (steps := steps_of(n, degree))], degree)


def common_degrees(each: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the degrees of an axis that serves all of these splits of it."""
    return refined(each, prod(each[0]))


def _chosen(joint: Joint, degree: int, stream: bool) -> tuple[Joint, Indexed, list[Nested], list[Nested]]:
    """Return the chunk and its indexes, those that devices can share, and those of the stream."""
    joint, first = _unfused(joint)
    fitting = [n for n in shareable(joint, first) if steps_of(n, degree) is not None]
    tokens = list(_tokens(joint, first)) if stream else []
    for nest in tokens:
        if steps_of(nest, degree) is None:
            size = prod(i.size for i in nest)
            raise DirectiveError(
                f"{size} tokens cannot be shared by {degree} devices; {gcd(size, degree)} devices can share them"
            )
    return joint, first, fitting, tokens


def share(joint: Joint, name: str, degrees: tuple[int, ...], *, stream: bool) -> Shared:
    """Return the chunk's indexes for an axis that is split into these degrees."""
    joint, first, fitting, tokens = _chosen(joint, prod(degrees), stream)
    places = [list(_places(first, nest, degrees)) for nest in (*fitting, *tokens)]
    cuts: dict[tuple[TensorKey, int], set[int]] = {}
    for place in (p for nest in places for p in nest):
        cuts.setdefault((place.key, place.dim), set()).update({place.inner, place.inner * place.size} - {1})
    cut = indexed(joint, {at: {c for c in points if c < _size(first, at)} for at, points in cuts.items()})
    axes = []
    for number, size in enumerate(degrees):
        weights = frozenset(_found(cut, nest[number]) for nest in places[: len(fitting)])
        along = frozenset(_found(cut, nest[number]) for nest in places[len(fitting) :])
        axes.append(Axis(name if len(degrees) == 1 else f"{name}.{number}", size, weights, along))
    return Shared(joint, cut, tuple(axes))


def _unfused(joint: Joint) -> tuple[Joint, Indexed]:
    """Return the chunk without the ops that would keep devices from sharing what a product sums over."""
    first = indexed(joint)
    crossing = _in_crossing(joint, first)

    def chosen(node: fx.Node) -> bool:
        factor = first.ops[node].tensors[1]
        return not crossing.issuperset(factor[-1])

    apart = unfused(joint, chosen)
    return apart, first if apart is joint else indexed(apart)


def _in_crossing(joint: Joint, indexes: Indexed) -> set[Index]:
    return {i for node in _crossing(joint) for dim in indexes.tensors[key_of(node)] for i in dim}


def _size(indexes: Indexed, at: tuple[TensorKey, int]) -> int:
    return prod(i.size for i in indexes.tensors[at[0]][at[1]])


def _tokens(joint: Joint, indexes: Indexed) -> Iterator[Nested]:
    seen: set[Nested] = set()
    for k, node in enumerate(joint.inputs):
        if joint.kinds[k] in ("value", "batch") and len(indexes.tensors[node, 0]) > TOKENS:
            seen.add(indexes.tensors[node, 0][TOKENS])
    for node in joint.outputs:
        dims = indexes.tensors[key_of(node)]
        if len(dims) > TOKENS:
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


def _found(indexes: Indexed, place: _Place) -> Index:
    inner = 1
    for index in reversed(indexes.tensors[place.key][place.dim]):
        if inner == place.inner and index.size == place.size:
            return index
        inner *= index.size
    raise AssertionError(f"no index at {place}")


def unshared(nests: Mapping[str, Nested], degree: int) -> tuple[str, ...]:
    """Return the names of the nests that `degree` devices cannot share evenly."""
    return tuple(name for name, nest in nests.items() if steps_of(nest, degree) is None)
