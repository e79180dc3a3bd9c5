"""Mixtral 8x7B, experts over tp and 4 replicas: mixtral_8x7b_tp1pp4ep8vpp8_release of Megatron-LM (d98e8a64).

On 64 GPUs (assumed).
"""

import piper
from piper import recipes

cluster = "h100x8*8@hopper-megatron"
sizes = piper.models.DecoderConfig(
    layers=32, width=4096, heads=32, hidden=14336, vocab=32000, length=4096, kv_heads=8, theta=1e4,
    experts=piper.models.Experts(number=8, top_k=2, hidden=14336, balance=0.01),
)  # fmt: skip
job = piper.models.job(sizes, global_batch=256, clip_norm=1.0)
strategy = piper.Strategy(
    piper.Mesh(pp=4, dp=2, ep=4, tp=2),
    (
        recipes.tensor_parallel(sequence=True),
        recipes.expert_parallel(over=("tp", "ep")),
        recipes.interleaved(rows=1, chunks=8),
        recipes.data_parallel(over=("dp", "ep"), zero=1, bucket_mb=152.6),
    ),
    global_batch=256,
)
