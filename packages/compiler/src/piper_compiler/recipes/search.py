"""Search for orders of F, I and W: list scheduling under many policies, then local improvement, within a fixed effort.

1. Policies (`zb_greedy.Greedy`): the ones that give the published schedules on even stages, then a fixed pseudo-random
   sample. Each result that is not far from the best is tightened from its end (`zb_greedy.Justify`).
2. Descent: one entry of the best policy is changed at a time.
3. Annealing of the best order (`zb_anneal`).

Effort is counted in operations, never in seconds, and the random numbers are seeded: the same arguments give the same
orders everywhere. The search ends early at an order that a lower bound shows to be the best.

Sources: zero-bubble pipelines, Qi et al. 2023 (arXiv 2401.10241); the V placement and its limits of memory, Qi et al.
2024 (arXiv 2405.15362).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import permutations, product
from math import inf
from random import Random
from typing import TypeVar

from piper_compiler.actions import Action, ActionPhase, Slot
from piper_compiler.recipes.zb_anneal import Anneal
from piper_compiler.recipes.zb_greedy import Cutoff, Greedy, Justify, Policy, Rules
from piper_compiler.recipes.zb_problem import FORWARD, INPUT, OrderScore, Problem, Queue, Stages

T = TypeVar("T")

NOTHING = OrderScore(inf, inf, inf)

EFFORT = 1_000_000
"""The operations that list scheduling places in one search, at 1 to 1.5 us each.

