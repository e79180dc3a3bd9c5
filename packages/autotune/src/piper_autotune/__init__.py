"""Piper's tuner: searches the parameters of a strategy in simulation, under a memory limit; what runs plans is handed in."""

from piper_autotune.problem import Problem
from piper_autotune.rows import Row
from piper_autotune.search import Progress
from piper_autotune.study import NothingFoundError, Study
from piper_autotune.tune import Measured, tune

__all__ = ["Measured", "NothingFoundError", "Problem", "Progress", "Row", "Study", "tune"]
