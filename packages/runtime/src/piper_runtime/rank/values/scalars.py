"""Join the losses and metrics of microbatches on all ranks to values of a global batch, or of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from piper_ir.plan.plan import Plan
from piper_ir.program.program import Output

Scalars = Mapping[str, Mapping[int, float]]
"""The values of a rank by name and microbatch."""
METRIC, WEIGHT, TOTAL = "metric ", "weight of metric ", "total of metric "


def scalar_name(output: Output) -> str:
    """Return the name under which a rank keeps a scalar of a chunk: its kind, with the name of a metric."""
    match output.kind:
        case "metric":
            return METRIC + output.ref
        case "metric_weight":
            return WEIGHT + output.ref
        case "metric_total":
            return TOTAL + output.ref
        case _:
            return output.kind


def step_loss(plan: Plan, scalars: Sequence[Scalars], batches: int = 1) -> float:
    """Return the loss of a step, or of several batches, from the scalars of all ranks.

    It is the mean over microbatches and replicas, their sum, or the sum of losses over the sum of weights. Of several
    batches that have a sum each, it is the mean of these.
    """
    total = _total("loss", scalars)
    if plan.loss_kind == "total":
        return total / batches
    if plan.loss_kind == "mean":
        return total / (plan.microbatches * plan.replicas * batches)
    weight = _total("weight", scalars)
    return total / weight if weight else math.nan


def metrics_of(plan: Plan, scalars: Sequence[Scalars], batches: int = 1) -> dict[str, float]:
    """Return the metrics of outputs by name: means, sums, or sums divided by weights (NaN if these are 0)."""
    names = dict.fromkeys(
        name.removeprefix(METRIC)
        for by_name in scalars
        for name in by_name
        if name.startswith(METRIC)
    )
    totals = {name: None for by_name in scalars for name in by_name if name.startswith(TOTAL)}
    metrics = {name.removeprefix(TOTAL): _total(name, scalars) for name in totals}
    for name in names:
        total = _total(METRIC + name, scalars)
        if any(WEIGHT + name in by_name for by_name in scalars):
            weight = _total(WEIGHT + name, scalars)
            metrics[name] = total / weight if weight else math.nan
        else:
            metrics[name] = total / (plan.microbatches * plan.replicas * batches)
    return metrics


def _total(name: str, scalars: Iterable[Scalars]) -> float:
    return sum(value for by_name in scalars for value in by_name.get(name, {}).values())
