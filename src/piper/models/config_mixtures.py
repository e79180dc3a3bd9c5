"""Say which mixture a type of Hugging Face's (`model_type`) is: a row of data for each.

Names of fields, and the values that a file may leave out, stand in transformers 5's classes of configurations; names of
Kimi K2, MiniMax-M2 and DBRX also in the files that their authors publish.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.config_parts import (
    ATTENTION,
    DEFAULTS,
    LLAMA,
    OFF,
    PARTLY,
    QKV,
    SPLIT,
    ConfigRow,
    Fields,
    Unsaid,
    count,
)

_EXPERTS = {
    "experts.number": "num_experts",
    "experts.top_k": "num_experts_per_tok",
    "experts.hidden": "moe_intermediate_size",
    "experts.normalized": "norm_topk_prob",
}
_LOCAL: Mapping[str, str | tuple[str, ...]] = {
    **LLAMA,
    "experts.number": ("num_local_experts", "num_experts"),
    "experts.top_k": "num_experts_per_tok",
    "experts.hidden": "intermediate_size",
}
"""A mixture without dense layers, whose `intermediate_size` is that of an expert."""
_LATENT = {
    "latent.q_rank": "q_lora_rank",
    "latent.kv_rank": "kv_lora_rank",
    "latent.nope_dim": "qk_nope_head_dim",
    "latent.rope_dim": "qk_rope_head_dim",
    "latent.value_dim": "v_head_dim",
}
_ROUTED = {
    "experts.number": "n_routed_experts",
    "experts.top_k": "num_experts_per_tok",
    "experts.hidden": "moe_intermediate_size",
    "experts.normalized": "norm_topk_prob",
    "experts.scale": "routed_scaling_factor",
    "dense_layers": "first_k_dense_replace",
}
"""The experts of DeepSeek, and of models with its routers."""
_DEEPSEEK = {
    **{name: theirs for name, theirs in LLAMA.items() if name not in ("kv_heads", "head_dim")},
    **_LATENT,
    **_ROUTED,
}
_GROUPED = ("topk_method", "scoring_func", "n_group", "topk_group", "n_shared_experts")
"""The fields that `_deepseek` reads."""
_OF_HEADS = ("num_key_value_heads", "head_dim", "qk_head_dim")
"""The fields that say nothing more beside latent attention."""
_ROUTERS = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}


def _dense_first(fields: Fields) -> Mapping[str, Any]:
    """Say which layers of a Qwen mixture have no experts: none, or the first."""
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise Unsaid(f"mlp_only_layers={dense!r}")
    return {"dense_layers": len(dense)}


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
        "experts.groups": count(fields, "n_group", 1) if grouped else 1,
        "experts.top_groups": count(fields, "topk_group", 1) if grouped else 1,
        "experts.shared_hidden": count(fields, "n_shared_experts", 0)
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


def _ernie(fields: Fields) -> Mapping[str, Any]:
    """Say which layers of an ERNIE mixture have experts, from one to the last, and how wide the shared experts are."""
    last, every = fields.get("moe_layer_end_index", -1), fields.get("moe_layer_interval", 1)
    if last not in (-1, fields["num_hidden_layers"] - 1) or every != 1:
        raise Unsaid(f"moe_layer_end_index={last!r} with moe_layer_interval={every!r}")
    shared = count(fields, "moe_num_shared_experts", 0)
    return {"experts.shared_hidden": shared * fields["moe_intermediate_size"]}


def _dbrx(fields: Fields) -> Mapping[str, Any]:
    """Read DBRX's own dictionaries of attention and of experts."""
    attention, experts = fields.get("attn_config") or {}, fields.get("ffn_config") or {}
    if not isinstance(attention, Mapping) or not isinstance(experts, Mapping):
        raise Unsaid(f"attn_config={attention!r} with ffn_config={experts!r}")
    if experts.get("ffn_act_fn", {"name": "silu"}) != {"name": "silu"}:
        raise Unsaid(f"ffn_config.ffn_act_fn={experts['ffn_act_fn']!r}")
    theta = attention.get("rope_theta", 10_000.0)
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise Unsaid(f"attn_config.rope_theta={theta!r}")
    hidden = count(experts, "ffn_hidden_size", 3_584)
    return {
        "kv_heads": count(attention, "kv_n_heads", 1),
        "theta": theta,
        "hidden": hidden,
        "experts.hidden": hidden,
        "experts.number": count(experts, "moe_num_experts", 4),
        "experts.top_k": count(experts, "moe_top_k", 1),
        "experts.normalized": experts.get("moe_normalize_expert_weights", 1) is not None,
    }