Rules that are known already, or cannot help, count as the others and are not carried out.
"""
SWEEPS = 1_000_000
"""The operations that annealing sweeps in one search, at about 0.6 us each."""
SAMPLES, CHANGES, MOVES = 300, 1200, 6000
"""The upper bounds of random rules, changes of the best rules, and annealing sweeps; small problems need no more."""

_PHASES: tuple[ActionPhase, ...] = ("F", "I", "W")
_ONE = ((INPUT, 0), (FORWARD, 0)), ((FORWARD, 0), (INPUT, 0))
_TWO = tuple(permutations(((FORWARD, 1), (FORWARD, 0), (INPUT, 0), (INPUT, 1))))
_FLAT = ((FORWARD, 0), (FORWARD, 1), (INPUT, 0), (INPUT, 1))


@lru_cache(maxsize=16)
def find_orders(
    stages: Stages, microbatches: int, limit: tuple[float, ...], goal: OrderScore | None = None
) -> tuple[tuple[Slot, ...], ...]:
    """Return the best orders found for these stages within a memory limit per device.

    The limit must hold one microbatch (`Stages.least`). The search may end as soon as `goal` is met.
    """
    problem = Problem(stages, microbatches, limit)
    queues = Search(problem, goal).run()
    return tuple([tuple([(_action(problem, op),) for op in queue]) for queue in queues])


def _action(problem: Problem, op: int) -> Action:
    return Action(problem.stage(op), _PHASES[op % 3], problem.microbatch(op))


class Search:
    """Search the orders of one problem, and keep the best seen so far."""

    def __init__(self, problem: Problem, goal: OrderScore | None = None) -> None:
        self.problem, self.random = problem, Random(0).random
        self.best = NOTHING
        self.orders: list[Queue] = []
        self.rules, self.tightened = Rules((), 0), False
        """The rules that gave the best orders, and whether these orders were tightened from the end."""
        self.worth: dict[Rules, tuple[OrderScore, bytes]] = {}
        """The score of rules that were tried, and the times at which their operations end."""
        self.tight: dict[bytes, OrderScore] = {}
        """The score of orders, by their times, when tightened from the end."""
        self.effort = 0
        self.bound = problem.bound()
        self.goal = goal or OrderScore(self.bound, 0.0, 0.0)
        """The score at which the search ends."""

    @property
    def done(self) -> bool:
        return self.best.meets(self.goal)

    def run(self) -> list[Queue]:
        for rules in self._known():
            self._try(rules, inf)
        for _ in range(SAMPLES):
            if self.effort < 0.2 * EFFORT:
                self._try(self._sample(), 1.0)
        self._descend()
        if not self.done:
            self._anneal()
        return self.orders

    def _try(self, rules: Rules, reach: float, wanted: float = 0.0) -> OrderScore:
        """Return the score of the orders under these rules, as they are or tightened from the end.

        They are tightened when their makespan exceeds the best one by at most `reach` times the best bubble. A run is
        given up, with the result NOTHING, when it can neither be the best, nor come within that reach, nor have a
        makespan and span of at most `wanted` in sum.
        """
        if self.done:
            return self.best
        self.effort += self.problem.count
        known = self._plain(rules)
        if known not in self.worth:
            result = Greedy(self.problem, rules).run(self._cut(reach, wanted))
            if result is None:
                return NOTHING
            orders, swept = result
            self.worth[known] = self.problem.value(swept), array("d", swept.end).tobytes()
            self._consider(self.worth[known][0], orders, rules, False)
        value, times = self.worth[known]
        if value.makespan <= self._latest(reach):
            self.effort += self.problem.count
            value = min(value, self._tightened(rules, times))
        return value

    def _tightened(self, rules: Rules, times: bytes) -> OrderScore:
        """Return the score of orders under these rules, which end at `times`, when tightened from the end."""
        if times not in self.tight:
            orders = Justify(self.problem, array("d", times).tolist()).run()
            swept = self.problem.sweep(orders)
            self.tight[times] = NOTHING if swept is None else self.problem.value(swept)
            self._consider(self.tight[times], orders, rules, True)
        return self.tight[times]

    def _plain(self, rules: Rules) -> Rules:
        """Return a normal form, equal for rules whose difference has no effect.

        With one stage per device there is no last stage and no second `ahead`; without a limit nothing has to yield.
        """
        one, free = self.problem.stages.chunks == 1, min(self.problem.limit) == inf
        if not one and not free:
            return rules
        policies = [
            q._replace(
                yields=q.yields and not free,
                last=q.last and not one,
                ahead=q.ahead[:1] * 2 if one else q.ahead,
            )
            for q in rules.policies
        ]
        return rules._replace(policies=tuple(policies))

    def _latest(self, reach: float) -> float:
        """Return the makespan up to which orders are tightened."""
        return self.best.makespan + reach * (self.best.makespan - min(self.problem.busy))

    def _cut(self, reach: float, wanted: float) -> Cutoff:
        """Return the limits beyond which list scheduling ends early: its result would be of no use."""
        best, bound, close = self.best, self.bound, 1e-9 * self.best.makespan
        makespan = max(best.makespan, self._latest(reach))
        tied = (
            best.makespan <= bound + close and self._latest(reach) < bound - close
        )  # only the span can become better
        return Cutoff(
            makespan + close, best.span + close if tied else inf, wanted + close, bound - close
        )

    def _consider(
        self, value: OrderScore, orders: list[Queue], rules: Rules, tightened: bool
    ) -> None:
        if value < self.best and all(map(self.problem.fits, orders, self.problem.limit)):
            self.best, self.orders, self.rules, self.tightened = value, orders, rules, tightened

    def _known(self) -> Iterator[Rules]:
        """Yield rules that give ZB-H1 and ZB-H2, or ZBV, V-Half and V-Min, on even stages."""
        p, m = self.problem.stages.devices, self.problem.microbatches
        if self.problem.stages.chunks == 1:
            for ahead in ([p - r for r in range(p)], [2 * (p - r) - 1 for r in range(p)], [m] * p):
                for pending, yields in product((m + 1, 1), (True, False)):
                    yield Rules(
                        tuple([Policy(_ONE[0], (n, m), pending, yields, False) for n in ahead]), m
                    )
            return
        half = self._units() / 2
        even = [(_whole(half + r / 8, m), _whole(half + 3 * r / 4, m)) for r in range(p)]
        yield Rules(tuple([Policy(_FLAT, n, 1, False, False) for n in even]), m)  # V-Half
        free = [
            Rules((Policy(prefer, (m, m), m + 1, True, True),) * p, lead)
            for lead, prefer in product((0, m), _TWO)
        ]
        yield free[0]  # V-Min
        for prefer in _TWO:
            if prefer[0] == (FORWARD, 1):
                for n in (1, 2):
                    yield Rules(
                        tuple([Policy(prefer, (m, 1 + n * r), 1, False, False) for r in range(p)]),
                        m,
                    )
        yield from free[1:]

    def _units(self) -> float:
        """Return how many activations the first device may keep, at most the number that can be of use."""
        problem = self.problem
        return min(
            problem.limit[0] / (problem.stages.activation[0] or 1.0), 2.0 * problem.stages.devices
        )

    def _sample(self) -> Rules:
        """Return random rules with bounds `ahead` that change linearly along the devices."""
        problem, x = self.problem, self.random
        p, m, two = problem.stages.devices, problem.microbatches, problem.stages.chunks == 2
        units = self._units()
        prefer, pending = self._one_of(_TWO if two else _ONE), self._one_of((1, 2, 3, m + 1))
        yields, last, wait = x() < 0.5, x() < 0.5, self._one_of((0.0, 0.0, 0.3, 0.6, 1.0))
        first, slope = units * (0.3 + 0.7 * x()) + 1, units / p * (1.5 * x() - 1)
        second, rise = 0.5 + units * 0.7 * x(), units / p * (1.5 * x() - 0.5)
        ahead = [(_whole(first + slope * r, m), _whole(second + rise * r, m)) for r in range(p)]
        return Rules(
            tuple([Policy(prefer, n, pending, yields, last, wait) for n in ahead]),
            self._one_of((m, m, 0, 2)),
        )

    def _descend(self) -> None:
        """Change one entry of the best rules at a time, on one device or from one device to the last."""
        current, value = self.rules, self.best
        p = self.problem.stages.devices
        for _ in range(CHANGES):
            if self.done or self.effort >= EFFORT:
                return
            start = int(self.random() * p)
            stop = start + 1 if self.random() < 0.5 else p
            change = self._change()
            policies = tuple(
                [change(q) if start <= r < stop else q for r, q in enumerate(current.policies)]
            )
            trial = current._replace(policies=policies)
            result = self._try(trial, 0.5 if self.tightened else -1.0, _steer(value)[0])
            if _steer(result) <= _steer(value):
                current, value = trial, result

    def _change(self) -> Callable[[Policy], Policy]:
        """Return a function that sets another value of one entry of a policy."""
        m, two = self.problem.microbatches, self.problem.stages.chunks == 2
        kind = self._one_of(("prefer", "pending", "yields", "last", "wait", "ahead", "ahead"))
        if kind == "ahead":
            step, first = self._one_of((-2, -1, 1, 2)), not two or self.random() < 0.5
            return lambda q: q._replace(ahead=_moved(q.ahead, step, first, m))
        options: dict[str, Sequence[object]] = {
            "prefer": _TWO if two else _ONE,
            "pending": (1, 2, 3, 4, m + 1),
            "yields": (True, False),
            "last": (True, False),
            "wait": (0.0, 0.3, 0.6, 1.0),
        }
        entry = {kind: self._one_of(options[kind])}
        return lambda q: Policy(**(q._asdict() | entry))

    def _anneal(self) -> None:
        problem = self.problem
        sweeps = min(MOVES, SWEEPS // problem.count)
        mean = sum(problem.seconds) / problem.count
        for seed, heat in enumerate((0.3, 1.0, 0.3)):
            state = Anneal(problem, self.orders, seed)
            state.run(sweeps // 3, heat * mean, self.goal)
            if state.best < self.best:
                self.best, self.orders = state.best, state.orders

    def _one_of(self, options: Sequence[T]) -> T:
        return options[int(self.random() * len(options))]


def _whole(x: float, most: int) -> int:
    return max(1, min(most, round(x)))


def _moved(ahead: tuple[int, int], step: int, first: bool, most: int) -> tuple[int, int]:
    a, b = ahead
    return (_whole(a + step, most), b) if first else (a, _whole(b + step, most))


def _steer(value: OrderScore) -> tuple[float, float]:
    """Return the score that descent follows: a smaller span often leads to a smaller makespan."""
    return value.makespan + value.span, value.idle
