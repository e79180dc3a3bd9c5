"""Compute rates of a simulated plan: tokens per second, and the utilisation of devices."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ir.plan import Plan
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.metrics import executed_flops, main_dtype, model_flops


@dataclass(frozen=True, slots=True)
class Rates:
    """Hold the rates of steady state; `notes` are warnings."""

    tokens_per_s: float | None
    mfu: float | None
    hfu: float | None
    notes: tuple[str, ...]


def rates_of(
    plan: Plan, target: Cluster | None, period_s: float, tokens_per_row: int | None, model_flops_per_step: float | None
) -> Rates:
    """Return the rates of a plan with a step per period; model FLOPs are those given, else those of its parameters."""
    per_second = 1 / period_s if period_s > 0 else None
    tokens_per_s = _rate(plan.global_batch * (tokens_per_row or 0), per_second)
    if target is None:
        return Rates(tokens_per_s, None, None, ())
    if model_flops_per_step is None and tokens_per_row is not None:
        model_flops_per_step = model_flops(plan, tokens_per_row)
    dtype = main_dtype(plan)
    top = target.peak_of(plan.mesh.world, dtype)
    mfu, hfu = _rate(model_flops_per_step, per_second, top), _rate(executed_flops(plan), per_second, top)
    unknown = [k for k, kind in enumerate(target.kinds) if dtype not in kind.device.peak_flops]
    guesses = [target.kinds[k].device.guess(dtype, target.name_of(k)) for k in unknown]
    return Rates(tokens_per_s, mfu, hfu, tuple(guesses) if mfu is not None or hfu is not None else ())


def _rate(amount: float | None, per_second: float | None, top: float = 1.0) -> float | None:
    """Return an amount per second over the top; None when a value is unknown or zero."""
    return None if not amount or per_second is None else amount * per_second / top
