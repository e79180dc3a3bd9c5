"""Fold the candidates of a study that are as good as equal, and find the parameters that make no difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from piper_ir.study.study import Row, objective_of
from piper_ir.tools import time_text

EQUAL = 1e-3
"""The relative difference in objective or memory up to which candidates count as equal."""


@dataclass(frozen=True)
class FoldedRows:
    """Hold the best of some candidates, and the others that are equal to it but for `EQUAL`, best first."""

    best: Row
    others: tuple[Row, ...] = ()

    @property
    def differs(self) -> Mapping[str, tuple[Any, ...]]:
        """Return by parameter the values in which the rows differ, the value of the best row first."""
        rows = (self.best, *self.others)
        names = dict.fromkeys(name for row in rows for name in row.params)
        values = {
            name: tuple(dict.fromkeys(row.params[name] for row in rows if name in row.params))
            for name in names
        }
        absent = {name for name in names if any(name not in row.params for row in rows)}
        return {
            name: distinct
            for name, distinct in values.items()
            if len(distinct) > 1 or name in absent
        }


def folded(rows: Sequence[Row]) -> list[FoldedRows]:
    """Return complete rows, best first, each folded into a better one that is equal in objective and memory.

    A row that was measured is folded into none, since its error is a fact of its own; nor is one of another predictor.
    """
    groups: list[FoldedRows] = []
    for row in rows:
        k = next((k for k, group in enumerate(groups) if _equal(group.best, row)), None)
        if k is None:
            groups.append(FoldedRows(row))
        else:
            groups[k] = FoldedRows(groups[k].best, (*groups[k].others, row))
    return groups


def _equal(a: Row, b: Row) -> bool:
    comparable = (
        a.source == b.source and b.measured_period_s is None and a.measured_period_s is None
    )
    return comparable and _same(a, b)


def _same(a: Row, b: Row) -> bool:
    return _near(objective_of(a), objective_of(b)) and _near(a.device_bytes, b.device_bytes)


def _near(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else abs(a - b) <= EQUAL * max(abs(a), abs(b))


def indifferent(rows: Sequence[Row]) -> dict[str, int]:
    """Return the parameters that make no difference, with the pairs of candidates that show it.

    A pair differs in the parameter alone. All pairs of a parameter must be equal in objective and memory.
    """
    pairs: dict[str, list[bool]] = {}
    complete = [row for row in rows if row.state == "complete" and row.period_s is not None]
    for a, b in combinations(complete, 2):
        if a.source == b.source and a.params.keys() == b.params.keys():
            names = [name for name, value in a.params.items() if value != b.params[name]]
            if len(names) == 1:
                pairs.setdefault(names[0], []).append(_same(a, b))
    return {name: len(verdicts) for name, verdicts in pairs.items() if all(verdicts)}


def indifferent_text(rows: Sequence[Row]) -> str:
    """Return one line about the parameters that make no difference; "" if all do, or nobody knows."""
    phrases = [
        f"{name} ({count} pair{'s' if count > 1 else ''})"
        for name, count in indifferent(rows).items()
    ]
    return f"make no difference of {EQUAL:.1%} or more: {', '.join(phrases)}" if phrases else ""


def interval_text(rows: Sequence[Row], best: Row | None, share: float, stack: str) -> str:
    """Return a line about the interval of the best candidate, and how many others are within it.

    Args:
        rows: The candidates.
        best: The best one.
        share: The share by which 80 % of published runs are at most longer than predicted, `interval_share`; it holds
            where the row of the best has no interval of its own.
        stack: Name of the software stack whose runs say so; "" for none.

    Returns "" if there is no interval, or the best candidate was measured.
    """
    if not share or best is None or best.period_s is None or best.measured_period_s is not None:
        return ""
    low_s, high_s = best.low_s, best.high_s
    if low_s is None or high_s is None:
        low_s, high_s = best.period_s / (1 + share), best.period_s * (1 + share)
    whose = f"published runs of {stack}" if stack else "published runs"
    near = [
        row
        for row in rows
        if row.state == "complete"
        and row.number != best.number
        and objective_of(row) <= objective_of(best) * high_s / best.period_s
    ]
    within = f"{time_text(low_s)} to {time_text(high_s)}"
    others = (
        f"{len(near)} other candidate{'s are' if len(near) > 1 else ' is'} within it, so that only a run tells which is "
        f"faster (--confirm)"
        if near
        else "no other candidate is within it"
    )
    return f"best {time_text(best.period_s)} ({within}: 80 % of {whose} fall inside); {others}"


def folded_text(group: FoldedRows) -> str:
    """Return a text for the others of a group: "and 3 equal ones with bucket_mb=50, 100"; "" without any."""
    if not group.others:
        return ""
    own = group.best.params
    values = (
        f"{name}={', '.join(str(v) for v in distinct if name not in own or v != own[name])}"
        for name, distinct in group.differs.items()
    )
    return f"and {len(group.others)} equal to {EQUAL:.1%} with " + "; ".join(values)
