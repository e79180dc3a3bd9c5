"""Say which decoder a type of Hugging Face's (`model_type`) is: a row of data for each.

Names of fields, and the values that a file may leave out, stand in transformers 5's classes of configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Fields = Mapping[str, Any]
"""The fields of a config.json."""


class Unsaid(Exception):
    """Stop at a field for which a DecoderConfig cannot say the same; its text is the field and its value."""


@dataclass(frozen=True)
class ConfigRow:
    """Say how a type's fields become the fields of a DecoderConfig.

    Attributes:
        sizes: names of a DecoderConfig ("experts.number" is one of its Experts) -> the file's field, or the fields of
            which the first that is there counts.
        fixed: fields of a DecoderConfig that are the same in all models of the type.
        defaults: values of fields that a file may leave out.
        switches: fields -> their values -> the fields of a DecoderConfig that these set; other values are refused.
        window: how `sliding_window` counts: "always", if `use_sliding_window` is true ("asked"), in the layers that
            `layer_types` or a pattern names ("typed"), or not at all ("").
        derived: a function of all fields that returns further fields of a DecoderConfig.
        reads: the fields that it reads.
        notes: the parts that are taken in the nearest form in all models of the type.
    """

    sizes: Mapping[str, str | tuple[str, ...]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, Mapping[Any, Mapping[str, Any]]] = field(default_factory=dict)
    window: Literal["", "always", "asked", "typed"] = ""
    derived: Callable[[Fields], Mapping[str, Any]] | None = None
    reads: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu", "swish": "silu", "swiglu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "squared_relu",
}  # fmt: skip
"""The names of activations in files -> the names that a DecoderConfig has for them."""
ACTIVATION_FIELDS = ("hidden_activation", "hidden_act", "activation_function", "activation")

_BASE = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "length": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}
_LLAMA = {
    **_BASE,
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "head_dim": "head_dim",
    "theta": "rope_theta",
    "eps": "rms_norm_eps",
}
_PARTLY = {**_LLAMA, "rotary_part": "partial_rotary_factor"}
_LAYERNORM = {**_PARTLY, "eps": "layer_norm_eps"}
_EXPERTS = {
    "experts.number": "num_experts",
    "experts.top_k": "num_experts_per_tok",
    "experts.hidden": "moe_intermediate_size",
    "experts.normalized": "norm_topk_prob",
}
_GPT2 = {
    "layers": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
    "vocab": "vocab_size",
    "length": "n_positions",
    "tied": "tie_word_embeddings",
    "eps": "layer_norm_epsilon",
}
_LATENT = {
    "latent.q_rank": "q_lora_rank",
    "latent.kv_rank": "kv_lora_rank",
    "latent.nope_dim": "qk_nope_head_dim",
    "latent.rope_dim": "qk_rope_head_dim",
    "latent.value_dim": "v_head_dim",
}
_DEEPSEEK = {
    **{name: theirs for name, theirs in _LLAMA.items() if name not in ("kv_heads", "head_dim")},
    **_LATENT,
    "experts.number": "n_routed_experts",
    "experts.top_k": "num_experts_per_tok",
    "experts.hidden": "moe_intermediate_size",
    "experts.normalized": "norm_topk_prob",
    "experts.scale": "routed_scaling_factor",
    "dense_layers": "first_k_dense_replace",
}
_DEFAULTS = {"tie_word_embeddings": False, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
_WITH_NORMS = {"tie_word_embeddings": False, "rope_theta": 10_000.0, "layer_norm_eps": 1e-5}
_GEMMA = {
    **_DEFAULTS,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
}
_PLAIN = {"gated": False, "norm": "layernorm"}
_BIASED = {**_PLAIN, "attention_bias": "all", "mlp_bias": True}
_OFF: Mapping[Any, Mapping[str, Any]] = {False: {}, None: {}}
_ATTENTION = {"attention_bias": {**_OFF, True: {"attention_bias": "all"}}}
_MLP = {"mlp_bias": {**_OFF, True: {"mlp_bias": True}}}
_NEVER = {"qk_layernorm": _OFF}
_ROUTERS = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}
_SCALED = (
    "the embedding is not multiplied by sqrt(width), and norms do not add 1: that takes almost no time",
)


def _count(fields: Fields, name: str, usual: int) -> int:
    """Return a field that is an integer from 0 on, or the usual number if it is null or not there."""
    value = fields.get(name)
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Unsaid(f"{name}={value!r}")
    return value


def _dense_first(fields: Fields) -> Mapping[str, Any]:
    """Say which layers of a Qwen mixture have no experts: none, or the first."""
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise Unsaid(f"mlp_only_layers={dense!r}")
    return {"dense_layers": len(dense)}


def _gpt2(fields: Fields) -> Mapping[str, Any]:
    return {"hidden": _count(fields, "n_inner", 4 * fields["n_embd"])}


def _gptj(fields: Fields) -> Mapping[str, Any]:
    return {
        **_gpt2(fields),
        "rotary_part": _count(fields, "rotary_dim", 64) * fields["n_head"] / fields["n_embd"],
    }


def _falcon(fields: Fields) -> Mapping[str, Any]:
    """Say how Falcon's architectures differ: heads of keys, norms, biases and positions."""
    new, heads = (
        fields.get("new_decoder_architecture", False),
        fields.get("num_attention_heads", fields.get("n_head")),
    )
    keys = fields.get("num_kv_heads", fields.get("n_head_kv"))
    said: dict[str, Any] = {
        "hidden": _count(fields, "ffn_hidden_size", 4 * fields["hidden_size"]),
        "kv_heads": (keys or heads) if new else 1 if fields.get("multi_query", True) else heads,
        "positions": "alibi" if fields.get("alibi") else "rotary",
    }
    if new or fields.get("parallel_attn", True):
        norms = _count(fields, "num_ln_in_parallel_attn", 2 if new else 1)
        said |= {"parallel": True, "parallel_norms": norms}
    return said | ({"attention_bias": "all", "mlp_bias": True} if fields.get("bias") else {})


