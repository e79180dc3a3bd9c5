"""Small mixtures of Hugging Face's classes, as they come, with their experts tagged."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper

VOCABULARY, LENGTH = 32, 8
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    num_experts_per_tok=2, intermediate_size=24, attn_implementation="sdpa", max_position_embeddings=16,
)  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", dict(num_local_experts=4)),
    "qwen3_moe": ("Qwen3Moe", dict(num_experts=4, moe_intermediate_size=24, head_dim=8, norm_topk_prob=True)),
    "deepseek_v3": (
        "DeepseekV3",
        dict(
            n_routed_experts=4, moe_intermediate_size=12, n_shared_experts=1, n_group=2, topk_group=2,
            first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
            num_key_value_heads=4,
        ),
    ),
    "gpt_oss": ("GptOss", dict(num_local_experts=4, head_dim=8, sliding_window=4, attn_implementation="eager")),
}  # fmt: skip
"""The classes' names, with the sizes that not all of them have."""


def mixture(family: str) -> nn.Module:
    import transformers

    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(SIZES | own))
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter, tensor in model.named_parameters():
        if any(part in parameter for part in ("bias", "sinks", "experts")):
            nn.init.normal_(tensor, std=0.1)
    return piper.tag(
        model, {"model.layers.*.mlp.experts": dict(experts=0, replace="gated_experts")}
    )


def text(step: int, rows: range) -> Any:
    drawn = [torch.Generator().manual_seed(100 * step + r) for r in rows]
    tokens = torch.stack([torch.randint(VOCABULARY, (LENGTH + 1,), generator=g) for g in drawn])
    return {"input_ids": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()


def of_logits(out: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.logits.reshape(-1, VOCABULARY), targets.reshape(-1))
