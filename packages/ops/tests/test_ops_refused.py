"""Calls that have no portable operation are refused with the op, its variant, the line and a way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import piper_ops
from packages.ops.tests.test_ops_replace import (
    MASK,
    TARGET,
    f64,
    flex_trained,  # noqa: F401 - a fixture that holds here, too
    split,
    x,
)
from piper_ops import UnsupportedVariant, replace_portable


def autocast(a: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return a @ a.mT


def lstm(a: Tensor) -> Tensor:
    out: Tensor = LSTM(a)[0]
    return out


TABLE = torch.linspace(0, 1, 32, dtype=f64).view(4, 8)


LSTM = nn.LSTM(16, 16, dtype=f64)


MHA = nn.MultiheadAttention(16, 4, batch_first=True, dtype=f64)


LINEAR = nn.Linear(16, 16, dtype=f64)


ROWS = TARGET.clamp(0)


REFUSED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "attention with a mask that is causal, too": (
        lambda a: F.scaled_dot_product_attention(*[split(a)] * 3, attn_mask=MASK, is_causal=True),
        "attn_mask together with is_causal",
        "Put the causal part into the mask",
    ),
    "flex_attention that looks up a row of a table": (
        lambda a: flex_attention(
            *[split(a)] * 3, score_mod=lambda score, b, h, i, j: score + TABLE[h][j]
        ),
        "flex_attention: getitem in its score_mod or mask_mod",
        r"table\[b, q_idx\]",
    ),
    "flex_attention with a sum": (
        lambda a: flex_attention(
            *[split(a)] * 3, score_mod=lambda score, b, h, i, j: score + score.sum()
        ),
        "flex_attention: sum in its score_mod or mask_mod",
        "element-wise operations",
    ),
    "norm of two dtypes": (
        lambda a: F.layer_norm(a.bfloat16(), (16,), torch.ones(16)),
        "layer_norm: weight or bias .*float32 beside an input of torch.bfloat16",
        "one shape and dtype",
    ),
    "legacy reduction": (
        lambda a: F.cross_entropy(a.view(-1, 16), ROWS.view(-1), size_average=False),
        "cross_entropy: the legacy arguments",
        "reduction='mean'",
    ),
    "fused attention of inference": (
        lambda a: (
            torch._native_multi_head_attention(
                a, a, a, 16, 4, *(p.detach() for p in MHA.parameters())
            )[0]
            * a
        ),
        "_native_multi_head_attention: ",
        "nn.MultiheadAttention",
    ),
    "nn.LSTM": (lstm, "lstm: fused recurrent", r"region\(opaque=True\)"),
    "batch norm in training": (
        nn.BatchNorm1d(8, dtype=f64),
        "batch_norm: batch statistics",
        "LayerNorm",
    ),
    "batch norm without running statistics": (
        nn.BatchNorm1d(8, track_running_stats=False, dtype=f64).eval(),
        "batch_norm: batch statistics",
        "LayerNorm",
    ),
    "instance norm": (
        nn.InstanceNorm1d(8, track_running_stats=True, dtype=f64),
        "instance_norm: ",
        "track_running_stats=False",
    ),
    "native layer norm": (
        lambda a: torch.native_layer_norm(a, (16,), None, None, 1e-5)[0],
        "native_layer_norm: ",
        "F.layer_norm",
    ),
    "autocast": (autocast, "autocast: autocast inside", "Precision"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:size_average and reduce:UserWarning")
def test_refused_with_op_variant_line_and_way_out(name: str, capture: Any) -> None:
    fn, words, way_out = REFUSED[name]
    gm, _ = capture(fn, x())
    with pytest.raises(UnsupportedVariant, match=f"(?s){words}.*{way_out}") as caught:
        replace_portable(gm)
    if not isinstance(fn, nn.Module):  # a bare torch module has no line of the user's
        lines, first = inspect.getsourcelines(fn)
        named = [f"{__file__}:{first + i}" for i in range(len(lines))]
        assert any(f"{line})" in str(caught.value) for line in named)


def test_every_refusal_is_a_sentence_with_a_way_out() -> None:
    for refusal in piper_ops.REFUSALS.values():
        assert refusal.reason and refusal.way_out.endswith(".")
