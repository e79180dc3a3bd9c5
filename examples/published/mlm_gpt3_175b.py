"""GPT-3 175B in float16, TP 8 x PP 16: examples/gpt3/train_gpt3_175b_distributed.sh of Megatron-LM (d98e8a64).

On 1,024 GPUs (assumed), with the last batch of its schedule.
"""

import piper
from piper import recipes

cluster = "h100x8*128@hopper-megatron"
precision = piper.Precision("float32", "float16")
job = piper.models.job("gpt3-175b", global_batch=1536, precision=precision, clip_norm=1.0)
strategy = piper.Strategy(
    piper.Mesh(pp=16, dp=8, tp=8),
    (recipes.tensor_parallel(), recipes.one_f_one_b(rows=1), recipes.data_parallel()),
    global_batch=1536,
)
