"""Describe how a failed run goes on, and the functions of a caller that have a part in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from piper_ir.plan.plan import Plan
from piper_runtime.rank.values.code import ExportedCode


@dataclass(frozen=True, slots=True)
class Restart:
    """Describe one failure of a run, and how the run went on.

    Attributes:
        step: the first step that was not finished.
        error: the class of the error.
        message: the message of the error, with rank and instruction.
        lost: the ranks whose process died; empty if a rank raised or hung.
        resumed: the first step after the restart.
        ranks: how many ranks went on.
        seconds: from the moment at which the failure was known to the end of the next step; None if no step was left.
        source: the state that it went on from: a checkpoint, host snapshots with their ranks, or the beginning.
    """

    step: int
    error: str
    message: str
    lost: tuple[int, ...]
    resumed: int
    ranks: int
    seconds: float | None = None
    source: str = ""


Replan = Callable[[int], tuple[Plan, ExportedCode]]
"""A function that returns a plan for at most so many ranks, with its code; it raises PiperError when there is none."""
OnRestart = Callable[[Restart], object]
"""A function that is called when a run that failed is about to go on."""
