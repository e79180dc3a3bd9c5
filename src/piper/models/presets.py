"""Hold sizes of published models.

tests/captures/test_models.py compares parameter counts with their authors' figures.
"""

from __future__ import annotations

from collections.abc import Mapping

from piper.models.decoder_config import DecoderConfig
from piper.models.gpt import GPTConfig
from piper.models.llama import LlamaConfig
from piper.models.moe import MoEConfig
from piper_ir.ground.errors import JobError

Config = DecoderConfig | GPTConfig | LlamaConfig
"""The type of the sizes of any of the models."""

PRESETS: Mapping[str, Config] = {
    "gpt3-175b": GPTConfig(layers=96, width=12_288, heads=96),
    "llama3-8b": LlamaConfig(layers=32, width=4_096, heads=32, kv_heads=8, hidden=14_336),
    "llama3-70b": LlamaConfig(layers=80, width=8_192, heads=64, kv_heads=8, hidden=28_672),
    "llama3-405b": LlamaConfig(layers=126, width=16_384, heads=128, kv_heads=8, hidden=53_248),
    "qwen3-moe-1b": MoEConfig(
        layers=16, width=1_024, heads=16, kv_heads=8, hidden=3_584, vocab=151_936, length=512, theta=1e6, eps=1e-6, qk_norm=True,
        experts=4, top_k=2,
    ),
    "qwen3-moe-9b": MoEConfig(
        layers=24, width=2_048, heads=32, kv_heads=8, hidden=7_168, vocab=151_936, length=2_048, theta=1e6, eps=1e-6,
        qk_norm=True, experts=8, top_k=2,
    ),
}  # fmt: skip
"""The sizes of published models, by name.

GPT-3: arXiv 2005.14165, table 2.1 (175.0B), with GPT-2's vocabulary. Llama 3: arXiv 2407.21783, table 3, with 128,256
tokens and rows of 8,192 tokens; model cards of 8.03B, 70.6B and 406B parameters. Qwen3-like: the 1B and the 9B of the
paper that Piper follows (arXiv 2606.11169), by its public artifact (run_megatron.py); these are no models of the Qwen
team. Models that are trained there without a bound on an expert's tokens have capacity factor 1.25 here.
"""


def preset(name: str) -> Config:
    """Return the sizes of a published model; raise JobError, with all known names, for an unknown one."""
    if name not in PRESETS:
        raise JobError(
            f"unknown model {name!r}; known are {', '.join(PRESETS)}, and any DecoderConfig, GPTConfig, LlamaConfig or MoEConfig"
        )
    return PRESETS[name]
