"""Protect the checks of tensors that wait on the host: on CPUs, with small models."""

from __future__ import annotations

import pytest

from benchmarks import gpu_check, gpu_offload
from benchmarks.step_model import TINY
from piper import models

SMALL = models.LlamaConfig(layers=3, width=32, heads=2, kv_heads=1, hidden=64, vocab=64, length=16)


def test_the_section_is_among_the_checks() -> None:
    names = [getattr(s, "func", None) for s in gpu_check.sections()]
    assert gpu_offload.moved in names and "offload" in gpu_check.PROVES
    chosen = list(gpu_check.chosen(states=False, layouts=False, offload=True))
    assert [s.func for s in chosen] == [gpu_offload.rates, gpu_offload.equal, gpu_offload.moved]  # type: ignore[attr-defined]  # partials


@pytest.mark.long
def test_numbers_and_bytes_on_a_cpu() -> None:
    rows = [
        *gpu_offload.rates("cpu", 1 << 16),
        *gpu_offload.equal("cpu", TINY),
        *gpu_offload.moved("cpu", SMALL, least_mb=0),
    ]
    assert all(r.value > 0 for r in rows[:3])
    judged = [r for r in rows if r.goal is not None and "over the" not in r.name]
    assert judged and all(r.met for r in judged if "peak memory" not in r.name), judged
