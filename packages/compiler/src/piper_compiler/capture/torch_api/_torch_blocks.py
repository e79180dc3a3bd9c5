"""Hold the private API of torch by which its attention modules are traced into: their parts are ordinary operations.

Dynamo puts a call of nn.MultiheadAttention into the graph as one operation, and modules in eval mode without gradients
take fused kernels of inference. Both compute what the Python code of the same modules computes, which is traced here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.modules import transformer

from piper_compiler.capture.torch_api._torch import in_place

flex = sys.modules[flex_attention.__module__]  # torch.nn.attention has a function of this name
NESTED = "nn.TransformerEncoder over nested tensors"
"""The text by which a capture tells that a model would take nested tensors."""


@contextmanager
def attention_modules_traced() -> Iterator[None]:
    """Let Dynamo trace nn.MultiheadAttention, nn.Transformer and their parts as code, not as fused operations."""
    rules = trace_rules.get_torch_obj_rule_map()
    rule = rules.pop(F.multi_head_attention_forward, None)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            in_place(transformer, {"_detect_is_causal_mask": _as_said}),
            in_place(F, {"_check_key_padding_mask": _check_padding, "_none_or_dtype": _no_dtype}),
            in_place(
                flex, {"_validate_device": _any_device, "_transpose_ordered": _not_transposed}
            ),
            in_place(nn.TransformerEncoder, {"forward": _forward if fused else _ENCODE}),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        if rule is not None:
            rules[F.multi_head_attention_forward] = rule


def _as_said(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Return whether the user says that a mask is causal, without a look at its values.

    torch looks, and takes kernels that make such a mask themselves: the result is the same.
    """
    return is_causal is True


def _no_dtype(mask: Tensor | None) -> None:
    """Return no dtype to compare masks with: where two differ, torch only warns."""


def _any_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Accept tensors of a CPU with gradients: flex_attention is captured, and none of its kernels is asked for."""


def _not_transposed(num_blocks: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks of a block mask, which nothing reads, without the transforms that sort them by keys."""
    return num_blocks, indices


def _check_padding(key_padding_mask: Tensor, src_len: int, bsz: int) -> None:
    if tuple(key_padding_mask.shape) != (bsz, src_len):
        raise AssertionError(
            f"key_padding_mask has the shape {key_padding_mask.shape}, not {(bsz, src_len)}"
        )


_ENCODE = nn.TransformerEncoder.forward


def _forward(
    self: Any,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """Encode as nn.TransformerEncoder does, unless it would take nested tensors for some batches and not for others."""
    if src_key_padding_mask is not None and mask is None and src.dim() == 3 and _may_nest(self):
        torch._dynamo.graph_break(msg=NESTED)
    encoded: Tensor = _ENCODE(self, src, mask, src_key_padding_mask, is_causal)
    return encoded


def _may_nest(encoder: Any) -> bool:
    first = encoder.layers[0]
    if not getattr(encoder, "use_nested_tensor", False) or first.training:
        return False
    return not (torch.is_grad_enabled() and any([p.requires_grad for p in first.parameters()]))
