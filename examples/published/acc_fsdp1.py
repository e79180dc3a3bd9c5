"""FULL_SHARD by layers: examples/slurm/fsdp_config.yaml of accelerate (16cb6eb8).

It says neither model nor GPUs: here Llama 3 8B on 8.
"""

import piper
from piper import recipes

cluster = "h100x8@eager"
job = piper.models.job("llama3-8b", global_batch=8, length=2048)
directives = (recipes.one_f_one_b(rows=1), recipes.data_parallel(zero=3, bucket_mb=833))
strategy = piper.Strategy(piper.Mesh(dp=8), directives, global_batch=8)
