"""Which attention kernel is chosen where; the CUDA calls against torch's meta kernels, which know their schemas and
shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from piper_ops import attention_lowering
from piper_ops.attention import sdpa_kernels
from piper_ops.attention.lowering import LoweringName
from piper_ops.attention.sdpa_kernels import (
    BIAS_ALIGNMENT,
    KERNELS,
    LSE_ALIGNMENT,
    AttentionInputs,
    cuda_efficient,
)
from tests.helpers.cases import each_case

SHAPE = (2, 64, 4, 32)
GROUPED, DEEP, ODD, ONE_KEY = (2, 64, 2, 32), (2, 64, 4, 256), (2, 64, 4, 20), (2, 1, 4, 32)


@each_case(
    ("device", "dtype", "changes", "name"),
    [
        ("cpu", torch.float64, {}, "cpu_flash"),
        ("cpu", torch.bfloat16, {"masked": True}, "cpu_flash"),
        ("cpu", torch.float32, {"v": (2, 64, 4, 16)}, "math"),
        ("cuda", torch.bfloat16, {}, "cuda_flash"),
        ("cuda", torch.bfloat16, {"capability": (9, 0)}, "cuda_cudnn"),
        ("cuda", torch.bfloat16, {"capability": (9, 0), "k": GROUPED, "v": GROUPED}, "cuda_flash"),
        (
            "cuda",
            torch.bfloat16,
            {"capability": (9, 0), "q": DEEP, "k": DEEP, "v": DEEP},
            "cuda_flash",
        ),
        ("cuda", torch.bfloat16, {"capability": (9, 0), "k": ONE_KEY, "v": ONE_KEY}, "cuda_flash"),
        ("cuda", torch.bfloat16, {"capability": (7, 5)}, "cuda_efficient"),
        ("cuda", torch.bfloat16, {"masked": True}, "cuda_efficient"),
        (
            "cuda",
            torch.bfloat16,
            {"is_causal": True, "k": (2, 80, 4, 32), "v": (2, 80, 4, 32)},
            "cuda_efficient",
        ),
        ("cuda", torch.float32, {}, "cuda_efficient"),
        ("cuda", torch.float64, {}, "math"),
        ("cuda", torch.bfloat16, {"q": ODD, "k": ODD, "v": ODD}, "math"),
    ],
)
def test_choice(device: str, dtype: torch.dtype, changes: dict[str, Any], name: str) -> None:
    shapes = {key: changes.get(key, SHAPE) for key in ("q", "k", "v")}
    choice = attention_lowering(device, dtype, **{**shapes, **changes})
    assert choice.name == name
    assert choice.fallback == (name == "math") == bool(choice.reason)


def test_fallback_says_what_kept_each_kernel() -> None:
    reason = attention_lowering("cuda", torch.float64, SHAPE, SHAPE, SHAPE).reason
    assert (
        all(f"{name}: " in reason for name in ("cuda_cudnn", "cuda_flash", "cuda_efficient"))
        and "float64" in reason
    )


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="'tpu'"):
        attention_lowering("tpu", torch.float32, SHAPE, SHAPE, SHAPE)


@each_case(
    ("name", "kv_heads", "mask"),
    [
        ("cuda_flash", 4, None),
        ("cuda_flash", 2, None),
        ("cuda_cudnn", 4, None),
        ("cuda_efficient", 4, None),
        ("cuda_efficient", 2, (65, 65)),
        ("cuda_efficient", 4, (2, 1, 1, 65)),
    ],
)
def test_cuda_lowerings_fit_torchs_schemas(
    name: LoweringName, kv_heads: int, mask: tuple[int, ...] | None
) -> None:
    """Schema and shapes only: none of these has been run on a GPU."""

    def t(heads: int) -> Tensor:
        return torch.empty(2, heads, 65, 32, dtype=torch.bfloat16, device="meta")

    q, k, v = t(4), t(kv_heads), t(kv_heads)
    bias = None if mask is None else torch.empty(mask, dtype=torch.bfloat16, device="meta")
    given = AttentionInputs(q, k, v, bias, mask is None, 0.1)
    forward, backward = KERNELS[name]
    out, lse = forward(given)
    assert out.shape == q.shape and lse.shape == (2, 4, 65) and lse.dtype == torch.float32
    assert [g.shape for g in backward(out, out, lse, given)] == [
        q.shape,
        k.shape,
        v.shape,
    ]


def test_efficient_operands_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of bias and logsumexp start at multiples of what the kernel reads at once, and padding rows contribute
    nothing."""
    seen: dict[str, Tensor] = {}

    class Recorder:
        def _scaled_dot_product_efficient_attention(
            self, *args: Any, **kwargs: Any
        ) -> tuple[Any, ...]:
            seen["bias"] = args[3]
            return args[0], torch.zeros(2, 4, 96), None, None

        def _scaled_dot_product_efficient_attention_backward(
            self, *args: Any, **kwargs: Any
        ) -> tuple[Any, ...]:
            seen["lse"] = args[6]
            return *args[1:4], None

    monkeypatch.setattr(sdpa_kernels, "aten", Recorder())
    q = torch.zeros(2, 4, 65, 8)
    given = AttentionInputs(q, q, q, torch.randn(65, 65), False, 0.1)
    out, lse = cuda_efficient(given)
    KERNELS["cuda_efficient"][1](out, out, lse, given)
    assert given.mask is not None
    assert seen["bias"].stride(-2) % BIAS_ALIGNMENT == 0 and torch.equal(
        seen["bias"][1, 2], given.mask
    )
    assert (
        seen["lse"].shape[-1] % LSE_ALIGNMENT == 0 and (seen["lse"][..., 65:] == float("inf")).all()
    )
