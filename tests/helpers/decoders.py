"""Small decoders of the kinds that are published, by the fields of a DecoderConfig."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from piper.models import BERTConfig, DecoderConfig, Experts, Latent

BASE = DecoderConfig(
    layers=2, width=16, heads=4, kv_heads=2, hidden=24, vocab=32, length=8, theta=1e4
)
LATENT = Latent(q_rank=10, kv_rank=12, nope_dim=6, rope_dim=4, value_dim=5)
MIXTURE = Experts(number=4, top_k=2, hidden=20)
PLAIN: dict[str, Any] = dict(gated=False, norm="layernorm")
DECODERS: dict[str, DecoderConfig] = {
    "Llama": BASE,
    "Qwen2": replace(BASE, attention_bias="qkv"),
    "Qwen3": replace(BASE, qk_norm=True, head_dim=6),
    "OLMo 2": replace(BASE, norms="after", qk_norm=True, qk_norm_over="all"),
    "Gemma 3": replace(
        BASE, norms="sandwich", activation="gelu_tanh", window=3, window_every=2, qk_norm=True, tied=True
    ),
    "Mistral": replace(BASE, window=3, logit_cap=3.0),
    "Nemotron": replace(BASE, **PLAIN, activation="squared_relu", rotary_part=0.5),
    "GPT-2": replace(
        BASE, **PLAIN, kv_heads=None, positions="learned", activation="gelu_tanh", attention_bias="all", mlp_bias=True,
        tied=True,
    ),
    "GPT-NeoX": replace(
        BASE, **PLAIN, kv_heads=None, activation="gelu", rotary_part=0.5, attention_bias="all", mlp_bias=True, parallel=True,
        parallel_norms=2,
    ),
    "Phi": replace(
        BASE, **PLAIN, activation="relu", rotary_part=0.5, attention_bias="all", mlp_bias=True, parallel=True, head_bias=True
    ),
    "MPT": replace(BASE, **PLAIN, norm_bias=False, activation="gelu", positions="alibi", heads=6, head_dim=4),
    "BLOOM": replace(BASE, attention="math", positions="alibi", embedding_norm=True),
    "sinks": replace(BASE, sinks=True, window=3, window_every=2),
    "no positions": replace(BASE, positions="none"),
    "latent": replace(BASE, kv_heads=None, latent=LATENT),
    "latent, queries of the token": replace(BASE, kv_heads=None, latent=replace(LATENT, q_rank=None)),
    "Mixtral": replace(BASE, experts=MIXTURE),
    "Qwen2-MoE": replace(
        BASE, experts=replace(MIXTURE, shared_hidden=12, shared_gate=True, normalized=False)
    ),
    "DeepSeek-V2": replace(
        BASE, kv_heads=None, latent=LATENT, dense_layers=1,
        experts=replace(MIXTURE, number=8, groups=4, top_groups=2, normalized=False, scale=2.5, shared_hidden=12),
    ),
    "DeepSeek-V3": replace(
        BASE, kv_heads=None, latent=LATENT, dense_layers=1,
        experts=replace(MIXTURE, number=8, groups=4, top_groups=2, score="sigmoid", scale=2.5, shared_hidden=12),
    ),
    "MTP": replace(BASE, mtp=2, kv_heads=None, latent=LATENT, experts=MIXTURE, dense_layers=1, tied=True),
    "GPT-OSS": replace(
        BASE, sinks=True, window=3, window_every=2, attention_bias="all", activation="quick_gelu",
        experts=replace(MIXTURE, bias=True, clamp=0.05),
    ),
    "places and biases": replace(BASE, experts=replace(MIXTURE, bias=True, capacity_factor=1.0)),
    "BERT": BERTConfig(layers=2, width=16, heads=4, vocab=32, length=8, fused_qkv=False),
    "experts without a gate": replace(BASE, gated=False, activation="squared_relu", experts=MIXTURE),
    "sinks written out": replace(BASE, attention="math", sinks=True, window=3, window_every=2),
}  # fmt: skip
"""Small decoders of the kinds that are published."""
