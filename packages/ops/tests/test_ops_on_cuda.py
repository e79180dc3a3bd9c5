"""The kernels that only a CUDA device has, against float64: attention by every lowering, norms and cross-entropy.
Skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from piper_ops import cross_entropy, layer_norm, rms_norm
from piper_ops.attention.lowering import LoweringName
from piper_ops.attention.sdpa_kernels import KERNELS, AttentionInputs
from tests.helpers.cases import each_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the norm of a difference over the norm: a few roundings of the dtype."""
CLASSES = 96


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers of `dtype` in float64."""
    return torch.randn(shape, device="cuda").to(dtype).double()


def away(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("name", "dtype", "kv_heads", "length", "dim", "causal", "mask"),
    [
        ("cuda_cudnn", torch.bfloat16, 4, 128, 64, True, None),
        ("cuda_cudnn", torch.bfloat16, 4, 100, 128, False, None),
        ("cuda_cudnn", torch.float16, 4, 65, 32, True, None),
        ("cuda_flash", torch.bfloat16, 4, 128, 64, True, None),
        ("cuda_flash", torch.bfloat16, 2, 100, 64, True, None),
        ("cuda_flash", torch.bfloat16, 4, 65, 256, False, None),
        ("cuda_efficient", torch.float32, 4, 128, 64, True, None),
        ("cuda_efficient", torch.float32, 2, 65, 32, False, (65, 65)),
        ("cuda_efficient", torch.bfloat16, 4, 65, 32, False, (2, 1, 1, 65)),
        ("math", torch.float32, 2, 65, 32, True, None),
    ],
)
def test_attention_and_its_gradients(
    name: LoweringName,
    dtype: torch.dtype,
    kv_heads: int,
    length: int,
    dim: int,
    causal: bool,
    mask: tuple[int, ...] | None,
) -> None:
    if name == "cuda_cudnn" and torch.cuda.get_device_capability() not in ((9, 0), (10, 0)):
        pytest.skip("cuDNN's attention is chosen on sm90 and sm100 only")
    shapes = [(2, length, heads, dim) for heads in (4, kv_heads, kv_heads, 4)]
    q, k, v, grad = (drawn(*s, dtype=dtype).transpose(1, 2) for s in shapes)
    bias = None if mask is None else drawn(*mask, dtype=dtype)
    forward, backward = KERNELS["math"]
    exact = AttentionInputs(q, k, v, bias, causal)
    out, lse = forward(exact)
    wanted = (out, lse, *backward(grad, out, lse, exact))
    forward, backward = KERNELS[name]
    q, k, v, grad = (t.to(dtype) for t in (q, k, v, grad))
    narrow = AttentionInputs(q, k, v, None if bias is None else bias.to(dtype), causal)
    out, lse = forward(narrow)
    kept = out.transpose(1, 2).contiguous().transpose(1, 2)  # as piper::attention saves it
    found = (out, lse, *backward(grad, kept, lse.contiguous(), narrow))
    assert max(away(f, w) for f, w in zip(found, wanted, strict=True)) < TOLERANCE[dtype]


def through(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output and the gradients of the inputs, for an uneven gradient of the output."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = function(*leaves)
    out.backward(
        torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
        if out.dim()
        else None
    )
    return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]


TARGET = torch.arange(64) % CLASSES
TARGET[3] = -100
OPS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int]] = {
    "layer_norm": (
        lambda x, w, b: layer_norm(x, [CLASSES], w, b, 1e-5)[0], lambda x, w, b: F.layer_norm(x, [CLASSES], w, b, 1e-5), 3
    ),
    "rms_norm": (lambda x, w: rms_norm(x, [CLASSES], w, 1e-5)[0], lambda x, w: F.rms_norm(x, [CLASSES], w, 1e-5), 2),
    "cross_entropy": (lambda x: cross_entropy(x, TARGET.cuda())[0], lambda x: F.cross_entropy(x, TARGET.cuda()), 1),
}  # fmt: skip


@each_case("dtype", [torch.float64, torch.float32, torch.bfloat16])
@each_case("name", OPS)
def test_norms_and_cross_entropy(name: str, dtype: torch.dtype) -> None:
    ours, torchs, count = OPS[name]
    inputs = [
        drawn(*shape, dtype=dtype) for shape in ((64, CLASSES), (CLASSES,), (CLASSES,))[:count]
    ]
    wanted = through(torchs, *inputs)
    found: list[Any] = through(ours, *[t.to(dtype) for t in inputs])
    # The uneven gradient is rounded too, and columns of it nearly cancel in the gradient of a bias.
    loose = 10 if dtype == torch.bfloat16 else 1
    assert max(away(f, w) for f, w in zip(found, wanted, strict=True)) < loose * TOLERANCE[dtype]
