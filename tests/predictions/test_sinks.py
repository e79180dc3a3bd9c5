"""Attention with sinks is predicted as a kernel: its memory grows with the tokens, and it is as fast as without sinks."""

from __future__ import annotations

from functools import cache

import pytest

import piper
from piper import Mesh, Strategy, models
from piper_simulator.simulation import Simulation


@cache
def predicted(length: int, *, sinks: bool = True, attention: str = "fused") -> Simulation:
    sizes = models.DecoderConfig(
        layers=2, width=1024, heads=16, kv_heads=4, hidden=2048, vocab=4096, length=length, sinks=sinks,
        attention=attention,  # type: ignore[arg-type]  # one of its words
    )  # fmt: skip
    plan = piper.compile(models.job(sizes, global_batch=1), Strategy(Mesh(), ())).plan
    return piper.simulate(plan, "h100x8")


def curvature(attention: str) -> float:
    """How much more memory the second half of 8,192 tokens needs than the first, as a share of all."""
    held = [max(predicted(t, attention=attention).held_bytes) for t in (4096, 6144, 8192)]
    return (held[2] - 2 * held[1] + held[0]) / held[2]


@pytest.mark.long
def test_memory_grows_with_the_tokens() -> None:
    assert curvature("fused") == pytest.approx(0, abs=1e-3)
    assert curvature("math") > 0.05  # the control: written out, it grows with their square


def test_sinks_take_little_time() -> None:
    fused, plain = (predicted(8192, sinks=s).period_s for s in (True, False))
    assert plain < fused < 1.1 * plain
    assert predicted(8192, attention="math").period_s > 1.5 * plain
