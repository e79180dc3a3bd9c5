"""Make the model of a published run from its columns, and from the words of its note that change a model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from piper import models
from piper.published.run_cluster import software_of
from piper.published.table import PublishedRow
from piper_ir.tools import names

VOCAB = 32_000
"""The tokens of a row that leaves its vocab open: that of sentencepiece models, as open Megatron forks train with."""
PADDED = 128
"""The number to whose multiples, times tp, Megatron pads a vocabulary (--make-vocab-size-divisible-by)."""
LATENT = models.Latent(q_rank=1_536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
"""The latent attention of DeepSeek-V2 and V3 (arXiv 2405.04434, section 3.1.2), which others took over."""
GOLDEN = "functional_tests/test_cases/gpt"
"""The tests of Megatron-LM whose models leave --hidden-dropout at 0.1, its default."""
KERNEL_HEADS = 8
"""The divisor of head dimensions in attention's kernels: torch pads other heads (ATen: attention.cpp, pad_last_dim)."""
FLASH_WORDS = ("FlashAttention", "flash-attn")
"""The words of a note of Megatron in float16 that does not write attention out."""
MODEL_WORDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("latent attention", {"latent": LATENT, "kv_heads": None}),
    ("ALiBi", {"positions": "none"}),  # FlashAttention's kernel adds the bias to the scores
    ("squared ReLU", {"activation": "squared_relu", "attention_bias": "none", "mlp_bias": False}),
    ("rotary", {"positions": "rotary"}),
    ("gated GELU", {"activation": "gelu"}),
    ("QK norm", {"qk_norm": True}),
    ("heads of 128", {"head_dim": 128}),
    ("dropout 0.1", {"dropout": 0.1}),
    ("attention written out", {"attention": "math"}),
)
"""The words of a note that change a model."""


@cache  # rows of one model share one capture, and captures are found by their callables
def _config(fields: tuple[tuple[str, Any], ...]) -> models.DecoderConfig:
    return models.DecoderConfig(**dict(fields))


def model_of(published: PublishedRow) -> tuple[models.DecoderConfig, tuple[str, ...]]:
    """Return the model of a row, and notes on fields in the nearest form."""
    vocab = published.vocab or VOCAB
    if is_megatron(published) or published.tp > 1:
        step = published.tp * (1 if is_nanotron(published) else PADDED)
        vocab = -(-vocab // step) * step
    fields: dict[str, Any] = {
        "layers": published.layers,
        "width": published.hidden,
        "heads": published.heads,
        "kv_heads": published.kv_heads,
        "hidden": published.ffn or 4 * published.hidden,
        "vocab": vocab,
        "length": published.seq,
        "tied": published.tied,
    }
    notes = []
    if published.arch == "gpt":
        half = published.dtype == "fp16" and is_megatron(published)
        flash = any(names(published.note, word) for word in FLASH_WORDS)
        fields |= {"activation": "gelu_tanh", "gated": False, "norm": "layernorm"}
        fields |= {"attention_bias": "all", "mlp_bias": True, "positions": "learned"}
        fields |= {"attention": "math" if half and not flash else "fused"}
        if (half or GOLDEN in published.source) and "no dropout" not in published.note:
            fields["dropout"] = 0.1
    if published.dtype == "fp16":
        notes.append("float16 is computed as bfloat16, which has as many bytes")
    if published.experts is not None:
        hidden = published.expert_ffn or fields["hidden"]
        fields["dense_layers"] = published.dense_layers
        fields["experts"] = models.Experts(
            number=published.experts,
            top_k=published.top_k or 1,
            hidden=hidden,
            shared_hidden=hidden * published.shared_experts,
            capacity_factor=capacity_of(published),
        )
        if capacity_of(published) is None:
            capacity = published.capacity or 1
            if capacity != 1:
                few = "too few" if capacity > 1 else "too many"
                notes.append(
                    f"experts are dropless, and have {few} rows for a capacity of {capacity:g}"
                )
            if published.ep > 1 and published.tp > 1 and not published.seq_parallel:
                notes.append(
                    "experts are whole along tp, which repeats their work: give seq_parallel"
                )
    for words, changes in MODEL_WORDS:
        if published.says(words):
            fields |= changes
    each, rest = divmod(published.hidden, published.heads)
    if (
        not rest
        and each % KERNEL_HEADS
        and fields.get("attention") != "math"
        and not {"latent", "head_dim"} & set(fields)
    ):
        fields["head_dim"] = -(-each // KERNEL_HEADS) * KERNEL_HEADS
        notes.append(
            f"heads of {each} are taken as {fields['head_dim']}, as attention's kernel pads them"
        )
    if published.experts is not None and fields.get("mlp_bias"):
        fields |= {"mlp_bias": False, "experts": replace(fields["experts"], bias=True)}
    if fields.get("dropout") and fields.get("attention") != "math":
        fields["attention_dropout"] = 0.0
        notes.append("attention's kernel draws no dropout")
    return _config(tuple(sorted(fields.items()))), tuple(notes)


def is_nanotron(published: PublishedRow) -> bool:
    """Return whether a run is of nanotron, which pads a vocabulary to a multiple of tp alone."""
    return names(software_of(published), "nanotron")


def is_megatron(published: PublishedRow) -> bool:
    """Return whether a run is of Megatron-LM or of software built on it, by its stack."""
    software = software_of(published)
    words = ("Megatron", "NeMo", "zero-bubble")
    return any(names(software, w) for w in words) and not names(software, "Automodel")


def capacity_of(published: PublishedRow) -> float | None:
    """Return the capacity of a row's experts; None where they are dropless, or devices share the tokens of a row."""
    shared = published.cp > 1 or (published.tp > 1 and published.seq_parallel)
    return None if shared else published.capacity
