"""Define a caller's options for a run, beside the plan, the code and the job."""

from __future__ import annotations

from dataclasses import dataclass

from piper_runtime.checkpoint.host_snapshots import SnapshotOptions
from piper_runtime.checkpoint.settings import Checkpoints


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Hold the settings of a run and its recordings.

    Attributes:
        steps: how many steps to run.
        timeout_s: seconds without progress of any rank after which the run ends.
        trace: whether to keep the spans of the last step.
        memory: whether to measure peak bytes.
        gradients: whether to keep the gradients of every step.
        ranges: whether to name instructions in profilers.
        stream: whether to report every finished step.
        first_step: the number of the first of these steps.
        checkpoint: the folder and frequency of checkpoints; None: never.
        loader: who calls the batch function, see `piper_runtime.launch.execute`.
        snapshots: the folder and frequency of the ranks' copies of their state in memory of the machine; None: never.
    """

    steps: int
    timeout_s: float = 60.0
    trace: bool = False
    memory: bool = False
    gradients: bool = False
    ranges: bool = False
    stream: bool = False
    first_step: int = 0
    checkpoint: Checkpoints | None = None
    loader: str | int = "thread"
    snapshots: SnapshotOptions | None = None

    @property
    def numbers(self) -> range:
        """Return the numbers of the steps."""
        return range(self.first_step, self.first_step + self.steps)

    @property
    def measured(self) -> int:
        """Return the step in which memory is measured: the second, or the only one.

        Some optimizers make their state in the first step, after the peak of the forward.
        """
        return self.first_step + min(1, self.steps - 1)
