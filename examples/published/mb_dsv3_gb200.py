"""DeepSeek-V3 without its MTP block on 256 GB200, experts over 64 of them: the bf16 recipe of Megatron-Bridge (067f987d) (25.11).

Stages as its layout: 15 of four layers, the last one with the head. mla_up_proj is made again, and SwiGLU keeps its inputs.
Nearest: a run keeps outputs of experts for the gradient of their shares, routers in bfloat16, moments in float32, no CUDA graphs.
"""

import piper
from piper import ANY, recipes, where

cluster = "gb200x64*4@blackwell-nemo"
half = piper.Precision("float32", "bfloat16", "bfloat16")
job = piper.models.job("deepseek-v3", global_batch=4096, precision=half)
again = ("*.attention.kv_up", "*.attention.q_up", "*.attention.turn", "*.feed_forward.activation")
strategy = piper.Strategy(
    piper.Mesh(pp=4, ep=64),
    (
        recipes.expert_parallel(),
        recipes.interleaved(rows=1, chunks=4, at=tuple(range(4, 61, 4))),
        piper.recompute(where(layer=ANY), keep="inputs", modules=again),
        recipes.data_parallel(over=("dp", "ep"), zero=1),
    ),
    global_batch=4096,
)
