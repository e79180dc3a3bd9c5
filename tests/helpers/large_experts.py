"""A mixture whose experts are most of a step, and its plans' chunks of experts."""

from __future__ import annotations

from piper import models
from piper_ir.plan.plan import Plan
from piper_ir.program.program import Chunk
from piper_simulator import load_cluster

LARGE = models.MoEConfig(
    layers=1,
    width=512,
    heads=4,
    kv_heads=2,
    hidden=2048,
    vocab=64,
    length=512,
    experts=8,
    top_k=2,
    capacity_factor=None,
)
NODES = load_cluster("a100x1*4@eager")


def of_experts(plan: Plan) -> Chunk:
    return next(c for c in plan.chunks if c.experts and "experts" in c.coords)
