"""GPT-OSS 120B on 64 H100, experts over 8: the performance archive (26.04.01) of Megatron-Bridge (067f987d)."""

import piper
from piper import models, recipes

cluster = "h100x8*8@hopper-megatron"
sizes = models.DecoderConfig(
    layers=36, width=2880, heads=64, kv_heads=8, head_dim=64, hidden=2880, vocab=201088, length=4096, theta=150000.0,
    activation="quick_gelu", attention_bias="all", sinks=True, window=128, window_every=2,
    experts=models.Experts(number=128, top_k=4, hidden=2880, bias=True, clamp=7.0),
)  # fmt: skip
job = models.job(sizes, global_batch=1280)
strategy = piper.Strategy(
    piper.Mesh(pp=4, dp=2, ep=8),
    (
        recipes.expert_parallel(),
        recipes.one_f_one_b(rows=1),
        recipes.data_parallel(over=("dp", "ep"), zero=1),
    ),
    global_batch=1280,
)
