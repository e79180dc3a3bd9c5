"""Context parallelism, FSDP over it, Llama 3 8B: examples/torch_native_parallelism/configs/cp.yaml of accelerate (16cb6eb8)."""

import piper
from piper import ANY, recipes, where

cluster = "h100x8@eager"
job = piper.models.job("llama3-8b", global_batch=1, length=65536)
strategy = piper.Strategy(
    piper.Mesh(cp=8),
    (
        recipes.context_parallel(attention="gather"),
        recipes.one_f_one_b(rows=1),
        piper.recompute(where(layer=ANY), keep="inputs"),
        recipes.data_parallel(over=("dp", "cp"), zero=3, bucket_mb=833),
    ),
    global_batch=1,
)
