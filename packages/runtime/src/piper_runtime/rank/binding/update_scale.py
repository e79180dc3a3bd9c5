"""Make the factor of gradients in an Update: the weight of the loss, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from piper_ir.ground.errors import NonFiniteLossError
from piper_ir.plan.plan import Part
from piper_ir.program.ops import Update
from piper_runtime.rank.binding.rank_state import RankState, not_finite_advice
from piper_runtime.rank.job.loss_scale import RunningScale
from piper_runtime.rank.values.store import empty_value


def scale_of(part: Part, op: Update, rank: RankState) -> Callable[[], float | torch.Tensor | None]:
    """Return a function that makes the factor of gradients in an Update; None if the step is to be skipped.

    If the loss is scaled, the host decides on that, so it waits for the norm of the gradient, as torch's GradScaler
    does.
    """
    if op.scaled and rank.loss_scale is not None:
        return _unscaling(part, op, rank, rank.loss_scale)
    return _late_scale(part, op, rank) if rank.numbers.late else _scale(part, op, rank)


def _unscaling(
    part: Part, op: Update, rank: RankState, running: RunningScale
) -> Callable[[], float | None]:
    """Return the scale of gradients of a scaled loss, which sets the scale of the next step."""
    values, reads = rank.store.values, part.reads

    def scale() -> float | None:
        scalars, by = [float(values[v]) for v in reads], running.value
        finite, stuck = math.isfinite(scalars[-1]), running.at_least
        running.update(finite)
        rank.gradient_norm = None
        if finite:
            scalars[-1] /= by**2
            rank.gradient_norm = gradient_norm(op, scalars)
            return gradient_scale(op, scalars, f"step {rank.step}, rank {rank.rank}") / by
        if stuck:
            raise NonFiniteLossError(
                f"step {rank.step}, rank {rank.rank}: the gradient is not finite, and the loss is scaled by {by:g}, "
                f"which is the least that Precision(loss_scale=...) allows; {not_finite_advice(op.clip)}"
            )
        return None

    return scale


def _scale(part: Part, op: Update, rank: RankState) -> Callable[[], float]:
    values, reads = rank.store.values, part.reads

    def scale() -> float:
        scalars = [float(values[v]) for v in reads]
        rank.gradient_norm = gradient_norm(op, scalars)
        return gradient_scale(op, scalars, f"step {rank.step}, rank {rank.rank}")

    return scale


def _late_scale(part: Part, op: Update, rank: RankState) -> Callable[[], float | torch.Tensor]:
    """Return the scale on the device; its scalars are checked when the step ends."""
    values, arrived = rank.store.values, list[float]()

    def check(number: float) -> None:
        arrived.append(number)
        if len(arrived) == len(part.reads):
            scalars = arrived.copy()
            arrived.clear()
            rank.gradient_norm = gradient_norm(op, scalars)
            gradient_scale(op, scalars, f"step {rank.step}, rank {rank.rank}")

    readers = [(v, rank.numbers.reader(empty_value(rank.plan, v)[1], check)) for v in part.reads]

    def scale() -> float | torch.Tensor:
        for v, read in readers:
            read(values[v])
        return device_scale(op, [values[v] for v in part.reads])

    return scale


def device_scale(op: Update, scalars: list[torch.Tensor]) -> float | torch.Tensor:
    """Return `gradient_scale` of scalars on a device, in float64 there and without its checks."""
    scale = scalars[0].double().reciprocal() if op.weighted else 1.0
    if op.clip is None:
        return scale
    magnitude = scale.abs() if isinstance(scale, torch.Tensor) else abs(scale)
    return scale * (op.clip / (scalars[-1].double().sqrt() * magnitude + 1e-6)).clamp(max=1.0)


def gradient_norm(op: Update, scalars: list[float]) -> float | None:
    """Return the norm of the gradient before it is clipped; None if no norm is read, or if it is no number.

    `scalars` is as in `gradient_scale`.
    """
    weight = scalars[0] if op.weighted else 1.0
    if not op.normed or not weight or not math.isfinite(scalars[-1]):
        return None
    return math.sqrt(scalars[-1]) / abs(weight)


def gradient_scale(op: Update, scalars: list[float], where: str) -> float:
    """Return the one factor of gradients in an Update.

    `scalars` are [sum of weights, if weighted] + [squared norm of the summed gradients, if normed]. Clipping is
    torch's clip_grad_norm_ on the gradient after division: min(1, clip / (norm + 1e-6)). Raises NonFiniteLossError when
    the weights sum to zero or the norm is not finite.
    """
    weight = scalars[0] if op.weighted else 1.0
    if not weight:
        raise NonFiniteLossError(
            f"{where}: the loss weights of the global batch sum to 0, so the loss is not a number; mask fewer rows"
        )
    scale = 1.0 / weight
    if op.clip is None:
        return scale
    if not math.isfinite(scalars[-1]):
        raise NonFiniteLossError(
            f"{where}: the squared norm of the gradient is {scalars[-1]}, so it cannot be clipped "
            f"to {op.clip:g}; " + not_finite_advice(op.clip)
        )
    return scale * min(1.0, op.clip / (math.sqrt(scalars[-1]) * abs(scale) + 1e-6))
