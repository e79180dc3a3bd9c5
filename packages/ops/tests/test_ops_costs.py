"""FLOPs and bytes against formulas written out by hand."""

from __future__ import annotations

import operator
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop, flop_registry

import piper_ops
from piper_ops import (
    PORTABLE,
    KernelInfo,
    all_gather,
    all_reduce,
    all_reduce_,
    all_to_all,
    attention_with_sinks,
    float8_linear,
    fusion,
    kernel_of,
    reduce_scatter,
    replace_portable,
    shift,
    wait,
)
from piper_ops.costing.few_flops import NAMES
from piper_ops.costing.formulas import FORMULAS, OF_FLOAT8
from tests.helpers.cases import each_case

aten = torch.ops.aten
piper = torch.ops.piper
B, T, H, D, V = 3, 10, 4, 8, 50
BF16 = torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cost(op: Any, *args: Any, **kwargs: Any) -> KernelInfo:
    return kernel_of(op, args, op(*args, **kwargs), kwargs)


@each_case("causal", [False, True])
def test_attention(causal: bool) -> None:
    q, k = meta(B, T, H, D, dtype=BF16), meta(B, 6, 2, D, dtype=BF16)
    out, lse = piper.attention(q, k, k, None, causal, None, True)
    forward = cost(piper.attention.default, q, k, k, None, causal, None, True)
    flops = 4 * B * H * T * 6 * D // (2 if causal else 1)
    small, large = 2 * k.numel(), 2 * q.numel()
    assert forward == KernelInfo(
        "attention",
        (B, H, T, 6, D),
        flops,
        2 * large + 2 * small + 4 * B * H * T,
        "bfloat16",
        "flash",
        "attention",
    )
    dgrad = cost(piper.attention_dgrad.default, out, q, k, k, out, lse, None, causal)
    assert dgrad.flops == 2.5 * flops and dgrad.dims == forward.dims
    assert dgrad.bytes == 4 * large + 4 * small + 4 * B * H * T


def test_attention_with_another_v() -> None:
    q, v = meta(B, T, H, D), meta(B, T, H, 2)
    assert cost(piper.attention.default, q, q, v).flops == 2 * B * H * T * T * (D + 2)


def test_norms() -> None:
    x, w, stat = meta(B, T, D, dtype=BF16), meta(D, dtype=BF16), meta(B, T, 1)
    n = x.numel()
    layer = cost(piper.layer_norm.default, x, [D], w, w, 1e-5)
    assert layer == KernelInfo(
        "norm", (), 8 * n, 2 * 2 * n + 2 * 2 * D + 2 * 4 * B * T, "bfloat16", op="layer_norm"
    )
    assert cost(piper.layer_norm.default, x, [D], None, None, 1e-5).flops == 6 * n
    assert cost(piper.layer_norm_dgrad.default, x, x, [D], stat, stat, w).flops == 10 * n
    wgrad = cost(piper.layer_norm_wgrad.default, x, x, [D], stat, stat, BF16, [True, True])
    assert (wgrad.flops, wgrad.bytes) == (5 * n, 2 * 2 * n + 2 * 4 * B * T + 2 * 2 * D)
    assert (
        cost(piper.layer_norm_wgrad.default, x, x, [D], stat, stat, BF16, [False, True]).flops == n
    )
    both = cost(piper.layer_norm_backward.default, x, x, [D], stat, stat, w, [True, True])
    assert both.flops == (10 + 3) * n and both.bytes == 3 * 2 * n + 2 * 4 * B * T + 3 * 2 * D
    rms = cost(piper.rms_norm.default, x, [D], w, None)
    assert (rms.flops, rms.bytes) == (4 * n, 2 * 2 * n + 2 * D + 4 * B * T)
    assert cost(piper.rms_norm_dgrad.default, x, x, [D], stat, None).flops == 6 * n
    assert cost(piper.rms_norm_wgrad.default, x, x, [D], stat, BF16).flops == 3 * n


def test_cross_entropy() -> None:
    logits, target, lse = meta(T, V), meta(T, dtype=torch.int64), meta(T)
    forward = cost(piper.cross_entropy.default, logits, target)
    assert forward == KernelInfo(
        "loss", (T, V), 4 * T * V, 4 * T * V + 8 * T + 4 + 4 * T, "float32", op="cross_entropy"
    )
    dgrad = cost(piper.cross_entropy_dgrad.default, meta(), logits, target, lse)
    assert (dgrad.op, dgrad.dims, dgrad.flops) == ("cross_entropy_dgrad", (T, V), 3 * T * V)


