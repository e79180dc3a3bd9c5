"""Llama 3 70B, FSDP x TP: llama3_70b of torchtitan (b5bcd76c), on 256 GPUs with 16 rows for 8 of them."""

import piper
from piper import ANY, recipes, where

cluster = "h100x8*32@hopper-torch-compile"
job = piper.models.job("llama3-70b", global_batch=512)
strategy = piper.Strategy(
    piper.Mesh(dp=32, tp=8),
    (
        recipes.tensor_parallel(sequence=True),
        recipes.one_f_one_b(rows=16),
        piper.tile_loss(8),
        piper.recompute(where(layer=ANY), keep="inputs"),
        recipes.data_parallel(zero=3, bucket_mb=409),
    ),
    global_batch=512,
)
