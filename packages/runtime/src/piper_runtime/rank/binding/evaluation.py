"""Evaluate beside training: the forwards of another plan, on the parameters that a rank trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from piper_ir.ground.errors import PiperError
from piper_ir.plan.plan import Plan
from piper_runtime.rank.binding.rank import Rank
from piper_runtime.rank.binding.rank_state import RankJob
from piper_runtime.rank.job.job import Batch, NamedParameters
from piper_runtime.rank.optimizers.optimizer import RankOptimizer
from piper_runtime.rank.values.code import ExportedCode
from piper_runtime.rank.values.rng import rng_seed
from piper_runtime.rank.values.store import Store

EvaluatedScalars = dict[str, dict[int, float]]
"""The values of losses, weights and metrics by microbatch."""


@dataclass(frozen=True)
class Evaluation:
    """Say how a run evaluates its model.

    Attributes:
        plan: the forwards, for the ranks of the training plan.
        code: the code of its chunks.
        batch: as Job.batch; its steps are the batches of an evaluation.
        every: the number of steps after which the model is evaluated, again and again.
        batches: the global batches of an evaluation.
    """

    plan: Plan
    code: ExportedCode
    batch: Batch
    every: int
    batches: int

    def due(self, step: int) -> bool:
        """Return whether the model is evaluated after this step, which counts from 0."""
        return (step + 1) % self.every == 0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Hold a rank's scalars of an evaluation, by microbatch of all its batches, and its seconds."""

    scalars: EvaluatedScalars
    seconds: float


class EvaluationRank(Rank):
    """Bind the plan of an evaluation to the states of a rank that trains; `number` is the batch that comes next."""

    def __init__(self, trained: Rank, evaluation: Evaluation) -> None:
        self._trained, self.number = trained, 0
        job = RankJob(
            evaluation.batch, _no_optimizer, None, trained.seed, draws=trained.draws, progress=trained.progress
        )  # fmt: skip
        super().__init__(
            evaluation.plan, trained.rank, evaluation.code, job, {}, {}, None, trained.device
        )

    def _states(self, *_: object) -> tuple[Store, RankOptimizer]:
        return self._trained.store, self._trained.optimizer

    def begin(self, step: int) -> None:
        super().begin(step)
        self.feed.begin(self.number)
        self.seed = rng_seed(
            self._trained.seed, step, self.number, "evaluation"
        )  # else all batches draw the same numbers

    def end(self) -> None:
        """End a batch: nothing has been updated."""
        self.numbers.finish()
        self.end_counts()

    def record(self, kind: str, mb: int, value: float) -> None:
        """Keep a value whatever it is: a loss that is not finite here says nothing of the training."""
        if self.counts:
            self.scalars.setdefault(kind, {})[mb] = value


def _no_optimizer(named: NamedParameters) -> object:
    raise AssertionError("an evaluation makes no optimizer")


def evaluate(
    evaluation: Evaluation, ranks: Sequence[EvaluationRank], run: Callable[[], object]
) -> Mapping[int, Evaluated]:
    """Return the scalars that each of these ranks finds; `run` runs a batch on all of them.

    The random numbers that the training draws afterwards do not change.
    """
    began = time.perf_counter()
    scalars_by_rank: dict[int, EvaluatedScalars] = {rank.rank: {} for rank in ranks}
    with torch.random.fork_rng(devices=[]):
        for number in range(evaluation.batches):
            for rank in ranks:
                rank.number = number
            try:
                run()
            except PiperError as error:
                error.args = (f"in an evaluation, batch {number}: {error}", *error.args[1:])
                raise
            first = number * evaluation.plan.microbatches
            for rank in ranks:
                for kind, values in rank.scalars.items():
                    scalars_by_rank[rank.rank].setdefault(kind, {}).update(
                        {first + mb: value for mb, value in values.items()}
                    )
    seconds = time.perf_counter() - began
    return {rank: Evaluated(scalars, seconds) for rank, scalars in scalars_by_rank.items()}