def test_matmuls() -> None:
    left, right = meta(T, D), meta(D, V)
    moved = 4 * (T * D + D * V + T * V)
    assert cost(aten.mm.default, left, right) == KernelInfo(
        "matmul", (T, V, D), 2 * T * V * D, moved, "float32", op="mm"
    )
    added = cost(aten.addmm.default, meta(V), left, right, beta=1)
    assert (added.dims, added.flops, added.bytes) == ((T, V, D), 2 * T * V * D, moved + 4 * V)
    into = meta(T, V)
    summed = cost(aten.addmm_.default, into, left, right)
    assert (summed.kind, summed.dims, summed.bytes) == ("matmul", (T, V, D), moved + 4 * T * V)
    batched = cost(aten.bmm.default, meta(B, T, D), meta(B, D, V))
    assert (batched.dims, batched.flops, batched.bytes) == (
        (B, T, V, D),
        2 * B * T * V * D,
        B * moved,
    )
    assert cost(aten.baddbmm.default, meta(B, T, V), meta(B, T, D), meta(B, D, V)).dims == (
        B,
        T,
        V,
        D,
    )


def test_matmuls_of_vectors_and_of_other_libraries_forms() -> None:
    left, right = meta(T, D), meta(D, V)
    assert (
        cost(aten.mv.default, left, meta(D)).flops
        == cost(aten.addmv.default, meta(T), left, meta(D)).flops
        == 2 * T * D
    )
    assert cost(aten.dot.default, meta(D), meta(D)).flops == 2 * D
    assert cost(aten.addbmm.default, meta(T, V), meta(B, T, D), meta(B, D, V)).dims == (B, T, V, D)
    assert cost(aten._addmm_activation.default, meta(V), left, right).flops == 2 * T * V * D
    bytes_ = torch.int8
    assert cost(
        aten._int_mm.default, meta(32, 16, dtype=bytes_), meta(16, 8, dtype=bytes_)
    ).dims == (32, 8, 16)


GROUPED = {
    "rows are grouped": ((T, D), (4, D, V), (T, V), (T, V, D)),
    "columns are grouped": ((4, T, D), (D, V), (T, V), (T, V, D)),
    "the inner dimension is grouped": ((T, D), (D, V), (4, T, V), (T, V, D)),
    "every group is a product": ((4, T, D), (4, D, V), (4, T, V), (4, T, V, D)),
}


@each_case("name", GROUPED)
def test_grouped_products_are_products_whatever_the_groups_are(name: str) -> None:
    """The shapes of torch.nn.functional.grouped_mm. The groups together have all rows, columns or inner elements."""
    left, right, out, dims = GROUPED[name]
    args = (meta(*left, dtype=BF16), meta(*right, dtype=BF16), meta(4, dtype=torch.int32))
    info = kernel_of(aten._grouped_mm.default, args, meta(*out, dtype=BF16))
    assert (info.kind, info.dims, info.flops, info.formula) == (
        "matmul",
        dims,
        2 * prod(dims),
        True,
    )
    if name == "rows are grouped":
        found = torch.empty(out)
        ends = [2, 5, 5, T]
        a, b = torch.randn(left), torch.randn(right)
        with FlopCounterMode(
            display=False
        ) as counter:  # an independent witness: one product per group
            for g, (start, end) in enumerate(pairwise([0, *ends])):
                found[start:end] = a[start:end] @ b[g]
        assert counter.get_total_flops() == info.flops


def test_grouped_products_of_hugging_face_have_a_formula() -> None:
    """Its op where torch has no grouped kernel: transformers is not needed to know that it is a product."""
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        library = torch.library.Library("transformers", "FRAGMENT")
        library.define("grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor")
    op = torch.ops.transformers.grouped_mm_fallback.default
    info = kernel_of(op, (meta(T, D), meta(4, D, V), meta(4, dtype=torch.int32)), meta(T, V))
    assert (info.kind, info.dims, info.flops) == ("matmul", (T, V, D), 2 * T * V * D)
    assert info.formula and info.op == "transformers::grouped_mm_fallback"


def test_what_torch_has_a_count_for_has_a_formula() -> None:
    """torch.utils.flop_counter as the list of what does many FLOPs; what is left out cannot be in a captured graph."""
    internal = {
        "cudnn_convolution",
        "_slow_conv2d_forward",
        "_flash_attention_forward",
        "_flash_attention_backward",
    }
    internal |= {"_efficient_attention_forward", "_efficient_attention_backward"}
    packets = {
        str(p).removeprefix("aten."): p
        for p in flop_registry
        if isinstance(p, torch._ops.OpOverloadPacket)
    }
    assert {name for name, p in packets.items() if p._qualified_op_name not in FORMULAS} == internal


