"""Compare the outputs of a chunk's forward for all rows at once with its outputs for parts of them, on numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor, fx

from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts.indexes import TensorKey, key_of
from piper_capture.torch_api import _torch
from piper_ir.ground.sizes import TensorSpec, bind
from piper_ops import float8_past_scale, float8_scale, is_draw

PARTS = (3, 2)
"""The rows of the two parts."""
MOST = 2**25
"""The largest number of elements of all tensors of the chunk for which it is computed: a second or less."""
MOST_TRAINED = 2**27
"""The largest number of elements of an opaque region's parameters, of whose other tensors only inputs are known."""
SEEDS = range(3)
BRANCHES, SMALL = range(12), 2**20
"""The seeds of an opaque region whose inputs have fewer elements than this: each may take another branch."""
APART = 4.0
"""The size of the mean of a row's elements in a trial; their standard deviation is 1.

So a condition on several rows, such as the sign of a sum or a number of positive elements, differs between parts.
"""
INTEGERS = 2
"""The integers of a trial are below this, so that they may be labels, places and tokens."""
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The relative differences that rounding explains."""
HALF, HALVES = 0.03, (torch.bfloat16, torch.float16)
"""The relative difference that rounding explains in half precision, and its dtypes."""
SHIFTED = 1e-3
"""The relative difference of whole tensors that rounding explains in wider ones, between products of shifted rows."""
FLIPPED = 0.03
"""The part of integers, such as the numbers of chosen experts, that rounding may change there."""


@dataclass(frozen=True)
class RowsInDim:
    """Say where the rows lie in a dimension of [outer, rows, inner] steps."""

    dim: int
    outer: int


class RowTrial:
    """Run the forward of a chunk on all rows and on two parts of them.

    `joints` are the graphs of the first part (PARTS), of the whole, and of the second part, alike node by node.
    `parts` says where rows lie in a tensor of the whole, and `asked` are the nodes of the whole that are compared.
    Nodes `of_batch`, as of batch norms, combine rows by definition: their results are given, like draws.
    """

    def __init__(
        self,
        joints: Sequence[Joint],
        parts: Callable[[TensorKey], RowsInDim | None],
        asked: Sequence[fx.Node],
        of_batch: Collection[fx.Node] = (),
    ) -> None:
        self._first, self._whole, self._second = joints
        self._parts, self._asked, self._of_batch = parts, asked, of_batch
        # a value that is rounded to half precision shows in a result of another dtype, too
        self._halves = any(t.dtype in HALVES for t in _values(self._whole))

    def same(self) -> bool | None:
        """Return whether parts give the same outputs as the whole; None if that cannot be tried."""
        alike = all(
            len(j.graph.nodes) == len(self._whole.graph.nodes) for j in (self._first, self._second)
        )
        if not alike or _elements(self._whole) > MOST:
            return None
        try:
            with torch.random.fork_rng(devices=[]):
                before = torch.get_rng_state()
                same = all(self._tried(seed) for seed in SEEDS)
                drawn = not torch.equal(
                    before, torch.get_rng_state()
                )  # within a kernel of the user's
            return None if drawn else same
        except (*_torch.RUN_ERRORS, IndexError, KeyError, TypeError, ValueError):
            return None

    def _tried(self, seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        kinds = zip(self._whole.inputs, self._whole.kinds, strict=True)
        values = {n: _random(n.meta["val"], generator, kind == "param") for n, kind in kinds}
        means = _row_means(seed, generator)
        for node, value in values.items():
            if (lying := self._parts((node, 0))) is not None:
                values[node] = _shifted(value, lying.dim, lying.outer, means)
        values |= {
            n: _drawn(n, generator)
            for n in self._whole.graph.nodes
            if n in self._of_batch or is_draw(n.target, n.args, n.kwargs)
        }
        wanted = self._run(self._whole, values, self._asked)
        parts = []
        for number, joint in enumerate((self._first, self._second)):
            twin = dict(zip(self._whole.graph.nodes, joint.graph.nodes, strict=True))
            own = {twin[n]: self._parts_of(n, value, number) for n, value in values.items()}
            parts.append(self._run(joint, own, [twin[n] for n in self._asked]))
        return all(
            self._equal(n, wanted[k], [p[k] for p in parts], shifted=bool(seed))
            for k, n in enumerate(self._asked)
        )

    def _run(
        self, joint: Joint, given: Mapping[fx.Node, Tensor], asked: Sequence[fx.Node]
    ) -> list[Any]:
        env: dict[fx.Node, Any] = {
            **given,
            **{n: joint.constants[name] for n, name in joint.constant_names.items()},
        }
        needed, queue = set[fx.Node](), list(asked)
        while queue:
            node = queue.pop()
            if node not in needed:
                needed.add(node)
                queue += node.all_input_nodes
        with torch.no_grad():
            for node in joint.graph.nodes:
                if node not in needed or node in env:
                    continue
                if node.target in (float8_scale, float8_past_scale):  # a microbatch's by definition
                    env[node] = torch.ones(node.meta["val"].shape)
                    continue
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*args, **kwargs)
        return [env[n] for n in asked]

    def _parts_of(self, node: fx.Node, value: Any, number: int) -> Any:
        if not isinstance(value, tuple):
            return self._part((node, 0), value, number)
        return tuple(self._part((node, k), each, number) for k, each in enumerate(value))

    def _part(self, key: TensorKey, value: Tensor, number: int) -> Tensor:
        lying = self._parts(key)
        if lying is None:
            return value
        rows = value.unflatten(lying.dim, (lying.outer, sum(PARTS), -1))
        return (
            rows.split(PARTS, lying.dim + 1)[number].flatten(lying.dim, lying.dim + 2).contiguous()
        )

    def _equal(self, node: fx.Node, whole: Any, parts: Sequence[Any], *, shifted: bool) -> bool:
        if not isinstance(whole, Tensor):
            return True
        rounded = HALF if self._halves else 0.0
        return all(
            _near(self._part(key_of(node), whole, number), part, rounded, shifted=shifted)
            for number, part in enumerate(parts)
        )


def _elements(joint: Joint) -> int:
    return sum(t.numel() for t in _values(joint))


def _values(joint: Joint) -> Iterator[Tensor]:
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        for t in value if isinstance(value, tuple | list) else (value,):
            if isinstance(t, Tensor):
                yield t


def _random(like: Tensor, generator: torch.Generator, trained: bool) -> Tensor:
    """Return numbers; a parameter's are scaled so that the outputs of its op are as large as the inputs."""
    shape = tuple(like.shape)
    if like.dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.3
    if not like.is_floating_point():
        return torch.randint(INTEGERS, shape, generator=generator).to(like.dtype)
    scale = shape[-1] ** -0.5 if trained and len(shape) > 1 else 1.0
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(like.dtype)


