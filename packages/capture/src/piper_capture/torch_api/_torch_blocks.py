"""Hold the private API of torch that lets Dynamo trace into its attention modules as ordinary operators.

Dynamo puts a call of nn.MultiheadAttention into the graph as one node, and modules in eval mode without gradients use
fused inference kernels. Both give the results of the modules' Python code, which is traced here instead.
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

from piper_capture.torch_api._torch import in_place

flex = sys.modules[flex_attention.__module__]  # torch.nn.attention has a function of this name
NESTED = "nn.TransformerEncoder over nested tensors"
"""The graph break message of a model that would take nested tensors."""


@contextmanager
def attention_modules_traced() -> Iterator[None]:
    """Let Dynamo trace nn.MultiheadAttention, nn.Transformer and their parts as Python code, not as fused operators."""
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
    """Return whether the user says that a mask is causal, without reading its values.

    torch reads them, to use kernels that make a causal mask themselves: the result is the same.
    """
    return is_causal is True


def _no_dtype(mask: Tensor | None) -> None:
    """Return no dtype to compare masks with: if two differ, torch only warns."""


def _any_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Accept CPU tensors that require gradients: flex_attention is only captured, none of its kernels runs."""


def _not_transposed(num_blocks: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks of a block mask unchanged, without the transforms that sort them: nothing reads the result."""
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
    """Encode like nn.TransformerEncoder, but break the graph if it would take nested tensors for some batches only."""
    if src_key_padding_mask is not None and mask is None and src.dim() == 3 and _may_nest(self):
        torch._dynamo.graph_break(msg=NESTED)
    encoded: Tensor = _ENCODE(self, src, mask, src_key_padding_mask, is_causal)
    return encoded


def _may_nest(encoder: Any) -> bool:
    first = encoder.layers[0]
    if not getattr(encoder, "use_nested_tensor", False) or first.training:
        return False
    return not (torch.is_grad_enabled() and any([p.requires_grad for p in first.parameters()]))
