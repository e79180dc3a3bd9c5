"""Hold descriptions of published models.

tests/captures/test_models.py compares parameter counts with their authors' figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.decoder_config import DecoderConfig, Experts, Latent
from piper.models.decoder_kinds import GPTConfig, LlamaConfig, MoEConfig
from piper_ir.ground.errors import JobError

_LLAMA2: dict[str, Any] = dict(vocab=32_000, length=4_096, theta=1e4)
_QWEN3: dict[str, Any] = dict(vocab=151_936, theta=1e6, eps=1e-6, qk_norm=True)
_MIXTRAL: dict[str, Any] = dict(theta=1e6, length=8_192)
_NEMOTRON: dict[str, Any] = dict(
    norm="layernorm", activation="squared_relu", gated=False, rotary_part=0.5, theta=1e4, vocab=256_000, length=4_096
)  # fmt: skip
_DEEPSEEK: dict[str, Any] = dict(
    heads=128, length=4_096, theta=1e4, eps=1e-6,
    latent=Latent(q_rank=1_536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
)  # fmt: skip

PRESETS: Mapping[str, DecoderConfig] = {
    # arXiv 2005.14165, table 2.1 (175.0B), with GPT-2's vocabulary
    "gpt3-175b": GPTConfig(layers=96, width=12_288, heads=96),
    # arXiv 2307.09288, table 1, and the published weights
    "llama2-7b": LlamaConfig(layers=32, width=4_096, heads=32, hidden=11_008, **_LLAMA2),
    "llama2-13b": LlamaConfig(layers=40, width=5_120, heads=40, hidden=13_824, **_LLAMA2),
    "llama2-70b": LlamaConfig(layers=80, width=8_192, heads=64, kv_heads=8, hidden=28_672, **_LLAMA2),
    # arXiv 2407.21783, table 3, with 128,256 tokens and rows of 8,192 tokens; model cards of 8.03B, 70.6B and 406B
    "llama3-8b": LlamaConfig(layers=32, width=4_096, heads=32, kv_heads=8, hidden=14_336),
    "llama3-70b": LlamaConfig(layers=80, width=8_192, heads=64, kv_heads=8, hidden=28_672),
    "llama3-405b": LlamaConfig(layers=126, width=16_384, heads=128, kv_heads=8, hidden=53_248),
    # model cards of Llama 3.2: 1.24B and 3.21B
    "llama3.2-1b": LlamaConfig(layers=16, width=2_048, heads=32, kv_heads=8, hidden=8_192, tied=True),
    "llama3.2-3b": LlamaConfig(layers=28, width=3_072, heads=24, kv_heads=8, hidden=8_192, tied=True),
    # arXiv 2505.09388, tables 1 and 2, and model cards: 8.2B, 32.8B, 30.5B, 235B
    "qwen3-8b": DecoderConfig(layers=36, width=4_096, heads=32, kv_heads=8, head_dim=128, hidden=12_288, **_QWEN3),
    "qwen3-32b": DecoderConfig(layers=64, width=5_120, heads=64, kv_heads=8, head_dim=128, hidden=25_600, **_QWEN3),
    "qwen3-30b-a3b": DecoderConfig(
        layers=48, width=2_048, heads=32, kv_heads=4, head_dim=128, hidden=6_144, **_QWEN3,
        experts=Experts(number=128, top_k=8, hidden=768),
    ),
    "qwen3-235b-a22b": DecoderConfig(
        layers=94, width=4_096, heads=64, kv_heads=4, head_dim=128, hidden=12_288, **_QWEN3,
        experts=Experts(number=128, top_k=8, hidden=1_536),
    ),
    # arXiv 2401.04088, table 1, and the announcements: 46.7B and 141B
    "mixtral-8x7b": DecoderConfig(
        layers=32, width=4_096, heads=32, kv_heads=8, hidden=14_336, vocab=32_000, **_MIXTRAL,
        experts=Experts(number=8, top_k=2, hidden=14_336),
    ),
    "mixtral-8x22b": DecoderConfig(
        layers=56, width=6_144, heads=48, kv_heads=8, hidden=16_384, vocab=32_768, **_MIXTRAL,
        experts=Experts(number=8, top_k=2, hidden=16_384),
    ),
    # arXiv 2405.04434, section 3.1.2: 236B
    "deepseek-v2": DecoderConfig(
        layers=60, width=5_120, hidden=12_288, vocab=102_400, dense_layers=1, **_DEEPSEEK,
        experts=Experts(
            number=160, top_k=6, hidden=1_536, shared_hidden=3_072, normalized=False, scale=16.0, groups=8, top_groups=3
        ),
    ),
    # arXiv 2412.19437, section 4.2: 671B, without the block that predicts a further token
    "deepseek-v3": DecoderConfig(
        layers=61, width=7_168, hidden=18_432, vocab=129_280, dense_layers=3, **_DEEPSEEK,
        experts=Experts(
            number=256, top_k=8, hidden=2_048, shared_hidden=2_048, score="sigmoid", scale=2.5, groups=8, top_groups=4
        ),
    ),
    # arXiv 2204.06745, section 2: 20,554,567,680
    "gpt-neox-20b": DecoderConfig(
        layers=44, width=6_144, heads=64, hidden=24_576, vocab=50_432, length=2_048, theta=1e4, rotary_part=0.25,
        norm="layernorm", activation="gelu_tanh", gated=False, attention_bias="all", mlp_bias=True, fused_qkv=True,
        parallel=True, parallel_norms=2,
    ),
    # arXiv 2402.16819, table 1: 15.6B; arXiv 2406.11704, table 1: 331.6B and 9.4B of embeddings
    "nemotron-15b": DecoderConfig(layers=32, width=6_144, heads=48, kv_heads=8, hidden=24_576, **_NEMOTRON),
    "nemotron-340b": DecoderConfig(layers=96, width=18_432, heads=96, kv_heads=8, hidden=73_728, **_NEMOTRON),
    # arXiv 2408.00118, tables 1 and 2: 1,180M of embeddings and 26,047M; scores of attention are not capped here
    "gemma2-27b": DecoderConfig(
        layers=46, width=4_608, heads=32, kv_heads=16, head_dim=128, hidden=36_864, vocab=256_000, theta=1e4, eps=1e-6,
        activation="gelu_tanh", norms="sandwich", window=4_096, window_every=2, logit_cap=30.0, tied=True,
    ),
    # arXiv 2211.05100, table 3: 176,247M
    "bloom-176b": DecoderConfig(
        layers=70, width=14_336, heads=112, hidden=57_344, vocab=250_880, length=2_048, norm="layernorm", embedding_norm=True,
        activation="gelu_tanh", gated=False, attention_bias="all", mlp_bias=True, fused_qkv=True, positions="alibi", tied=True,
    ),
    # The 1B and the 9B of the paper that Piper follows (arXiv 2606.11169), by its public artifact (run_megatron.py); these
    # are no models of the Qwen team. What is trained there without a bound on an expert's tokens has capacity factor 1.25.
    "qwen3-moe-1b": MoEConfig(
        layers=16, width=1_024, heads=16, kv_heads=8, hidden=3_584, vocab=151_936, length=512, theta=1e6, eps=1e-6, qk_norm=True,
        experts=4, top_k=2,
    ),
    "qwen3-moe-9b": MoEConfig(
        layers=24, width=2_048, heads=32, kv_heads=8, hidden=7_168, vocab=151_936, length=2_048, theta=1e6, eps=1e-6,
        qk_norm=True, experts=8, top_k=2,
    ),
}  # fmt: skip
"""The descriptions of published models, by name, each under the source of its numbers."""


def preset(name: str) -> DecoderConfig:
    """Return the sizes of a published model; raise JobError, with all known names, for an unknown one."""
    if name not in PRESETS:
        raise JobError(
            f"unknown model {name!r}; known are {', '.join(PRESETS)}, and any DecoderConfig"
        )
    return PRESETS[name]
