"""Set the largest sizes that are accepted.

A mistyped number is refused by name before it fills the memory or runs for ever.
"""

from __future__ import annotations

MOST_RANKS = 1 << 20
"""Ranks of a mesh, and devices of a cluster: many times those of the largest machines that train one model."""
MOST_NODES = 1 << 20
"""Compute nodes of one training step, and operations of a recipe's order.

A node takes about 15 kB in a graph, a plan and their simulation, so that many are 15 GB."""
MOST_STEP_INSTRUCTIONS = 10_000_000
"""Instructions that one simulation of several steps keeps the times of: about 2 GB."""


def most(wanted: int, per_item: int) -> int:
    """Return how many items fit when all may take `wanted` and each takes `per_item`: at least 1."""
    return max(1, wanted // max(1, per_item))
