"""Piper's simulator: predicts time and memory of a plan on a cluster, without a GPU and without PyTorch."""

from piper_simulator.clusters import Cluster, cpu_local, load_cluster
from piper_simulator.comparison import Comparison, compare
from piper_simulator.explanation import Why, why
from piper_simulator.jitter import Distribution
from piper_simulator.simulation import Simulation, simulate

__all__ = [
    "Cluster",
    "Comparison",
    "Distribution",
    "Simulation",
    "Why",
    "compare",
    "cpu_local",
    "load_cluster",
    "simulate",
    "why",
]
