"""Read metrics.jsonl, a line per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from piper_ir.ground.codec import read_json
from piper_ir.plan.plan import Plan
from piper_report.facts.expert_history import ExpertHistory
from piper_report.facts.reading import a_mapping, checked, lines_of

EVALUATED = "eval_"
"""The prefix of the names of an evaluation's metrics."""
EXPERTS = "experts"
"""The key of the tokens of experts."""


@dataclass(frozen=True)
class Metric:
    """Hold one line of metrics.jsonl, without the tokens of experts.

    Attributes:
        time: seconds since 1970.
        batch_s: seconds of waiting for Job.batch, on the rank that waited most.
        gradient_norm: the norm of the gradient before it was clipped.
        learning_rates: the learning rates of the optimizer's groups.
        metrics: values of the job's own metrics.
        evaluation: the loss and these metrics on the job's eval_data; in the file their names begin with "eval_".
        evaluation_s: seconds of the evaluation.
        loss_scale: the scale of the step's loss.
        skipped: whether the optimizer's step was skipped.
    """

    step: int
    loss: float
    step_s: float
    tokens_per_s: float | None = None
    time: float | None = None
    batch_s: float | None = None
    gradient_norm: float | None = None
    learning_rates: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)
    evaluation_s: float | None = None
    loss_scale: float | None = None
    skipped: bool | None = None


def read_metrics(path: Path, plan: Plan | None) -> tuple[tuple[Metric, ...], ExpertHistory | None]:
    """Return the steps of a file, and of all of them the load of experts; None for a model without experts."""
    steps, experts = [], ExpertHistory(plan)
    for line, where in lines_of(path):
        record = a_mapping(read_json(line, where), where)
        evaluation = {
            name.removeprefix(EVALUATED): value
            for name, value in record.items()
            if name.startswith(EVALUATED)
        }
        rest = {name: value for name, value in record.items() if not name.startswith(EVALUATED)}
        step = checked(Metric, rest | ({"evaluation": evaluation} if evaluation else {}), where)
        if rest.get(EXPERTS):
            experts.add(step.step, rest[EXPERTS], f"{where}.{EXPERTS}")
        steps.append(step)
    return tuple(steps), experts if experts.steps else None
