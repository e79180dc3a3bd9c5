"""Make answers of torchtitan's parser as `ask.py` prints them, for a small Llama and a small mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


def _part(kind: str, **fields: Any) -> Json:
    return {"__class__": f"torchtitan.models.{kind}.Config", **fields}


def _linear(inputs: int, outputs: int) -> Json:
    kind = "common.linear.Linear"
    return _part(kind, in_features=inputs, out_features=outputs, bias=False)


def _norm(width: int) -> Json:
    return _part("common.nn_modules.RMSNorm", normalized_shape=width, eps=1e-5)


def _feed_forward(width: int, hidden: int) -> Json:
    w1, w2, w3 = _linear(width, hidden), _linear(hidden, width), _linear(width, hidden)
    return _part("common.feed_forward.FeedForward", w1=w1, w2=w2, w3=w3)


def attention(width: int = 64, heads: int = 4, kv_heads: int = 2) -> Json:
    """Return grouped-query attention."""
    rope = _part("common.rope.ComplexRoPE", dim=width // heads, max_seq_len=128, theta=500_000.0)
    return _part(
        "common.attention.GQAttention", dim=width, n_heads=heads, n_kv_heads=kv_heads, head_dim=None, qk_norm=None,
        rope=rope, inner_attention=_part("common.attention.FlexAttention"), wo=_linear(width, width),
    )  # fmt: skip


def mixture(width: int = 64, hidden: int = 32, number: int = 8) -> Json:
    """Return a mixture with a shared expert."""
    experts = _part("common.moe.GroupedExperts", dim=width, hidden_dim=hidden, num_experts=number)
    sends = _part("common.token_dispatcher.AllToAllTokenDispatcher", num_experts=number, top_k=2)
    routed = _part("common.moe.RoutedExperts", inner_experts=experts, token_dispatcher=sends)
    router = _part(
        "common.moe.TokenChoiceTopKRouter", top_k=2, score_func="sigmoid", route_norm=False, num_expert_groups=None
    )  # fmt: skip
    return _part(
        "common.moe.MoE", num_experts=number, routed_experts=routed, router=router,
        shared_experts=_feed_forward(width, 2 * hidden),
    )  # fmt: skip


def model(layers: int = 6, mixed: int = 0, width: int = 64) -> Json:
    """Return a decoder whose last `mixed` layers have experts."""
    blocks = [
        _part(
            "llama3.model.Llama3TransformerBlock", attention=attention(width),
            feed_forward=None if k >= layers - mixed else _feed_forward(width, 96),
            moe=mixture(width) if k >= layers - mixed else None, attention_norm=_norm(width), ffn_norm=_norm(width),
        )
        for k in range(layers)
    ]  # fmt: skip
    return _part(
        "llama3.model.Llama3Model", dim=width, vocab_size=256, lm_head=_linear(width, 256), norm=_norm(width),
        layers=blocks, enable_weight_tying=False,
    )  # fmt: skip


def gpt_oss(windows: Sequence[str | None]) -> Json:
    """Return a decoder as GPT-OSS has them: a layer for each of `windows`, which attends to few tokens or to all."""
    tree = model(len(windows), mixed=len(windows))
    for block, window in zip(tree["layers"], windows):
        size = 32 if window else None
        block["attention"] |= {"sliding_window_size": size, "wo": {**_linear(64, 64), "bias": True}}
        block["attention"]["inner_attention"] = _part(
            "VarlenAttention", window_size=[31 if size else -1, 0]
        )
        block["moe"]["routed_experts"]["inner_experts"] |= {
            **_part("gpt_oss.moe.GptOssGroupedExperts"), "swiglu_limit": 7.0,
        }  # fmt: skip
    return tree


def answer(tree: Json | None = None, **changes: Any) -> Json:
    """Return an answer; `changes` are options by their full names, with two underscores for a dot."""
    config: Json = {
        "model_spec": {"name": "llama3", "flavor": "small", "model": tree or model()},
        "training": _part(
            "Training", local_batch_size=2, global_batch_size=-1, seq_len=128, max_norm=1.0, dtype="float32",
            mixed_precision_param="bfloat16", mixed_precision_reduce="float32", enable_cpu_offload=False,
        ),
        "parallelism": _part(
            "Parallelism", data_parallel_replicate_degree=1, data_parallel_shard_degree=-1,
            fsdp_reshard_after_forward="default", tensor_parallel_degree=1, enable_sequence_parallel=True,
            pipeline_parallel_degree=1, module_fqns_per_model_part=None, pipeline_parallel_first_stage_less_layers=1,
            pipeline_parallel_last_stage_less_layers=1, pipeline_parallel_layers_per_stage=None,
            pipeline_parallel_schedule="1F1B", pipeline_parallel_microbatch_size=1, context_parallel_degree=1,
            expert_parallel_degree=1,
        ),
        "compile": _part("Compile", enable=False, components=["model", "loss"]),
        "activation_checkpoint": None,
        "loss": _part("CrossEntropyLoss"),
        "optimizer": _part(
            "Optimizers", param_groups=[{"optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 1e-3}}], implementation="fused"
        ),
        "profiler": _part("Profiler", enable_profiling=True),
    }  # fmt: skip
    for name, value in changes.items():
        *sections, last = name.split("__")
        at = config
        for section in sections:
            at = at[section]
        at[last] = value
    return {"version": "0.3.0", "config": config, "defaults": [], "parameters": None}
