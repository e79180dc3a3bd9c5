"""Improve an order locally: simulated annealing along its critical paths.

Only a move that separates two neighbours on a critical path can shorten a schedule (van Laarhoven, Aarts and Lenstra
1992, on job shops). So a move takes one of such a pair a few places further, the first one later or the second one
earlier: a W into a gap, or a forward to a place at which memory becomes free.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp
from random import Random

from piper_compiler.recipes.zb_problem import OrderScore, Problem, Queue, Swept

REACH = 6
"""The number of places that a move goes at most."""


class Anneal:
    """Hold a state of the search; `best` and `orders` are the best seen, and the same seed gives the same result."""

    def __init__(self, problem: Problem, orders: list[Queue], seed: int = 0) -> None:
        swept = problem.sweep(orders)
        assert swept is not None, "starts from orders that run"
        self.problem, self.random = problem, Random(seed).random
        self.now, self.swept = [list(q) for q in orders], swept
        self.value = self.best = problem.value(swept)
        self.orders = orders
        self.sweeps = 0

    def run(self, sweeps: int, heat: float, goal: OrderScore) -> None:
        """Sweep at most `sweeps` times, and end when the best meets `goal`.

        `heat` is the number of seconds that a step may lose, at the start about one in three times.
        """
        start, tries, arcs = self.sweeps, 0, self._arcs()
        while (
            self.sweeps - start < sweeps
            and tries < 20 * sweeps
            and not self.best.meets(goal)
            and arcs
        ):
            tries += 1
            left = 1 - (self.sweeps - start) / sweeps
            if self._moved(*self._move(arcs), heat * left + 1e-9 * self.best.makespan):
                arcs = self._arcs()

    def _move(self, arcs: list[tuple[int, int]]) -> tuple[int, int, int]:
        """Return a device, the position of one of its operations, and the new position for it."""
        r, second = arcs[int(self.random() * len(arcs))]
        far = 1 + int(self.random() ** 2 * REACH)
        if self.random() < 0.5:
            return r, second, max(0, second - far)
        return r, second - 1, min(len(self.now[r]) - 1, second - 1 + far)

    def _moved(self, r: int, source: int, target: int, heat: float) -> bool:
        """Try a move, and keep it when it is legal and good enough; return whether it was kept."""
        queue, problem = self.now[r], self.problem
        op = queue[source]
        if any(
            self._tied(op, x)
            for x in (queue[target:source] if target < source else queue[source + 1 : target + 1])
        ):
            return False
        queue.insert(target, queue.pop(source))
        if problem.fits(queue, problem.limit[r]):
            self.sweeps += 1
            swept = problem.sweep(self.now)
            if swept is not None:
                value = problem.value(swept)
                worse = _cost(value) - _cost(self.value)
                if worse <= 0 or self.random() < exp(max(-50.0, -worse / heat)):
                    self._keep(value, swept)
                    return True
        queue.insert(source, queue.pop(target))
        return False

    def _keep(self, value: OrderScore, swept: Swept) -> None:
        self.value, self.swept = value, swept
        if value < self.best:
            self.best, self.orders = value, [list(q) for q in self.now]

    def _tied(self, op: int, other: int) -> bool:
        """Return whether two operations of a device must keep their order: same stage, and same phase or microbatch."""
        problem = self.problem
        if problem.stage(op) != problem.stage(other):
            return False
        return op % 3 == other % 3 or problem.microbatch(op) == problem.microbatch(other)

    def _arcs(self) -> list[tuple[int, int]]:
        """Return (device, position of the second) of neighbours on critical paths.

        The paths end on the last device to end and on the one with the largest span.
        """
        problem, swept = self.problem, self.swept
        p = len(self.now)
        spans = [swept.last[r] - swept.first[r] - problem.busy[r] for r in range(p)]
        ends = dict.fromkeys(
            (max(range(p), key=swept.last.__getitem__), max(range(p), key=spans.__getitem__))
        )
        place = [0] * problem.count
        for queue in self.now:
            for i, op in enumerate(queue):
                place[op] = i
        return [arc for r in ends for arc in self._path(r, place)]

    def _path(self, r: int, place: list[int]) -> Iterator[tuple[int, int]]:
        """Go back from the last operation of a device along the operations that delayed each other; ties are random."""
        problem, end, home = self.problem, self.swept.end, self.problem.stages.home
        op = self.now[r][-1]
        close = 1e-9 * self.best.makespan
        while True:
            start, i, need = end[op] - problem.seconds[op], place[op], problem.needs[op]
            data = need >= 0 and end[need] + problem.lag[op] >= start - close
            machine = i > 0 and end[self.now[r][i - 1]] >= start - close
            if machine and not (data and self.random() < 0.5):
                yield r, i
                op = self.now[r][i - 1]
            elif data:
                op, r = need, home[problem.stage(need)]
            else:
                return


def _cost(value: OrderScore) -> float:
    """Return the cost that annealing lowers: the makespan, and a little of the rest, which leads to it."""
    return value.makespan + 0.5 * value.span + 0.02 * value.idle