def _minimax(fields: Fields) -> Mapping[str, Any]:
    """Say which part of each head of MiniMax-M2 is rotated."""
    usual = {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid"}
    for name, value in usual.items():
        if fields.get(name, value) != value:
            raise Unsaid(f"{name}={fields[name]!r}")
    head = count(fields, "head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    return {"rotary_part": count(fields, "rotary_dim", head) / head}


MIXTURES: Mapping[str, ConfigRow] = {
    "mixtral": ConfigRow(
        {**LLAMA, **_EXPERTS, "experts.number": ("num_local_experts", "num_experts"), "experts.hidden": "intermediate_size"},
        window="always",
        defaults={**DEFAULTS, "num_key_value_heads": 8, "norm_topk_prob": True, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    ),
    "qwen2_moe": ConfigRow(
        {**LLAMA, **_EXPERTS, "experts.shared_hidden": "shared_expert_intermediate_size"}, {"experts.shared_gate": True},
        {**DEFAULTS, "norm_topk_prob": False, "qkv_bias": True}, {"qkv_bias": {**OFF, True: {"attention_bias": "qkv"}}},
        "asked", _dense_first, ("mlp_only_layers",),
    ),
    "qwen3_moe": ConfigRow(
        {**LLAMA, **_EXPERTS}, {"qk_norm": True}, {**DEFAULTS, "norm_topk_prob": False}, ATTENTION, "asked", _dense_first,
        ("mlp_only_layers",),
    ),
    "deepseek_v2": ConfigRow(
        _DEEPSEEK, {}, {**DEFAULTS, "norm_topk_prob": False, "first_k_dense_replace": 0}, derived=_deepseek,
        reads=(*_GROUPED, *_OF_HEADS),
    ),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), ConfigRow(
        {**_DEEPSEEK, "mtp": "num_nextn_predict_layers"}, {},
        {**DEFAULTS, "norm_topk_prob": True, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}, derived=_deepseek,
        reads=(*_GROUPED, *_OF_HEADS),
    )),
    "glm4_moe": ConfigRow(
        {**PARTLY, **_ROUTED, "mtp": "num_nextn_predict_layers"}, {},
        {**DEFAULTS, "rms_norm_eps": 1e-5, "norm_topk_prob": True, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
         "num_nextn_predict_layers": 0},
        {**QKV, "use_qk_norm": {**OFF, True: {"qk_norm": True}}}, derived=_deepseek, reads=_GROUPED,
    ),
    "dots1": ConfigRow(
        {**LLAMA, **_ROUTED}, {"qk_norm": True}, {**DEFAULTS, "norm_topk_prob": False, "first_k_dense_replace": 0},
        ATTENTION, "asked", _deepseek, _GROUPED,
    ),
    "minimax_m2": ConfigRow(
        _LOCAL, {"qk_norm": True, "qk_norm_over": "all", "experts.score": "sigmoid", "experts.normalized": True},
        {**DEFAULTS, "rope_theta": 5e6}, derived=_minimax,
        reads=("rotary_dim", "use_qk_norm", "qk_norm_type", "scoring_func", "use_routing_bias", "attn_type_list",
               "shared_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "use_mtp"),
        notes=("the blocks that predict further tokens are left out: they take time and memory",),
    ),
    "granitemoe": ConfigRow(
        _LOCAL, {"experts.normalized": True}, DEFAULTS, ATTENTION,
        notes=("embedding, attention, residuals and logits are not scaled: that takes almost no time",),
    ),
    "phimoe": ConfigRow(
        _LOCAL, {"norm": "layernorm", "experts.normalized": False}, {**DEFAULTS, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        {"attention_bias": {**OFF, True: {"attention_bias": "all"}}, "lm_head_bias": {**OFF, True: {"head_bias": True}}},
        reads=("input_jitter_noise",),
        notes=("experts are chosen by a softmax, and not by sparse mixing: both take almost no time",),
    ),
    "ernie4_5_moe": ConfigRow(
        {**LLAMA, "experts.number": "moe_num_experts", "experts.top_k": "moe_k", "experts.hidden": "moe_intermediate_size",
         "dense_layers": "moe_layer_start_index"},
        {"experts.normalized": True}, {**DEFAULTS, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        {"use_bias": OFF}, derived=_ernie,
        reads=("moe_layer_end_index", "moe_layer_interval", "moe_num_shared_experts", "moe_norm_min"),
        notes=("the bias by which experts are chosen is left out: that takes almost no time",),
    ),
    "dbrx": ConfigRow(
        {"layers": "n_layers", "width": "d_model", "heads": "n_heads", "vocab": "vocab_size", "length": "max_seq_len",
         "tied": "tie_word_embeddings"},
        {"norm": "layernorm", "norm_bias": False}, {"tie_word_embeddings": False}, derived=_dbrx,
        reads=("attn_config", "ffn_config", "num_key_value_heads"),
        notes=(*SPLIT, "these are not clipped: that takes almost no time"),
    ),
    "gpt_oss": ConfigRow(
        {**LLAMA, **_EXPERTS, "experts.number": ("num_local_experts", "num_experts"), "experts.hidden": "intermediate_size",
         "experts.top_k": ("num_experts_per_tok", "experts_per_token")},
        {"sinks": True, "experts.bias": True},
        {**DEFAULTS, "norm_topk_prob": True, "rope_theta": 150_000.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 8,
         "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2, "attention_bias": True},
        {**ATTENTION, "swiglu_alpha": {None: {}, 1.702: {}}}, "typed", _gpt_oss,
        ("swiglu_limit", "initial_context_length", "experts_per_token"),
    ),
}  # fmt: skip
"""The types of mixtures that a DecoderConfig describes to the parameter; the notes name the differences."""
