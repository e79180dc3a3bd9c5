"""Say which decoder a type of Hugging Face's (`model_type`) is: a row of data for each, mixtures in `config_mixtures`.

Names of fields, and the values that a file may leave out, stand in transformers 5's classes of configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.config_mixtures import MIXTURES
from piper.models.config_parts import (
    ATTENTION,
    BASE,
    DEFAULTS,
    LAYERNORM,
    LLAMA,
    MLP,
    OFF,
    PARTLY,
    PLAIN,
    QKV,
    SPLIT,
    UNROTATED,
    WITH_NORMS,
    ConfigRow,
    Fields,
    Unsaid,
    count,
)

_GPT2 = {
    "layers": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
    "vocab": "vocab_size",
    "length": "n_positions",
    "tied": "tie_word_embeddings",
    "eps": "layer_norm_epsilon",
}
_GEMMA = {
    **DEFAULTS,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
}
_BIASED = {**PLAIN, "attention_bias": "all", "mlp_bias": True}
_NEVER = {"qk_layernorm": OFF}
_SCALED = (
    "the embedding is not multiplied by sqrt(width), and norms do not add 1: that takes almost no time",
)


def _gpt2(fields: Fields) -> Mapping[str, Any]:
    return {"hidden": count(fields, "n_inner", 4 * fields["n_embd"])}


def _gptj(fields: Fields) -> Mapping[str, Any]:
    return {
        **_gpt2(fields),
        "rotary_part": count(fields, "rotary_dim", 64) * fields["n_head"] / fields["n_embd"],
    }


def _falcon(fields: Fields) -> Mapping[str, Any]:
    """Say how Falcon's architectures differ: heads of keys, norms, biases and positions."""
    new, heads = (
        fields.get("new_decoder_architecture", False),
        fields.get("num_attention_heads", fields.get("n_head")),
    )
    keys = fields.get("num_kv_heads", fields.get("n_head_kv"))
    said: dict[str, Any] = {
        "hidden": count(fields, "ffn_hidden_size", 4 * fields["hidden_size"]),
        "kv_heads": (keys or heads) if new else 1 if fields.get("multi_query", True) else heads,
        "positions": "alibi" if fields.get("alibi") else "rotary",
    }
    if new or fields.get("parallel_attn", True):
        norms = count(fields, "num_ln_in_parallel_attn", 2 if new else 1)
        said |= {"parallel": True, "parallel_norms": norms}
    return said | ({"attention_bias": "all", "mlp_bias": True} if fields.get("bias") else {})


def _mpt(fields: Fields) -> Mapping[str, Any]:
    """Read MPT's own dictionary of attention."""
    attention = fields.get("attn_config") or {}
    if not isinstance(attention, Mapping):
        raise Unsaid(f"attn_config={attention!r}")
    usual = {
        "attn_type": "multihead_attention",
        "clip_qkv": None,
        "qk_ln": False,
        "prefix_lm": False,
        "alibi_bias_max": 8,
    }
    for name, value in usual.items():
        if attention.get(name, value) != value:
            raise Unsaid(f"attn_config.{name}={attention[name]!r}")
    alibi = attention.get("alibi", True)
    return {
        "hidden": count(fields, "expansion_ratio", 4) * fields["d_model"],
        "positions": "alibi"
        if alibi
        else "learned"
        if fields.get("learned_pos_emb", True)
        else "none",
    }


