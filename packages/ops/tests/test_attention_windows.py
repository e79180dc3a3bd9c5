"""Attention in a window equals attention under its mask, alone or of devices that share tokens, in linear memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from piper_ops import (
    UnsupportedVariant,
    attention,
    attention_dgrad,
    attention_with_sinks,
    cpu_workspace,
    cuda_workspace,
)
from piper_ops.attention.sdpa_kernels import KERNELS, AttentionInputs
from piper_ops.attention.windows import in_window
from piper_ops.costing.workspace import peak_bytes_inside
from piper_ops.ground.library import OP_KERNELS
from tests.helpers.cases import each_case

TOKENS, HEADS, DIM = 300, 4, 8


def drawn(tokens: int, heads: int, dim: int = DIM, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, tokens, heads, dim).to(dtype)


def masked(window: int, tokens: int = TOKENS) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - window)


def away(found: Any, wanted: Any) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


@each_case("window", [1, 5, 200, TOKENS - 1, TOKENS, 10 * TOKENS])
@each_case(("kv_heads", "values"), [(4, DIM), (2, DIM), (4, 6)])
def test_it_equals_a_mask(window: int, kv_heads: int, values: int) -> None:
    """A window computes the same as its mask, in one block and in several, with grouped heads, fused and unfused.

    A window larger than the sequence is plain causal attention.
    """
    q, k, v = drawn(TOKENS, HEADS), drawn(TOKENS, kv_heads), drawn(TOKENS, kv_heads, values)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    grad = drawn(TOKENS, HEADS, values)
    results = []
    for options in ((None, True, 0.3, True, window), (masked(window), False, 0.3, True)):
        out, lse = attention(q, k, v, *options)
        results.append((out.detach(), lse, *torch.autograd.grad(out, leaves, grad)))
    assert away(*results) < 1e-12
    sinks = torch.randn(HEADS, dtype=torch.float64).requires_grad_()
    found, wanted = (
        attention_with_sinks(q, k, v, sinks, *options)
        for options in ((None, True, 0.3, True, window), (masked(window), False, 0.3, True))
    )
    both = (torch.autograd.grad(out, (*leaves, sinks), grad) for out in (found, wanted))
    assert away([found.detach()], [wanted.detach()]) < 1e-12 and away(*both) < 1e-11


def shared(tensor: Tensor, place: int, degree: int, order: str, dim: int = 1) -> Tensor:
    parts = tensor.chunk(2 * degree if order == "zigzag" else degree, dim)
    own = [parts[place], parts[2 * degree - 1 - place]] if order == "zigzag" else [parts[place]]
    return torch.cat(own, dim)


@each_case("order", ["blocks", "zigzag"])
@each_case("window", [3, 140, 290])
def test_devices_that_share_tokens_have_parts_of_it(window: int, order: str) -> None:
    """Gradients of keys are the sum of the devices' parts; the workspace is alike on all of them."""
    q, k, v = drawn(TOKENS, HEADS), drawn(TOKENS, 2), drawn(TOKENS, 2)
    grad, degree = drawn(TOKENS, HEADS), 2
    out, lse = attention(q, k, v, masked(window), False, None, True)
    gq, *of_keys = attention_dgrad(grad, q, k, v, out, lse, masked(window))
    sums = [torch.zeros_like(k), torch.zeros_like(v)]
    for place in range(degree):
        at = place, degree, order
        own_q, own_grad, own_out, own_gq = (shared(t, *at) for t in (q, grad, out, gq))
        forward = own_q, k, v, None, True, None, True, window, *at
        found = attention(*forward)
        assert away(found, (own_out, shared(lse, *at, dim=2))) < 1e-12
        backward = own_grad, own_q, k, v, *found, None, True, None, window, *at
        grads = attention_dgrad(*backward)
        assert away([grads[0]], [own_gq]) < 1e-12
        for total, part in zip(sums, grads[1:], strict=True):
            total.add_(part)
        for op, args, results in ((attention, forward, found), (attention_dgrad, backward, grads)):
            assert cpu_workspace(op, args, results) == peak_bytes_inside(OP_KERNELS[op], *args)
    assert away(sums, of_keys) < 1e-11