def test_attention_of_torch_counts_as_ours() -> None:
    q = meta(B, H, T, D, dtype=BF16)
    args = (q, q, q, 0.0, True)
    out = aten._scaled_dot_product_flash_attention_for_cpu.default(*args)
    forward = kernel_of(aten._scaled_dot_product_flash_attention_for_cpu.default, args, out)
    assert (forward.kind, forward.dims, forward.flops) == (
        "attention",
        (B, H, T, T, D),
        4 * B * H * T * T * D // 2,
    )
    back = (out[0], q, q, q, *out, 0.0, True)
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert cost(op, *back).flops == 2.5 * forward.flops


def test_other_ops_that_do_many_flops_per_element() -> None:
    x, y = meta(B, T, D), meta(B, V, D)
    assert cost(aten._cdist_forward.default, x, y, 2.0, None).flops == 3 * B * T * V * D
    back = (meta(B, T, V), x, y, 2.0, meta(B, T, V))
    assert kernel_of(aten._cdist_backward.default, back, x).flops == 4 * B * T * V * D
    complex_, half = meta(B, 8, dtype=torch.complex64), meta(B, 8)
    assert cost(aten._fft_c2c.default, complex_, [1], 0, True).flops == B * 5 * 8 * 3
    assert cost(aten._fft_r2c.default, half, [1], 0, True).flops == B * 5 * 8 * 3 // 2
    three = (meta(T, D), meta(V, D, 6), meta(T, 6))
    assert (
        kernel_of(aten._trilinear.default, (*three, [1, 3], [0], [1, 2], [2, 3]), meta(T, V)).flops
        == 3 * T * V * D * 6
    )


def test_a_running_sum_has_the_elements_around_its_dimension() -> None:
    x = meta(B, T, V)
    assert [cost(aten.cumsum.default, x, dim).dims for dim in (0, 1, -1)] == [
        (1, B, T * V),
        (B, T, V),
        (B * T, V, 1),
    ]
    assert cost(aten.cumsum.default, x, 1).flops == B * T * V and cost(
        aten.cumsum.default, meta(), 0
    ).dims == (1, 1, 1)


def test_an_op_that_nothing_knows_says_so() -> None:
    """One FLOP per element is right for what is element-wise, a sum, or on the list; else it is a guess."""
    x = meta(T, D)
    for known in (
        cost(aten.add.Tensor, x, x), cost(aten.sum.dim_IntList, x, [0]), cost(aten._softmax.default, x, -1, False),
        cost(aten.cumsum.default, x, 0), cost(aten.clone.default, x), cost(aten.sort.default, x),
        cost(aten.mm.default, x, meta(D, 2)),
    ):  # fmt: skip
        assert known.formula, known.op
    assert not cost(aten.linalg_qr.default, x).formula
    assert cost(aten.linalg_qr.default, x).flops == T * D
    assert {name for name in NAMES if not hasattr(aten, name)} == set(), (
        "a name on the list that torch does not have"
    )


