"""TP x hybrid FSDP, Llama 3 8B: examples/torch_native_parallelism/configs/tp_hsdp.yaml of accelerate (16cb6eb8)."""

import piper
from piper import recipes

cluster = "h100x8@eager"
job = piper.models.job("llama3-8b", global_batch=4, length=2048)
states = dict.fromkeys(("optim", "grads", "params"), "dp")
strategy = piper.Strategy(
    piper.Mesh(rep=2, dp=2, tp=2),
    (
        recipes.tensor_parallel(),
        recipes.one_f_one_b(rows=1),
        recipes.data_parallel(over=("dp", "rep"), shard=states),
    ),
    global_batch=4,
)
