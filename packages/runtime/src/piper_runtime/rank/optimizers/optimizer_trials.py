"""Test an optimizer's declaration on small tensors, and find the size of its state for a piece of a bucket.

A trial takes the user's optimizer as their function makes it, with its groups and settings, and gives each group small
parameters in place of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from piper_ir.ground.errors import JobError
from piper_ir.tools import user_code
from piper_runtime.rank.optimizers.optimizer_calls import keep_from_start, one_by_one
from piper_runtime.rank.optimizers.optimizer_kinds import KEEPS_TO, TRIED, declared_elementwise
from piper_runtime.rank.optimizers.optimizer_sizes import NumbersOfMeta, step_bytes

Make = Callable[[], Optimizer]
"""A function that makes the user's optimizer anew."""

SHAPE = (6, 7)
PARTS = (0, 17, 18, 42)
"""The bounds of the parts of a tensor of this shape; one part has one element."""
SCALES = (1e-2, 1.0, 30.0)
"""The scale of the gradients of each step: a bound of a norm shows in the last."""
ELEMENTS = 4096
"""The elements of a trial piece; sizes follow from a piece of so many elements and one of twice as many."""


def check_elementwise(make: Make) -> None:
    """Raise JobError if steps on parts of a tensor are not the parts of steps on the whole."""
    kind = type(make()).__name__
    for group in _groups_on_wholes(make):
        raise JobError(
            f"piper.elementwise({kind}): it was tried on a tensor of {list(SHAPE)} with the settings of group "
            f"{group}, and steps on parts of it are not the parts of the steps on the whole, so it needs whole "
            f"parameters; declare it with piper.per_parameter({kind}) if it updates each parameter by itself, and "
            f"use zero=0 and no shard"
        )


def by_elements(optimizer: Optimizer, make: Make) -> bool:
    """Return whether an optimizer that no fused kernel runs can run on pieces of buckets.

    A declared one can, and one of torch's whose steps on parts of a tensor are the parts of steps on the whole. An
    optimizer with loaded state cannot: that is the state of whole parameters.
    """
    if any(
        float(state.get("step", 1)) for state in optimizer.state.values()
    ):  # Adagrad begins with one, of step 0
        return False
    if declared_elementwise(optimizer):
        return True
    return type(optimizer) in TRIED and next(_groups_on_wholes(make), None) is None


def _groups_on_wholes(make: Make) -> Iterator[int]:
    """Yield the groups whose steps on parts of a tensor are not the parts of steps on the whole."""
    start, gradients = _numbers(SHAPE)
    for group in range(len(make().param_groups)):
        whole = _stepped(make, group, [start], [[g] for g in gradients])[0].flatten()
        parts = _stepped(make, group, _split(start), [_split(g) for g in gradients])
        if not _equal(torch.cat(parts), whole):
            yield group


def check_per_parameter(make: Make) -> None:
    """Raise JobError if steps on two parameters differ from steps on each of them alone."""
    kind = type(make()).__name__
    for index, group in enumerate(make().param_groups):
        shapes = [tuple(min(d, 6) for d in p.shape) for p in group["params"][:2]]
        starts, gradients = zip(
            *(_numbers(shape, seed) for seed, shape in enumerate((shapes * 2)[:2])), strict=True
        )
        together = _stepped(make, index, starts, list(zip(*gradients, strict=True)))
        alone = [
            _stepped(make, index, [s], [[g] for g in gs])[0]
            for s, gs in zip(starts, gradients, strict=True)
        ]
        if not all(_equal(a, b) for a, b in zip(together, alone, strict=True)):
            raise JobError(
                f"piper.per_parameter({kind}): it was tried on two tensors with the settings of group {index}, and "
                f"a step on both is not that on each alone, so that a rank which holds only some parameters would "
                f"step otherwise; use a strategy without place, where each rank holds all of them"
            )


