"""Set the largest accepted sizes, so that a mistyped number is refused before it fills the memory or runs for ever."""

from __future__ import annotations

MOST_RANKS = 1 << 20
"""The most ranks of a mesh, and devices of a cluster: many times the largest machines that train one model."""
MOST_NODES = 1 << 20
"""The most compute nodes of one training step, and operations of a recipe's order.

A node takes about 15 kB in a graph, a plan and their simulation, so that many are 15 GB.
"""
MOST_STEP_INSTRUCTIONS = 10_000_000
"""The most instructions of one simulation of several steps: their times take about 2 GB."""

MOST_SMS = 4096
"""The most SMs that a strategy may name: many times the SMs of any device (an H100 has 132, a B200 148)."""


def most(wanted: int, per_item: int) -> int:
    """Return how many items of size `per_item` fit into `wanted`: at least 1."""
    return max(1, wanted // max(1, per_item))
