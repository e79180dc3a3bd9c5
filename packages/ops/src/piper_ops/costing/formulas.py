"""Hold the formulas for the cost of operators in one table, `FORMULAS`, by the name of the operator's schema.

Operators that do many FLOPs per element have one: matrix products, grouped ones, convolutions, attention, distances
and Fourier transforms. A matrix product of dimensions (M, N, K) is 2 M N K FLOPs. They cover the operators of
`torch.utils.flop_counter`, and operators that it lacks. So have operators that move data (no FLOPs), and look-ups,
which read only a part of their operand. `piper_ops.costing.few_flops` lists the operators that need no formula. An
operator in neither is named to the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log2, prod
from typing import Literal

import torch
from torch import Tensor

from piper_ops.costing.registry import FLASH, PORTABLE, Call
from piper_ops.float8.products import float8_mm
from piper_ops.float8.quantise import float8_cast, float8_past_scale, float8_scale

aten = torch.ops.aten
Packet = torch._ops.OpOverloadPacket
Dims = Callable[[Call], tuple[int, ...]]


CostKind = Literal["matmul", "attention", "norm", "elementwise", "embedding", "loss", "other"]


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor that memory holds: a dimension of stride 0 counts once."""
    stored = prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride
    )
    return stored * tensor.element_size()


def _no_dims(call: Call) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class CostFormula:
    """Give the cost of one call of an operator.

    Attributes:
        flops: the FLOPs of a call; a multiply-add is 2.
        dims: the dimensions of the kernel, as in `KernelInfo`.
        bytes: the bytes that a call reads and writes; None for its inputs plus its outputs, once each.
        kind: the family of the kernel.
        lowering: as in `KernelInfo`.
        dtype: the dtype of the arithmetic; "" for that of the first result.
    """

    flops: Callable[[Call], float]
    dims: Dims = _no_dims
    bytes: Callable[[Call], float] | None = None
    kind: CostKind = "elementwise"
    lowering: str = ""
    dtype: str = ""


def _product(dims: Dims, flops: Callable[[Call], int] | None = None) -> CostFormula:
    """Return the formula of a matrix product: 2 FLOPs for each element of its dimensions, unless given."""
    count = flops or (lambda call: 2 * prod(dims(call)))
    return CostFormula(count, dims, kind="matmul")


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

    The shapes are as in torch.nn.functional.grouped_mm. [M, K] x [G, K, N]: each of the M rows meets the matrix of its
    group. [G, M, K] x [K, N]: each of the N columns meets the matrix of its group. [M, K] x [K, N]: each group has its
    part of K. In all of them every group together is one product (M, N, K), whatever the offsets are. [G, M, K] x [G,
    K, N] is a batch of products.
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


_FORWARD = CostFormula(_attention_flops(1, 1), _attention, kind="attention", lowering=FLASH)
_BACKWARD = CostFormula(_attention_flops(3, 2), _attention, kind="attention", lowering=FLASH)
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


def _scanned(call: Call) -> tuple[int, ...]:
    """Return (outer, length, inner): the elements before, along and behind the dimension of a running sum."""
    shape = call.outs[0].shape
    dim = call.args["dim"] % max(1, len(shape))
    return prod(shape[:dim]), prod(shape[dim : dim + 1]), prod(shape[dim + 1 :])


def _rows_read(call: Call) -> int:
    """Count the indices and the rows that they pick, which are read and written; the whole table is not read."""
    return sum(map(nbytes_of, call.operands[1:])) + 2 * sum(map(nbytes_of, call.outs))


def _table_written(call: Call) -> int:
    """Count that the whole table is set to zero, before the rows that were picked are written."""
    tensors = (*call.operands, *call.outs)
    return sum(map(nbytes_of, tensors)) + nbytes_of(call.operands[0])


_LOOK_UPS: Mapping[Packet, CostKind] = {
    aten.embedding: "embedding",
    aten.index_select: "elementwise",
    aten.gather: "elementwise",
    aten.index: "elementwise",
}

# fmt: off
_MOVES: frozenset[Packet] = frozenset(
    (
        aten.clone, aten._to_copy, aten.copy, aten.copy_, aten.cat, aten.stack, aten.constant_pad_nd, aten.repeat, aten.flip,
        aten.roll, aten.slice_backward, aten.select_backward, aten.slice_scatter, aten.select_scatter, aten.index_put,
        aten.scatter, aten.diagonal_scatter, aten.as_strided_scatter, aten.fill, aten.full, aten.full_like, aten.zeros,
        aten.zeros_like, aten.ones, aten.ones_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.empty,
        aten.empty_like, aten.scalar_tensor, aten.arange, aten.eye, aten.tril, aten.triu, aten.lift_fresh_copy,
    )
)
# fmt: on

