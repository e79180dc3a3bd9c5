"""Choose which indexes of a chunk an axis of devices shares, and cut them so that each has one step per device.

An index can be shared if parameters have it, every op can be sharded along it, and activations between chunks do not
have it: in a transformer the heads, the hidden units of the feed-forward part and the vocabulary. If an axis has more
devices than there are key heads (grouped-query attention), the axis is split into one for the heads and one for the
groups of queries, and all other indexes are cut accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import fx

from piper_capture.graphs.stepgraph import TOKENS, Joint
from piper_capture.layouts.context import HEADS as HEADS_AROUND
from piper_capture.layouts.context import ZIGZAG
from piper_capture.layouts.decide import SharedAxis
from piper_capture.layouts.fitting import instead, refined, steps_of, tokens_text, uneven
from piper_capture.layouts.indexes import (
    Indexed,
    LoopIndex,
    OpIndexes,
    OverlappingCuts,
    TensorKey,
    indexed,
    key_of,
)
from piper_capture.layouts.means import means_apart
from piper_capture.layouts.names import AskedIndexes, Nested, ParamNames
from piper_capture.layouts.nest_places import NestPlace, has_nest, index_at, nest_places
from piper_capture.layouts.unfuse import unfused
from piper_ir.ground.errors import DirectiveError
from piper_ir.program.layout import Sharding

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
    """Hold a chunk, its indexes as cut for the axes, the axes, and the dimensions that do not divide evenly."""

    joint: Joint
    indexes: Indexed
    axes: tuple[SharedAxis, ...]
    unshared: tuple[Unshared, ...] = ()


def shareable(joint: Joint, indexes: Indexed, kept: Collection[int] = ()) -> tuple[Nested, ...]:
    """Return the indexes that devices can share, those next to each other in a parameter together.

    The inputs `kept` are to stay unsharded.
    """
    crossing = in_crossing(joint, indexes)
    whole = {i for op in indexes.ops.values() for i in op.whole}
    whole |= {i for k in kept for dim in indexes.tensors[joint.inputs[k], 0] for i in dim}
    run_by_first: dict[LoopIndex, Nested] = {}
    for k, node in enumerate(joint.inputs):
        if joint.kinds[k] != "param":
            continue
        for dim in indexes.tensors[node, 0]:
            for run in _runs(dim, lambda i: i not in crossing and i not in whole):
                run_by_first[run[0]] = max(run_by_first.get(run[0], run), run, key=len)
    inner = {i for run in run_by_first.values() for i in run[1:]}
    return tuple(run for first, run in run_by_first.items() if first not in inner)


def _runs(dim: Sequence[LoopIndex], good: Callable[[LoopIndex], bool]) -> Iterator[Nested]:
    run: list[LoopIndex] = []
    for index in (*dim, None):
        if index is not None and good(index):
            run.append(index)
        elif run:
            yield tuple(run)
            run = []


def _crossing(joint: Joint) -> Iterator[fx.Node]:
    """Yield the nodes of activations between chunks: inputs and outputs."""
    yield from (n for k, n in enumerate(joint.inputs) if joint.kinds[k] == "value")
    yield from joint.outputs


@dataclass(frozen=True)
class _Claim:
    """Hold the indexes of a chunk that the devices of one axis share.

    Attributes:
        asked: the axis.
        weights: the indexes along which parameters are sharded.
        stream: the tokens of activations between chunks.
        inside: the indexes along which an op that needs all tokens is sharded: the heads of attention.
    """

    asked: Sharding
    weights: tuple[Nested, ...] = ()
    stream: tuple[Nested, ...] = ()
    inside: tuple[Nested, ...] = ()

    @property
    def nests(self) -> tuple[Nested, ...]:
        """Return the indexes, each once: in a chunk that is alone, weights may have the tokens, too."""
        return tuple(dict.fromkeys((*self.weights, *self.stream, *self.inside)))

    def halved(self, nest: Nested) -> bool:
        """Return whether each device has two blocks of a nest, in zigzag order."""
        return self.asked.order == ZIGZAG and nest in self.stream

    def takes_part_of(self, op: OpIndexes) -> bool:
        """Return whether an op needs all tokens, which the devices share, and is sharded along nothing else."""
        stream, weights = (
            {i for nest in nests for i in nest} for nests in (self.stream, self.weights)
        )
        return not stream.isdisjoint(op.whole) and weights.isdisjoint(op.rewritten)


@dataclass(frozen=True)
class _Chosen:
    """Hold a chunk and its indexes, the claims of each axis on them, and the nests that do not divide evenly."""

    joint: Joint
    indexes: Indexed
    claims: tuple[_Claim, ...]
    others: tuple[tuple[Nested, int], ...]

    def of_nests(self) -> dict[Nested, list[int]]:
        """Return the numbers of the claims on each nest, in the order in which they take its steps.

        Tokens are shared along a context axis first, so that a device has neighbouring ones, and heads along a
        tensor axis.
        """
        numbers_by_nest: dict[Nested, list[int]] = {}
        for number, claim in enumerate(self.claims):
            for nest in claim.nests:
                numbers_by_nest.setdefault(nest, []).append(number)
        for nest, numbers in numbers_by_nest.items():
            numbers.sort(
                key=lambda n: (nest in self.claims[n].inside, not self.claims[n].asked.context)
            )
        return numbers_by_nest

    def halves(self, nest: Nested, numbers: Sequence[int]) -> int:
        """Return the number of halves into which a nest is cut before it is sharded: 2 in zigzag order, else 1."""
        return 2 if any(self.claims[n].halved(nest) for n in numbers) else 1


def split_degrees(
    joint: Joint, asked: Sequence[Sharding], params: ParamNames = ()
) -> tuple[tuple[int, ...], ...]:
    """Return the degrees into which each axis must be split to share the indexes of a chunk."""
    chosen = _chosen(joint, asked, (), params)
    points: list[set[int]] = [{1, claim.asked.degree} for claim in chosen.claims]
    for nest, numbers in chosen.of_nests().items():
        first = chosen.halves(nest, numbers)
        steps = steps_of(nest, first * prod(chosen.claims[n].asked.degree for n in numbers)) or ()
        ends = [prod(steps[: k + 1]) for k in range(len(steps))]
        for number in numbers:
            degree = chosen.claims[number].asked.degree
            points[number] |= {end // first for end in ends if first < end < first * degree}
            first *= degree
    return tuple(tuple(b // a for a, b in pairwise(sorted(each))) or (1,) for each in points)


def common_degrees(each: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the degrees of an axis that serves all of these splits of it."""
    return refined(each, prod(each[0]))


