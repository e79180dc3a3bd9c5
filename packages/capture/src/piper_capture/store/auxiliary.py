"""Find the backwards that are not linear in the incoming gradients, and whether a batch in parts trains the same.

Only code of a user's makes one: a torch.autograd.Function, a hook, the formula of an operator, a module that runs as it
was written. Chunks with such code are looked at as graphs (`linearity`). If one is not linear, it runs on random
numbers: on four rows, and on the two halves of these. Gradients of parameters are sums over rows. An *auxiliary*
gradient, which comes out even if the incoming gradients are zero, may be

- a sum: the gradient of the whole is the sum over the halves. Any plan trains it as it is;
- a mean: the gradient of the whole is the mean over the halves, as a mean over rows has it, or a term without rows.
  Each microbatch starts from a gradient of 1 then, and all is divided in the end;
- neither, as for a product of means, or for a mean over a mask: the gradient of the whole batch cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor

from piper_capture.steps.joint import Interpreter, constants_of
from piper_capture.steps.linearity import Auxiliary, Kind, Linearity, dependence
from piper_capture.store.codestore import CodeStore, TraceSpec
from piper_capture.torch_api import _torch
from piper_capture.trace.own_backwards import own_backwards
from piper_capture.trace.written_modules import LARGEST, weights_like
from piper_capture.values.concrete import line_of
from piper_ir.ground.errors import CaptureError
from piper_ir.ground.sizes import Affine, TensorSpec, bind
from piper_ir.program.layout import EXPERTS

ROWS = 2
"""The rows of a half."""
SCALES = (1e-4, 1e4)
"""The factors of gradients that come in: bounds, as of their norm, show at some of these."""
NEAR_SCALES = (1e-2, 1e2)
"""The factors beside an auxiliary gradient, in whose rounding smaller numbers would be lost."""
FILLINGS = (((0, 1), 1.0), ((0, 1, -100), 1.0), ((0, 1), 30.0))
"""The integers of a trial, once with the target among them that losses ignore, and how far its numbers spread."""
NOISE = 8
"""The error that a gradient may have, such as of a bias of keys (zero), in units of rounding of the largest one."""
MOST_PRODUCTS = 4e10
"""The most multiplications of a forward that is tried, as 10 seconds of a core allow."""


def auxiliary(store: CodeStore, code: str, sums: bool) -> Auxiliary | None:
    """Return how the backward of a chunk is not linear, or None; `sums`: the loss comes as a pair (sum, weight)."""
    recipe = store.recipe(code)
    own = next(own_backwards(recipe.cut.body(recipe.piece)), None)
    if own is None or not any(recipe.tangent_mask):
        return None
    linearity = Linearity.UNKNOWN if recipe.piece.opaque else dependence(store.joint(code, ROWS))[0]
    if linearity == Linearity.LINEAR:
        return None
    result = _tried(_Trial(recipe, sums), linearity, line_of(own))
    if (
        result is not None and EXPERTS in recipe.piece.region.coords
    ):  # whose rows may come from several devices
        return replace(result, kind="unknown")
    return result


def _tried(trial: _Trial, found: Linearity, line: str) -> Auxiliary | None:
    if trial.too_large:  # an operator of a user's is taken at its word there
        return None if found == Linearity.UNKNOWN else Auxiliary(line, "unknown")
    kinds = set[Kind]()
    for integers, spread in FILLINGS:
        with suppress(
            CaptureError
        ):  # an index that is none, or numbers that the model does not take
            kinds.add(trial.kind(found, integers, spread))
    if kinds == {"linear"} and found != Linearity.AFFINE:
        return None
    kinds.discard("linear")
    return Auxiliary(line, kinds.pop() if len(kinds) == 1 else "unknown")


class _Trial:
    """Run the backward of a chunk for real, on a batch and on its halves.

    Attributes:
        wanted: of each input that gets a gradient, its number, and the dimension of its rows or None.
    """

    def __init__(self, recipe: TraceSpec, sums: bool) -> None:
        self._recipe, self._sums = recipe, sums
        self._rows = [_dimension_of_rows(spec) for spec in recipe.specs]
        self.wanted = [(k, self._rows[k]) for k, needed in enumerate(recipe.needs_grad) if needed]
        self._generator = torch.Generator().manual_seed(0)

    @property
    def too_large(self) -> bool:
        """Return whether a run would take too much time or memory."""
        bound_specs = [
            (s.kind, spec.bind(2 * ROWS))
            for s, spec in zip(self._recipe.piece.slots, self._recipe.specs, strict=True)
        ]
        weights = sum(bind(spec.numel, 0) for kind, spec in bound_specs if kind == "param")
        tokens = max(
            [
                bind(spec.numel, 0) // max(1, bind(spec.shape[-1], 0))
                for _, spec in bound_specs
                if spec.shape
            ],
            default=1,
        )
        return (
            weights * tokens > MOST_PRODUCTS
            or sum(bind(spec.nbytes, 0) for _, spec in bound_specs) > LARGEST
        )

    def kind(self, found: Linearity, integers: Sequence[int], spread: float) -> Kind:
        """Return how the gradients of the whole relate to its halves'; raise CaptureError if that cannot be tried."""
        whole, halves = self._recorded(integers, spread)
        own = whole.gradients(_times(whole.likes, 0.0))
        if found == Linearity.AFFINE or self._is_affine(whole, own):
            return self._of_auxiliary(
                own, self._joined([half.gradients(_times(half.likes, 0.0)) for half in halves])
            )
        for scale in (1.0, *SCALES):
            coming = self._tangents(whole, halves, scale)
            parts = [
                half.gradients(tangents) for half, tangents in zip(halves, coming[1:], strict=True)
            ]
            if not _close(whole.gradients(coming[0]), self._joined(parts)):
                return "unknown"
        return "sum"

    def _recorded(
        self, integers: Sequence[int], spread: float
    ) -> tuple[_Recorded, list[_Recorded]]:
        """Return a forward of the whole, and forwards of its halves."""
        if -1 in self._rows:
            raise CaptureError("rows lie in two dimensions, or among others")
        kinds = [slot.kind for slot in self._recipe.piece.slots]
        values = [
            self._filled(*kind_and_spec, integers, spread)
            for kind_and_spec in zip(kinds, self._recipe.specs, strict=True)
        ]
        cut = [
            [v, v] if dim is None else list(v.chunk(2, dim))
            for v, dim in zip(values, self._rows, strict=True)
        ]
        return _Recorded(self._recipe, 2 * ROWS, values), [
            _Recorded(self._recipe, ROWS, half) for half in zip(*cut, strict=True)
        ]

    def _filled(
        self, kind: str, spec: TensorSpec, integers: Sequence[int], spread: float
    ) -> Tensor:
        shape, dtype = spec.bind(2 * ROWS).shape, getattr(torch, spec.dtype)
        sizes = [bind(size, 0) for size in shape]
        if kind in ("param", "buffer"):
            return weights_like(sizes, dtype, self._generator)
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(sizes, generator=self._generator).mul(spread).to(dtype)
        return torch.tensor(integers)[
            torch.randint(len(integers), sizes, generator=self._generator)
        ].to(dtype)

    def _is_affine(self, whole: _Recorded, own: list[Tensor]) -> bool:
        """Return whether gradients are linear but for `own`, the gradients with zero incoming ones."""
        (first,), (second,) = (self._tangents(whole, [], 1.0) for _ in range(2))
        of_first, other = (_minus(whole.gradients(tangents), own) for tangents in (first, second))
        if not _close(_minus(whole.gradients(_plus(first, second)), own), _plus(of_first, other)):
            return False
        scales = NEAR_SCALES if _any(own) else SCALES
        return all(
            _close(_minus(whole.gradients(_times(first, s)), own), _times(of_first, s))
            for s in scales
        )

    def _of_auxiliary(self, own: list[Tensor], joined: list[Tensor]) -> Kind:
        """Return the kind of an auxiliary gradient; "unknown" if one is of another chunk's value without rows."""
        if not _any(own):
            return "linear"
        slots = self._recipe.piece.slots
        if _any(
            [
                g
                for g, (k, dim) in zip(own, self.wanted, strict=True)
                if slots[k].kind == "value" and dim is None
            ]
        ):
            return "unknown"
        return (
            "sum"
            if _close(own, joined)
            else "mean"
            if _close(own, _times(joined, 0.5))
            else "unknown"
        )

    def _joined(self, parts: list[list[Tensor]]) -> list[Tensor]:
        pairs = zip(*parts, strict=True)
        return [
            a + b if dim is None else torch.cat([a, b], dim)
            for (a, b), (_, dim) in zip(pairs, self.wanted, strict=True)
        ]

    def _tangents(
        self, whole: _Recorded, halves: Sequence[_Recorded], scale: float
    ) -> list[list[Tensor]]:
        """Return gradients that come in, for the whole and for each half; a loss has a share of 1."""
        tangents = [
            [
                torch.randn(end.shape, generator=self._generator).to(end.dtype) * scale
                for end in whole.likes
            ]
        ]
        tangents += [[] for _ in halves]
        for k, end in enumerate(whole.likes):
            if whole.losses[k]:
                tangents[0][k] = torch.full_like(end, scale)
                shares = [tangents[0][k] * (1.0 if self._sums else 0.5)] * len(halves)
            elif not halves:
                continue
            else:
                short = [
                    d for d, size in enumerate(halves[0].likes[k].shape) if size * 2 == end.shape[d]
                ]
                if len(short) != 1:
                    raise CaptureError("an output without rows gets a gradient")
                shares = list(tangents[0][k].chunk(2, short[0]))
            for part, share in zip(tangents[1:], shares, strict=True):
                part.append(share)
        return tangents


