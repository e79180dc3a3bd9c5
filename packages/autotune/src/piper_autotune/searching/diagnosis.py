"""Explain why a search found nothing, and which memory limit would let it find something."""

from __future__ import annotations

from collections import Counter

from piper_autotune.searching.search import StrategySearch
from piper_autotune.space.problem import TuningProblem
from piper_autotune.space.rules import TOO_MUCH
from piper_ir.study.study import Row
from piper_ir.tools import enough_text, size_text

MEMORY_KINDS = ("memory", *TOO_MUCH)
MOST_COMPILED = 32
"""The most candidates compiled, when nothing fits, to find the smallest limit that fits one."""


def nothing_found(search: StrategySearch, problem: TuningProblem) -> str:
    """Return the message for the user."""
    rows = list(search.rows.values())
    if not rows:
        return "the search ended without a candidate: the sampler proposed nothing that could be scored"
    too_much = [r for r in rows if r.kind in MEMORY_KINDS]
    least = _smallest(search, too_much) if problem.memory_limit is not None else None
    if least is not None and problem.memory_limit is not None:
        some = _counted(search, len(rows))
        return (
            f"{some} fits into {size_text(problem.memory_limit)}; the smallest needs "
            f"{enough_text(least.device_bytes or 0)} "
            f"({least.reason}; params {dict(least.params)}). {_way_out(problem, least)} "
            "choices that hold less: more stages, smaller microbatches, fewer of them in flight"
        )
    kind, count = Counter(str(r.kind) for r in rows).most_common(1)[0]
    first = next(r for r in rows if r.kind == kind)
    return f"all {len(rows)} candidates were rejected, {count} of them as {kind!r}; the first: {first.reason}"


def _counted(search: StrategySearch, count: int) -> str:
    """Return the beginning of a message: nothing in the whole space fits, or none of the tried candidates does."""
    if search.exhausted:
        return f"nothing fits: none of the {count} candidates of this space"
    return f"none of the {count} candidates that were tried (there are more, so give more trials)"


def _way_out(problem: TuningProblem, least: Row) -> str:
    """Return advice if nothing fits.

    A higher limit does not help if no type of device has the memory of the smallest candidate: a rank never has more
    than its own device.
    """
    devices = problem.several_devices
    if all(
        least.device_bytes is not None and least.device_bytes <= device.memory_bytes
        for device in devices
    ):
        return "Set memory_limit to at least that, or offer"
    own = ", ".join(f"{device.name} {size_text(device.memory_bytes)}" for device in devices)
    return (
        f"Each rank has the memory of its own device, whatever the limit: {own}. Put types with "
        f"more where more is held, or offer"
    )


def _smallest(search: StrategySearch, rows: list[Row]) -> Row | None:
    """Return the candidate that needs least; any whose lower bound is below the least exact need is compiled."""
    known = {r.number: r for r in rows}
    for _ in range(MOST_COMPILED):
        least = min(known.values(), key=lambda r: (r.device_bytes, r.number), default=None)
        if least is None or least.kind == "memory":
            return least
        row = search.score(least.number)
        if row.kind == "memory":
            known[least.number] = row
        else:
            del known[least.number]
    return min(
        (r for r in known.values() if r.kind == "memory"),
        key=lambda r: (r.device_bytes, r.number),
        default=None,
    )
