"""Write the descriptions of four well-known kinds of models by their sizes alone."""

from __future__ import annotations

from typing import Any

from piper.models.decoder import DecoderConfig
from piper.models.decoder_config import Experts

LlamaConfig = DecoderConfig
"""A description that names nothing but sizes is a Llama (Llama 3, arXiv 2407.21783)."""


def GPTConfig(
    *, layers: int, width: int, heads: int, vocab: int = 50_257, length: int = 2_048, tied: bool = True, **more: Any
) -> DecoderConfig:  # fmt: skip
    """Describe a GPT: learned positions, LayerNorm before each part, GELU, 4 x width wide (GPT-3, arXiv 2005.14165).

    `more` are further fields of DecoderConfig, such as dropout or attention. GPT-3 alternates dense with banded sparse
    attention (section 2.1); here every layer is dense.
    """
    kind: dict[str, Any] = {
        "hidden": 4 * width,
        "activation": "gelu",
        "gated": False,
        "norm": "layernorm",
        "attention_bias": "all",
        "mlp_bias": True,
        "fused_qkv": True,
        "positions": "learned",
    }
    sizes = {"layers": layers, "width": width, "heads": heads, "vocab": vocab, "length": length}
    return DecoderConfig(**{**kind, **sizes, "tied": tied, **more})


def BERTConfig(
    *, layers: int, width: int, heads: int, vocab: int = 30_522, length: int = 512, **more: Any
) -> DecoderConfig:  # fmt: skip
    """Describe a BERT as Megatron-LM builds it, with norms before each part; `more` are further fields.

    It has as many parameters as the published one (arXiv 1810.04805), whose norms stand behind the sum of a part and
    its input, and which has a norm behind the embedding in place of the one behind the last layer.
    """
    kind: dict[str, Any] = {
        "causal": False,
        "token_types": 2,
        "head_transform": True,
        "head_bias": True,
        "pooled_classes": 2,
    }
    sizes = {"layers": layers, "width": width, "heads": heads, "vocab": vocab, "length": length}
    return GPTConfig(**{**kind, **sizes, **more})


def MoEConfig(
    *, hidden: int, experts: int, top_k: int, capacity_factor: float | None = 1.25, balance: float = 0.0, **sizes: Any
) -> DecoderConfig:  # fmt: skip
    """Describe a Llama whose feed-forward parts are mixtures of Qwen3's kind, with a capacity.

    `hidden` is the width of an expert, `sizes` are the other fields of DecoderConfig.
    """
    mixture = Experts(
        number=experts, top_k=top_k, hidden=hidden, capacity_factor=capacity_factor, balance=balance
    )
    return DecoderConfig(hidden=hidden, experts=mixture, **sizes)
