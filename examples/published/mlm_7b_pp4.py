"""A GPT of 7B, 8 stages of one layer on each of 4 devices: gpt3_7b_tp1_pp4_memory_speed of Megatron-LM (d98e8a64).

Nearest: attention's kernel draws no dropout.
"""

import piper
from piper import recipes

cluster = "h100x8@hopper-megatron-deterministic"
sizes = piper.models.DecoderConfig(
    layers=32, width=4096, heads=32, hidden=16384, vocab=131200, length=8192, kv_heads=8, activation="gelu", gated=False,
    norm="layernorm", attention_bias="all", mlp_bias=True, positions="learned", dropout=0.1,
    attention_dropout=0.0,
)  # fmt: skip
job = piper.models.job(sizes, global_batch=8, clip_norm=1.0)
strategy = piper.Strategy(
    piper.Mesh(pp=4, dp=2),
    (recipes.interleaved(rows=1, chunks=8), recipes.data_parallel(zero=1, bucket_mb=152.6)),
    global_batch=8,
)
