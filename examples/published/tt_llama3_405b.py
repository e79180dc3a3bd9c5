"""Llama 3.1 405B, FSDP x TP x PP in float8 but for the head: torchtitan (b5bcd76c), on 512 GPUs.

That is table 5 of its benchmarks of December 2024 (llama3_h100_202412_torchtitan). Nearest: messages of tp are not
hidden behind products (AsyncTP), parameters are gathered in bfloat16. A pipeline had as many microbatches as stages
then, unless told otherwise.
"""

import piper
from piper import ANY, recipes, where

cluster = "h100-96g-hbm2e-500w:8*64@hopper-torch-compile"
float8 = piper.Float8("tensorwise", modules=("layers.*",))
precision = piper.Precision(params="float32", compute="bfloat16", float8=float8)
job = piper.models.job("llama3-405b", global_batch=256, precision=precision)
strategy = piper.Strategy(
    piper.Mesh(pp=8, dp=8, tp=8),
    (
        recipes.tensor_parallel(sequence=True),
        recipes.one_f_one_b(rows=4),
        piper.recompute(where(layer=ANY), keep="inputs"),
        recipes.data_parallel(zero=3, bucket_mb=1521, resident_mb="step", reduced_mb="step"),
    ),
    global_batch=256,
)