ROWS: Mapping[str, ConfigRow] = {
    **MIXTURES,
    "llama": ConfigRow(LLAMA, defaults=DEFAULTS, switches={**ATTENTION, **MLP}),
    "mistral": ConfigRow(
        LLAMA, defaults={**DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4_096}, window="always"
    ),
    "qwen2": ConfigRow(LLAMA, {"attention_bias": "qkv"}, DEFAULTS, window="asked"),
    "qwen3": ConfigRow(LLAMA, {"qk_norm": True}, {**DEFAULTS, "head_dim": 128}, ATTENTION, window="asked"),
    "gemma": ConfigRow(LLAMA, {}, _GEMMA, ATTENTION, notes=_SCALED),
    "gemma2": ConfigRow(
        {**LLAMA, "logit_cap": "final_logit_softcapping"}, {"norms": "sandwich"},
        {**_GEMMA, "sliding_window": 4_096, "sliding_window_pattern": 2, "final_logit_softcapping": 30.0}, ATTENTION, "typed",
        notes=_SCALED,
    ),
    "gemma3_text": ConfigRow(
        {**LLAMA, "logit_cap": "final_logit_softcapping"}, {"norms": "sandwich", "qk_norm": True},
        {**_GEMMA, "sliding_window": 4_096, "sliding_window_pattern": 6, "rope_theta": 1e6}, ATTENTION, "typed", notes=_SCALED,
    ),
    "phi": ConfigRow(
        LAYERNORM, {**_BIASED, "parallel": True, "head_bias": True},
        {**WITH_NORMS, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new"}, _NEVER,
    ),
    "phi3": ConfigRow(
        PARTLY, {}, {**DEFAULTS, "rms_norm_eps": 1e-5}, window="always",
        notes=SPLIT,
    ),
    "gpt2": ConfigRow(
        _GPT2, {**_BIASED, "positions": "learned", "fused_qkv": True},
        {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}, derived=_gpt2,
        reads=("n_inner",),
    ),
    "gpt_bigcode": ConfigRow(
        _GPT2, {**_BIASED, "positions": "learned"},
        {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_pytorch_tanh"},
        derived=lambda fields: {**_gpt2(fields), "kv_heads": 1 if fields.get("multi_query", True) else fields["n_head"]},
        reads=("n_inner", "multi_query", "num_key_value_heads", "scale_attention_softmax_in_fp32", "inference_runner",
               "max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input"),
        notes=SPLIT,
    ),
    "gptj": ConfigRow(
        _GPT2, {**PLAIN, "mlp_bias": True, "parallel": True, "head_bias": True, "theta": 10_000.0},
        {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}, derived=_gptj,
        reads=("n_inner", "rotary_dim"),
    ),
    "gpt_neox": ConfigRow(
        {**LAYERNORM, "rotary_part": ("rotary_pct", "partial_rotary_factor"), "theta": ("rotary_emb_base", "rope_theta")},
        {**PLAIN, "mlp_bias": True, "fused_qkv": True},
        {**WITH_NORMS, "rotary_pct": 0.25, "hidden_act": "gelu", "use_parallel_residual": True, "attention_bias": True},
        {**ATTENTION, "use_parallel_residual": {**OFF, True: {"parallel": True, "parallel_norms": 2}}},
    ),
    "falcon": ConfigRow(
        {
            **BASE, "layers": ("num_hidden_layers", "n_layer"), "heads": ("num_attention_heads", "n_head"),
            "eps": "layer_norm_epsilon", "theta": "rope_theta",
        },
        PLAIN,
        {
            "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 2_048,
            "activation": "gelu",
        },
        derived=_falcon,
        reads=(
            "new_decoder_architecture", "num_kv_heads", "n_head_kv", "multi_query", "parallel_attn", "num_ln_in_parallel_attn",
            "alibi", "bias", "ffn_hidden_size",
        ),
    ),
    "starcoder2": ConfigRow(
        {**LLAMA, "eps": "norm_epsilon"}, PLAIN,
        {"tie_word_embeddings": True, "rope_theta": 10_000.0, "norm_epsilon": 1e-5, "use_bias": True,
         "hidden_act": "gelu_pytorch_tanh"},
        {"use_bias": {**OFF, True: {"attention_bias": "all", "mlp_bias": True}}, "mlp_type": {None: {}, "default": {}},
         "norm_type": {None: {}, "layer_norm": {}}},
        window="always",
    ),
    "olmo2": ConfigRow(
        LLAMA, {"norms": "after", "qk_norm": True, "qk_norm_over": "all"}, {**DEFAULTS, "rms_norm_eps": 1e-5}, ATTENTION
    ),
    "olmo3": ConfigRow(
        LLAMA, {"norms": "after", "qk_norm": True, "qk_norm_over": "all"},
        {**DEFAULTS, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "sliding_window": 4_096, "sliding_window_pattern": 4},
        ATTENTION, "typed",
    ),
    "exaone4": ConfigRow(
        LLAMA, {"norms": "after", "qk_norm": True},
        {**DEFAULTS, "rms_norm_eps": 1e-5, "sliding_window": 4_096, "sliding_window_pattern": 4}, window="typed",
        notes=UNROTATED,
    ),
    "smollm3": ConfigRow(
        LLAMA, {}, {**DEFAULTS, "rope_theta": 2e6, "tie_word_embeddings": True}, {**ATTENTION, **MLP}, "asked",
        reads=("no_rope_layers", "no_rope_layer_interval"), notes=UNROTATED,
    ),
    "seed_oss": ConfigRow(
        LLAMA, {}, {**DEFAULTS, "attention_bias": True}, {**QKV, **MLP, "attention_out_bias": OFF}
    ),
    "ernie4_5": ConfigRow(
        LLAMA, {}, {**DEFAULTS, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        {"use_bias": {**OFF, True: {"attention_bias": "all", "mlp_bias": True}}},
    ),
    "arcee": ConfigRow(
        LLAMA, {"gated": False}, {**DEFAULTS, "rms_norm_eps": 1e-5, "hidden_act": "relu2"}, {**ATTENTION, **MLP}
    ),
    "glm": ConfigRow(PARTLY, {}, {**DEFAULTS, "partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128}, QKV),
    "glm4": ConfigRow(
        PARTLY, {"norms": "sandwich"}, {**DEFAULTS, "partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128}, QKV
    ),
    "internlm2": ConfigRow(LLAMA, {}, DEFAULTS, {"bias": OFF}, notes=SPLIT),
    "stablelm": ConfigRow(
        LAYERNORM, {"norm": "layernorm"}, {**WITH_NORMS, "partial_rotary_factor": 0.25},
        {**_NEVER, "use_qkv_bias": {**OFF, True: {"attention_bias": "qkv"}},
         "use_parallel_residual": {**OFF, True: {"parallel": True}}},
    ),
    "cohere": ConfigRow(
        LAYERNORM, {"norm": "layernorm", "norm_bias": False, "parallel": True},
        {**WITH_NORMS, "tie_word_embeddings": True, "rope_theta": 500_000.0}, {**ATTENTION, "use_qk_norm": OFF},
        notes=("logits are not scaled: that takes almost no time",),
    ),
    "cohere2": ConfigRow(
        LAYERNORM, {"norm": "layernorm", "norm_bias": False, "parallel": True},
        {**WITH_NORMS, "tie_word_embeddings": True, "sliding_window": 4_096, "sliding_window_pattern": 4}, ATTENTION, "typed",
        reads=("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing",
               "use_gated_activation", "use_parallel_block", "use_parallel_embedding"),
        notes=("logits are not scaled: that takes almost no time", *UNROTATED),
    ),
    "granite": ConfigRow(
        LLAMA, {}, DEFAULTS, {**ATTENTION, **MLP},
        notes=("embedding, attention, residuals and logits are not scaled: that takes almost no time",),
    ),
    "nemotron": ConfigRow(
        {**PARTLY, "eps": "norm_eps"}, PLAIN,
        {"tie_word_embeddings": False, "rope_theta": 10_000.0, "norm_eps": 1e-5, "partial_rotary_factor": 0.5,
         "hidden_act": "relu2"},
        {**ATTENTION, **MLP},
        notes=("norms do not add 1 to their weights: that takes almost no time",),
    ),
    "mpt": ConfigRow(
        {"layers": "n_layers", "width": "d_model", "heads": "n_heads", "vocab": "vocab_size", "length": "max_seq_len",
         "tied": "tie_word_embeddings", "eps": "layer_norm_epsilon"},
        {**PLAIN, "fused_qkv": True},
        {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "activation": "gelu", "no_bias": True},
        {"no_bias": {True: {"norm_bias": False}, False: {"attention_bias": "all", "mlp_bias": True}}},
        derived=_mpt, reads=("attn_config", "expansion_ratio", "learned_pos_emb", "norm_type"),
    ),
    "bloom": ConfigRow(
        {"layers": "n_layer", "width": ("n_embed", "hidden_size"), "heads": ("num_attention_heads", "n_head"),
         "vocab": "vocab_size", "length": "seq_length", "tied": "tie_word_embeddings", "eps": "layer_norm_epsilon"},
        {**_BIASED, "positions": "alibi", "embedding_norm": True, "fused_qkv": True},
        {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "seq_length": 2_048, "activation": "gelu_new"},
        derived=lambda fields: {"hidden": 4 * (fields.get("n_embed") or fields["hidden_size"])},
    ),
}  # fmt: skip
"""The types (`model_type`) that a DecoderConfig describes to the parameter."""
OTHERS: Mapping[str, str] = {
    "gemma3": "it also sees images; its text_config alone is a gemma3_text",
    "qwen3_next": "its attention is linear in three of four layers",
    "jamba": "most of its layers are no attention",
    "mamba": "it has no attention",
    "mamba2": "it has no attention",
}
"""The reasons why no DecoderConfig describes other types."""
