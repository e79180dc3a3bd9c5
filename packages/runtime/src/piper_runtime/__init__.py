"""Executes a plan: in one process (inline), in one process per rank (processes), or in one Ray actor per rank (ray)."""

from piper_runtime.job import Job, Precision
from piper_runtime.rng import rng_seed
from piper_runtime.run import Run, execute

__all__ = ["Job", "Precision", "Run", "execute", "rng_seed"]
