"""Choose the kernel that an attention call runs, from device, dtype and shapes.

Kernels and cost models use the same choice. They restate the conditions of torch's own dispatcher
(torch.nn.attention.SDPBackend), so that the choice is known without the device. On sm90 the kernels of every CUDA
choice were run, but FlashAttention with a window was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from piper_ops.ground.library import FLOATS, HALF

LoweringName = Literal["cpu_flash", "cuda_cudnn", "cuda_flash", "cuda_efficient", "math"]


@dataclass(frozen=True, slots=True)
class Lowering:
    """Name the kernel family that runs.

    "math" is the fallback: it materialises batch x heads x T_q x T_k matrices, the others do not.

    Attributes:
        name: the kernel family.
        reason: for "math", why no fused kernel was taken.
    """

    name: LoweringName
    reason: str = ""

    @property
    def fallback(self) -> bool:
        return self.name == "math"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Hold the facts that decide the choice of a kernel; shapes are [batch, T, heads, head_dim]."""

    dtype: torch.dtype
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    masked: bool
    causal: bool
    windowed: bool = False

    @property
    def grouped(self) -> bool:
        return self.q[2] != self.k[2]


def attention_lowering(
    device: str,
    dtype: torch.dtype,
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    *,
    masked: bool = False,
    is_causal: bool = False,
    windowed: bool = False,
    capability: tuple[int, int] = (8, 0),
) -> Lowering:
    """Return the lowering that piper::attention and piper::attention_dgrad take on a device.

    Args:
        device: "cpu" or "cuda"; any other raises ValueError.
        dtype: the dtype of q, k and v.
        q: its shape [batch, T, heads, head_dim].
        k: its shape, likewise.
        v: its shape, likewise.
        masked: whether an attn_mask is given.
        is_causal: whether query i attends to keys 0..i only.
        windowed: whether it attends to the last ones of these alone.
        capability: the compute capability of the CUDA device.
    """
    call = AttentionCall(dtype, tuple(q), tuple(k), tuple(v), masked, is_causal, windowed)
    if device == "cpu":
        refusals = {"cpu_flash": _against_cpu_flash(call)}
    elif device == "cuda":
        refusals = {
            "cuda_cudnn": _against_cudnn(call, capability),
            "cuda_flash": _against_flash(call, capability),
            "cuda_efficient": _against_efficient(call),
        }
    else:
        raise ValueError(f"attention has lowerings for cpu and cuda, not for {device!r}")
    names: tuple[LoweringName, ...] = (
        ("cpu_flash",) if device == "cpu" else ("cuda_cudnn", "cuda_flash", "cuda_efficient")
    )
    for name in names:
        if not refusals[name]:
            return Lowering(name)
    return Lowering("math", "; ".join(f"{name}: {why}" for name, why in refusals.items()))


def _against_cpu_flash(call: AttentionCall) -> str:
    if call.dtype not in FLOATS:
        return f"dtype {call.dtype}"
    if call.q[-1] != call.v[-1]:
        return f"head_dim of v {call.v[-1]} differs from {call.q[-1]}"
    return _against_empty(call)


def _against_cudnn(call: AttentionCall, capability: tuple[int, int]) -> str:
    # torch prefers cuDNN on Hopper and datacenter Blackwell only; elsewhere flash is as fast
    if capability not in ((9, 0), (10, 0)):
        return f"preferred on sm90 and sm100 only, not on sm{capability[0]}{capability[1]}"
    if call.grouped:
        return "grouped heads"
    if call.windowed:
        return "a window"
    if call.q[-1] > 128:
        return f"head_dim {call.q[-1]} above 128"
    if call.k[1] == 1:
        return "one key"
    return _against_flash(call, capability)


def _against_flash(call: AttentionCall, capability: tuple[int, int]) -> str:
    if call.dtype not in HALF:
        return f"dtype {call.dtype}"
    if capability < (8, 0):
        return f"needs sm80, not sm{capability[0]}{capability[1]}"
    if call.masked:
        return "attn_mask"
    if call.q[-1] != call.v[-1] or call.q[-1] % 8 or call.q[-1] > 256:
        return f"head_dims {call.q[-1]}, {call.v[-1]} not equal, a multiple of 8 and at most 256"
    if call.causal and not call.windowed and call.q[1] != call.k[1]:
        # flash aligns a rectangular causal mask bottom right, F.scaled_dot_product_attention top left
        return f"causal with T_q {call.q[1]} != T_k {call.k[1]}"
    return _against_empty(call)


def _against_efficient(call: AttentionCall) -> str:
    if call.dtype not in (torch.float32, *HALF):
        return f"dtype {call.dtype}"
    multiple = 4 if call.dtype == torch.float32 else 8
    if call.q[-1] % multiple or call.v[-1] % multiple:
        return f"head_dims {call.q[-1]}, {call.v[-1]} not multiples of {multiple}"
    return _against_empty(call)


def _against_empty(call: AttentionCall) -> str:
    return "an empty tensor" if 0 in (*call.q, *call.k, *call.v) else ""
