"""Show what policies of recomputation cost and save: FLOPs of R for a layer, and the most activations of 1F1B.

One row per microbatch, bf16. Of the FLOPs of F, I and W, R of a GPT-3 layer must take at most 22.5 % under "inputs" and
3 % under "products"; with "inputs" the most activations on the first device of 1F1B, where most microbatches are in
flight, must be at most 0.25 times those without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import piper
from benchmarks.measure import Goal, Row
from piper import models
from piper_compiler import Strategy, recipes
from piper_ir.fold import memory
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.ground.sizes import bind
from piper_ir.program.program import Chunk

MODELS = ("gpt3-175b", "llama3-8b", "qwen3-moe-1b")
POLICIES = ("attention", "products", "inputs")
LAYERS, DEVICES, MICROBATCHES = 8, 4, 8
GOALS = {("gpt3-175b", "inputs"): 0.225, ("gpt3-175b", "products"): 0.03}
PEAK_GOAL = 0.25


@dataclass(frozen=True)
class Policy:
    """Hold what a layer keeps and computes again under a policy; `peak` is a share of that without recomputation."""

    model: str
    keep: str
    kept: int
    flops: float
    bytes: float
    peak: float


def measure(name: str, policies: tuple[str, ...] = POLICIES) -> Iterator[Policy]:
    """Yield what each policy does to the second layer of a preset, and to 1F1B of a few layers."""
    job = models.job(replace(models.preset(name), layers=LAYERS), global_batch=MICROBATCHES)
    base = 0
    for keep in ("all", *policies):
        strategy = Strategy(
            Mesh(pp=DEVICES),
            (
                *recipes.one_f_one_b(pp=DEVICES, microbatches=MICROBATCHES),
                piper.recompute(where(), keep=keep),
            ),
        )
        plan = piper.compile(job, strategy).plan
        peak = max(usage.bytes.get("activation", 0) for usage in memory.scan(plan, plan.roles[0]))
        base = base or peak
        layer = (plan.variants or plan.chunks)[1]
        yield Policy(name, keep, kept_bytes(layer), *again(layer), peak / base)


def kept_bytes(chunk: Chunk) -> int:
    """The bytes that F keeps for the backward, beside inputs and outputs."""
    return sum(
        int(bind(chunk.ports[p].nbytes, 1))
        for p in chunk.steps["F"].writes
        if p.startswith("saved")
    )


def again(chunk: Chunk) -> tuple[float, float]:
    """FLOPs and bytes of R, as shares of those of F, I and W."""
    if "R" not in chunk.steps:
        return 0.0, 0.0
    cost = chunk.steps["R"].cost
    rest = [chunk.steps[s].cost for s in ("F", "I", "W") if s in chunk.steps]
    return cost.flops / sum(c.flops for c in rest), cost.bytes / sum(c.bytes for c in rest)


def missed(found: list[Policy]) -> list[str]:
    """The goals that are missed."""
    out = [
        f"{p.model} {p.keep}: {p.flops:.1%} of the FLOPs"
        for p in found
        if p.flops > GOALS.get((p.model, p.keep), 1)
    ]
    return out + [
        f"{p.model} inputs: {p.peak:.2f} x"
        for p in found
        if p.keep == "inputs" and p.peak > PEAK_GOAL
    ]


def rows(quick: bool) -> Iterator[Row]:
    """Return what each policy keeps, the goals of FLOPs, and the peak; `quick`: of the mixture."""
    for name in MODELS[-1:] if quick else MODELS:
        for p in measure(name):
            title, limit = f"{name}, {p.keep}", GOALS.get((name, p.keep))
            peak = Goal("below", PEAK_GOAL) if p.keep == "inputs" else None
            flops = None if limit is None else Goal("below", 100 * limit)
            yield Row("recompute", f"{title}: kept of a layer", p.kept / 2**20, "MiB", note="a row")
            yield Row(
                "recompute", f"{title}: R of F, I and W", 100 * p.flops, "% FLOPs", goal=flops
            )
            title = f"{title}: most activations of the first device of 1F1B, of those without"
            yield Row("recompute", title, p.peak, "ratio", goal=peak)
