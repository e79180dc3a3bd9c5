"""Plans for CUDA against what an H200's allocator was asked for, as committed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import piper
from benchmarks.gpu_check import BLOCKS, MICROBATCHES, ROWS
from piper import models
from piper_ir.memory import on_device

MEASURED = Path(__file__).resolve().parents[1] / "benchmarks" / "measured" / "gpu-check-h200-last.txt"


@pytest.mark.long
@pytest.mark.parametrize("name", BLOCKS)
def test_the_peaks_of_six_plans_are_what_was_asked_for_to_the_byte(name: str) -> None:
    """Compiled here; the plans of that run counted tensors alone, and are these with another kind of device."""
    text, config = MEASURED.read_text(), BLOCKS[name]
    work = models.job(config, global_batch=ROWS)
    for m in MICROBATCHES:
        plan = piper.compile(work, piper.Strategy(piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=m),))).plan
        title = re.escape(f"bfloat16, {name}, {plan.rows} x {config.length} tokens, m={m}: peak memory")
        found = re.search(rf"{title} .* predicted (\d+) bytes, the allocator was asked for (\d+)", text)
        assert found is not None, title
        assert (plan.roles[0].peak_bytes, on_device(plan, "cuda").roles[0].peak_bytes) == tuple(map(int, found.groups()))
