"""Llama 3 70B, TP x PP x CP: llama3_70b_pretrain_64gpu_h100_bf16 of Megatron-Bridge (067f987d).

Nearest: messages of tp are not hidden behind products (userbuffers).
"""

import piper
from piper import recipes

cluster = "h100x8*8@hopper-megatron"
job = piper.models.job("llama3-70b", global_batch=256)
strategy = piper.Strategy(
    piper.Mesh(pp=4, dp=2, cp=2, tp=4),
    (
        recipes.tensor_parallel(sequence=True),
        recipes.context_parallel(attention="ring"),
        recipes.interleaved(rows=1, chunks=5),
        recipes.data_parallel(over=("dp", "cp"), zero=1),
    ),
    global_batch=256,
)
