"""Define the reports of a rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from piper_runtime.engine.memory import AllocatorCounter, Counter, MemoryCounter, MemoryRecord
from piper_runtime.engine.trace import TimedSpan
from piper_runtime.rank.binding.evaluation import Evaluated
from piper_runtime.rank.binding.rank import Rank
from piper_runtime.rank.binding.rank_state import RankState
from piper_runtime.rank.values.code import used_code

MEASURED = (
    "bytes of live tensor storages in the second step (the first of a run of one step), temporaries of operators "
    "included, as torch's dispatcher shows them (of a process per CUDA rank: as torch's allocator was asked for "
    "them)"
)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Describe one finished step of a run.

    Attributes:
        step: its number; a run that was resumed goes on with the numbers of the run before.
        loss: the loss over the global batch.
        step_s: wall seconds since the step before it was done on the slowest rank; for the first, since all ranks were
            ready.
        batch_s: seconds of waiting for Job.batch, of the rank that waited most.
        experts: by module of experts the tokens that chose each, with `mean`, `max` and `overflow`; empty if a model
            counts none (`piper_ir.ground.expert_tokens`).
        gradient_norm: the norm of the gradient before it was clipped; None if it is not finite, or if the gradient is
            not clipped and the loss not scaled.
        learning_rates: the learning rates of the optimizer's groups.
        metrics: the values of Job.metrics that are functions of outputs.
        evaluation: the loss and these metrics on Job.eval_data; empty after steps without an evaluation.
        eval_s: the seconds of the evaluation, which are no part of step_s.
        loss_scale: the scale of the step's loss; None if it is not scaled.
        skipped: whether the optimizer's step was left out, since the scaled gradient was not finite.
    """

    step: int
    loss: float
    step_s: float
    batch_s: float = 0.0
    experts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gradient_norm: float | None = None
    learning_rates: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    eval_s: float = 0.0
    loss_scale: float | None = None
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class StepDone:
    """Report a step that one rank has just done, with the fields of a `RankReport`."""

    step: int
    started: float
    finished: float
    scalars: dict[str, dict[int, float]]
    batch_s: float = 0.0
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)
    gradient_norm: float | None = None
    learning_rates: tuple[float, ...] = ()
    loss_scale: float | None = None
    skipped: bool = False
    evaluated: dict[str, dict[int, float]] = field(default_factory=dict)
    eval_s: float = 0.0