def _chosen(
    joint: Joint, asked: Sequence[Sharding], kept: Collection[int], params: ParamNames
) -> _Chosen:
    """Return the indexes of a chunk that devices share; raise DirectiveError if its tokens do not divide evenly."""
    joint, first = taken_apart(joint)
    chosen = _claimed(joint, first, asked, kept, params)
    apart = means_apart(
        joint, lambda n: any(claim.takes_part_of(first.ops[n]) for claim in chosen.claims)
    )
    if apart is not joint:
        chosen = _claimed(apart, indexed(apart), asked, kept, params)
    _check_tokens(chosen)
    return chosen


def _claimed(
    joint: Joint,
    first: Indexed,
    asked: Sequence[Sharding],
    kept: Collection[int],
    params: ParamNames,
) -> _Chosen:
    nests, heads = shareable(joint, first, kept), _heads(first)
    tensor = prod(s.degree for s in asked if not s.context)
    tokens = _shared_tokens(joint, first, asked)
    claims, others = [], []
    for one in asked:
        stream = tokens if one.stream == "tokens" or one.context else ()
        if one.context:
            heads_too = heads if one.attention == HEADS_AROUND else ()
            inside = tuple(
                nest for nest in heads_too if steps_of(nest, tensor * one.degree) is not None
            )
            claims.append(_Claim(one, (), stream, inside))
            continue
        if one.experts:
            claims.append(_Claim(one, experts_of(joint, first, one, params, kept)))
            continue
        wanted = AskedIndexes(one.index, params).among(joint, first, nests)
        wanted = tuple(
            n for n in wanted if all(i.size for i in n)
        )  # a parameter without elements has no parts
        fitting = tuple(n for n in wanted if steps_of(n, one.degree) is not None)
        others += [(n, one.degree) for n in wanted if n not in fitting]
        claims.append(_Claim(one, fitting, stream))
    return _Chosen(joint, first, tuple(claims), tuple(others))