_OF_ATEN: Mapping[Packet, CostFormula] = {
    **dict.fromkeys(
        (aten.mm, aten._int_mm, aten._scaled_mm, aten._scaled_mm_v2),
        _product(_matrices("self", "mat2")),
    ),
    **dict.fromkeys(
        (aten.addmm, aten.addmm_, aten._addmm_activation), _product(_matrices("mat1", "mat2"))
    ),
    aten.bmm: _product(_matrices("self", "mat2")),
    **dict.fromkeys(
        (aten.baddbmm, aten.baddbmm_, aten.addbmm, aten.addbmm_),
        _product(_matrices("batch1", "batch2")),
    ),
    aten.mv: _product(_vector("self", "vec")),
    **dict.fromkeys((aten.addmv, aten.addmv_), _product(_vector("mat", "vec"))),
    aten.dot: _product(_vector("self", "tensor")),
    aten.vdot: _product(_vector("self", "other")),
    **dict.fromkeys(
        (aten._grouped_mm, aten._scaled_grouped_mm, aten._scaled_grouped_mm_v2),
        _product(_grouped("self", "mat2")),
    ),
    **dict.fromkeys(_CONVOLUTIONS, _product(_convolution)),
    **dict.fromkeys(
        (aten.convolution_backward, aten.convolution_backward_overrideable),
        _product(_no_dims, _convolution_backward_flops),
    ),
    aten._fft_c2c: CostFormula(_fourier_flops(5)),
    **dict.fromkeys((aten._fft_r2c, aten._fft_c2r), CostFormula(_fourier_flops(2.5))),
    aten._trilinear: CostFormula(_trilinear_flops),
    # Counted off the definition: subtract, power, add; and back: subtract, power, scale, add.
    aten._cdist_forward: CostFormula(_distances(3)),
    aten._cdist_backward: CostFormula(_distances(4)),
    **{getattr(aten, name): _FORWARD for name in _KERNELS},
    **{getattr(aten, f"{name}_backward"): _BACKWARD for name in _KERNELS},
    **{
        packet: CostFormula(lambda call: 0, bytes=_rows_read, kind=kind)
        for packet, kind in _LOOK_UPS.items()
    },
    aten.embedding_dense_backward: CostFormula(
        lambda call: call.tensor("grad_output").numel(), bytes=_table_written, kind="embedding"
    ),
    **dict.fromkeys(
        (aten.cumsum, aten.cumprod), CostFormula(lambda call: call.outs[0].numel(), _scanned)
    ),
    **dict.fromkeys(_MOVES, CostFormula(lambda call: 0)),
}

_OF_LIBRARIES: Mapping[str, CostFormula] = {
    "transformers::grouped_mm_fallback": _product(_grouped("input", "weight"))
}
"""The formulas of ops that other libraries register.

Hugging Face registers one for experts if torch has no grouped kernel (transformers/integrations/moe.py).
"""

FLOAT8 = "float8"
"""The name of the rate at which a device multiplies in any float8 dtype."""
OF_FLOAT8: Mapping[torch._ops.OpOverload, CostFormula] = {
    # Counted off the definition: magnitude, maximum; multiply, clamp, round.
    float8_scale: CostFormula(lambda call: 2 * call.tensor("x").numel(), dtype="float32"),
    float8_past_scale: CostFormula(lambda call: 0, bytes=lambda call: 0, kind="other"),
    float8_cast: CostFormula(lambda call: 3 * call.tensor("x").numel(), dtype="float32"),
    float8_mm: CostFormula(
        lambda call: 2 * prod(_matrices("a", "b")(call)),
        _matrices("a", "b"),
        kind="matmul",
        dtype=FLOAT8,
    ),
}

FORMULAS: Mapping[str, CostFormula] = {
    **{op._schema.name: formula for op, formula in OF_FLOAT8.items()},
    **{packet._qualified_op_name: formula for packet, formula in _OF_ATEN.items()},
    **_OF_LIBRARIES,
    **{
        f.op._schema.name: CostFormula(f.flops, f.dims, f.bytes, record.kind, record.lowering)
        for record in PORTABLE.values()
        for f in record.formulas
    },
}
"""An operator, as "aten::mm", -> its formula."""
