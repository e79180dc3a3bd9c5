"""A Llama of Hugging Face's, unchanged, whose heads, hidden elements, vocabulary and tokens two devices share.

piper explain examples/hugging_face_llama.py; piper verify examples/hugging_face_llama.py. It needs `transformers`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import piper

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def model() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**CONFIG, use_cache=False, attn_implementation="sdpa"))


def batch(step: int, rows: range) -> tuple[dict[str, Tensor], Tensor]:
    drawn = torch.randint(128, (8, 17), generator=torch.Generator().manual_seed(step))[
        rows.start : rows.stop
    ]
    return {"input_ids": drawn[:, :-1].contiguous()}, drawn[:, 1:].contiguous()


def loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-3)


job = piper.Job(model, batch, loss, optimizer, global_batch=8)
strategy = piper.Strategy(piper.Mesh(tp=2), [piper.shard(piper.where(), stream="tokens")])
