"""Each op equals eager torch: outputs and gradients in float64, layouts and dtypes in the others, fake against real."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import piper_ops
from piper_ops.attention.sdpa_kernels import KERNELS, AttentionInputs
from piper_ops.ground import library
from piper_ops.pointwise import losses
from tests.helpers.cases import each_case

TOLERANCE = 1e-12


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def agree(
    ours: Callable[..., Tensor], eager: Callable[..., Tensor], *inputs: Tensor | None
) -> float:
    """Largest difference of output and gradients, which flow from a random, transposed tangent."""
    leaves = [
        t.detach().requires_grad_() for t in inputs if t is not None and t.is_floating_point()
    ]
    fill = iter(leaves)
    args = [next(fill) if t is not None and t.is_floating_point() else t for t in inputs]
    results = []
    tangent: Tensor | None = None
    for function in (ours, eager):
        out = function(*args)
        if tangent is None:
            tangent = rand(*out.shape[::-1]).permute(tuple(range(out.dim()))[::-1]).to(out.dtype)
        results.append((out, *torch.autograd.grad(out, leaves, tangent)))
    return max(float((a - b).detach().abs().max()) for a, b in zip(*results, strict=True))


def ours_attention(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    kwargs["mask"] = kwargs.pop("attn_mask", None)
    out: Tensor = piper_ops.attention(*(t.transpose(1, 2) for t in (q, k, v)), **kwargs)[0]
    return out.transpose(1, 2)


CAUSAL_MASK = torch.ones(9, 9, dtype=torch.bool).tril()
HOLED_MASK = CAUSAL_MASK.clone()
HOLED_MASK[3] = False

ATTENTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), {}),
    "causal": ((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"is_causal": True}),
    "wide": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"is_causal": True}),
    "tall": ((2, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 8), {"is_causal": True}),
    "scale": ((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"scale": 0.7}),
    "bool_mask": ((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": CAUSAL_MASK}),
    "row_masked_whole": ((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": HOLED_MASK}),
    "bias": ((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": rand(2, 1, 9, 9)}),
    "key_bias": ((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": rand(2, 1, 1, 9)}),
    "head_bias": ((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": rand(4, 9, 9)}),
    "grouped": ((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8), {"is_causal": True, "enable_gqa": True}),
    "other_v": ((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 6), {"is_causal": True}),
}


@each_case("name", ATTENTIONS)
def test_attention_equals_eager(name: str) -> None:
    q, k, v, kwargs = ATTENTIONS[name]
    ours, eager = (
        partial(function, **kwargs) for function in (ours_attention, F.scaled_dot_product_attention)
    )
    assert agree(ours, eager, rand(*q), rand(*k), rand(*v)) < TOLERANCE


def test_agree_sees_a_wrong_attention() -> None:
    t = [rand(2, 4, 9, 8) for _ in range(3)]
    assert (
        agree(lambda *t: ours_attention(*t, is_causal=True), F.scaled_dot_product_attention, *t)
        > 0.1
    )


@each_case("name", ATTENTIONS)
def test_math_lowering_equals_eager(name: str) -> None:
    """The fallback, which no CPU call above but "other_v" takes."""
    q, k, v, kwargs = ATTENTIONS[name]
    tensors = [rand(*s).requires_grad_() for s in (q, k, v)]
    ref = F.scaled_dot_product_attention(*tensors, **kwargs)
    tangent = rand(*ref.shape)
    mask = kwargs.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill_(~mask, float("-inf"))
    given = AttentionInputs(*tensors, mask, kwargs.get("is_causal", False), kwargs.get("scale"))
    forward, backward = KERNELS["math"]
    with torch.no_grad():
        out, lse = forward(given)
        grads = backward(tangent, out, lse, given)
    expected = (ref, *torch.autograd.grad(ref, tensors, tangent))
    assert (
        max(
            float((a - b).detach().abs().max())
            for a, b in zip((out, *grads), expected, strict=True)
        )
        < TOLERANCE
    )


def test_attention_of_strided_qkv_has_contiguous_results() -> None:
    """Views of one fused projection, a head_dim that is not the fastest, and the expanded tangent of sum()."""
    qkv = rand(2, 9, 3, 4, 8).requires_grad_()
    q, k, v = qkv.unbind(2)
    slow = rand(2, 9, 8, 4).requires_grad_()
    out, lse = piper_ops.attention(q, slow.transpose(2, 3), v, None, True)
    ref = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, slow.transpose(2, 3), v)), is_causal=True
    )
    assert out.is_contiguous() and out.shape == (2, 9, 4, 8)
    assert lse.is_contiguous() and lse.shape == (2, 4, 9) and lse.dtype == torch.float64
    ours, eager = (torch.autograd.grad(t.sum(), (qkv, slow)) for t in (out, ref))
    assert max(float((a - b).abs().max()) for a, b in zip(ours, eager, strict=True)) < TOLERANCE
    grads = piper_ops.attention_dgrad(out.detach().expand_as(out), q, k, v, out, lse, None, True)
    assert all(g.is_contiguous() for g in grads)


@each_case(("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)])
@each_case("shape", [(8,), (3, 8)])
def test_layer_norm_equals_eager(shape: tuple[int, ...], weight: bool, bias: bool) -> None:
    w, b = (rand(*shape) if given else None for given in (weight, bias))

    def ours(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        out: Tensor = piper_ops.layer_norm(x, shape, w, b, 1e-5)[0]
        return out

    assert (
        agree(ours, lambda x, w, b: F.layer_norm(x, shape, w, b), rand(2, 5, 3, 8), w, b)
        < TOLERANCE
    )


@each_case("dtype", [torch.bfloat16, torch.float32, torch.float64])
@each_case("mask", [[True, True], [True, False], [False, True]])
def test_layer_norm_gradients_together_are_those_apart(
    dtype: torch.dtype, mask: list[bool]
) -> None:
    x, tangent, w = rand(2, 5, 8, dtype=dtype), rand(2, 5, 8, dtype=dtype), rand(8, dtype=dtype)
    _, mean, rstd = piper_ops.layer_norm(x, [8], w, None, 1e-5)
    both = piper_ops.layer_norm_backward(tangent, x, [8], mean, rstd, w, mask)
    apart = (
        piper_ops.layer_norm_dgrad(tangent, x, [8], mean, rstd, w),
        *piper_ops.layer_norm_wgrad(tangent, x, [8], mean, rstd, dtype, mask),
    )
    for a, b in zip(both, apart, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


BY_EXPERTS = {n for n in piper_ops.PORTABLE if n.startswith("experts_")} | {
    "route",
    "grouped_mm",
    "grouped_mm_wgrad_",
    "grouped_add",
    "unroute",
}
OF_EXPERTS = {f.op for p in piper_ops.PORTABLE.values() if p.name in BY_EXPERTS for f in p.formulas}
"""Those of test_expert_ops and test_expert_rounds."""


@each_case("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_kernels_called_directly_give_what_the_ops_give(dtype: torch.dtype) -> None:
    x, w, stat = (
        rand(2, 5, 8, dtype=dtype),
        rand(8, dtype=dtype),
        rand(2, 5, 1, dtype=library.accumulate_dtype(dtype)),
    )
    args = {op: a for op, a in call_args(dtype, grad=False).values()}
    args[piper_ops.layer_norm_dgrad] = (x, x, [8], stat, stat, w)
    args[piper_ops.layer_norm_wgrad] = (x, x, [8], stat, stat, dtype, [True, False])
    args[piper_ops.layer_norm_backward] = (x, x, [8], stat, stat, w, [True, True])
    q, k, v, *options = args[piper_ops.attention]
    out, lse = piper_ops.attention(q, k, v, *options)
    args[piper_ops.rms_norm_dgrad], args[piper_ops.rms_norm_wgrad] = (
        (x, x, [8], stat, w),
        (x, x, [8], stat, dtype),
    )
    logits, target, *how = args[piper_ops.cross_entropy]
    loss, of_rows = piper_ops.cross_entropy(logits, target, *how)
    args[piper_ops.cross_entropy_dgrad] = (loss, logits, target, of_rows, *how)
    args[piper_ops.attention_dgrad] = (out, q, k, v, out, lse, *options[:3])
    matrix, scale, narrow = rand(4, 8, dtype=dtype), torch.ones(4, 1), torch.float8_e4m3fn
    args[piper_ops.float8_scale] = matrix, 1, 0, narrow, True
    args[piper_ops.float8_cast] = matrix, scale, narrow
    left, right = matrix.to(narrow), matrix.t().to(narrow)
    args[piper_ops.float8_mm] = left, scale, right, scale.t(), dtype, False
    for op, kernel in piper_ops.DIRECT.items():
        if op in OF_EXPERTS:
            continue
        ours, theirs = (
            found if isinstance(found, tuple) else (found,)
            for found in (kernel(*args[op]), op(*args[op]))
        )
        assert [t.stride() for t in ours] == [t.stride() for t in theirs]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), op


@each_case("weight", [True, False])
@each_case("eps", [None, 1e-3])
def test_rms_norm_equals_eager(weight: bool, eps: float | None) -> None:
    def ours(x: Tensor, w: Tensor | None) -> Tensor:
        out: Tensor = piper_ops.rms_norm(x, (3, 8), w, eps)[0]
        return out

    w = rand(3, 8) if weight else None
    assert agree(ours, lambda x, w: F.rms_norm(x, (3, 8), w, eps), rand(2, 5, 3, 8), w) < TOLERANCE


@each_case("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm_default_eps_is_torchs(dtype: torch.dtype) -> None:
    tiny = torch.full((1, 8), 1e-5, dtype=dtype)
    torch.testing.assert_close(
        piper_ops.rms_norm(tiny, (8,), None, None)[0], F.rms_norm(tiny, (8,))
    )


@each_case("reduction", ["mean", "sum", "none"])
@each_case("ignore", [-100, 3])
def test_cross_entropy_equals_eager(
    reduction: str, ignore: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(losses.SLICE_ELEMENTS, "cpu", 21)  # three rows a slice
    target = torch.tensor([0, 3, 6, 3, 1, 2, 5, 5, 3, 0])
    if ignore == -100:
        target[4] = ignore

    def ours(x: Tensor) -> Tensor:
        loss: Tensor = piper_ops.cross_entropy(x, target, reduction, ignore)[0]
        return loss

    eager = partial(F.cross_entropy, target=target, reduction=reduction, ignore_index=ignore)
    assert agree(ours, eager, 3 * rand(10, 7)) < TOLERANCE


@each_case("dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_in_slices_of_half_precision(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient, which is made from the logsumexp, is torch's up to the rounding of the result."""
    monkeypatch.setitem(losses.SLICE_ELEMENTS, "cpu", 21)  # three rows a slice
    logits, target = (
        (5 * rand(8, 7)).to(dtype).requires_grad_(),
        torch.tensor([0, 3, -100, 6, 1, 1, -100, 2]),
    )
    exact = logits.detach().double().requires_grad_()
    (ours,) = torch.autograd.grad(piper_ops.cross_entropy(logits, target)[0], logits)
    (theirs,) = torch.autograd.grad(F.cross_entropy(exact, target), exact)
    torch.testing.assert_close(ours, theirs.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert not ours[2].any() and not ours[6].any()


def test_cross_entropy_of_ignored_targets_only_is_torchs() -> None:
    logits = rand(4, 7).requires_grad_()
    target = torch.full((4,), -100)
    for reduction in ("mean", "sum"):
        ours = piper_ops.cross_entropy(logits, target, reduction)[0]
        eager = F.cross_entropy(logits, target, reduction=reduction)
        torch.testing.assert_close(ours, eager, equal_nan=True)
        torch.testing.assert_close(
            *(torch.autograd.grad(t, logits)[0] for t in (ours, eager)), equal_nan=True
        )


def test_cross_entropy_target_out_of_range_is_refused() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        piper_ops.cross_entropy(rand(2, 7), torch.tensor([1, 7]))


def call_args(
    dtype: torch.dtype, grad: bool
) -> dict[str, tuple[torch._ops.OpOverload, tuple[Any, ...]]]:
    def t(*shape: int) -> Tensor:
        return rand(*shape, dtype=dtype).requires_grad_(grad)

    target = torch.tensor([0, -100, 4])
    return {
        "attention": (
            piper_ops.attention,
            (t(2, 5, 4, 8), t(2, 5, 2, 8), t(2, 5, 2, 8), None, True, None, True),
        ),
        "attention_mask": (
            piper_ops.attention,
            (t(2, 9, 4, 8), t(2, 9, 4, 8), t(2, 9, 4, 8), CAUSAL_MASK),
        ),
        "layer_norm": (piper_ops.layer_norm, (t(2, 5, 8), [8], t(8), t(8), 1e-5)),
        "layer_norm_plain": (piper_ops.layer_norm, (t(2, 5, 8), [8], None, None, 1e-5)),
        "rms_norm": (piper_ops.rms_norm, (t(2, 5, 8), [8], t(8), None)),
        "cross_entropy": (piper_ops.cross_entropy, (t(3, 7), target, "mean", -100)),
        "cross_entropy_none": (piper_ops.cross_entropy, (t(3, 7), target, "none", -100)),
    }


@each_case("dtype", [torch.bfloat16, torch.float32, torch.float64])
@each_case("name", call_args(torch.float32, grad=True))
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    """torch's own check: schema, autograd registration, and that fake and real results agree in shape, dtype and
    strides."""
    op, args = call_args(dtype, grad=True)[name]
    torch.library.opcheck(
        op, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


@pytest.mark.parametrize("name", call_args(torch.float32, grad=True))
def test_opcheck_aot(name: str) -> None:
    op, args = call_args(torch.float64, grad=True)[name]
    torch.library.opcheck(op, args, test_utils=("test_aot_dispatch_static",))


@each_case("name", call_args(torch.float32, grad=True))
def test_gradcheck(name: str) -> None:
    op, args = call_args(torch.float64, grad=True)[name]
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]

    def function(*values: Tensor) -> Tensor:
        given = iter(values)
        out: Tensor = op(
            *(next(given) if isinstance(a, Tensor) and a.requires_grad else a for a in args)
        )[0]
        return out

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@each_case("name", call_args(torch.float32, grad=True))
def test_bfloat16_close_to_float64(name: str) -> None:
    """Statistics are float32, and the gradients are those of exact arithmetic to bfloat16's 8 bits."""
    op, args = call_args(torch.bfloat16, grad=True)[name]
    exact = [
        a.detach().double().requires_grad_() if isinstance(a, Tensor) and a.requires_grad else a
        for a in args
    ]
    results = []
    for values in (args, exact):
        out, *stats = op(*values)
        leaves = [a for a in values if isinstance(a, Tensor) and a.requires_grad]
        results.append((out, *torch.autograd.grad(out.sum() + (out * out).sum(), leaves)))
        assert all(s.dtype == (torch.float32 if values is args else torch.float64) for s in stats)
    kinds = [
        torch.float32 if name.startswith("cross_entropy") else torch.bfloat16,
        *[torch.bfloat16] * (len(results[0]) - 1),
    ]
    for ours, true, dtype in zip(*results, kinds, strict=True):
        assert ours.dtype == dtype, "a loss has more digits than what it is made of"
        torch.testing.assert_close(ours.double(), true, rtol=0.05, atol=0.05)


def test_meta_results_are_those_of_cpu() -> None:
    for op, args in call_args(torch.bfloat16, grad=False).values():
        real = op(*args)
        meta = op(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
        assert [(m.shape, m.dtype, m.stride()) for m in meta] == [
            (r.shape, r.dtype, r.stride()) for r in real
        ]


def test_double_backward_is_refused() -> None:
    x = rand(2, 8).requires_grad_()
    out = piper_ops.layer_norm(x, [8], None, None, 1e-5)[0]
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"layer_norm_dgrad.*double backward"):
        torch.autograd.grad(grad.sum(), x)


@each_case(
    ("call", "words"),
    [
        (lambda: piper_ops.attention(rand(2, 5, 8), rand(2, 5, 8), rand(2, 5, 8)), "4-dimensional"),
        (
            lambda: piper_ops.attention(rand(2, 5, 4, 8), rand(2, 5, 2, 8), rand(2, 5, 2, 8)),
            "enable_gqa",
        ),
        (
            lambda: piper_ops.attention(rand(2, 5, 4, 8), rand(1, 5, 4, 8), rand(1, 5, 4, 8)),
            "broadcast",
        ),
        (
            lambda: piper_ops.attention(*[rand(2, 9, 4, 8)] * 3, CAUSAL_MASK, True),
            "together with is_causal",
        ),
        (lambda: piper_ops.attention(*[rand(2, 8, 4, 8)] * 3, CAUSAL_MASK), "does not broadcast"),
        (
            lambda: piper_ops.attention(*[rand(2, 9, 4, 8)] * 3, rand(9, 9).requires_grad_()),
            "requires a gradient",
        ),
        (lambda: piper_ops.layer_norm(rand(2, 8), [7], None, None, 1e-5), "normalized_shape"),
        (
            lambda: piper_ops.layer_norm(rand(2, 8), [8], torch.ones(8), None, 1e-5),
            "torch.float32 beside.*torch.float64",
        ),
        (lambda: piper_ops.cross_entropy(rand(2, 8), torch.zeros(2, dtype=torch.int32)), "int64"),
        (
            lambda: piper_ops.cross_entropy(rand(2, 8), torch.zeros(2, dtype=torch.int64), "max"),
            "none, mean, sum",
        ),
    ],
)
def test_unsupported_variants_are_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(piper_ops.UnsupportedVariant, match=words):
        call()