def experts_of(
    joint: Joint, indexes: Indexed, asked: Sharding, params: ParamNames, kept: Collection[int] = ()
) -> tuple[Nested, ...]:
    """Return the indexes of a chunk's experts, which its weights have; its inputs and outputs may have them, too.

    The inputs `kept` are to stay unsharded.
    """
    whole = {i for op in indexes.ops.values() for i in op.whole}
    whole |= {i for k in kept for dim in indexes.tensors[joint.inputs[k], 0] for i in dim}
    wanted = AskedIndexes(asked.index, params)
    named = {i for name in asked.index for i in wanted.named(joint, indexes, name)}
    runs = {
        run
        for k, node in enumerate(joint.inputs)
        if joint.kinds[k] == "param"
        for dim in indexes.tensors[node, 0]
        for run in _runs(dim, lambda i: i in named and i not in whole)
    }
    return tuple(sorted(runs, key=lambda run: run[0].number))


def _check_tokens(chosen: _Chosen) -> None:
    for nest, numbers in chosen.of_nests().items():
        claims, size = [chosen.claims[n] for n in numbers], prod(i.size for i in nest)
        if not any(nest in claim.stream for claim in claims):
            continue
        degree, halves = prod(claim.asked.degree for claim in claims), chosen.halves(nest, numbers)
        if halves > 1:
            _check_zigzag(nest, claims, size)
        elif steps_of(nest, degree) is None:
            axes = ", ".join(f"{c.asked.over}={c.asked.degree}" for c in claims)
            raise DirectiveError(
                f"shard: {tokens_text(nest)} cannot be shared by {degree} devices ({axes}){instead(nest, degree)}; "
                f"dimension 1 of tensors between layers is taken for the tokens, dimension 0 for the rows"
            )
        for claim in claims:
            around = claim.asked.attention == HEADS_AROUND
            if (claim.halved(nest) or not around) and nest[0].size % (halves * claim.asked.degree):
                ways = ['order="blocks"'] * (
                    halves > 1 and (around or nest[0].size % claim.asked.degree == 0)
                )
                ways += ['attention="heads"' + ', order="blocks"' * (halves > 1)] * (not around)
                raise DirectiveError(
                    f'attention="{claim.asked.attention}" over {claim.asked.over}: an op takes the '
                    f"{size} tokens as {nest[0].size} blocks, which {claim.asked.degree} devices cannot "
                    f"share{', two each in zigzag order' * (halves > 1)}; use {' or '.join(ways)}"
                )


def _check_zigzag(nest: Nested, claims: Sequence[_Claim], size: int) -> None:
    """Raise DirectiveError if the tokens do not divide into two equal blocks per device, as zigzag order needs."""
    context = next(claim.asked for claim in claims if claim.halved(nest))
    others = prod(claim.asked.degree for claim in claims) // context.degree

    def fits(degree: int) -> bool:
        return steps_of(nest, 2 * degree * others) is not None

    if fits(context.degree):
        return
    fitting = [d for d in range(1, size + 1) if d != context.degree and fits(d)]
    nearest = min(fitting, key=lambda d: (abs(d - context.degree), d), default=0)
    beside = f", with {others} more for each," if others > 1 else ""
    instead = [f"{nearest} devices can share them so"] * (nearest > 0)
    instead += [f'{context.degree} can with order="blocks"'] * (
        steps_of(nest, context.degree * others) is not None
    )
    instead = instead or [f"a multiple of {2 * context.degree * others} tokens would be accepted"]
    raise DirectiveError(
        f"{size} tokens cannot be shared by {context.degree} devices along {context.over}{beside} in zigzag order, "
        f"of which each has two blocks; {', '.join(instead)}"
    )


