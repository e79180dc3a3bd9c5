"""Executes a plan: in one process (inline) or in one process per rank (processes)."""

from piper_runtime.job import Job, Precision
from piper_runtime.rng import rng_seed
from piper_runtime.run import Run, execute

__all__ = ["Job", "Precision", "Run", "execute", "rng_seed"]
