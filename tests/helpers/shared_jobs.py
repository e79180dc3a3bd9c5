"""Jobs whose chunks devices share, and how each is compiled, run and judged against one device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import piper
from piper import Mesh
from piper.api.compiling.compiling import Compiled
from piper.models import GPTConfig, LlamaConfig, MoEConfig
from piper_compiler import Strategy
from piper_runtime.launch.ground.result import Run
from piper_runtime.rank.job.job import Job
from tests.helpers import parity
from tests.helpers.compositions import Composition, adamw, captured, job_of

SIZES: dict[str, Any] = {
    "llama": LlamaConfig(layers=4, width=32, heads=8, kv_heads=4, hidden=48, vocab=64, length=8),
    "few_kv_heads": LlamaConfig(
        layers=2, width=32, heads=8, kv_heads=2, hidden=48, vocab=64, length=8, qk_norm=True
    ),
    "experts": MoEConfig(
        layers=4, width=16, heads=4, kv_heads=2, hidden=16, vocab=32, length=8, experts=4, top_k=2
    ),
    "dropless": MoEConfig(
        layers=4,
        width=16,
        heads=4,
        kv_heads=2,
        hidden=16,
        vocab=32,
        length=8,
        experts=4,
        top_k=2,
        capacity_factor=None,
    ),
    "gpt": GPTConfig(layers=4, width=32, heads=4, vocab=64, length=8),
}
"""Models of the catalog; every other name is one of tests/helpers/models.py."""


ROWS = 8
"""A batch has so many rows, unless a test asks for another number."""


@functools.cache
def job(name: str, rows: int = ROWS) -> Job:
    """A job in float64 that trains with AdamW and clips."""
    if name in SIZES:
        made = piper.models.job(SIZES[name], global_batch=rows, precision="float64")
        return replace(made, optimizer=adamw, clip_norm=0.5)
    captured(name)
    return replace(
        job_of(Composition(name, optimizer="adamw", clip=0.5)), global_batch=rows, seed=3
    )


@functools.cache
def expected(name: str, replicas: int, microbatches: int, rows: int = ROWS) -> parity.Reference:
    """What one device computes."""
    return parity.reference(job(name, rows), replicas=replicas, microbatches=microbatches)


def compiled(
    name: str,
    mesh: Mesh,
    directives: Sequence[Any],
    *,
    stream: str = "",
    keep: bool = False,
    cut: bool = False,
    rows: int = ROWS,
) -> Compiled:
    """A job whose chunks the devices along tp share, and further directives."""
    asked = piper.shard(piper.where(), stream=stream, keep=keep, cut=cut)
    return piper.compile(job(name, rows), Strategy(mesh, [asked, *directives]))


def in_twos(name: str, mesh: Mesh, directives: Sequence[Any]) -> Compiled:
    """Compile the job with a batch whose microbatches have two rows: for others all chunks would be traced once
    more."""
    strategy = Strategy(mesh, directives)
    many = 8 * ROWS
    return piper.compile(
        job(name, 2 * many // piper.compile(job(name, many), strategy).plan.rows), strategy
    )


def run(made: Compiled, *, launcher: str = "inline", steps: int = parity.STEPS, **more: Any) -> Run:
    """A run of a few steps with its gradients."""
    return piper.execute(made, steps=steps, launcher=launcher, gradients=True, **more)


def assert_equal(name: str, made: Compiled, found: Run) -> None:
    """A run is what one device computes."""
    plan, job = made.plan, made.job
    assert job is not None
    one = expected(name, plan.replicas, plan.microbatches, job.global_batch)
    parity.assert_parity(found, one, label=f"{name} {plan.mesh}")
