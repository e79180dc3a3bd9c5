"""Llama 3 8B in float8, distributed optimizer: examples/llama/train_llama3_8b_h100_fp8.sh of Megatron-LM (d98e8a64).

Nearest: parameters gathered in bfloat16: predicted too slow.
"""

import piper
from piper import recipes

cluster = "h100x8@hopper-megatron"
float8 = piper.Float8("delayed", modules=("layers.*",), saved="float8")
precision = piper.Precision(params="float32", compute="bfloat16", reduce="bfloat16", float8=float8)
sizes = piper.models.LlamaConfig(
    layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, vocab=128256, length=8192, theta=1e6
)  # fmt: skip
job = piper.models.job(sizes, global_batch=128, precision=precision, lr=1.5e-4, clip_norm=1.0)
strategy = piper.Strategy(
    piper.Mesh(dp=8),
    (recipes.one_f_one_b(rows=1), recipes.data_parallel(zero=1, bucket_mb=76.3)),
    global_batch=128,
)
