"""Plans for CUDA against what an H200's allocator was asked for, as committed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import piper
from benchmarks.gpu_check import BLOCKS, MICROBATCHES, ROWS
from piper import models
from piper_ir.fold.memory import on_device
from piper_ir.ground.sizes import bind

MEASURED = (
    Path(__file__).resolve().parents[2] / "benchmarks" / "measured" / "gpu-check-h200-last.txt"
)

MORE = {"float32": 2, "int64": 8}
"""Bytes of an element of a buffer beyond those of then."""


@pytest.mark.long
@pytest.mark.parametrize("name", BLOCKS)
def test_the_peaks_of_six_plans_are_what_was_asked_for_to_the_byte(name: str) -> None:
    """Compiled here; the plans of that run counted tensors alone, and are these with another kind of device.

    Loss and tables of rotary angles were bfloat16 then, and are float32 now: 2 bytes more each. New since are the
    number of targets of each microbatch (4 bytes) and the tokens of each expert (8 bytes)."""
    text, config = MEASURED.read_text(), BLOCKS[name]
    work = models.job(config, global_batch=ROWS, precision="bfloat16")
    for m in MICROBATCHES:
        plan = piper.compile(
            work, piper.Strategy(piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=m),))
        ).plan
        title = re.escape(
            f"bfloat16, {name}, {plan.rows} x {config.length} tokens, m={m}: peak memory"
        )
        found = re.search(
            rf"{title} .* predicted (\d+) bytes, the allocator was asked for (\d+)", text
        )
        assert found is not None, title
        wider = (
            2
            + 4 * plan.microbatches
            + sum(MORE[b.spec.dtype] * bind(b.spec.numel, 0) for b in plan.buffers)
        )
        planned = plan.roles[0].peak_bytes, on_device(plan, "cuda").roles[0].peak_bytes
        assert tuple(nbytes - wider for nbytes in planned) == tuple(map(int, found.groups()))
