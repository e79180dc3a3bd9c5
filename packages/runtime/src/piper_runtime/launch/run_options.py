"""Define a caller's options for a run, beside the plan, the code and the job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Say how a run goes, and what it records.

    Attributes:
        timeout_s: seconds without progress of any rank after which the run ends.
        trace: whether to keep the spans of the last step.
        memory: whether to measure peak bytes.
        gradients: whether to keep the gradients of every step.
        ranges: whether to name instructions in profilers.
        stream: whether to report every finished step.
        loader: who calls the batch function, see `piper_runtime.launch.execute`.
    """

    steps: int
    timeout_s: float = 60.0
    trace: bool = False
    memory: bool = False
    gradients: bool = False
    ranges: bool = False
    stream: bool = False
    loader: str | int = "thread"
