"""Make zero-bubble schedules found by search, for any times and within a memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

from piper_compiler.directives import Boundaries, Directive
from piper_compiler.recipes.registry import recipe
from piper_compiler.recipes.scheduled import scheduled
from piper_compiler.recipes.search import find_orders
from piper_compiler.recipes.stages import check_numbers
from piper_compiler.recipes.zb_problem import OrderScore, Stages
from piper_ir.ground.errors import DirectiveError

_PerStage = float | Sequence[float]

ROUNDING = 1e-9
"""The share by which a sum of activations may exceed the limit, because they are added in floating point."""


@recipe(
    source="search; Qi et al. 2023 (arXiv 2401.10241), Qi et al. 2024 (arXiv 2405.15362)",
    formula="none in general; equal to ZB-H1, ZB-H2 and ZBV, or better, at their memory",
    peak="at most memory_limit",
    use="stages of different cost, slow links, or a memory limit between those of the named schedules",
    rule="chunks 1, or 2 (V placement); memory_limit holds one microbatch of all stages of a device",
)
def zero_bubble(
    *,
    pp: int,
    microbatches: int,
    F: _PerStage = 1.0,
    I: _PerStage = 1.0,  # noqa: E741 - the field's name for the input gradient
    W: _PerStage = 1.0,
    hop: float = 0.0,
    activation: _PerStage = 1.0,
    kept_after_I: _PerStage | None = None,
    memory_limit: _PerStage | None = None,
    chunks: int = 1,
    at: Boundaries = "even",
) -> tuple[Directive, ...]:
    """Return the order with the smallest makespan that a search of fixed effort finds (`recipes.search`).

    Ties go to the smallest span bubble. The result is deterministic. An argument of a stage is a number or one per
    stage; there are pp x chunks stages. Raises DirectiveError for arguments that do not fit, and for a limit that lets
    nothing run.

    Args:
        pp: devices.
        microbatches: how many.
        F: time of a stage's forward for one microbatch.
        I: time of its input gradient.
        W: time of its weight gradient.
        hop: time between two devices, in the same unit.
        activation: the memory that a stage keeps for one microbatch from the start of F to the end of W.
        kept_after_I: how much of that lives on from I to W (default: all).
        memory_limit: the most that a device keeps at any time, in the unit of `activation`; a number or one per device
            (default: no limit).
        chunks: 1 places stage r on device r; 2 places stages r and 2 pp - 1 - r there (V).
        at: the boundaries of stages, as in `partition`.
    """
    stages = _stages(
        "zero_bubble", pp, microbatches, chunks, (F, I, W), hop, activation, kept_after_I
    )
    limit = _limit(memory_limit, stages)
    return scheduled(find_orders(stages, microbatches, limit), microbatches=microbatches, at=at)


@recipe(
    source="Qi et al. 2024 (arXiv 2405.15362); found by search",
    formula="F=I=W, p >= 4: span = global = 3(2p - M) - 1 for peak M; 1F1B: 6(p - 1)",
    peak="2 floor((p + 2) / 2) of 2p stages",
    use="half of the activations of ZBV, for about half of the bubble of 1F1B",
    rule="any pp, microbatches >= 1; 2 chunks per device",
)
def v_half(*, pp: int, microbatches: int, at: Boundaries = "even") -> tuple[Directive, ...]:
    """Search the V placement within 2 floor((p + 2) / 2) units for F = I = W.

    Source: Qi et al. 2024 (arXiv 2405.15362).
    """
    return _preset("v_half", pp, microbatches, 2, 2, at)


@recipe(
    source="Qi et al. 2024 (arXiv 2405.15362); found by search",
    formula="F=I=W, p >= 4: span = global = 3(2p - M) - 1 for peak M; 1F1B: 6(p - 1)",
    peak="2 floor((p + 4) / 3) of 2p stages",
    use="a third of the activations of ZBV, for about two thirds of the bubble of 1F1B",
    rule="any pp, microbatches >= 1; 2 chunks per device",
)
def v_min(*, pp: int, microbatches: int, at: Boundaries = "even") -> tuple[Directive, ...]:
    """Search the V placement within 2 floor((p + 4) / 3) units for F = I = W.

    Source: Qi et al. 2024 (arXiv 2405.15362).
    """
    return _preset("v_min", pp, microbatches, 4, 3, at)


def v_frontier(p: int, units: int) -> int:
    """Return the span bubble of the V placement with a peak of `units`, F = I = W = 1 and m >= p.

    Each unit less than the 2p of ZBV costs three operations: one before the first I arrives, one while the forwards of
    the next microbatches wait for the memory of the first ones, one after the last F. It costs two if the units nearly
    fill the first gap.
    """
    return 3 * p - 1 - 3 * units + max(3 * p, p - 1 + 2 * (1 + (units + 1) // 2))


def _preset(
    name: str, pp: int, microbatches: int, more: int, share: int, at: Boundaries
) -> tuple[Directive, ...]:
    """Return the V placement within 2 floor((p + more) / share) units; the search ends at the frontier."""
    stages = _stages(name, pp, microbatches, 2, (1.0, 1.0, 1.0), 0.0, 1.0, None)
    units = 2 * ((pp + more) // share)
    bubble = float(v_frontier(pp, units))
    goal = (
        OrderScore(6 * microbatches + max(bubble, pp - 1.0), bubble, 0.0)
        if microbatches >= pp
        else None
    )
    orders = find_orders(stages, microbatches, _limit(float(units), stages), goal)
    return scheduled(orders, microbatches=microbatches, at=at)


def _stages(
    name: str,
    pp: int,
    microbatches: int,
    chunks: int,
    times: tuple[_PerStage, _PerStage, _PerStage],
    hop: float,
    activation: _PerStage,
    kept: _PerStage | None,
) -> Stages:
    check_numbers(name, pp=pp, microbatches=microbatches)
    if chunks not in (1, 2):
        raise DirectiveError(
            f"zero_bubble(chunks={chunks!r}): chunks must be 1, or 2 for the V placement"
        )
    n = pp * chunks
    forward, back, weight = (
        _each(name, x, n, "stage") for name, x in zip("FIW", times, strict=True)
    )
    keeps = _each("activation", activation, n, "stage")
    after = keeps if kept is None else _each("kept_after_I", kept, n, "stage")
    for s in range(n):
        if after[s] > keeps[s]:
            raise DirectiveError(
                f"zero_bubble(kept_after_I=...): stage {s} keeps {after[s]:g} after I and {keeps[s]:g} before it; "
                f"W cannot need more than F saved"
            )
    (latency,) = _each("hop", hop, 1, "pipeline")
    return Stages(pp, chunks, tuple(zip(forward, back, weight, strict=True)), keeps, after, latency)


def _limit(given: _PerStage | None, stages: Stages) -> tuple[float, ...]:
    """Return each device's memory limit, with rounding forgiven; raise DirectiveError if no microbatch fits."""
    p = stages.devices
    if given is None:
        return (inf,) * p
    limits = _each("memory_limit", given, p, "device")
    least = stages.least()
    for r, (limit, need) in enumerate(zip(limits, least, strict=True)):
        if limit * (1 + ROUNDING) < need:
            own = " and ".join(str(s) for s, home in enumerate(stages.home) if home == r)
            smallest = max(least) if isinstance(given, int | float) else need
            raise DirectiveError(
                f"zero_bubble(memory_limit={given!r}): no schedule fits. Device {r} keeps {need:g} for one "
                f"microbatch of stage {own}, and may keep {limit:g}; the smallest limit that fits is {smallest:g}"
            )
    return tuple([x * (1 + ROUNDING) for x in limits])


def _each(name: str, value: _PerStage, count: int, of: str) -> tuple[float, ...]:
    """Return a number per stage or device."""
    listed = (value,) * count if isinstance(value, int | float) else value
    if not isinstance(listed, tuple | list) or any(type(x) not in (int, float) for x in listed):
        raise DirectiveError(
            f"zero_bubble({name}={value!r}): a number is needed, or a list with a number per {of}"
        )
    try:
        values = tuple([float(x) for x in listed])
    except OverflowError:  # an integer of hundreds of digits
        values = (inf,) * count
    if len(values) != count:
        raise DirectiveError(
            f"zero_bubble({name}=...): {len(values)} values for {count} {of}s; give one number, or one per {of}"
        )
    if not all(isfinite(x) and x >= 0 for x in values):
        raise DirectiveError(
            f"zero_bubble({name}={value!r}): every value must be a finite number that is not negative"
        )
    return values
