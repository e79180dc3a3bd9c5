"""The torch.library namespace "piper" and helpers shared by the ops in it.

Every op is functional, has contiguous outputs that alias nothing, and the same shapes, dtypes and strides on every device, so
that a graph traced on meta is the graph that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("piper", "DEF")
_Kernel = Callable[..., Any]
DIRECT: dict[torch._ops.OpOverload, _Kernel] = {}
"""Ops whose kernel generated code may call as a function: what torch's dispatcher and its Python registration cost (about 15 us)
is most of a small call."""
OP_KERNELS: dict[torch._ops.OpOverload, _Kernel] = {}
"""Every op's kernel, so that what it holds while it runs can be counted (`piper_ops.workspace` says how much that is on CUDA)."""

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float64, torch.float32, *HALF)


def define(
    name: str,
    schema: str,
    fake: Callable[..., Any],
    kernel: Callable[..., Any],
    *,
    check: Callable[..., None] | None = None,
    direct: bool = False,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> torch._ops.OpOverload:
    """Registers piper::<name> with one fake and one kernel for CPU and CUDA (it branches on the device where lowerings differ).

    `check` sees the arguments first; the fake has its own. `direct`: the kernel is in DIRECT, where it runs without the check:
    code that calls it was traced with the fake. Without `backward` the op is itself a gradient: differentiating it is refused.
    """
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    qualified = f"piper::{name}"
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel if check is None else _checked(check, kernel), key)
    torch.library.register_fake(qualified, fake, lib=LIBRARY)
    formula = backward or _no_double_backward(qualified)
    torch.library.register_autograd(qualified, formula, setup_context=setup_context, lib=LIBRARY)
    overload: torch._ops.OpOverload = getattr(torch.ops.piper, name).default
    OP_KERNELS[overload] = kernel
    if direct:
        DIRECT[overload] = kernel
    return overload


def _checked(check: Callable[..., None], kernel: _Kernel) -> _Kernel:
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return kernel(*args, **kwargs)

    return checked


def _no_double_backward(qualified: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise NotImplementedError(f"{qualified} is a gradient and has none of its own: double backward is not supported")

    return backward


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics (mean, rstd, logsumexp) and of inner arithmetic: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def contiguous_empty(like: Tensor, shape: Sequence[int | torch.SymInt], dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(tuple(shape), dtype=dtype or like.dtype)