def _row_means(seed: int, generator: torch.Generator) -> Tensor:
    """Return the mean of each row's elements: none, then of one sign in each part, then any."""
    if seed in (0, 1, 2):
        size = APART * (0, 1, -1)[seed]
        return torch.tensor([size] * PARTS[0] + [-size] * PARTS[1])
    return torch.randn(sum(PARTS), generator=generator) * APART


def _shifted(tensor: Tensor, dim: int, outer: int, means: Tensor) -> Tensor:
    """Return numbers with such means of rows, which lie in a dimension of [outer, rows, inner] steps.

    Integers are all one where the means of each part have one sign, and zero in the other part.
    """
    rows = tensor.unflatten(dim, (outer, sum(PARTS), -1))
    own = means.view(-1, *(1,) * (rows.dim() - dim - 2))
    if tensor.is_floating_point():
        rows = rows + own.to(tensor.dtype)
    elif bool((own.abs() == APART).all()):
        rows = (own > 0).to(tensor.dtype).expand_as(rows)
    return rows.flatten(dim, dim + 2).contiguous()


def _drawn(node: fx.Node, generator: torch.Generator) -> Any:
    """Return numbers in place of an op's own draws: the same for a row in the whole and in its part."""
    value = node.meta["val"]
    numbers = tuple(
        _random(t, generator, trained=False)
        for t in (value if isinstance(value, tuple | list) else (value,))
    )
    return numbers if isinstance(value, tuple | list) else numbers[0]


