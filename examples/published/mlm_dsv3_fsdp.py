"""DeepSeek-V3 with its MTP block under FSDP, experts over 8 GPUs: examples/megatron_fsdp of Megatron-LM (d98e8a64).

On 512 GPUs (assumed). Nearest: projections of attention are computed again, too, where the list is mlp, moe,
mla_up_proj, layernorm.
"""

from dataclasses import replace

import piper
from piper import ANY, recipes, where

cluster = "h100x8*64@hopper-megatron"
sizes = replace(piper.models.preset("deepseek-v3"), mtp=1, mtp_weight=0.1)
precision = piper.Precision("float32", "bfloat16", "bfloat16", keep={"*.router.*": "float32"})
job = piper.models.job(sizes, global_batch=2048, precision=precision, clip_norm=1.0)
strategy = piper.Strategy(
    piper.Mesh(dp=64, ep=8),
    (
        recipes.expert_parallel(),
        recipes.one_f_one_b(rows=4),
        piper.recompute(where(layer=ANY), keep="attention"),
        recipes.data_parallel(over=("dp", "ep"), zero=3, bucket_mb=445),
    ),
    global_batch=2048,
)
