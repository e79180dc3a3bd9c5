"""Say of an op how its loops run over the dimensions of its tensors.

An op is a nest of loops: `mm` runs over m, n and k, an element-wise op over each dimension of its result. Its rule
names the dimensions that one loop runs over, in its arguments and results. Then the op can be sharded along that loop:
a device that takes k of its n * k steps needs its shard of the tensors that have the loop and all of the others, and
makes its shard of each result that has the loop. A result that lacks the loop is a sum over all of its steps, so the
device makes a partial sum. If neither holds, the rule says that the dimension is `whole`: it cannot be sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from piper_capture.torch_api._torch import OpOverload

if TYPE_CHECKING:
    from piper_capture.layouts.emit import Emitter

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DimOf:
    """Name a dimension of a tensor of a call.

    Attributes:
        tensor: k for the k-th tensor among the arguments in the order of the schema, -1 - k for the k-th result.
        dim: counted from 0.
    """

    tensor: int
    dim: int


@dataclass(frozen=True, slots=True)
class Inner:
    """Name a loop that is only a factor of dimensions, such as the number of parts of a split.

    Attributes:
        size: its number of steps.
        number: tells the inner loops of one op apart.
    """

    size: int
    number: int = 0


Nest = tuple[DimOf | Inner, ...]
"""A nest of loops, the outermost first."""


@dataclass(frozen=True)
class OpCall:
    """Hold a call of an op with its tensors, which may be fake.

    Attributes:
        args: schema name -> value, defaults left out.
        results: the tensors that the op returns; an output that a mask leaves out is an empty vector, so that the
            others keep their numbers.
    """

    op: OpOverload
    args: Mapping[str, Any]
    results: tuple[Tensor, ...]

    @staticmethod
    def of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> OpCall:
        """Return the call of `op` that made `result`."""
        names = [a.name for a in op._schema.arguments]
        by_name = dict(zip(names, args, strict=False)) | dict(kwargs)
        returned = result if isinstance(result, list | tuple) else (result,)
        results = tuple(t if isinstance(t, Tensor) else torch.empty(0) for t in returned)
        return OpCall(op, {n: by_name[n] for n in names if n in by_name}, results)

    @cached_property
    def _numbered(self) -> tuple[tuple[str, Tensor], ...]:
        return tuple((name, t) for name, value in self.args.items() for t in _tensors(value))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors among the arguments, in the order of the schema."""
        return tuple(t for _, t in self._numbered)

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return the numbers of the tensors of an argument: none if it is not given or is None."""
        return tuple(k for k, (n, _) in enumerate(self._numbered) if n == name)

    def number(self, name: str) -> int:
        """Return the number of an argument that is one tensor."""
        (tensor_number,) = self.numbers(name)
        return tensor_number

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument that is no tensor, or the default of the schema."""
        if name in self.args:
            return self.args[name]
        (argument,) = (a for a in self.op._schema.arguments if a.name == name)
        return argument.default_value if argument.has_default_value() else default

    def shape(self, tensor: int) -> Shape:
        """Return the shape of a tensor by its number."""
        value = self.tensors[tensor] if tensor >= 0 else self.results[-1 - tensor]
        return tuple(value.shape)

    def size(self, at: DimOf | Inner) -> int:
        """Return the number of steps of a dimension or an inner loop."""
        return at.size if isinstance(at, Inner) else self.shape(at.tensor)[at.dim]

    def made(self, result: int) -> bool:
        """Return whether a result, counted from 0, is made at all."""
        return tuple(self.results[result].shape) != (0,)

    def dims(self, tensor: int) -> Nest:
        """Return all dimensions of a tensor."""
        return tuple(DimOf(tensor, d) for d in range(len(self.shape(tensor))))

    def every(self) -> Iterator[int]:
        """Yield the numbers of all tensors, the results last."""
        yield from range(len(self.tensors))
        yield from (-1 - k for k in range(len(self.results)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


Localize = Callable[[OpCall, Sequence[Shape]], Mapping[str, Any]]
"""A function of the unsharded call and the local shapes of its results, which returns the arguments that change."""


def unchanged(call: OpCall, results: Sequence[Shape]) -> Mapping[str, Any]:
    """Return no arguments: the op computes a shard as it computes the whole."""
    return {}


@dataclass(frozen=True, slots=True)
class LoopPlace:
    """Name a device's shard of a loop along an axis: [outer, place, rest] of [outer, degree, rest].

    If a loop is sharded along several axes, there is a place for each in order, within the shard of those before.
    In the `order` "zigzag" every second place of the outer ones is counted from behind.
    """

    axis: str
    degree: int
    rest: int
    order: str = ""


Emit = Callable[["Emitter", Mapping[str, Any], Sequence[LoopPlace]], Sequence[fx.Node]]
"""A function of a device's arguments and its places along the axes, which adds nodes and returns the results' nodes."""


@dataclass(frozen=True)
class LoopRewrite:
    """Replace an op that cannot be sharded along a loop by itself by ops that can.

    Attributes:
        emit: adds these ops.
        partial: whether results that lack the loop are partial sums; else they are replicated.
        whole: the arguments, by number, that must be replicated though they have the loop.
        partial_results: the results, counted from 0, that are partial sums though they have the loop.
    """

    emit: Emit
    partial: bool
    whole: frozenset[int] = frozenset()
    partial_results: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Loops:
    """Hold the loops of an op.

    Attributes:
        same: pairs of nests that run over the same steps in the same order, so of equal size in total.
        summed: dimensions and inner loops over which results that lack them are sums.
        whole: dimensions and inner loops that cannot be sharded.
        linear: sets of arguments, by number, in which the op is linear together: if these are partial sums and all
            others are replicated, the results are partial sums.
        localize: the arguments that differ for a device's shard.
        rewrites: for dimensions among `whole`, ops that replace the op so that it can be sharded along them.
    """

    same: tuple[tuple[Nest, Nest], ...] = ()
    summed: frozenset[DimOf | Inner] = frozenset()
    whole: frozenset[DimOf | Inner] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    localize: Localize = field(default=unchanged, compare=False)
    rewrites: Mapping[DimOf, LoopRewrite] = field(default_factory=dict)