def _near(a: Tensor, b: Tensor, least: float = 0.0, *, shifted: bool = False) -> bool:
    """Return whether two tensors are equal but for rounding, which explains relative differences of `least`, too.

    Products of `shifted` rows are large numbers whose differences count, as the scores of attention: their rounding
    shows in single elements, while another branch changes a tensor as a whole.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        x, y = (torch.view_as_real(z.resolve_conj()) for z in (a, b))
        return _near(x, y, least, shifted=shifted)
    if not a.is_floating_point():
        return float((a == b).double().mean()) >= 1 - FLIPPED * shifted if a.numel() else True
    if shifted:
        difference, norm = float((a.double() - b.double()).norm()), float(b.double().norm())
        if isfinite(difference + norm):
            most = max(least, SHIFTED if a.dtype in CLOSE else HALF)
            return difference <= most * (norm + CLOSE[torch.float32])
        least = HALF
    close = max(least, CLOSE.get(a.dtype, HALF))
    return bool(torch.allclose(a.double(), b.double(), rtol=close, atol=close, equal_nan=True))


def opaque_same(
    modules: Sequence[fx.GraphModule],
    specs: Sequence[TensorSpec],
    kinds: Sequence[str],
    values: Sequence[bool],
) -> bool | None:
    """Return whether an opaque region gives the same outputs for parts as for all rows; None if it cannot be tried.

    `values` says which results are values of the model: others, such as a loss, are made of all rows.
    """
    first, whole, second = modules
    rows = sum(PARTS)
    shapes = [tuple(bind(d, rows) for d in spec.shape) for spec in specs]
    sizes = [prod(shape) for shape in shapes]
    elements = sum(sizes)
    trained = sum([n for n, kind in zip(sizes, kinds, strict=True) if kind == "param"])
    if elements - trained > MOST or trained > MOST_TRAINED:
        return None
    try:
        for seed in BRANCHES if elements < SMALL else SEEDS:
            generator = torch.Generator().manual_seed(seed)
            likes = [
                torch.empty(s, dtype=getattr(torch, spec.dtype), device="meta")
                for s, spec in zip(shapes, specs, strict=True)
            ]
            inputs = [
                _random(t, generator, kind == "param") for t, kind in zip(likes, kinds, strict=True)
            ]
            means = _row_means(seed, generator)
            inputs = [
                t if (dim := _dim_of_rows(spec)) is None else _shifted(t, dim, 1, means)
                for t, spec in zip(inputs, specs, strict=True)
            ]
            wanted = _called(whole, inputs)
            by_part = [
                _called(m, [_rows_of(t, s, k) for t, s in zip(inputs, specs, strict=True)])
                for k, m in enumerate((first, second))
            ]
            compared = [
                (w, a, b) for w, a, b, value in zip(wanted, *by_part, values, strict=True) if value
            ]
            if not all(_joins(*each, shifted=bool(seed)) for each in compared):
                return False
    except (
        Exception
    ):  # the user's code may raise anything on random numbers, which then tell nothing
        return None
    return True


def _called(module: fx.GraphModule, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        outputs = module(*(t.clone().requires_grad_(t.is_floating_point()) for t in given))
    return tuple(t.detach() for t in outputs)


def _dim_of_rows(spec: TensorSpec) -> int | None:
    """Return the dimension that grows with the rows, which are outermost in it; None if there is none."""
    return next((d for d, size in enumerate(spec.shape) if bind(size, 1) != bind(size, 2)), None)


def _rows_of(tensor: Tensor, spec: TensorSpec, number: int) -> Tensor:
    """Return a part of the rows."""
    if (dim := _dim_of_rows(spec)) is None:
        return tensor
    rows = tensor.unflatten(dim, (sum(PARTS), -1))
    return rows.split(PARTS, dim)[number].flatten(dim, dim + 1)


def _joins(whole: Tensor, first: Tensor, second: Tensor, *, shifted: bool) -> bool:
    """Return whether two results give the third: concatenated if they differ in size, else each by itself."""
    dims = [d for d, (a, b) in enumerate(zip(whole.shape, first.shape, strict=True)) if a != b]
    if not dims:
        return all(_near(whole, part, shifted=shifted) for part in (first, second))
    return _near(whole, torch.cat([first, second], dims[0]), shifted=shifted)
