"""Canonical durations: what the compiler assumes when it has to order things and no cluster is known.

They decide ties and places of frees, never results: any durations give a legal plan.
"""

from __future__ import annotations

from piper_ir.costs import Costs
from piper_ir.program import Chunk, Step

FLOPS = 3e14
"""FLOP/s of a nominal accelerator: about what dense bf16 matrix products reach on an A100-class device."""
BANDWIDTH = 2e12
"""Bytes/s of its memory."""


def chunk_seconds(chunk: Chunk, step: Step, costs: Costs | None = None) -> float:
    """Seconds of one step of a chunk with bound sizes: given, else from `costs`, else nominal."""
    cost = chunk.steps[step].cost
    if cost.seconds is not None:
        return cost.seconds
    if costs is not None and (known := costs.of_compute(chunk.id, step, chunk.code)) is not None:
        return known.seconds
    return max(cost.flops / FLOPS, cost.bytes / BANDWIDTH)