def _heads(indexes: Indexed) -> tuple[Nested, ...]:
    """Return the heads of queries of each attention."""
    ops = [op for op in indexes.ops.values() if op.call.op is torch.ops.piper.attention.default]
    return tuple(dict.fromkeys(op.tensors[op.call.number("q")][HEADS] for op in ops))


def share(
    joint: Joint, asked: Sequence[Sharding], kept: Collection[int] = (), params: ParamNames = ()
) -> SharedChunk:
    """Return the chunk's indexes, cut for axes that are split as asked; the inputs `kept` stay unsharded.

    `params` are for each input its names in all chunks that are like this one, by which indexes may be asked for.
    """
    chosen = _chosen(joint, asked, kept, params)
    first, of_nests = chosen.indexes, chosen.of_nests()
    places: dict[tuple[Nested, int], list[NestPlace]] = {}
    halves: dict[Nested, NestPlace] = {}
    for nest, numbers in of_nests.items():
        degrees = [(n, size) for n in numbers for _, size in asked[n].axes]
        halved = [2] if chosen.halves(nest, numbers) > 1 else []
        places_of_nest = list(nest_places(first, nest, [*halved, *(size for _, size in degrees)]))
        if halved:
            halves[nest] = places_of_nest.pop(0)
        for place, (number, _) in zip(places_of_nest, degrees, strict=True):
            places.setdefault((nest, number), []).append(place)
    cuts: dict[tuple[TensorKey, int], set[int]] = {}
    for place in (p for each in (*places.values(), halves.values()) for p in each):
        cuts.setdefault((place.key, place.dim), set()).update(
            {place.inner, place.inner * place.size} - {1}
        )
    try:
        cut = indexed(
            chosen.joint,
            {at: {c for c in points if c < _size(first, at)} for at, points in cuts.items()},
        )
        axes = tuple(_axes(chosen, asked, places, halves, cut))
    except OverlappingCuts:
        raise _overlapping(tuple(of_nests)) from None
    if _twice(axes):
        raise _overlapping(tuple(of_nests))
    unshared = tuple(
        u for nest, degree in chosen.others for u in _unshared(chosen.joint, first, nest, degree)
    )
    return SharedChunk(chosen.joint, cut, axes, unshared)


def _axes(
    chosen: _Chosen,
    asked: Sequence[Sharding],
    places: Mapping[tuple[Nested, int], Sequence[NestPlace]],
    halves: Mapping[Nested, NestPlace],
    cut: Indexed,
) -> Iterator[SharedAxis]:
    """Yield each axis, or those into which it is split, with the indexes that its devices share."""
    for number, claim in enumerate(chosen.claims):
        for k, (name, size) in enumerate(asked[number].axes):
            weights, stream, inside = (
                frozenset(index_at(cut, places[n, number][k]) for n in nests)
                for nests in (claim.weights, claim.stream, claim.inside)
            )
            within = {
                index_at(cut, places[n, number][k]): index_at(cut, halves[n])
                for n in claim.stream
                if claim.halved(n)
            }
            yield SharedAxis(
                name,
                size,
                weights,
                stream,
                inside,
                claim.asked.attention,
                within,
                expert_chunk=claim.asked.experts,
            )


def _twice(axes: Sequence[SharedAxis]) -> bool:
    """Return whether two axes share one index, which cannot be, as each is decided without the others."""
    shared = [axis.weights | axis.stream | axis.inside for axis in axes]
    return len(frozenset[LoopIndex]().union(*shared)) < sum(map(len, shared))


def _overlapping(nests: Sequence[Nested]) -> DirectiveError:
    """Return the error for dimensions that are within others, such as 8 tokens and the 2 x 8 of another value."""
    within = [n for n in nests if any(n != other and set(n) & set(other) for other in nests)]
    listed = " and of ".join(sorted(" x ".join(str(i.size) for i in nest) for nest in within))
    return DirectiveError(
        f"shard: devices cannot share dimensions of {listed} elements, one of which is within the other; fewer "
        f"devices can"
    )


