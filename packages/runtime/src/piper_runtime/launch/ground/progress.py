"""Join the losses and times of all ranks to one record per step, while the run goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from piper_ir.ground.errors import NonFiniteLossError, PiperWarning
from piper_ir.ground.expert_tokens import experts_of
from piper_ir.plan.plan import Plan
from piper_runtime.checkpoint.rank_file import SaveDone
from piper_runtime.launch.ground.report import RankReport, StepDone, StepRecord
from piper_runtime.rank.job.job_evaluation import of_loss
from piper_runtime.rank.values.scalars import metrics_of, step_loss

OnStep = Callable[[StepRecord], object]
"""A function that a caller wants to be called with every finished step."""
OnSave = Callable[[SaveDone], object]
"""A function that is called with each rank's report on its file of a checkpoint."""


def evaluated(record: StepRecord, metrics: Mapping[str, Callable[..., Any]]) -> dict[str, float]:
    """Return the values of the evaluation after a step, with the job's metrics that are functions of its loss.

    One that fails is left out, with a warning: training is worth more.
    """
    values = dict(record.evaluation)
    for name, function in of_loss(metrics).items() if values else ():
        try:
            values[name] = float(function(values["loss"]))
        except Exception as e:  # a function of the user's may fail in any way
            warnings.warn(
                f"metric {name!r} failed on an evaluation: {type(e).__name__}: {e}",
                PiperWarning,
                stacklevel=2,
            )
    return values


class Progress:
    """Collect the reports of ranks on their steps, and hand on each step in order when its last rank is done with it.

    A step that a rank reports twice (in a message, later in its report) counts once. `latest` is the last step that all
    ranks have done.
    """

    def __init__(
        self, plan: Plan, on_step: OnStep | None, on_save: OnSave | None = None, first_step: int = 0
    ):
        self._plan = plan
        self._on_step = on_step
        self._on_save = on_save
        self._found: dict[int, dict[int, StepDone]] = {}
        self._next = first_step
        self._ended: dict[int, float] = {}
        self._warned = False
        self.latest: StepRecord | None = None

    def add(self, rank: int, done: StepDone) -> None:
        """Add the report of one rank; raise NonFiniteLossError when a step's loss weights add up to 0."""
        if done.step < self._next:
            return
        self._found.setdefault(done.step, {})[rank] = done
        while len(self._found.get(self._next, ())) == self._plan.mesh.world:
            self._hand_on(self._record(self._found.pop(self._next)))
            self._next += 1

    def saved(self, done: SaveDone) -> None:
        """Hand on one rank's report on its file of a checkpoint."""
        if self._on_save is not None:
            self._on_save(done)

    def finish(self, reports: Mapping[int, RankReport]) -> None:
        """Hand on the steps that messages did not bring."""
        for rank, report in reports.items():
            for done in report.steps():
                self.add(rank, done)

    def _record(self, found: Mapping[int, StepDone]) -> StepRecord:
        # Summed in the order of ranks, whoever came first: a loss has the same bits in every run.
        scalars = [found[rank].scalars for rank in sorted(found)]
        loss = step_loss(self._plan, scalars)
        if loss != loss:
            raise NonFiniteLossError(
                f"step {self._next}: the sum of loss weights over the global batch is 0; is every row masked?"
            )
        start = max(done.started for done in found.values())
        step_s = max(done.finished - self._ended.get(rank, start) for rank, done in found.items())
        self._ended = {rank: done.finished + done.eval_s for rank, done in found.items()}
        experts = experts_of([found[rank].expert_tokens for rank in sorted(found)])
        first = found[min(found)]  # all ranks have the same norm, rates and scale
        waited = max(done.batch_s for done in found.values())
        return StepRecord(
            self._next, loss, step_s, waited, experts, first.gradient_norm, first.learning_rates, metrics_of(self._plan, scalars),
            self._evaluation(found), max(done.eval_s for done in found.values()), first.loss_scale, first.skipped,
        )  # fmt: skip

    def _evaluation(self, found: Mapping[int, StepDone]) -> dict[str, float]:
        """Return the loss and the metrics of the evaluation after a step; nothing if there was none.

        A microbatch of an evaluation has as many rows as one of training, so the number of batches follows from theirs.
        """
        evaluated = [found[rank].evaluated for rank in sorted(found)]
        count = max((len(scalars.get("loss", ())) for scalars in evaluated), default=0)
        if not count:
            return {}
        batches = count // self._plan.microbatches
        return {
            "loss": step_loss(self._plan, evaluated, batches),
            **metrics_of(self._plan, evaluated, batches),
        }

    def _hand_on(self, record: StepRecord) -> None:
        self.latest = record
        if self._on_step is None:
            return
        try:
            self._on_step(record)
        except Exception as e:  # the caller's own function may fail in any way; training must not
            if not self._warned:
                warnings.warn(
                    f"on_step failed in step {record.step}: {type(e).__name__}: {e}; training goes on, and this is "
                    f"said once",
                    PiperWarning,
                    stacklevel=2,
                )
            self._warned = True
