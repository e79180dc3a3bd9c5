"""Attention with sinks equals a softmax with one more column, whose share is dropped: its result and all gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from piper_ops import UnsupportedVariant, attention_with_sinks
from tests.helpers.cases import each_case

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2}
"""The largest norm of a difference over the norm, by dtype: some roundings, since the sums of a sink nearly cancel."""
ROWS, HEADS, DIM = 2, 4, 16


def window(tokens: int, width: int) -> Tensor:
    """Return a causal mask [tokens, tokens]: a query attends to its own key and the width - 1 keys before it."""
    return torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - width)


def with_a_column(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool
) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * DIM**-0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    column = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    shares = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return (shares @ v).transpose(1, 2)


def judged(
    device: str, dtype: torch.dtype, kv_heads: int, tokens: int, mask: Tensor | None, values: int
) -> list[float]:
    """Return the relative errors of the result and of the gradients of q, k, v and sinks, beside a column in float64."""
    shapes = [(ROWS, tokens, h, d) for h, d in ((HEADS, DIM), (kv_heads, DIM), (kv_heads, values))]
    drawn = [torch.randn(s, device=device).to(dtype) for s in (*shapes, (HEADS,))]
    tangent = torch.randn(ROWS, tokens, HEADS, values, device=device).to(dtype)
    mask = None if mask is None else mask.to(device)

    def all_of(function: Callable[..., Tensor], wide: bool) -> list[Tensor]:
        leaves = [(t.double() if wide else t).detach().requires_grad_() for t in drawn]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, tangent.to(out.dtype))]

    causal = mask is None
    found = all_of(lambda *t: attention_with_sinks(*t, mask, causal, None, True), False)
    wanted = all_of(lambda *t: with_a_column(*t, mask, causal), True)
    pairs = zip(found, wanted, strict=True)
    return [float((f.double() - w).norm() / w.norm()) for f, w in pairs]


HOLED = window(9, 9)
HOLED[3] = False


@each_case("dtype", TOLERANCE)
@each_case(
    ("kv_heads", "mask", "values"),
    [
        (4, None, DIM),
        (2, None, DIM),
        (2, window(9, 3), DIM),
        (2, HOLED, DIM),
        (4, window(9, 9).double().log(), DIM),
        (4, None, 24),
    ],
)
def test_it_equals_a_column(
    kv_heads: int, mask: Tensor | None, values: int, dtype: torch.dtype
) -> None:
    """Causal, of grouped heads, in a window, with a query that reads no key, a bias, and where no kernel is fused."""
    if mask is not None and mask.dtype == torch.float64:
        mask = mask.to(dtype)
    assert max(judged("cpu", dtype, kv_heads, 9, mask, values)) < TOLERANCE[dtype]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "mask"),
    [
        (torch.bfloat16, 4, None),  # cuDNN's kernel on sm90, else flash
        (torch.bfloat16, 2, None),  # flash
        (torch.bfloat16, 2, window(100, 16)),  # the efficient kernel
        (torch.float32, 2, None),
    ],
)
def test_it_equals_a_column_on_cuda(dtype: torch.dtype, kv_heads: int, mask: Tensor | None) -> None:
    assert max(judged("cuda", dtype, kv_heads, 100, mask, DIM)) < TOLERANCE[dtype]


def test_what_is_refused() -> None:
    q = torch.randn(2, 9, 4, 8)
    with pytest.raises(UnsupportedVariant, match=r"sinks \(2,\) of torch.float32.*4 heads"):
        attention_with_sinks(q, q, q, torch.ones(2))
    with pytest.raises(UnsupportedVariant, match="has no gradient"):
        attention_with_sinks(q, q, q, torch.ones(4), torch.ones(9, 9).requires_grad_())
