"""Hold the result of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piper_ir.ground.trace import Trace
from piper_ir.tools import Brief, size_text, time_text
from piper_runtime.engine.memory import MemoryRecord
from piper_runtime.launch.ground.restart import Restart
from piper_runtime.rank.job.job import InitialState

WARMUP_STEPS = 3


@dataclass(frozen=True, repr=False)
class Run(Brief):
    """Hold the result of `execute`.

    Attributes:
        losses: one per step, over the global batch.
        step_s: wall seconds per step between completions, on the slowest rank; the first since all ranks were ready.
        period_s: median of step_s[3:], None when there are none.
        peak_bytes: per rank the most bytes that were alive (`trace.notes` names the method); empty when not asked for.
        trace: trace of the last step; without spans unless they were asked for.
        rank_states: per rank its parameters and buffers after the last step.
        rank_gradients: per rank and step, with `gradients=True`.
        memory: bytes alive in each instruction; empty when not asked for.
        batch_s: of step_s, the seconds of waiting for Job.batch, of the rank that waited most.
        first_step: the number of the step that `losses` begins with.
        restarts: the failures of the run, and how it went on each time. `losses`, `step_s` and `batch_s` have each step
            once; all else is of the last attempt.
        metrics: per step the values of Job.metrics that are functions of outputs.
        evaluations: by step, the loss and all metrics on Job.eval_data after it, also metrics that are functions of the
            loss.
    """

    losses: list[float]
    step_s: list[float]
    period_s: float | None
    peak_bytes: dict[int, int]
    trace: Trace
    rank_states: Mapping[int, Mapping[str, torch.Tensor]]
    rank_gradients: Mapping[int, Sequence[Mapping[str, torch.Tensor]]]
    memory: Mapping[int, MemoryRecord]
    _initial: InitialState = field(repr=False)
    batch_s: list[float] = field(default_factory=list)
    first_step: int = 0
    restarts: tuple[Restart, ...] = ()
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def facts(self) -> Iterator[tuple[str, object]]:
        """Yield how far the run came, its last loss, its time per step and its peak."""
        yield (
            "steps",
            f"{self.first_step} to {self.first_step + len(self.losses) - 1}"
            if self.losses
            else "none",
        )
        if self.losses:
            yield "loss", f"{self.losses[-1]:.6g}"
        if self.period_s is not None:
            yield "period", time_text(self.period_s)
        if self.peak_bytes:
            yield "peak", size_text(max(self.peak_bytes.values()))
        if self.restarts:
            yield "restarts", len(self.restarts)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state_dict after the last step: on CPU, full shapes, under the names that the model gives.

        Tensors that no rank holds are as the model made them.
        """
        trained: dict[str, torch.Tensor] = {}
        for rank in sorted(self.rank_states, reverse=True):  # the lowest rank's copy counts
            trained.update(self.rank_states[rank])
        return self._initial.state_dict(trained)

    @property
    def gradients(self) -> list[dict[str, torch.Tensor]]:
        """Return per step the gradient of every trained parameter as the optimizer saw it; the lowest rank's copy."""
        steps: list[dict[str, torch.Tensor]] = []
        for rank in sorted(self.rank_gradients, reverse=True):
            for step, step_gradients in enumerate(self.rank_gradients[rank]):
                if step == len(steps):
                    steps.append({})
                steps[step].update(step_gradients)
        return steps
