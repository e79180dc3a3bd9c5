"""GPT-3 175B on 1,024 H100s, predicted on any machine; no GPU, and no memory for its weights.

piper simulate examples/gpt3_175b.py --cluster h100x8*128             step time, bubbles, memory by category; --why explains it
piper simulate examples/gpt3_175b.py --cluster h100x8*128 -p pp=32    another number of stages
"""

from __future__ import annotations

from typing import Any

import piper

DEVICES, ROWS = 1_024, 8_192

job = piper.models.job("gpt3-175b", global_batch=ROWS)
params = {"pp": 16, "microbatches": 128}
"""Rows of a microbatch: 8,192 / (microbatches x replicas), one here."""


def strategy(trial: Any) -> piper.Strategy:
    """1F1B over `pp` stages, on each of which replicas share the batch."""
    pp = trial.suggest_categorical("pp", (8, 16, 32))
    microbatches = trial.suggest_categorical("microbatches", (32, 64, 128))
    pipeline = piper.recipes.one_f_one_b(pp=pp, microbatches=microbatches)
    return piper.Strategy(
        piper.Mesh(pp=pp, dp=DEVICES // pp), (*pipeline, *piper.recipes.data_parallel(over=("dp",)))
    )