def _deepseek(fields: Fields) -> Mapping[str, Any]:
    """Say how DeepSeek's routers score, which groups they choose from, and how wide the shared experts are."""
    usual = "noaux_tc" if fields["model_type"] == "deepseek_v3" else "greedy"
    method = fields.get("topk_method") or usual
    score = _ROUTERS.get(method) if isinstance(method, str) else None
    if score is None or (fields.get("scoring_func") or score) != score:
        raise Unsaid(f"topk_method={method!r} with scoring_func={fields.get('scoring_func')!r}")
    grouped = method != "greedy"
    return {
        "experts.score": score,
        "experts.groups": _count(fields, "n_group", 1) if grouped else 1,
        "experts.top_groups": _count(fields, "topk_group", 1) if grouped else 1,
        "experts.shared_hidden": _count(fields, "n_shared_experts", 0)
        * fields["moe_intermediate_size"],
    }


def _gpt_oss(fields: Fields) -> Mapping[str, Any]:
    """Say how GPT-OSS gates its experts: by quick_gelu, whatever `hidden_act` says, of bounded products."""
    if fields.get("hidden_act", "silu") != "silu":
        raise Unsaid(f"hidden_act={fields['hidden_act']!r}")
    limit = fields.get("swiglu_limit", 7.0)
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise Unsaid(f"swiglu_limit={limit!r}")
    return {"activation": "quick_gelu", "experts.clamp": limit}


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
        "hidden": _count(fields, "expansion_ratio", 4) * fields["d_model"],
        "positions": "alibi"
        if alibi
        else "learned"
        if fields.get("learned_pos_emb", True)
        else "none",
    }


