"""Executes a plan: in one process (inline), in one process per rank (processes), or in one Ray actor per rank (ray)."""

from piper_runtime.launch.run import Run, execute
from piper_runtime.rank.job import Job, Precision
from piper_runtime.rank.rng import rng_seed

__all__ = ["Job", "Precision", "Run", "execute", "rng_seed"]
