"""Show what policies of recomputation cost and save: FLOPs and bytes of R for a layer, and the most activations of
1F1B.

python -m benchmarks.recompute_flops                         GPT-3 175B, Llama-3 8B and the Qwen3-like MoE 1B
python -m benchmarks.recompute_flops gpt3-175b               one of them

One row per microbatch, bf16. Goals: of the FLOPs of F, I and W, R of a GPT-3 layer takes at most 22.5 % under "inputs"
and 3 % under "products"; with "inputs" the most activations on the first device of 1F1B, where most microbatches are in
flight, are at most 0.25 times those without. It prints one line per model and policy, then the goals, and ends with 1
where one is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import piper
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

    def __str__(self) -> str:
        return (
            f"{self.model:<14}{self.keep:<12}{self.kept / 2**20:>9.1f} MiB kept per layer and "
            f"row{self.flops:>8.1%} "
            f"FLOPs"
            f"{self.bytes:>8.1%} bytes moved{self.peak:>8.2f} x activations on the first device"
        )


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


def main(names: tuple[str, ...]) -> int:
    found: list[Policy] = []
    for name in names or MODELS:
        for policy in measure(name):
            print(policy, flush=True)
            found.append(policy)
    late = missed(found)
    print("\n".join(f"missed: {line}" for line in late) or "all goals are met")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:])))
