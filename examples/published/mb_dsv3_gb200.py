"""DeepSeek-V3 without its MTP block on 256 GB200, experts over 64 of them: the bf16 recipe of Megatron-Bridge (067f987d) (25.11).

Nearest: stages as even as they go; without CUDA graphs; projections of attention are computed again (mla_up_proj).
"""

import piper
from piper import ANY, recipes, where

cluster = "gb200x64*4@blackwell-megatron"
job = piper.models.job("deepseek-v3", global_batch=4096)
strategy = piper.Strategy(
    piper.Mesh(pp=4, ep=64),
    (
        recipes.expert_parallel(),
        recipes.interleaved(rows=1, chunks=4),
        piper.recompute(where(layer=ANY), keep="products"),
        recipes.data_parallel(over=("dp", "ep"), zero=1),
    ),
    global_batch=4096,
)