@each_case("dtype", [torch.float64, torch.bfloat16])
def test_its_memory_is_linear_in_tokens_and_counted(dtype: torch.dtype) -> None:
    """Twice the tokens take the mask of a block once, and less than twice the bytes."""
    found: list[tuple[int, int]] = []
    for tokens in (1_000, 2_000):
        q, k, v = (drawn(tokens, 2, dtype=dtype) for _ in range(3))
        forward = q, k, v, None, True, None, False, 100
        out, lse = OP_KERNELS[attention](*forward)
        backward = q, q, k, v, out, lse, None, True, None, 100
        inside = [
            peak_bytes_inside(OP_KERNELS[op], *args)
            for op, args in ((attention, forward), (attention_dgrad, backward))
        ]
        assert cpu_workspace(attention, forward, (out, lse)) == inside[0]
        assert cpu_workspace(attention_dgrad, backward, (q, k, v)) == inside[1]
        found.append((inside[0], inside[1]))
    (forward_1, backward_1), (forward_2, backward_2) = found
    assert forward_1 == forward_2 < 1_000 * 1_000 * dtype.itemsize
    sums = 2 * 2 * 1_000 * 2 * DIM * 4 if dtype == torch.bfloat16 else 0
    assert backward_2 - backward_1 == sums, "gradients of keys and values in float32"


def test_flash_on_cuda_skips_keys_itself() -> None:
    """Its schema and shapes on meta: as a whole, and in the two blocks of tokens of one device of two."""
    half, whole = (torch.empty(2, n, 4, 32, dtype=torch.bfloat16, device="meta") for n in (64, 128))
    forward, backward = in_window("cuda_flash", *KERNELS["cuda_flash"])
    for q, at in ((whole, (0, 1, "")), (half, (1, 2, "zigzag"))):
        keys = whole.transpose(1, 2)
        given = AttentionInputs(q.transpose(1, 2), keys, keys, None, True, 0.1, 20, *at)
        out, lse = forward(given)
        assert out.shape == given.q.shape and lse.shape == given.q.shape[:3]
        grads = backward(out, out, lse, given)
        assert [g.shape for g in grads] == [t.shape for t in given[:3]]
    call = whole, whole, whole, None, True, None, False, 20
    assert cuda_workspace(attention, call, (whole, torch.empty(2, 4, 128))).bytes == 0  # type: ignore[union-attr]  # counted


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("dtype", "loose"), [(torch.bfloat16, 3e-2), (torch.float32, 5e-6), (torch.float64, 1e-12)]
)
def test_it_equals_a_mask_on_cuda(dtype: torch.dtype, loose: float) -> None:
    """The dtypes choose FlashAttention, the efficient kernel in blocks, and attention written out in blocks."""
    drawn_on = [drawn(TOKENS, heads, 32, dtype).cuda() for heads in (HEADS, 2, 2, HEADS)]
    results = []
    for wide, options in (
        (False, (None, True, 0.3, True, 40)),
        (True, (masked(40).cuda(), False, 0.3, True)),
    ):
        *leaves, grad = (t.double() if wide else t for t in drawn_on)
        out, _ = attention(*(t.requires_grad_() for t in leaves), *options)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, grad)))
    pairs = zip(*results, strict=True)
    assert max(float((a.double() - b).norm() / b.norm()) for a, b in pairs) < loose


def test_what_is_refused() -> None:
    q = drawn(9, 4)
    for options in ((True, None, False, -1), (False, None, False, 3), (True, None, False, 3, 0, 2)):
        with pytest.raises(UnsupportedVariant, match="needs is_causal and as many keys"):
            attention(q, q, q, None, *options)