@dataclass
class RankReport:
    """Hold the results of one rank.

    Attributes:
        started: when the rank was ready, on the machine-wide clock of the launcher, as all times here.
        finished: when each step was done.
        scalars: per step the losses and weights by microbatch.
        gradients: per step, as the optimizer saw them.
        spans: the last step's instructions with their begin and end; empty when not asked for.
        memory: memory in the measured step; None when not asked for.
        states: parameters and buffers after the last step that the rank holds whole.
        shared_states: the rank's shards of the parameters that it shares, by bucket.
        shared_gradients: per step, its shards of their gradients.
        clock_error_s: the error of times from another machine against the launcher's clock.
        batch_s: per step the seconds of waiting for Job.batch.
        waits: of the last step, see `piper_runtime.rank.batches.feed.Feed`.
        first_step: the number of the first step.
        expert_tokens: per step the buffers that count tokens of experts.
        updates: per step the norm of the gradient, the learning rates, the scale of the loss, and whether the
            optimizer's step was skipped.
        evaluations: by step, the scalars of the evaluation after it and its seconds.
        core_s: per step the seconds in which the issuing thread could run and waited for a core.
        threads_s: these seconds for all threads of the rank together, in the mean step after the warm-up.
        handed_on: the number of steps whose results the launcher has taken, and which are not kept here any more.
    """

    started: float = 0.0
    finished: list[float] = field(default_factory=list)
    scalars: list[dict[str, dict[int, float]]] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    spans: list[TimedSpan] = field(default_factory=list)
    memory: MemoryRecord | None = None
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    shared_states: dict[str, torch.Tensor] = field(default_factory=dict)
    shared_gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    clock_error_s: float = 0.0
    batch_s: list[float] = field(default_factory=list)
    waits: list[tuple[int, float, float]] = field(default_factory=list)
    first_step: int = 0
    expert_tokens: list[dict[str, list[int]]] = field(default_factory=list)
    updates: list[tuple[float | None, tuple[float, ...], float | None, bool]] = field(
        default_factory=list
    )
    evaluations: dict[int, tuple[dict[str, dict[int, float]], float]] = field(default_factory=dict)
    core_s: list[float] = field(default_factory=list)
    threads_s: float = 0.0
    handed_on: int = 0

    def shift(self, seconds: float, error_s: float) -> None:
        """Move the times to another clock, which is known to `error_s`."""
        self.started += seconds
        self.finished = [t + seconds for t in self.finished]
        self.spans = [(instr, start + seconds, end + seconds) for instr, start, end in self.spans]
        self.waits = [(mb, start + seconds, end + seconds) for mb, start, end in self.waits]
        self.clock_error_s = error_s

    def end_step(
        self, rank: Rank, ended: float | None = None, evaluated: Evaluated | None = None
    ) -> StepDone:
        """Keep the results of the step that a rank has just done, or at `ended`, and of the evaluation after it."""
        if evaluated is not None:
            self.evaluations[self.first_step + self.count] = evaluated.scalars, evaluated.seconds
        self.finished.append(time.perf_counter() if ended is None else ended)
        self.scalars.append({kind: dict(values) for kind, values in rank.scalars.items()})
        self.batch_s.append(sum(end - start for _, start, end in rank.feed.waits))
        self.expert_tokens.append(rank.expert_tokens)
        running = rank.loss_scale
        scale = (None, False) if running is None else (running.used, running.skipped)
        self.updates.append((rank.gradient_norm, rank.optimizer.rates, *scale))
        return self._done(len(self.finished) - 1)

    @property
    def count(self) -> int:
        """Return the number of steps that are done."""
        return self.handed_on + len(self.finished)

    def steps(self) -> list[StepDone]:
        """Return a report for every step that is done and was not handed on."""
        return [self._done(index) for index in range(len(self.finished))]

    def _done(self, index: int) -> StepDone:
        step = self.first_step + self.handed_on + index
        return StepDone(
            step, self.started, self.finished[index], self.scalars[index], self.batch_s[index], self.expert_tokens[index],
            *self.updates[index], *self.evaluations.get(step, ({}, 0.0)),
        )  # fmt: skip

    def hand_on(self) -> None:
        """Forget the results of steps, which the launcher has taken: a long run would fill the memory with them."""
        self.handed_on = self.count
        for kept in (
            self.finished,
            self.scalars,
            self.batch_s,
            self.expert_tokens,
            self.updates,
            self.evaluations,
        ):
            kept.clear()

    def probe(self, rank: RankState, buckets: tuple[str, ...], scale: float | torch.Tensor) -> None:
        """Keep the gradients that an Update is about to apply; this is a Probe."""
        if len(self.gradients) == self.count:
            self.gradients.append({})
            self.shared_gradients.append({})
        self.gradients[-1].update(rank.gradients(buckets, scale))
        self.shared_gradients[-1].update(rank.shared_gradients(buckets, scale))

    def close(self, rank: Rank, spans: Sequence[TimedSpan], counter: Counter | None) -> None:
        """Keep the remaining results when the last step is done."""
        self.states, self.shared_states = rank.states(), rank.shared_states()
        self.spans = list(spans)
        self.waits = list(rank.feed.waits)
        if counter is not None:
            kept = [*rank.store.host_tensors(), *rank.optimizer.state_tensors(host=True)]
            hosted = rank.host.peak + sum(t.untyped_storage().nbytes() for t in kept)
            self.memory = replace(counter.record(), host=hosted)


class Interrupted(KeyboardInterrupt):
    """Report an interrupt of a run whose ranks could still bring back results, as a `piper_runtime.Run` in `run`."""

    def __init__(self, reports: Mapping[int, RankReport]):
        super().__init__()
        self.reports = reports
        self.run: Any = None


def aligned(message: Any, ahead: float, error_s: float) -> Any:
    """Return a rank's message with its times on the launcher's clock.

    The rank's clock is `ahead` seconds ahead of it, known to `error_s`.
    """
    if isinstance(message, StepDone):
        return replace(message, started=message.started - ahead, finished=message.finished - ahead)
    if isinstance(message, RankReport):
        message.shift(-ahead, error_s)
    return message


def measured_counter(rank: Rank, *, alone: bool = False) -> Counter:
    """Return a counter that already holds the states of a rank; `alone` if no other rank is in this process.

    On CUDA it counts the workspace of the kernels of piper's ops, as plans for CUDA do (`Plan.device`).
    """
    cuda = rank.device.type == "cuda"
    counter = (
        AllocatorCounter(rank.device)
        if alone and cuda
        else MemoryCounter(rank.device.type, inside=cuda)
    )
    counter.track([*rank.store.state_tensors(), *rank.optimizer.state_tensors()])
    if not isinstance(counter, AllocatorCounter):  # an allocator made them before the first block
        counter.ignore(
            c
            for code, step in used_code(rank.plan, rank.role)
            for c in rank.steps.constants_of(code, step)
        )
    rank.untracked = counter.paused
    return counter
