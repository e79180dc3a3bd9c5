"""Hold formulas of the aten ops that do many FLOPs per element.

These are matrix products, grouped ones, convolutions, attention, distances and Fourier transforms. A matrix product of
dimensions (M, N, K) is 2 M N K FLOPs. The list covers the ops of `torch.utils.flop_counter`, and ops that it lacks.
`piper_ops.costing.few_flops` lists the ops that need no formula. An op on neither list is named to the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log2, prod
from typing import Literal

import torch

from piper_ops.costing.registry import FLASH, Call

aten = torch.ops.aten
Packet = torch._ops.OpOverloadPacket
Dims = Callable[[Call], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Product:
    """Hold a formula.

    Attributes:
        dims: the dimensions of the kernel, as in `KernelInfo`.
        flops: the FLOPs of a call; None for 2 x the product of the dims.
        kind: the family of the kernel.
        lowering: as in `KernelInfo`.
    """

    dims: Dims
    flops: Callable[[Call], int] | None = None
    kind: Literal["matmul", "attention", "elementwise"] = "matmul"
    lowering: str = ""

    def count(self, call: Call) -> int:
        """Return the FLOPs of a call."""
        return 2 * prod(self.dims(call)) if self.flops is None else self.flops(call)


def _no_dims(call: Call) -> tuple[int, ...]:
    return ()


def _matrices(left: str, right: str) -> Dims:
    """Return the dims of [M, K] x [K, N], or of [batch, M, K] x [batch, K, N]."""

    def dims(call: Call) -> tuple[int, ...]:
        a, b = call.tensor(left), call.tensor(right)
        return *a.shape[:-2], a.shape[-2], b.shape[-1], a.shape[-1]

    return dims


def _vector(left: str, right: str) -> Dims:
    def dims(call: Call) -> tuple[int, ...]:
        a = call.tensor(left)
        return (a.shape[0] if a.dim() == 2 else 1), 1, call.tensor(right).shape[0]

    return dims


def _grouped(left: str, right: str) -> Dims:
    """Return the dims of a product whose rows, columns or inner dimension are split into groups by offsets.

    The shapes are those of torch.nn.functional.grouped_mm. [M, K] x [G, K, N]: each of the M rows meets the matrix of
    its group. [G, M, K] x [K, N]: each of the N columns meets the matrix of its group. [M, K] x [K, N]: each group has
    its part of K. In all of them every group together is one product (M, N, K), whatever the offsets are. [G, M, K] x
    [G, K, N] is a batch of products.
    """

    def dims(call: Call) -> tuple[int, ...]:
        a, b = call.tensor(left), call.tensor(right)
        batch = a.shape[:1] if a.dim() == b.dim() == 3 else ()
        return *batch, a.shape[-2], b.shape[-1], a.shape[-1]

    return dims


def _convolution(call: Call) -> tuple[int, ...]:
    """Return the dims of the implicit matmul of a convolution.

    They are ([groups,] output positions, output channels per group, input channels per group x kernel). A transposed
    one is the input gradient of that convolution, with input and output exchanged.
    """
    groups: int = call.args["groups"]
    weight = call.tensor("weight")
    wide = call.tensor("input") if call.args["transposed"] else call.outs[0]
    positions = wide.shape[0] * prod(wide.shape[2:])
    dims = positions, weight.shape[0] // groups, prod(weight.shape[1:])
    return dims if groups == 1 else (groups, *dims)


def _convolution_backward_flops(call: Call) -> int:
    """Count the input and the weight gradient as many FLOPs each as the forward, and the bias gradient as a sum."""
    grad = call.tensor("grad_output")
    forward = 2 * prod(_convolution(Call(call.args, (grad,))))
    wants_input, wants_weight, wants_bias = call.args["output_mask"]
    return forward * (int(wants_input) + int(wants_weight)) + (grad.numel() if wants_bias else 0)


def _attention(call: Call) -> tuple[int, ...]:
    """Return (batch, query heads, T_q, T_k, head_dim) of torch's attention on [batch, heads, T, head_dim]."""
    q, k = call.tensor("query"), call.tensor("key")
    return q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3]


def _attention_flops(per_dim: int, per_value_dim: int) -> Callable[[Call], int]:
    """Return the FLOPs of so many products over head_dim and over the values' head_dim (`registry.attention_flops`)."""

    def flops(call: Call) -> int:
        batch, heads, queries, keys, dim = _attention(call)
        full = (
            2
            * batch
            * heads
            * queries
            * keys
            * (per_dim * dim + per_value_dim * call.tensor("value").shape[3])
        )
        return full // 2 if call.args["is_causal"] else full

    return flops


