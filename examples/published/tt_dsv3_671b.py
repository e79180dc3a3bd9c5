"""DeepSeek-V3 671B, FSDP with experts over 2 GPUs: deepseek_v3_671b of torchtitan (b5bcd76c), on 256 GPUs (assumed).

Nearest: selective checkpointing keeps every second product there. It does not fit, as its pull request 4016 says.
"""

import piper
from piper import ANY, recipes, where

cluster = "h100x8*32@eager"
job = piper.models.job("deepseek-v3", global_batch=1024)
strategy = piper.Strategy(
    piper.Mesh(dp=128, ep=2),
    (
        recipes.expert_parallel(),
        recipes.one_f_one_b(rows=4),
        piper.recompute(where(layer=ANY), keep="products"),
        recipes.data_parallel(over=("dp", "ep"), zero=3, bucket_mb=889),
    ),
    global_batch=1024,
)
