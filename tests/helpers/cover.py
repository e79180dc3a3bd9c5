"""Covering arrays: few rows of factors in which every two values meet that may meet, and random rows of the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from random import Random
from typing import Any

TRIES = 4
"""The number of random rows with a missing pair, of which the row with the most missing pairs is taken."""

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
Rule = Callable[..., bool]
"""A function that says whether values may meet; its arguments name their factors. It depends on nothing else."""
Costs = Callable[[Row], Mapping[Hashable, float]]
"""A function that says what a row needs, and what it takes to make each of that; rows share what they need."""
EACH = 0.5
"""The cost of a row beside its needs, in the same unit."""


class Product:
    """The product of factors, without the rows that break a rule.

    `costly` are values that a cover takes only for a pair that is missing.
    """

    def __init__(
        self,
        factors: Mapping[str, Sequence[Any]],
        rules: Sequence[Rule],
        costly: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self.factors, self.costly = factors, costly or {}
        self._rules: dict[str, list[tuple[tuple[str, ...], Rule, dict[Any, bool]]]] = {
            name: [] for name in factors
        }
        for rule in rules:
            names = tuple(inspect.signature(rule).parameters)
            known: dict[Any, bool] = {}  # what the rule has said about values
            for name in names:
                self._rules[name].append((names, rule, known))

    def allows(self, row: Row, name: str) -> bool:
        """Return whether a row, which need not be complete, keeps the rules about a factor and others in the row."""
        for names, rule, known in self._rules[name]:
            try:
                values = tuple([row[n] for n in names])
            except KeyError:  # the row has not all of them yet
                continue
            if values not in known:
                known[values] = rule(*values)
            if not known[values]:
                return False
        return True

    def pairs(self) -> dict[Pair, None]:
        """Return every two values of two factors of which no rule says that they must not meet."""
        return {
            ((a, x), (b, y)): None
            for a, b in combinations(self.factors, 2)
            for x in self.factors[a]
            for y in self.factors[b]
            if all(self.allows({a: x, b: y}, name) for name in (a, b))
        }

    def drawn(self, rng: Random, given: Sequence[Row] = ({},)) -> Row:
        """Return a random row that has the values of one of `given`, itself drawn."""
        while True:
            row = dict(rng.choice(given))
            if (row := self._filled(row, rng, {}, costly=False)) is not None:
                return row

    def pairwise(self, seed: int = 0) -> list[Row]:
        """Return few rows in which every pair meets that meets in any row, or nearly: hopeless ones are given up."""
        rng, missing, rows = Random(seed), self.pairs(), list[Row]()
        while missing:
            pair = next(iter(missing))
            trials = [self._filled(dict(pair), rng, missing) for _ in range(TRIES)]
            filled = [row for row in trials if row is not None]
            if not filled:
                filled = [
                    row for _ in range(8 * TRIES) if (row := self._filled(dict(pair), rng, missing))
                ][:1]
            if not filled:
                del missing[pair]
                continue
            rows.append(max(filled, key=lambda row: sum(p in missing for p in met(self, row))))
            for p in met(self, rows[-1]):
                missing.pop(p, None)
        return rows

    def _filled(
        self, row: Row, rng: Random, missing: Mapping[Pair, None], costly: bool = True
    ) -> Row | None:
        """Return a row with values for all factors; None where it came to an end that no value fits."""
        place = {name: k for k, name in enumerate(self.factors)}
        for name in rng.sample(
            [n for n in self.factors if n not in row], len(self.factors) - len(row)
        ):
            values = [v for v in self.factors[name] if self.allows({**row, name: v}, name)]
            if not values:
                return None

            def gain(value: Any, name: str = name) -> float:
                new = 0
                for other, y in row.items():
                    ends = ((other, y), (name, value))
                    new += (ends if place[other] < place[name] else ends[::-1]) in missing
                return new + rng.random() - (costly and value in self.costly.get(name, ()))

            row[name] = max(values, key=gain)
        return {name: row[name] for name in self.factors}


def met(product: Product, row: Row) -> list[Pair]:
    """Return the pairs of a row."""
    return [((a, row[a]), (b, row[b])) for a, b in combinations(product.factors, 2)]


def part(product: Product, rows: Sequence[Row], share: float, costs: Costs) -> list[int]:
    """Return the numbers of cheap rows with all values that are in any, in which `share` of the pairs of all meet."""
    unmet = [set(met(product, row)) for row in rows]
    wanted = share * len(set[Pair]().union(*unmet))
    values = {value for row in rows for value in row.items()}
    needed, pairs, chosen = set[Hashable](), 0, list[int]()
    while values or pairs < wanted:

        def gain(k: int) -> float:
            return len(unmet[k]) / (
                EACH + sum(cost for what, cost in costs(rows[k]).items() if what not in needed)
            )

        new_values = [k for k, row in enumerate(rows) if not values.isdisjoint(row.items())]
        best = max(new_values or range(len(rows)), key=gain)
        chosen.append(best)
        values -= rows[best].items()
        needed.update(costs(rows[best]))
        met_now = unmet[best].copy()
        pairs += len(met_now)
        for others in unmet:
            others -= met_now
    return sorted(chosen)