ROWS: Mapping[str, ConfigRow] = {
    "llama": ConfigRow(_LLAMA, defaults=_DEFAULTS, switches={**_ATTENTION, **_MLP}),
    "mistral": ConfigRow(
        _LLAMA, defaults={**_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4_096}, window="always"
    ),
    "mixtral": ConfigRow(
        {**_LLAMA, **_EXPERTS, "experts.number": ("num_local_experts", "num_experts"), "experts.hidden": "intermediate_size"},
        window="always",
        defaults={**_DEFAULTS, "num_key_value_heads": 8, "norm_topk_prob": True, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    ),
    "qwen2": ConfigRow(_LLAMA, {"attention_bias": "qkv"}, _DEFAULTS, window="asked"),
    "qwen3": ConfigRow(_LLAMA, {"qk_norm": True}, {**_DEFAULTS, "head_dim": 128}, _ATTENTION, window="asked"),
    "qwen2_moe": ConfigRow(
        {**_LLAMA, **_EXPERTS, "experts.shared_hidden": "shared_expert_intermediate_size"}, {"experts.shared_gate": True},
        {**_DEFAULTS, "norm_topk_prob": False, "qkv_bias": True}, {"qkv_bias": {**_OFF, True: {"attention_bias": "qkv"}}},
        "asked", _dense_first, ("mlp_only_layers",),
    ),
    "qwen3_moe": ConfigRow(
        {**_LLAMA, **_EXPERTS}, {"qk_norm": True}, {**_DEFAULTS, "norm_topk_prob": False}, _ATTENTION, "asked", _dense_first,
        ("mlp_only_layers",),
    ),
    "gemma": ConfigRow(_LLAMA, {}, _GEMMA, _ATTENTION, notes=_SCALED),
    "gemma2": ConfigRow(
        {**_LLAMA, "logit_cap": "final_logit_softcapping"}, {"norms": "sandwich"},
        {**_GEMMA, "sliding_window": 4_096, "sliding_window_pattern": 2, "final_logit_softcapping": 30.0}, _ATTENTION, "typed",
        notes=_SCALED,
    ),
    "gemma3_text": ConfigRow(
        {**_LLAMA, "logit_cap": "final_logit_softcapping"}, {"norms": "sandwich", "qk_norm": True},
        {**_GEMMA, "sliding_window": 4_096, "sliding_window_pattern": 6, "rope_theta": 1e6}, _ATTENTION, "typed", notes=_SCALED,
    ),
    "phi": ConfigRow(
        _LAYERNORM, {**_BIASED, "parallel": True, "head_bias": True},
        {**_WITH_NORMS, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new"}, _NEVER,
    ),
    "phi3": ConfigRow(
        _PARTLY, {}, {**_DEFAULTS, "rms_norm_eps": 1e-5}, window="always",
        notes=("queries, keys and values are one matrix there and three here",),
    ),
    "gpt2": ConfigRow(
        _GPT2, {**_BIASED, "positions": "learned", "fused_qkv": True},
        {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}, derived=_gpt2,
        reads=("n_inner",),
    ),
    "gptj": ConfigRow(
        _GPT2, {**_PLAIN, "mlp_bias": True, "parallel": True, "head_bias": True, "theta": 10_000.0},
        {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}, derived=_gptj,
        reads=("n_inner", "rotary_dim"),
    ),
    "gpt_neox": ConfigRow(
        {**_LAYERNORM, "rotary_part": ("rotary_pct", "partial_rotary_factor"), "theta": ("rotary_emb_base", "rope_theta")},
        {**_PLAIN, "mlp_bias": True, "fused_qkv": True},
        {**_WITH_NORMS, "rotary_pct": 0.25, "hidden_act": "gelu", "use_parallel_residual": True, "attention_bias": True},
        {**_ATTENTION, "use_parallel_residual": {**_OFF, True: {"parallel": True, "parallel_norms": 2}}},
    ),
    "falcon": ConfigRow(
        {
            **_BASE, "layers": ("num_hidden_layers", "n_layer"), "heads": ("num_attention_heads", "n_head"),
            "eps": "layer_norm_epsilon", "theta": "rope_theta",
        },
        _PLAIN,
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
        {**_LLAMA, "eps": "norm_epsilon"}, _PLAIN,
        {"tie_word_embeddings": True, "rope_theta": 10_000.0, "norm_epsilon": 1e-5, "use_bias": True,
         "hidden_act": "gelu_pytorch_tanh"},
        {"use_bias": {**_OFF, True: {"attention_bias": "all", "mlp_bias": True}}, "mlp_type": {None: {}, "default": {}},
         "norm_type": {None: {}, "layer_norm": {}}},
        window="always",
    ),
    "olmo2": ConfigRow(
        _LLAMA, {"norms": "after", "qk_norm": True, "qk_norm_over": "all"}, {**_DEFAULTS, "rms_norm_eps": 1e-5}, _ATTENTION
    ),
    "stablelm": ConfigRow(
        _LAYERNORM, {"norm": "layernorm"}, {**_WITH_NORMS, "partial_rotary_factor": 0.25},
        {**_NEVER, "use_qkv_bias": {**_OFF, True: {"attention_bias": "qkv"}},
         "use_parallel_residual": {**_OFF, True: {"parallel": True}}},
    ),
    "cohere": ConfigRow(
        _LAYERNORM, {"norm": "layernorm", "norm_bias": False, "parallel": True},
        {**_WITH_NORMS, "tie_word_embeddings": True, "rope_theta": 500_000.0}, {**_ATTENTION, "use_qk_norm": _OFF},
        notes=("logits are not scaled: that takes almost no time",),
    ),
    "deepseek_v2": ConfigRow(
        _DEEPSEEK, {}, {**_DEFAULTS, "norm_topk_prob": False, "first_k_dense_replace": 0}, derived=_deepseek,
        reads=("topk_method", "scoring_func", "n_group", "topk_group", "n_shared_experts", "num_key_value_heads", "head_dim"),
    ),
    "deepseek_v3": ConfigRow(
        {**_DEEPSEEK, "mtp": "num_nextn_predict_layers"}, {},
        {**_DEFAULTS, "norm_topk_prob": True, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}, derived=_deepseek,
        reads=("topk_method", "scoring_func", "n_group", "topk_group", "n_shared_experts", "num_key_value_heads", "head_dim"),
    ),
    "gpt_oss": ConfigRow(
        {**_LLAMA, **_EXPERTS, "experts.number": ("num_local_experts", "num_experts"), "experts.hidden": "intermediate_size",
         "experts.top_k": ("num_experts_per_tok", "experts_per_token")},
        {"sinks": True, "attention": "math", "experts.bias": True},
        {**_DEFAULTS, "norm_topk_prob": True, "rope_theta": 150_000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8,
         "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2, "attention_bias": True},
        {**_ATTENTION, "swiglu_alpha": {None: {}, 1.702: {}}}, "typed", _gpt_oss,
        ("swiglu_limit", "initial_context_length", "experts_per_token"),
        ("attention with sinks is written out, which keeps its scores: a kernel for it needs less memory and time",),
    ),
    "granite": ConfigRow(
        _LLAMA, {}, _DEFAULTS, {**_ATTENTION, **_MLP},
        notes=("embedding, attention, residuals and logits are not scaled: that takes almost no time",),
    ),
    "nemotron": ConfigRow(
        {**_PARTLY, "eps": "norm_eps"}, _PLAIN,
        {"tie_word_embeddings": False, "rope_theta": 10_000.0, "norm_eps": 1e-5, "partial_rotary_factor": 0.5,
         "hidden_act": "relu2"},
        {**_ATTENTION, **_MLP},
        notes=("norms do not add 1 to their weights: that takes almost no time",),
    ),
    "mpt": ConfigRow(
        {"layers": "n_layers", "width": "d_model", "heads": "n_heads", "vocab": "vocab_size", "length": "max_seq_len",
         "tied": "tie_word_embeddings", "eps": "layer_norm_epsilon"},
        {**_PLAIN, "fused_qkv": True},
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