class _Recorded:
    """Hold a forward of a chunk as autograd has recorded it.

    Attributes:
        likes: the outputs whose gradients come in.
        losses: for each whether it is the loss.
    """

    def __init__(self, recipe: TraceSpec, rows: int, values: Sequence[Tensor]) -> None:
        module = recipe.cut.module(recipe.piece, rows)
        for node in module.graph.find_nodes(op="call_function", target=torch.nn.functional.dropout):
            node.args, node.kwargs = (node.args[0], 0.0), {}
        inputs = [
            v.detach().clone().requires_grad_(g)
            for v, g in zip(values, recipe.needs_grad, strict=True)
        ]
        self._leaves = [leaf for leaf in inputs if leaf.requires_grad]
        with _user_errors(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            outputs = Interpreter(module, constants_of(module)).run(*inputs)
        kinds = [r.kind for r in recipe.piece.results if not r.changed]
        ends = [
            (output, kind)
            for output, kind, m in zip(outputs, kinds, recipe.tangent_mask)
            if m and output.requires_grad
        ]
        self._ends, self.losses = (
            [output for output, _ in ends],
            [kind == "loss" for _, kind in ends],
        )
        self.likes = [output.detach() for output in self._ends]

    def gradients(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of all inputs that get one."""
        with _user_errors():
            return list(
                torch.autograd.grad(
                    self._ends, self._leaves, tangents, retain_graph=True, materialize_grads=True
                )
            )


@contextmanager
def _user_errors() -> Iterator[None]:
    """Raise CaptureError if the model does not take these numbers, such as an index that is too large."""
    try:
        yield
    except _torch.RUN_ERRORS as error:
        raise CaptureError(str(error)) from error


def _dimension_of_rows(spec: TensorSpec) -> int | None:
    """Return the one dimension that is a multiple of the rows; None without any, and -1 if it is not so simple."""
    dims = [k for k, size in enumerate(spec.shape) if isinstance(size, Affine)]
    if len(dims) > 1 or any(size.a for size in spec.shape if isinstance(size, Affine)):
        return -1
    return dims[0] if dims else None


def _any(tensors: Sequence[Tensor]) -> bool:
    return any(bool(t.any()) for t in tensors)


def _times(tensors: Sequence[Tensor], factor: float) -> list[Tensor]:
    return [t * factor for t in tensors]


def _plus(some: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(some, others, strict=True)]


def _minus(some: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    return [a - b for a, b in zip(some, others, strict=True)]


def _close(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether tensors are equal but for rounding; raise CaptureError for numbers that are not finite.

    Rounding is measured against the largest of all tensors, too: one whose true value is zero holds nothing else.
    """
    if not all(bool(t.isfinite().all()) for t in (*some, *others)):
        raise CaptureError("numbers that are not finite")
    largest = max((float(b.abs().max()) for b in others if b.numel()), default=0.0)
    return all(
        float((a - b).abs().max())
        <= (1e-3 if wide else 0.05) * float(b.abs().max())
        + NOISE * torch.finfo(a.dtype).eps * largest
        for a, b in zip(some, others, strict=True)
        for wide in [a.dtype in (torch.float32, torch.float64)]
        if a.numel()
    )
