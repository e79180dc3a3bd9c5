"""Judge the rules of ops: what an op makes of parts of tensors must be the parts of what it makes of the whole.

A call says of itself, in a line, where it can be computed in parts: a mark for each index of each dimension of its
tensors, `=` for one that all results have, `+` for one that results which lack it are sums over, `-` for one that must
be whole, `1` for a dimension of one step; several in brackets where a dimension is a nest. So mm is "=+ += -> ==".
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from piper_capture.layouts.indexes import LoopIndex, OpIndexes, _Space
from piper_capture.layouts.loops import OpCall
from piper_capture.torch_api._torch import OpOverload

TOLERANCE = 1e-12
Dims = Sequence[tuple[LoopIndex, ...]]
Cuts = Sequence[tuple[LoopIndex, int]]
"""Indexes, and the number of parts of each."""


def of_call(call: OpCall) -> OpIndexes:
    """Return the indexes of a single call, whose tensors are all different."""
    graph = fx.Graph()
    space = _Space()
    keys = []
    for k, tensor in enumerate(call.tensors):
        node = graph.placeholder(f"t{k}")
        space.add_tensors(node, (tensor,))
        keys.append((node, 0))
    op = graph.placeholder("op")
    space.add_op(op, call, tuple(keys))
    return space.whole.ops[op]


def place_of(tensor: Tensor, dim: int, outer: int, degree: int, place: int) -> Tensor:
    """Return a device's shard of a tensor whose dimension `dim` is [outer, degree, rest]."""
    size = tensor.shape[dim]
    split = tensor.reshape(
        *tensor.shape[:dim], outer, degree, size // outer // degree, *tensor.shape[dim + 1 :]
    )
    own = split.select(dim + 1, place)
    return own.reshape(*tensor.shape[:dim], size // degree, *tensor.shape[dim + 1 :])


class Draw:
    """Draws arguments. A small letter is a size of 6, with a seed also of 12, a capital one of 2 to 5, equal for equal
    letters of a draw; digits are themselves."""

    def __init__(self, seed: int) -> None:
        self._sizes = random.Random(seed)
        self._small = (6, 12) if seed else (6,)
        self._numbers = torch.Generator().manual_seed(seed)
        self._known: dict[str, int] = {}

    def n(self, letters: str) -> int:
        """Return the product of the sizes of some letters."""
        return prod(self.shape(letters))

    def shape(self, letters: str) -> list[int]:
        for c in letters:
            choices = self._small if c.islower() else (2, 3, 4, 5)
            self._known.setdefault(c, int(c) if c.isdigit() else self._sizes.choice(choices))
        return [self._known[c] for c in letters]

    def f(self, letters: str) -> Tensor:
        return torch.randn(self.shape(letters), dtype=torch.float64, generator=self._numbers)

    def p(self, letters: str) -> Tensor:
        """Return numbers between 0.1 and 0.9."""
        return 0.1 + 0.8 * torch.rand(
            self.shape(letters), dtype=torch.float64, generator=self._numbers
        )

    def i(self, letters: str, below: int) -> Tensor:
        return torch.randint(below, self.shape(letters), generator=self._numbers)

    def b(self, letters: str) -> Tensor:
        return torch.rand(self.shape(letters), generator=self._numbers) < 0.7

    def order(self, letters: str, below: int) -> Tensor:
        """Return numbers below one, along the last dimension all different."""
        *outer, last = self.shape(letters)
        rows = [torch.randperm(below, generator=self._numbers)[:last] for _ in range(prod(outer))]
        return torch.stack(rows).view(*outer, last)


@dataclass(frozen=True)
class Given:
    """A call to judge: `args` makes its arguments, `parts` says where it can be computed in parts."""

    op: OpOverload
    args: Callable[[Draw], tuple[Any, ...]]
    parts: str
    kwargs: Mapping[str, Any]

    def call(self, seed: int = 0) -> OpCall:
        return call_of(self.op, self.args(Draw(seed)), self.kwargs)


def cases(table: Mapping[str, tuple[Any, ...]]) -> dict[str, Given]:
    """Return cases from (op, arguments, parts) or with keyword arguments behind; a packet of ops stands for its
    default."""
    found = {}
    for name, (op, args, parts, *kwargs) in table.items():
        overload = op if isinstance(op, OpOverload) else op.default
        found[name] = Given(overload, args, parts, *(kwargs or [{}]))
    return found


def call_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCall:
    return OpCall.of(op, args, kwargs, op(*args, **kwargs))


def marks(call: OpCall) -> str:
    """Say where a call can be computed in parts."""
    found = of_call(call)

    def of(dims: Dims) -> str:
        return "".join(_mark(found, dim) for dim in dims) or "."

    arguments, results = (" ".join(map(of, tensors)) for tensors in (found.tensors, found.results))
    return f"{arguments} -> {results}".strip()


def _mark(found: OpIndexes, dim: tuple[LoopIndex, ...]) -> str:
    each = "".join(_sign(found.parts(index)) if index.size else "0" for index in dim)
    return f"({each})" if len(each) > 1 else each or "1"


def _sign(has: tuple[bool, ...] | None) -> str:
    return "-" if has is None else "=" if all(has) else "+"


def wrong_parts(call: OpCall) -> Iterator[str]:
    """Yield what differs when a call is computed in parts: of each index that allows it, and of each two."""
    found = of_call(call)
    everywhere = {
        i: None for dims in (*found.tensors, *found.results) for dim in dims for i in dim if i.size
    }
    free = [i for i in everywhere if found.parts(i) is not None]
    single: list[Cuts] = [
        [(i, n)] for i in free for n in sorted({2, 3, i.size}) if i.size % n == 0 and n <= 6
    ]
    double: list[Cuts] = [
        [(i, 2), (j, 2)]
        for i, j in itertools.combinations(free, 2)
        if i.size % 2 == j.size % 2 == 0
    ]
    for cuts in single + double:
        yield from (
            f"{call.op} {marks(call)} cut by {cuts}: {text}"
            for text in _differences(call, found, cuts)
        )


def _differences(call: OpCall, found: OpIndexes, cuts: Cuts) -> Iterator[str]:
    sums: dict[tuple[int, tuple[int | None, ...]], Tensor] = {}
    for places in itertools.product(*(range(n) for _, n in cuts)):
        try:
            made = _computed(call, found, cuts, places)
        except (RuntimeError, IndexError) as error:
            yield f"part {places}: {error}"
            return
        for k, part in enumerate(made):
            key = (
                k,
                tuple(
                    p if _has(found.results[k], i) else None
                    for (i, _), p in zip(cuts, places, strict=True)
                ),
            )
            sums[key] = sums[key] + part if key in sums else part
    for (k, places), part in sums.items():
        kept = [(cut, p) for cut, p in zip(cuts, places, strict=True) if p is not None]
        whole = _block(
            call.results[k], found.results[k], [cut for cut, _ in kept], [p for _, p in kept]
        )
        if not alike(part, whole):
            yield (
                f"result {k}, part {places}: {list(part.shape)} {_distance(part, whole)}, not {list(whole.shape)}"
            )


def _computed(
    call: OpCall, found: OpIndexes, cuts: Cuts, places: Sequence[int]
) -> tuple[Tensor, ...]:
    """Return what the device at these places makes."""
    parts = iter(
        [_block(t, dims, cuts, places) for t, dims in zip(call.tensors, found.tensors, strict=True)]
    )
    given = {
        name: pytree.tree_map_only(Tensor, lambda t: next(parts), value)
        for name, value in call.args.items()
    }
    shapes = [
        tuple(_block(r, dims, cuts, places).shape)
        for r, dims in zip(call.results, found.results, strict=True)
    ]
    return OpCall.of(
        call.op, (), {}, call.op(**(given | dict(found.loops.localize(call, shapes))))
    ).results


def _block(tensor: Tensor, dims: Dims, cuts: Cuts, places: Sequence[int]) -> Tensor:
    """Return a device's block, dense as devices hold it; inner indexes are cut first, so that the outer ones are whole
    then."""
    chosen = [
        (where, n, p)
        for (i, n), p in zip(cuts, places, strict=True)
        if (where := outer_of(dims, i)) is not None
    ]
    for (dim, outer), n, place in sorted(chosen, key=lambda found: -found[0][1]):
        tensor = place_of(tensor, dim, outer, n, place)
    return tensor.contiguous() if chosen else tensor


def _has(dims: Dims, index: LoopIndex) -> bool:
    return outer_of(dims, index) is not None


def wrong_terms(call: OpCall, seed: int = 10_007) -> Iterator[str]:
    """Yield what differs between an op of a sum and the sum of the op of its terms, for each set that it is linear
    in."""
    generator = torch.Generator().manual_seed(seed)
    for together in of_call(call).loops.linear:
        terms = {
            k: torch.randn(call.tensors[k].shape, dtype=torch.float64, generator=generator)
            for k in together
        }
        rest = {k: call.tensors[k] - term for k, term in terms.items()}
        first, second = _with(call, terms), _with(call, rest)
        for k, whole in enumerate(call.results):
            if not alike(first[k] + second[k], whole):
                yield (
                    f"{call.op} is not linear in {sorted(together)}: result {k}, "
                    f"{_distance(first[k] + second[k], whole)}"
                )


def _with(call: OpCall, instead: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
    tensors = iter([instead.get(k, t) for k, t in enumerate(call.tensors)])
    given = {
        name: pytree.tree_map_only(Tensor, lambda t: next(tensors), value)
        for name, value in call.args.items()
    }
    return OpCall.of(call.op, (), {}, call.op(**given)).results


def alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or a.itemsize == 1:
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def _distance(a: Tensor, b: Tensor) -> str:
    same = a.shape == b.shape and a.numel()
    return f"off by {(a.double() - b.double()).abs().max():.1e}" if same else "of another shape"


def outer_of(dims: Sequence[tuple[LoopIndex, ...]], index: LoopIndex) -> tuple[int, int] | None:
    """Return the dimension that an index is in and the steps of the factors outside of it there; None if in none."""
    for dim, inside in enumerate(dims):
        if index in inside:
            return dim, prod(i.size for i in inside[: inside.index(index)])
    return None
