"""Llama 3 8B, FSDP: llama3_8b of torchtitan (b5bcd76c), on 8 GPUs with 2 rows each.

Nearest: selective checkpointing keeps every second product there, all of them here.
"""

import piper
from piper import ANY, recipes, where

cluster = "h100-96g-hbm2e-500w:8@hopper-torch"
job = piper.models.job("llama3-8b", global_batch=16)
strategy = piper.Strategy(
    piper.Mesh(dp=8),
    (
        recipes.one_f_one_b(rows=2),
        piper.tile_loss(8),
        piper.recompute(where(layer=ANY), keep="products"),
        recipes.data_parallel(zero=3, bucket_mb=833),
    ),
    global_batch=16,
)
