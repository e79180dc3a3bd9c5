"""A GPT of 15B, TP 8 with sequence parallelism: gpt3_15b_8t_release of Megatron-LM (d98e8a64), on 64 GPUs (assumed).

The batch is the last one of its schedule; `-p` of a function of a trial would say the others.
"""

import piper
from piper import recipes

cluster = "h100x8*8@hopper-megatron"
sizes = piper.models.DecoderConfig(
    layers=32, width=6144, heads=48, hidden=24576, vocab=256000, length=4096, kv_heads=8, activation="squared_relu",
    gated=False, norm="layernorm", theta=1e4, rotary_part=0.5,
)  # fmt: skip
job = piper.models.job(sizes, global_batch=1152, clip_norm=1.0)
strategy = piper.Strategy(
    piper.Mesh(dp=8, tp=8),
    (
        recipes.tensor_parallel(sequence=True),
        recipes.one_f_one_b(rows=4),
        recipes.data_parallel(zero=1, bucket_mb=152.6),
    ),
    global_batch=1152,
)
