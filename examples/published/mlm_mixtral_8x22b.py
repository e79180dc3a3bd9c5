"""Mixtral 8x22B, each expert cut over tp beside 8 replicas with others: mixtral_8x22b_tp2pp8ep8vpp1_release of
Megatron-LM (d98e8a64), whose --expert-tensor-parallel-size is tp. On 128 GPUs (assumed).
"""

import piper
from piper import recipes

cluster = "h100x8*16@hopper-megatron"
sizes = piper.models.DecoderConfig(
    layers=56, width=6144, heads=48, hidden=16384, vocab=32000, length=4096, kv_heads=8, theta=1e4,
    experts=piper.models.Experts(number=8, top_k=2, hidden=16384, balance=0.01),
)  # fmt: skip
job = piper.models.job(sizes, global_batch=256, clip_norm=1.0)
strategy = piper.Strategy(
    piper.Mesh(pp=8, dp=1, ep=8, tp=2),
    (
        recipes.tensor_parallel(sequence=True),
        recipes.expert_parallel(hidden="tp"),
        recipes.one_f_one_b(rows=1),
        recipes.data_parallel(over=("dp", "ep"), zero=1, bucket_mb=152.6),
    ),
    global_batch=256,
)
