"""Show an answer to people: the job as understood, the ranked strategies, and why nothing fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from piper.planning.answers import Answer, PlannedStrategy
from piper.planning.sources import PlanSource
from piper_ir.tools import count_text, size_text, time_text
from piper_report import COUNTED, MFU, Table

COLUMNS = ("", "s/step", "tokens/s/device", "MFU", "memory")
ASKED = ("goodput", "days", "dollars")
"""The columns of a whole training, which are there if any strategy has them."""


def table(source: PlanSource, answer: Answer, cluster: str) -> Table:
    """Return the strategies as a table, best first, with the notes under it."""
    every = [*answer.strategies, *([answer.own] if answer.own is not None else [])]
    asked = [name for name in ASKED if any(getattr(one, name) is not None for one in every)]
    columns = (*COLUMNS, *asked)
    rows = tuple(_cells(k, one, asked) for k, one in enumerate(every, 1))
    return Table(
        f"{source.name} on {cluster}: {_counted(len(answer.strategies))}",
        columns,
        rows,
        tuple(_notes(source, answer)),
        tuple(map(_words, every)),
    )


def failure_text(source: PlanSource, answer: Answer, cluster: str) -> str:
    """Return why no strategy fits, with the notes, for an answer that has no rows for a table."""
    return "\n".join((f"{source.name} on {cluster}: {_counted(0)}", *_notes(source, answer)))


def _counted(strategies: int) -> str:
    several = "strategies that differ in structure"
    return count_text(strategies, "strategy", several) if strategies else "no strategy"


def numbers(source: PlanSource, answer: Answer, cluster: str) -> dict[str, Any]:
    """Return the answer for programs: the job, the strategies, the warnings."""
    more = {"failure": answer.failure} if answer.failure else {}
    if answer.own is not None:
        more["own"] = answer.own.as_dict()  # type: ignore[assignment]  # a value of JSON
    return {
        "job": {
            "name": source.name,
            "facts": source.facts,
            "cluster": cluster,
            "notes": list(source.notes),
        },
        "strategies": [one.as_dict() for one in answer.strategies],
        "warnings": [
            *(f"as nearest: {n}" for n in source.notes),
            *source.warnings,
            *answer.warnings,
        ],
        **more,
    }


def _cells(number: int, one: PlannedStrategy, asked: Sequence[str]) -> tuple[str, ...]:
    minutes = (one.checkpoint_every_s or 0.0) / 60
    of_training = {
        "goodput": _text(one.goodput, ".1%") + (f", {minutes:,.0f} min" if minutes else ""),
        "days": _text(one.days, ",.1f"),
        "dollars": _text(one.dollars, ",.0f"),
    }
    return (
        "yours" if one.own else str(number),
        f"{time_text(one.period_s)} ({time_text(one.low_s)} to {time_text(one.high_s)})",
        _text(one.tokens_per_s_per_device, ",.0f"),
        _text(one.mfu, ".1%"),
        size_text(one.device_bytes),
        *(of_training[name] for name in asked),
    )


def _words(one: PlannedStrategy) -> str:
    """Return a strategy in words, the largest part of its memory, and the memory on the fullest host."""
    fits = "" if one.fits else "does not fit; "
    host = f"; on a node's host: {size_text(one.host_bytes)}" * bool(one.host_bytes)
    return f"{one.mesh}: {one.schedule}; {fits}most memory: {one.largest}{host}"


def _text(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)


def _notes(source: PlanSource, answer: Answer) -> Iterator[str]:
    yield from (f"as nearest: {note}" for note in source.notes)
    if answer.failure:
        yield answer.failure
    if len(answer.strategies) > 1:
        first, second = answer.strategies[:2]
        gap = second.period_s / first.period_s - 1
        yield f"the first is {gap:.1%} faster than the second, {_why(first, second)}"
    if answer.own is not None and answer.strategies:
        change = answer.own.period_s / answer.strategies[0].period_s - 1
        fits = "" if answer.own.fits else ", and does not fit"
        more = f"{abs(change):.1%} {'more' if change > 0 else 'less'}"
        why = _why(answer.own, answer.strategies[0])
        yield f"yours takes {more} time per step than the first{fits}, {why}"
    if answer.strategies:
        yield f"in brackets: the interval in which 80 % of published runs fall; MFU: {COUNTED[MFU]}"
    yield from (f"warning: {text}" for text in (*source.warnings, *answer.warnings))
    if answer.study.interrupted:
        yield "warning: interrupted; these are the strategies until then"


def _why(one: PlannedStrategy, other: PlannedStrategy) -> str:
    """Return the parts of two steps beside each other, and the memory that one needs more."""
    return (
        f"on {_held(one, other)} memory per device: "
        f"{_beside('compute', one.compute_s, other.compute_s)}, "
        f"{_beside('exposed messages', one.exposed_s, other.exposed_s)}, "
        f"{_beside('waiting', one.waiting_s, other.waiting_s)}"
    )


def _beside(name: str, first: float, second: float) -> str:
    return f"{name} {time_text(first)} beside {time_text(second)}"


def _held(first: PlannedStrategy, second: PlannedStrategy) -> str:
    change = first.device_bytes - second.device_bytes
    return (
        "as much" if not change else f"{size_text(abs(change))} {'more' if change > 0 else 'less'}"
    )