@each_case(("groups", "transposed"), [(1, False), (2, False), (1, True), (2, True)])
def test_convolution_flops_equal_torchs_counter(groups: int, transposed: bool) -> None:
    """torch.utils.flop_counter as an independent witness."""
    x = meta(B, 4, 9, 9)
    weight = meta(4, 6 // groups, 3, 3) if transposed else meta(6, 4 // groups, 3, 3)
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    out = aten.convolution.default(*args)
    ours = cost(aten.convolution.default, *args)
    assert ours.kind == "matmul" and ours.flops == 2 * prod(ours.dims)
    assert ours.flops == conv_flop(*args, out_val=out)
    grads = (
        out,
        x,
        weight,
        None,
        [1, 1],
        [1, 1],
        [1, 1],
        transposed,
        [0, 0],
        groups,
        [True, True, False],
    )
    assert cost(aten.convolution_backward.default, *grads).flops == 2 * ours.flops


def test_embedding_reads_rows_not_the_table() -> None:
    table, index = meta(1000, D), meta(T, dtype=torch.int64)
    assert cost(aten.embedding.default, table, index) == KernelInfo(
        "embedding", (), 0, 2 * 4 * T * D + 8 * T, "float32", op="embedding"
    )
    backward = cost(aten.embedding_dense_backward.default, meta(T, D), index, 1000, -1, False)
    assert (backward.kind, backward.flops, backward.bytes) == (
        "embedding",
        T * D,
        2 * 4 * T * D + 8 * T + 4 * 1000 * D,
    )
    picked = cost(aten.index.Tensor, table, [index])
    assert (picked.flops, picked.bytes) == (0, 2 * 4 * T * D + 8 * T)


def test_elementwise_reductions_moves_and_views() -> None:
    x = meta(T, D)
    assert cost(aten.add.Tensor, x, x) == KernelInfo(
        "elementwise", (), T * D, 3 * 4 * T * D, "float32", op="add"
    )
    assert cost(aten.add.Tensor, x, meta(1, D).expand(T, D)).bytes == 4 * (2 * T * D + D)
    backward = cost(aten.gelu_backward.default, x, x, approximate="tanh")
    assert cost(aten.gelu_backward.grad_input, x, x, approximate="tanh", grad_input=x) == backward
    assert cost(aten.sum.dim_IntList, x, [0]).flops == T * D
    assert cost(aten.clone.default, x) == KernelInfo(
        "elementwise", (), 0, 2 * 4 * T * D, "float32", op="clone"
    )
    assert cost(aten.cat.default, [x, x]).bytes == 4 * 4 * T * D
    assert cost(aten._to_copy.default, x, dtype=BF16).bytes == 6 * T * D
    for view in (
        cost(aten.view.default, x, [D, T]),
        cost(aten.t.default, x),
        cost(aten.expand.default, meta(1, D), [T, D]),
        cost(aten._unsafe_view.default, x, [D * T]),
        cost(
            torch.ops.prim.device.default, x
        ),  # asks where a tensor is, as a library's attention does
        cost(aten.split.Tensor, x, 5),
        kernel_of(operator.getitem, ((x, x), 0), x),
    ):
        assert view == KernelInfo("other", (), 0, 0, "float32")


def test_only_ops_have_a_cost() -> None:
    with pytest.raises(TypeError, match="OpOverload"):
        kernel_of(torch.add, (meta(2), meta(2)), meta(2))


def test_registry_is_complete() -> None:
    """Every op in the namespace with a kernel has a formula, of the kind that its record says."""
    registered = {
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("piper::")
    }
    collectives = {
        op.name() for op in (all_gather, all_reduce, all_reduce_, all_to_all, reduce_scatter, shift)
    }
    # composed ops are made of other ones, and have no kernel; nor has the wait for a collective
    composed = {attention_with_sinks.name(), float8_linear.name()}
    others = collectives | composed | {fusion.name(), wait.name()}
    assert {f.op.name() for record in PORTABLE.values() for f in record.formulas} | {
        op.name() for op in OF_FLOAT8
    } == registered - others
    for record in PORTABLE.values():
        assert set(record.saved) <= set(record.outputs)
        assert len(record.forward.op._schema.returns) == len(record.outputs)


def test_saved_outputs_are_those_of_autograd() -> None:
    """A record's `saved` against what torch keeps when the op runs."""
    leaf = torch.randn(2, 5, 4, 8, requires_grad=True)
    calls: dict[str, tuple[Any, ...]] = {
        "attention": (leaf, leaf, leaf),
        "layer_norm": (leaf, [8], None, None, 1e-5),
        "rms_norm": (leaf, [8], None, None),
        "cross_entropy": (leaf.view(-1, 8), torch.zeros(40, dtype=torch.int64)),
    }
    for name, args in calls.items():
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t.data_ptr()) or t, lambda t: t
        ):
            outs = PORTABLE[name].forward.op(*args)
        saved = {o for o, t in zip(PORTABLE[name].outputs, outs) if t.data_ptr() in kept}
        assert saved == set(PORTABLE[name].saved)


def test_joint_graph_of_a_block_counts_by_hand(capture: Any, joint: Any) -> None:
    """Matmul FLOPs: forward 2 N per token and backward twice that; attention 4 T per token and width, halved, times
    3.5."""
    width, tokens = H * D, B * T

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.up = (
                nn.RMSNorm(width),
                nn.Linear(width, 3 * width),
                nn.Linear(width, width),
            )

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                t.view(B, T, H, D).transpose(1, 2) for t in self.qkv(self.norm(x)).split(width, 2)
            )
            a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            out: Tensor = self.up(a.transpose(1, 2).reshape(B, T, width))
            return out

    gm, inputs = capture(Block(), torch.randn(B, T, width, requires_grad=True))
    replace_portable(gm)
    totals: dict[str, int] = {}
    for node in joint(gm, inputs).graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            info = piper_ops.kernel_of(node.target, args, node.meta["val"], kwargs)
            totals[info.kind] = totals.get(info.kind, 0) + info.flops
    assert totals["matmul"] == 3 * 2 * tokens * 4 * width * width
    assert totals["attention"] == 3.5 * 4 * tokens * T * width / 2
    assert totals["norm"] == (4 + 7 + 3) * tokens * width
