"""Search over jobs, too: each choice of a job's own parameters is a problem of its own, with programs and an evaluator.

A strategy's `params` hold the choices of its job, so that they lead back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from piper_autotune.scoring.evaluators import Evaluator, Outcome
from piper_autotune.space.problem import Programs, TuningProblem, Under
from piper_autotune.space.rules import Pruned, PruningRules
from piper_compiler import Strategy
from piper_ir.program.program import Program

MOST_OPEN = 4
"""The most jobs whose evaluators stay open, since each may have worker processes."""


@dataclass(frozen=True)
class JobCase:
    """Hold the problem of one job, and how its programs are made."""

    problem: TuningProblem
    at_rows: Callable[[int], Program] | None = None
    under: Under | None = None
    modules: tuple[ModuleType, ...] = ()


class JobCases:
    """Find the case of a strategy by its params; `case_of` returns the case of params, and raises if they make none.

    `case_of` must return the same object for the same job.
    """

    def __init__(self, case_of: Callable[[Mapping[str, Any]], JobCase]) -> None:
        self._case_of = case_of
        self._programs: dict[int, Programs] = {}
        self._rules: dict[int, PruningRules] = {}

    def case(self, strategy: Strategy) -> JobCase:
        """Return the case of a strategy."""
        return self._case_of(strategy.params)

    def programs(self, case: JobCase) -> Programs:
        """Return the programs of a case, which are kept."""
        if id(case) not in self._programs:
            self._programs[id(case)] = Programs(case.problem, case.at_rows, case.under)
        return self._programs[id(case)]

    def check(self, strategy: Strategy, known_s: float = float("inf")) -> Pruned | None:
        """Return the first rule that rejects a strategy, as `PruningRules.check`."""
        case = self.case(strategy)
        if id(case) not in self._rules:
            self._rules[id(case)] = PruningRules(case.problem, self.programs(case))
        return self._rules[id(case)].check(strategy, known_s)


class PerJob:
    """Score each strategy by the evaluator of its job, which is made when it is needed."""

    def __init__(
        self,
        cases: JobCases,
        made: Callable[[JobCase, Programs, Iterable[ModuleType]], Evaluator],
        width: int,
    ) -> None:
        self._cases, self._made, self.width = cases, made, width
        self._open: dict[int, Evaluator] = {}
        self._tickets: dict[int, tuple[int, int]] = {}
        self._asked = 0

    def submit(self, strategy: Strategy, engine: bool = False) -> int:
        case = self._cases.case(strategy)
        evaluator = self._open.pop(id(case), None)
        if evaluator is None:
            self._close_others()
            evaluator = self._made(case, self._cases.programs(case), case.modules)
        self._open[id(case)] = evaluator  # the last used stands last
        self._asked += 1
        self._tickets[self._asked] = id(case), evaluator.submit(strategy, engine)
        return self._asked

    def result(self, ticket: int) -> Outcome:
        case, own = self._tickets.pop(ticket)
        return self._open[case].result(own)

    def close(self) -> None:
        for evaluator in self._open.values():
            evaluator.close()
        self._open.clear()

    def _close_others(self) -> None:
        """Close the cases that were not used for longest and have no candidate under way."""
        busy = {case for case, _ in self._tickets.values()}
        for case in [case for case in self._open if case not in busy][
            : max(0, len(self._open) - MOST_OPEN + 1)
        ]:
            self._open.pop(case).close()
