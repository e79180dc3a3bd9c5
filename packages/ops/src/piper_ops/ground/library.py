"""Define ops in the torch.library namespace "piper", and the helpers that these ops share.

Every op is functional. Its outputs are contiguous, alias nothing, and have the same shapes, dtypes and strides on every
device, so that a graph traced on meta is the graph that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

LIBRARY = torch.library.Library("piper", "DEF")
_Kernel = Callable[..., Any]
DIRECT: dict[torch._ops.OpOverload, _Kernel] = {}
"""The ops whose kernels generated code may call as a function.

torch's dispatcher and its Python registration cost about 15 us, which is most of a small call.
"""
OP_KERNELS: dict[torch._ops.OpOverload, _Kernel] = {}
"""The kernel of every op, so that its workspace can be counted."""

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float64, torch.float32, *HALF)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as programs and plans write it: "float32"."""
    return str(dtype).removeprefix("torch.")


def define(
    name: str,
    schema: str,
    fake: Callable[..., Any],
    kernel: Callable[..., Any],
    *,
    check: Callable[..., None] | None = None,
    direct: bool | Literal["unseen"] = False,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> torch._ops.OpOverload:
    """Register piper::<name> with one fake kernel and one kernel for CPU and CUDA.

    The kernel branches on the device if lowerings differ.

    Args:
        name: the op's name in the namespace "piper".
        schema: its arguments and results in torch's schema language.
        fake: makes the outputs' metadata; it checks the arguments itself.
        kernel: computes the outputs.
        check: sees the arguments before the kernel does, and raises if they are not supported.
        direct: the kernel is also put into DIRECT, and runs without the check from there: the code that calls it was
            traced with the fake. "unseen" says that the kernel makes tensors beside its results. If a dispatch mode is
            active, which would see these, the op is called instead.
        backward: the gradient; without it the op is itself a gradient, and differentiating it is refused.
        setup_context: saves for the backward, as in torch.library.register_autograd.
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
        DIRECT[overload] = _unseen(overload, kernel) if direct == "unseen" else kernel
    return overload


def _checked(check: Callable[..., None], kernel: _Kernel) -> _Kernel:
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return kernel(*args, **kwargs)

    return checked


def _unseen(op: _Kernel, kernel: _Kernel) -> _Kernel:
    watched: Callable[[], int] = torch._C._len_torch_dispatch_stack
    return lambda *args: op(*args) if watched() else kernel(*args)


def _no_double_backward(qualified: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise NotImplementedError(
            f"{qualified} is a gradient and has none of its own: double backward is not supported"
        )

    return backward


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics (mean, rstd, logsumexp) and inner arithmetic: float64 for itself, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def contiguous_empty(
    like: Tensor, shape: Sequence[int | torch.SymInt], dtype: torch.dtype | None = None
) -> Tensor:
    """Return a new contiguous tensor on the device of `like`, with its dtype unless another one is given."""
    return like.new_empty(tuple(shape), dtype=dtype or like.dtype)
