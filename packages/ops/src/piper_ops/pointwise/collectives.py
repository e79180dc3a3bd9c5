"""Define the collectives inside of a step as ops, so that a graph can hold them.

A device runs its step up to a collective, hands over the tensor, and goes on with the result. So these ops have shapes
and no kernels. They stack along a new leading dimension or take it away: element k of it belongs to the k-th device of
the axis. `axis` names the devices that take part, `degree` is their number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piper_ops.ground.library import LIBRARY, contiguous_empty, define


def _same(x: Tensor, axis: str, degree: int) -> Tensor:
    return contiguous_empty(x, x.shape)


def _stacked(x: Tensor, axis: str, degree: int) -> Tensor:
    return contiguous_empty(x, (degree, *x.shape))


def _own(x: Tensor, axis: str, degree: int) -> Tensor:
    if x.dim() == 0 or x.shape[0] != degree:
        raise ValueError(
            f"a tensor with one element of its first dimension for each of {degree} devices is "
            f"needed, not {x.shape}"
        )
    return contiguous_empty(x, x.shape[1:])


def _elsewhere(*args: Any) -> Tensor:
    raise RuntimeError(
        "a collective inside of a step is run by the engine that runs the step, not as an op"
    )


_SCHEMA = "(Tensor x, str axis, int degree) -> Tensor"

all_reduce = define("all_reduce", _SCHEMA, _same, _elsewhere)
"""An op that returns the sum over the devices of an axis."""

LIBRARY.define("all_reduce_(Tensor(a!) x, str axis, int degree) -> Tensor(a!)")
all_reduce_ = torch.ops.piper.all_reduce_.default
"""The in-place variant of `all_reduce`; steps call it if nothing else needs the argument any more."""


def _setup(ctx: Any, inputs: tuple[Tensor, str, int], output: Tensor) -> None:
    _, ctx.axis, ctx.degree = inputs


def _all_gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return reduce_scatter(grad, ctx.axis, ctx.degree), None, None


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return all_gather(grad, ctx.axis, ctx.degree), None, None


all_gather = define(
    "all_gather", _SCHEMA, _stacked, _elsewhere, backward=_all_gather_backward, setup_context=_setup
)
"""An op that returns the tensors of all devices, stacked along a new leading dimension.

Its gradient is `reduce_scatter`: the sum of the gradients that all devices have of an element.
"""

reduce_scatter = define(
    "reduce_scatter",
    _SCHEMA,
    _own,
    _elsewhere,
    backward=_reduce_scatter_backward,
    setup_context=_setup,
)
"""An op that sums stacked tensors over the devices and returns to each device its own element of the sum.

Its gradient is `all_gather`.
"""


def _all_to_all_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return all_to_all(grad, ctx.axis, ctx.degree), None, None


all_to_all = define(
    "all_to_all",
    _SCHEMA,
    _same,
    _elsewhere,
    backward=_all_to_all_backward,
    setup_context=_setup,
)
"""An op that sends element k of the leading dimension to device k, and stacks the received elements by source device.

Its gradient is sent back in the same way.
"""

shift = define("shift", _SCHEMA, _same, _elsewhere)
"""An op that sends a tensor to the next device of an axis, from the last to the first, and returns the received one."""

LIBRARY.define("wait(Tensor(a) x, Tensor given) -> Tensor(a)")
wait = torch.ops.piper.wait.default
"""The op behind which the result `x` of a collective is there; before it, the collective of `given` is under way.

A step starts a collective whose result such an op reads, and waits for any other. Until then nothing may read `x` or
change `given`.
"""

COLLECTIVE_KINDS = {
    op: op._schema.name.removeprefix("piper::").removesuffix("_")
    for op in (all_reduce, all_reduce_, all_gather, reduce_scatter, all_to_all, shift)
}
"""The ops of this module, each with its kind: a collective of `piper_ir.program.collectives`."""
