"""DeepSeek-V3 with its MTP block on 1,024 H100, experts over tp and 32 replicas: the bf16 recipe of Megatron-Bridge (067f987d).

Nearest: stages as even as they go; projections of attention are computed again, where the list is mla_up_proj, mlp.
"""

from dataclasses import replace

import piper
from piper import ANY, recipes, where

cluster = "h100x8*128@hopper-megatron"
job = piper.models.job(replace(piper.models.preset("deepseek-v3"), mtp=1), global_batch=16384)
strategy = piper.Strategy(
    piper.Mesh(pp=8, dp=2, ep=32, tp=2),
    (
        recipes.tensor_parallel(sequence=True),
        recipes.expert_parallel(over=("tp", "ep")),
        recipes.interleaved(rows=1, chunks=4),
        piper.recompute(where(layer=ANY), keep="attention"),
        recipes.data_parallel(over=("dp", "ep"), zero=1),
    ),
    global_batch=16384,
)
