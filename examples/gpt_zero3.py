"""A GPT whose ranks share all states (ZeRO-3) under ZBV, and whose first stages make activations again.

piper verify examples/gpt_zero3.py                              gradients and weights are those of one device
piper explain examples/gpt_zero3.py                             gathers, scatters and recomputation by role
piper simulate examples/gpt_zero3.py --cluster h100x8           time and memory of four H100s
piper run examples/gpt_zero3.py --launcher processes            train it on four processes of this machine
"""

from __future__ import annotations

import piper
from piper.models import GPTConfig

PP, DP, MICROBATCHES = 2, 2, 4

job = piper.models.job(
    GPTConfig(layers=8, width=64, heads=4, vocab=256, length=32),
    global_batch=16,
    precision="float32",
    clip_norm=1.0,
)
strategy = piper.Strategy(
    piper.Mesh(pp=PP, dp=DP),
    (
        *piper.recipes.zbv(pp=PP, microbatches=MICROBATCHES),
        *piper.recipes.recomputation(
            keep=["inputs", "inputs", "products", "all"]
        ),  # early stages have most in flight
        *piper.recipes.data_parallel(zero=3, bucket_mb=0.2, resident_mb=0.5),
    ),
)
