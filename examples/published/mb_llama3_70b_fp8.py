"""Llama 3 70B in float8, TP x PP: llama3_70b_pretrain_64gpu_h100_fp8cs of Megatron-Bridge (067f987d).

Its layout is Et*2|(t*2|)*34,t*3|(t*2|)*3,tL. Nearest: messages of tp are not hidden behind products (userbuffers),
and parameters are kept and gathered in bfloat16.
"""

import piper
from piper import recipes

cluster = "h100x8*8@hopper-megatron"
float8 = piper.Float8("tensorwise", modules=("layers.*",), saved="float8")
precision = piper.Precision(params="float32", compute="bfloat16", reduce="bfloat16", float8=float8)
job = piper.models.job("llama3-70b", global_batch=256, precision=precision)
strategy = piper.Strategy(
    piper.Mesh(pp=8, dp=2, tp=4),
    (
        recipes.tensor_parallel(sequence=True),
        piper.partition(40, at=(*range(3, 72, 2), 74, 76, 78, 80), units="all"),
        recipes.interleaved(rows=1, chunks=5),
        recipes.data_parallel(zero=1),
    ),
    global_batch=256,
)