def _numbers(shape: Sequence[int], seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Return a parameter and its gradients in each step."""
    source = torch.Generator().manual_seed(seed)
    drawn = [
        torch.randn(shape, generator=source, dtype=torch.float64) for _ in range(len(SCALES) + 1)
    ]
    return drawn[0], [scale * g for scale, g in zip(SCALES, drawn[1:], strict=True)]


def _split(tensor: Tensor) -> list[Tensor]:
    flat = tensor.flatten()
    return [flat[a:b] for a, b in pairwise(PARTS)]


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-9, atol=1e-12))  # NaN is a difference


def _stepped(
    make: Make, group: int, starts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return parameters after steps of one group of an optimizer."""
    optimizer = make()
    params = [torch.nn.Parameter(start.clone()) for start in starts]
    _only(optimizer, group, params)
    with (
        user_code(f"a trial step of {type(optimizer).__name__} on small tensors", JobError),
        torch.no_grad(),
    ):
        for step in gradients:
            for p, g in zip(params, step, strict=True):
                p.grad = g.clone()
            optimizer.step()
    for p in params:
        _check_kept(optimizer, p)
    return [p.detach() for p in params]


def _only(optimizer: Optimizer, group: int, params: Sequence[Tensor]) -> None:
    """Give a group these parameters in place of its own, and the others none."""
    optimizer.state.clear()
    one_by_one(optimizer, fused=False)
    for index, other in enumerate(optimizer.param_groups):
        other.pop("param_names", None)
        other["params"] = list(params) if index == group else []
        if isinstance(other.get("lr"), float | int) and not other["lr"]:
            other["lr"] = 1e-2  # a schedule may begin with zero, which shows nothing
    keep_from_start(optimizer)


def _check_kept(optimizer: Optimizer, p: Tensor) -> None:
    """Raise JobError if an optimizer keeps its state in another place than a plan can hold it."""
    kind = type(optimizer).__name__
    if strange := [key for key in optimizer.state if key is not p and not isinstance(key, Tensor)]:
        raise JobError(
            f"Job.optimizer: {kind} keeps {strange[0]!r} in its state beside parameters, which no rank would save "
            f"or share; an optimizer works on a plan if {KEEPS_TO}"
        )


@dataclass(frozen=True)
class PieceSizes:
    """Hold the sizes of an element-wise optimizer's state and temporaries for a piece of a bucket.

    Attributes:
        kept: bytes of state for each element, and beside them.
        held: bytes of temporaries in a step for each element, and beside them.
        left: bytes of them that are still there while the next piece is stepped: names of a loop hold them.
        behind: likewise, while the first piece of another group is stepped.
        scalars: dtype of each tensor of state that is one number for the whole piece.
    """

    kept: tuple[int, int]
    held: tuple[int, int]
    left: tuple[int, int]
    behind: tuple[int, int]
    scalars: dict[str, torch.dtype]


def piece_sizes(make: Make, group: int, dtype: torch.dtype) -> PieceSizes:
    """Return the sizes of a piece, from steps on two meta tensors; raise JobError if no piece has such sizes."""
    (state, held), (larger, more) = (
        _sizes(make, group, [n], dtype) for n in (ELEMENTS, 2 * ELEMENTS)
    )
    left, behind = (
        _affine(
            _sizes(make, group, 2 * [ELEMENTS], dtype, apart=apart)[1] - held,
            _sizes(make, group, 2 * [2 * ELEMENTS], dtype, apart=apart)[1] - more,
        )
        for apart in (False, True)
    )
    scalars: dict[str, torch.dtype] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and not value.ndim:
            scalars[key] = value.dtype
        elif isinstance(value, Tensor) and value.shape != (ELEMENTS,):
            raise JobError(
                f"piper.elementwise({type(make()).__name__}): it keeps a tensor of shape {list(value.shape)} as "
                f"{key!r} of a parameter of {ELEMENTS} elements; one of the parameter's shape is needed, or a "
                f"single number"
            )
    kept = _affine(_bytes(state), _bytes(larger))
    return PieceSizes(kept, _affine(held, more), left, behind, scalars)


def _affine(one: int, two: int) -> tuple[int, int]:
    """Return the bytes per element and beside them, from the bytes of pieces of one and of two times ELEMENTS."""
    return (two - one) // ELEMENTS, 2 * one - two


def _sizes(
    make: Make, group: int, numels: Sequence[int], dtype: torch.dtype, *, apart: bool = False
) -> tuple[dict[str, Any], int]:
    """Return the state of the first of some pieces after a step, and the bytes of temporaries in the next step.

    The pieces are of one group, or each of one of its own (`apart`).
    """
    optimizer = make()
    pieces = [
        torch.nn.Parameter(torch.empty(numel, dtype=dtype, device="meta")) for numel in numels
    ]
    for piece in pieces:
        piece.grad = torch.empty_like(piece)
    _only(optimizer, group, pieces)
    if apart:
        alone = optimizer.param_groups[group]
        optimizer.param_groups = [{**alone, "params": [piece]} for piece in pieces]
    with (
        NumbersOfMeta(),
        user_code(f"a step of {type(optimizer).__name__} on meta tensors", JobError),
        torch.no_grad(),
    ):
        optimizer.step()
    return dict(optimizer.state[pieces[0]]), step_bytes(
        optimizer, [("", piece) for piece in pieces]
    )


def _bytes(state: dict[str, Any]) -> int:
    return sum(t.nbytes for t in state.values() if isinstance(t, Tensor))