def taken_apart(joint: Joint) -> tuple[Joint, Indexed]:
    """Return the chunk with ops taken apart that would keep devices from sharing the inner dimension of a product."""
    first = indexed(joint)
    crossing = in_crossing(joint, first)

    def chosen(node: fx.Node) -> bool:
        factor = first.ops[node].tensors[1]
        return not crossing.issuperset(factor[-1])

    apart = unfused(joint, chosen)
    return apart, first if apart is joint else indexed(apart)


def in_crossing(joint: Joint, indexes: Indexed) -> set[LoopIndex]:
    """Return the indexes of activations between chunks."""
    return {i for node in _crossing(joint) for dim in indexes.tensors[key_of(node)] for i in dim}


def _size(indexes: Indexed, at: tuple[TensorKey, int]) -> int:
    return prod(i.size for i in indexes.tensors[at[0]][at[1]])


def _shared_tokens(joint: Joint, indexes: Indexed, asked: Sequence[Sharding]) -> tuple[Nested, ...]:
    """Return the tokens that devices share.

    A tensor of the batch of shape [rows, numbers] may hold tokens, or a row's features. These stay whole where they do
    not divide evenly, and other tokens do.
    """
    sharing = [one for one in asked if one.stream == "tokens" or one.context]
    if not sharing:
        return ()
    parts = prod(one.degree for one in sharing) * (1 + any(o.order == ZIGZAG for o in sharing))
    found = _tokens(joint, indexes)
    fitting = {nest for nest in found if steps_of(nest, parts) is not None}
    whole = {nest for nest, features in found.items() if features} - fitting if fitting else set()
    return tuple(nest for nest in found if nest not in whole)


def _tokens(joint: Joint, indexes: Indexed) -> dict[Nested, bool]:
    """Return the tokens of values between chunks, and whether only tensors of the batch [rows, numbers] have them.

    Tensors of the batch of more than three dimensions are pictures: their channels are tokens where nothing else is.
    Raises DirectiveError where no op tells them from the rows.
    """
    seen, exchanged, flat = dict[Nested, bool](), joint.exchanged, joint.flat

    def see(node: fx.Node, dims: Sequence[Nested], features: bool) -> None:
        nest = dims[joint.tokens_of(node)]
        nest = _within_rows(nest, joint.row_tokens) if node in flat else nest
        seen[nest] = features and seen.get(nest, True)

    pictures = []
    for k, node in enumerate(joint.inputs):
        if (
            joint.kinds[k] in ("value", "batch")
            and node not in exchanged
            and len(indexes.tensors[node, 0]) > TOKENS
        ):
            dims, given = indexes.tensors[node, 0], joint.kinds[k] == "batch"
            if given and len(dims) > TOKENS + 2:
                pictures.append(node)
            else:
                see(node, dims, given and len(dims) == TOKENS + 1)
    for node in joint.outputs:
        dims = indexes.tensors[key_of(node)]
        if node not in exchanged and len(dims) > TOKENS:
            see(node, dims, False)
    for node in () if any(seen) else pictures:
        see(node, indexes.tensors[node, 0], False)
    return {nest: seen[nest] for nest in sorted(filter(None, seen), key=lambda n: n[0].number)}


def _within_rows(nest: Nested, tokens: int) -> Nested:
    """Return the inner indexes of a dimension of rows x tokens, which have all tokens of a row."""
    for first in range(len(nest) + 1):
        if prod(i.size for i in nest[first:]) == tokens:
            return nest[first:]
    raise DirectiveError(
        f"shard: a value passes between chunks as [rows x {tokens} tokens, ...], and no operation of one of them takes "
        f"rows and tokens apart, so devices cannot share the tokens; let it pass as [rows, {tokens}, ...]"
    )


def _unshared(joint: Joint, indexes: Indexed, nest: Nested, degree: int) -> Iterator[Unshared]:
    """Yield the dimensions of parameters that `degree` devices cannot share evenly."""
    for k, node in enumerate(joint.inputs):
        for dim, inside in enumerate(indexes.tensors.get((node, 0), ())):
            if joint.kinds[k] == "param" and has_nest(inside, nest):
                yield Unshared(k, dim, prod(i.size for i in inside), uneven(nest, degree))