def _distances(per_element: int) -> Callable[[Call], int]:
    """Return so many FLOPs for each coordinate of each pair of points."""

    def flops(call: Call) -> int:
        return per_element * call.tensor("x1").numel() * call.tensor("x2").shape[-2]

    return flops


def _trilinear_flops(call: Call) -> int:
    """Count two multiplications and an addition for each element of the three operands broadcast against each other."""
    shapes = []
    for k in (1, 2, 3):
        shape = list(call.tensor(f"i{k}").shape)
        for d in sorted(call.args[f"expand{k}"]):
            shape.insert(d, 1)
        shapes.append(shape)
    broadcast: tuple[int, ...] = tuple(map(max, *shapes))
    return 3 * prod(broadcast)


def _fourier_flops(per_element: float) -> Callable[[Call], int]:
    """Return 5 N log2 N FLOPs per complex transform of N elements, half for real ones (as fftw.org/speed does)."""

    def flops(call: Call) -> int:
        tensors = (call.tensor("self"), call.outs[0])
        transformed: list[int] = call.args["dim"]
        size = prod(max(t.shape[d] for t in tensors) for d in transformed)
        batch = max(t.numel() // max(1, prod(t.shape[d] for d in transformed)) for t in tensors)
        return batch * round(per_element * size * log2(max(1, size)))

    return flops


_FORWARD = Product(_attention, _attention_flops(1, 1), "attention", FLASH)
_BACKWARD = Product(_attention, _attention_flops(3, 2), "attention", FLASH)
_KERNELS = tuple(
    f"_scaled_dot_product_{name}_attention{ending}"
    for name, ending in (
        ("flash", ""),
        ("flash", "_for_cpu"),
        ("efficient", ""),
        ("cudnn", ""),
        ("fused", "_overrideable"),
    )
)
_CONVOLUTIONS = (aten.convolution, aten._convolution, aten.convolution_overrideable)

PRODUCTS: Mapping[Packet, Product] = {
    **dict.fromkeys(
        (aten.mm, aten._int_mm, aten._scaled_mm, aten._scaled_mm_v2),
        Product(_matrices("self", "mat2")),
    ),
    **dict.fromkeys(
        (aten.addmm, aten.addmm_, aten._addmm_activation), Product(_matrices("mat1", "mat2"))
    ),
    aten.bmm: Product(_matrices("self", "mat2")),
    **dict.fromkeys(
        (aten.baddbmm, aten.baddbmm_, aten.addbmm, aten.addbmm_),
        Product(_matrices("batch1", "batch2")),
    ),
    aten.mv: Product(_vector("self", "vec")),
    **dict.fromkeys((aten.addmv, aten.addmv_), Product(_vector("mat", "vec"))),
    aten.dot: Product(_vector("self", "tensor")),
    aten.vdot: Product(_vector("self", "other")),
    **dict.fromkeys(
        (aten._grouped_mm, aten._scaled_grouped_mm, aten._scaled_grouped_mm_v2),
        Product(_grouped("self", "mat2")),
    ),
    **dict.fromkeys(_CONVOLUTIONS, Product(_convolution)),
    **dict.fromkeys(
        (aten.convolution_backward, aten.convolution_backward_overrideable),
        Product(_no_dims, _convolution_backward_flops),
    ),
    aten._fft_c2c: Product(_no_dims, _fourier_flops(5), "elementwise"),
    **dict.fromkeys(
        (aten._fft_r2c, aten._fft_c2r), Product(_no_dims, _fourier_flops(2.5), "elementwise")
    ),
    aten._trilinear: Product(_no_dims, _trilinear_flops, "elementwise"),
    # Counted off the definition: subtract, power, add; and back: subtract, power, scale, add.
    aten._cdist_forward: Product(_no_dims, _distances(3), "elementwise"),
    aten._cdist_backward: Product(_no_dims, _distances(4), "elementwise"),
    **{getattr(aten, name): _FORWARD for name in _KERNELS},
    **{getattr(aten, f"{name}_backward"): _BACKWARD for name in _KERNELS},
}

OF_LIBRARIES: Mapping[str, Product] = {
    "transformers::grouped_mm_fallback": Product(_grouped("input", "weight"))
}
"""The formulas of ops that other libraries register, by their names.

Hugging Face registers one for experts where torch has no grouped kernel (transformers/integrations/moe.py).
"""
