"""DeepSeek-V3 16B, FSDP with experts over 8 GPUs: deepseek_v3_16b of torchtitan (b5bcd76c).

Nearest: selective checkpointing keeps every second product there, and only its loss is compiled.
"""

import piper
from piper import ANY, recipes, where

cluster = "h100x8@eager"
sizes = piper.models.DecoderConfig(
    layers=27, width=2048, heads=16, hidden=10944, vocab=102400, length=4096, theta=1e4, dense_layers=1,
    latent=piper.models.Latent(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    experts=piper.models.Experts(number=64, top_k=6, hidden=1408, shared_hidden=2816, normalized=False),
)  # fmt: skip
job = piper.models.job(sizes, global_batch=32)
strategy = piper.Strategy(
    piper.Mesh(ep=8),
    (
        recipes.expert_parallel(),
        recipes.one_f_one_b(rows=4),
        piper.recompute(where(layer=ANY), keep="products"),
        recipes.data_parallel(over=("dp", "ep"), zero=3, bucket_mb=120),
    ),
    global_batch=32,
)
