"""DeepSeek-V3 with its MTP block on 1,024 H100, experts over tp and 32 replicas: the bf16 recipe of Megatron-Bridge (067f987d).

Stages as its layout: one layer, 30 of two, and MTP with the head. mla_up_proj and mlp are made again, SwiGLU keeps inputs.
Nearest: a run keeps outputs of experts for the gradient of their shares, routers in bfloat16, moments in float32.
"""

from dataclasses import replace

import piper
from piper import ANY, recipes, where

cluster = "h100x8*128@hopper-megatron"
half = piper.Precision("float32", "bfloat16", "bfloat16")
sizes = replace(piper.models.preset("deepseek-v3"), mtp=1)
job = piper.models.job(sizes, global_batch=16384, precision=half)
again = "inputs@*.attention.kv_up+*.attention.q_up+*.attention.turn+*.feed_forward.activation"
directives = (
    recipes.tensor_parallel(sequence=True),
    recipes.expert_parallel(over=("tp", "ep")),
    recipes.interleaved(rows=1, chunks=4, at=tuple(range(1, 62, 2))),
    piper.recompute(where(layer=ANY), keep=f"{again}&outputs@layers.0-2.feed_forward"),
    recipes.data_parallel(over=("dp", "ep"), zero=1),
)
strategy = piper.Strategy(piper.Mesh(pp=8, dp=2, ep=32, tp=2), directives, global_batch=16384)
