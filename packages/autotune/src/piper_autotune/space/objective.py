"""Define the objectives of a search: seconds per step, device-seconds per token, or dollars per token.

Each is the period times a weight that is known before a candidate is compiled, so that rules and rankings need to know
no more than the weight.
"""

from __future__ import annotations

from typing import Literal, get_args

from piper_compiler import Strategy
from piper_ir.ground.errors import TuneError
from piper_simulator import Cluster

Objective = Literal["period", "tokens_per_s_per_device", "dollars_per_token"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
SECONDS_PER_HOUR = 3600.0


def check_objective(objective: str, cluster: Cluster | None, tokens: int | None) -> None:
    """Raise TuneError for an unknown objective, and for one that lacks a number."""
    if objective not in OBJECTIVES:
        raise TuneError(
            f"tune(objective={objective!r}): one of {', '.join(map(repr, OBJECTIVES))} is accepted"
        )
    if objective == "period":
        return
    if tokens is None:
        raise TuneError(
            f"tune(objective={objective!r}): the tokens of a row are not known; give Job(tokens_per_row=...)"
        )
    if objective == "dollars_per_token":
        kinds = () if cluster is None else cluster.kinds
        missing = [kind.device.name for kind in kinds if not kind.device.price_per_hour]
        if missing or not kinds:
            what = f"{', '.join(missing)} has no price" if missing else "there is no cluster"
            raise TuneError(
                f"tune(objective={objective!r}): {what}; give dollars per device and hour in the "
                f"cluster file, as in\n"
                f'[device]\nbase = "{missing[0] if missing else "h100-80g-sxm"}"\nprice_per_hour = '
                f"2.5"
            )


def weight(
    objective: Objective, strategy: Strategy, cluster: Cluster | None, tokens: int | None
) -> float:
    """Return the weight of a second of a strategy's period; less is better."""
    if objective == "period":
        return 1.0
    assert tokens is not None, "see check_objective"
    world = strategy.mesh.world
    if objective == "tokens_per_s_per_device":
        return world / tokens
    assert cluster is not None, "see check_objective"
    prices = sum(cluster.of(rank).price_per_hour for rank in range(min(world, cluster.devices)))
    return prices / SECONDS_PER_HOUR / tokens


def value_text(objective: Objective, value: float) -> str:
    """Return a value as people say it: "1,234 tokens/s per device", "0.12 dollars per million tokens"."""
    if objective == "dollars_per_token":
        return f"{value * 1e6:.4g} dollars per million tokens"
    return f"{1 / value:,.0f} tokens/s per device" if value else "no time"
