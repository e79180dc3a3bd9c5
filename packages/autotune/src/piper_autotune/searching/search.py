"""Run the search: ask, build, prune, score, tell.

With one worker candidates follow one after the other. With n workers, results are told in the order in which candidates
were asked for, so that the same seed and the same n give the same study.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BruteForceSampler
from optuna.trial import TrialState

from piper_autotune.scoring.evaluators import Evaluator, Outcome
from piper_autotune.scoring.jobs import JobCases
from piper_autotune.scoring.scoring import Refused, Scored
from piper_autotune.searching.sampler import GuidedSampler
from piper_autotune.space.problem import TuningProblem
from piper_autotune.space.rules import RULES, SKIPPED, TOO_MUCH, Pruned, PruningRules
from piper_autotune.space.space import SkippedError, Space, SpaceError, StrategyFunction, again
from piper_compiler import Strategy, directives
from piper_ir.ground.codec import decode
from piper_ir.ground.errors import PiperError
from piper_ir.study.study import Row, objective_of

LEADERS = 5
"""The number of candidates that the event engine scores again; pruning by time keeps at least as many."""
REPEATS = 50
"""The number of known candidates proposed in a row after which a search goes through its space one by one."""
MOST_REPEATS = 500
"""The number of known candidates in a row after which a search ends that does so already, or cannot."""
MOST_VALUES = 1_000
"""The most values of a parameter of a space that is gone through one by one."""
PRUNED = 4
"""The number of candidates per trial that rules may reject for nothing; each one more costs a trial."""
UNUSABLE = 1e6
"""The part of the limit by which a candidate without any plan counts as exceeding it: more than any with one."""
BETWEEN = 3
"""The number of proposals among which one is a start, once half of the trials are spent."""
LAST = 12
"""The last 1/12 of the trials goes to kinds of starts of which none was tried."""
ATTRIBUTE = "piper"


@dataclass(frozen=True)
class SearchProgress:
    """Report after each candidate how far the search is.

    Attributes:
        done: how many of `trials` are spent.
        trials: how many may be spent.
        rejected: how many candidates were rejected.
        best: the best so far.
    """

    done: int
    trials: int
    rejected: int
    best: Row | None


@dataclass
class _Pending:
    """Hold a candidate that was asked for; `ticket` is the evaluator's, None for a repetition of `number`."""

    trial: Any
    strategy: Strategy
    ticket: int | None
    number: int


@dataclass(eq=False)
class StrategySearch:
    """Run one search; `rows` hold the results by number, and `strategies` the strategy of each row that has one.

    `starts` are choices by name that are tried before the sampler's, and `kind` says which are alike; see `tune`.
    """

    study: optuna.Study
    function: StrategyFunction
    problem: TuningProblem
    rules: PruningRules | JobCases
    evaluator: Evaluator
    trials: int
    leaders: int = LEADERS
    progress: Callable[[SearchProgress], None] | None = None
    cases: JobCases | None = None
    starts: tuple[Mapping[str, Any], ...] = ()
    kind: Callable[[Mapping[str, Any]], object] = field(kw_only=True)

    def __post_init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.strategies: dict[int, Strategy] = {}
        self.pruned: Counter[str] = Counter()
        self.interrupted = False
        self.exhausted = False
        self.repeated = 0
        self._space = Space()
        self._known: dict[object, int] = {}
        self._pending: deque[_Pending] = deque()
        self._spent = self._asked = 0
        self._starts = deque(self.starts)
        self._kinds: set[object] = set()
        self._ended = self._one_by_one = False

    def resume(self) -> None:
        """Continue an earlier search in the storage; its unfinished candidates count as failed."""
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)
            data = trial.user_attrs.get(ATTRIBUTE)
            if data is None:
                continue
            row: Row = decode(Row, data, f"trial {trial.number} of study {self.study.study_name}")
            self._count(row)
            strategy = (
                again(self.function, dict(row.params))
                if row.kind not in ("strategy", SKIPPED)
                else None
            )
            self._learn(row, strategy)

    def run(self) -> None:
        """Search until the trials are spent, the space is at its end, nothing new is proposed any more, or Ctrl-C."""
        try:
            repeats = 0
            while self._spent < self.trials and not self._ended:
                repeats = 0 if self._propose() else repeats + 1
                if repeats >= REPEATS and not self._goes_on(repeats):
                    break
                while len(self._pending) >= self.evaluator.width:
                    self._settle()
            while self._pending:
                self._settle()
        except KeyboardInterrupt:
            self.interrupted = True
            for item in self._pending:
                self._tell(item.trial, None, TrialState.FAIL)
            self._pending.clear()

    def _goes_on(self, repeats: int) -> bool:
        """Return whether to propose more after so many known candidates in a row: the rest of the space."""
        ours = self._one_by_one
        if isinstance(self.study.sampler, GuidedSampler):
            ours = True
            if _is_finite(self.study):
                self.study.sampler = BruteForceSampler(self.study.sampler.seed)
                self._one_by_one = True
        return ours and repeats < MOST_REPEATS

    def rescore(self) -> None:
        """Score the leaders again with the event engine, and their successors when one of them is refused there."""
        known: set[int] = set()
        while chosen := [row for row in self.complete()[: self.leaders] if row.number not in known]:
            tickets = [
                (row, self.evaluator.submit(self.strategies[row.number], engine=True))
                for row in chosen
            ]
            for row, ticket in tickets:
                self.rows[row.number] = self._row(
                    row.number, self.strategies[row.number], self.evaluator.result(ticket)
                )
                known.add(row.number)

    def complete(self) -> list[Row]:
        """Return the rows that fit, fastest first."""
        return sorted(
            (r for r in self.rows.values() if r.state == "complete"),
            key=lambda r: (objective_of(r), r.number),
        )

    def score(self, number: int) -> Row:
        """Return the row of a candidate that a rule had rejected, compiled for exact numbers."""
        outcome = self.evaluator.result(self.evaluator.submit(self.strategies[number]))
        self.rows[number] = self._row(number, self.strategies[number], outcome)
        return self.rows[number]

    def rule_lines(self) -> tuple[str, ...]:
        """Return the rules, each with its number of rejected candidates."""
        return tuple(
            f"{name}: {text} ({self.pruned[name]} candidates)" for name, text in RULES.items()
        )

    def _propose(self) -> bool:
        """Ask for one candidate, and hand it in unless a rule rejects it; return False when it is known."""
        self._asked += 1
        if (start := self._next_start()) is not None:
            self._starts.remove(start)
            self._kinds.add(self.kind(start))
            self.study.enqueue_trial(dict(start))
        trial = self.study.ask()
        try:
            strategy = self._space.strategy(self.function, trial)
        except SpaceError:
            self._tell(trial, None, TrialState.FAIL)
            raise
        except SkippedError as e:
            return self._failed(trial, str(e), SKIPPED)
        except PiperError as e:
            return self._failed(trial, str(e), "strategy")
        known = self._known.get(self._identity(strategy))
        if known is not None:
            self.repeated += 1
            self._pending.append(_Pending(trial, strategy, None, known))
            return False
        pruned = self.rules.check(
            strategy, self._threshold() / self.problem_of(strategy).weight(strategy)
        )
        if pruned is not None:
            self._prune(trial, strategy, pruned)
            return True
        self._known[self._identity(strategy)] = trial.number
        self._spent += 1
        self._pending.append(
            _Pending(trial, strategy, self.evaluator.submit(strategy), trial.number)
        )
        return True

    def _next_start(self) -> Mapping[str, Any] | None:
        """Return the start to try next; None if it is the sampler's turn.

        Every second start, and each one in the last trials, is of a kind of which none was tried, as long as there is
        one: the first starts are often alike, and each kind shall have an answer.
        """
        new = next((start for start in self._starts if self.kind(start) not in self._kinds), None)
        last = LAST * (self.trials - self._spent) <= self.trials
        if last and new is not None:
            return new
        if not self._starts or not (2 * self._spent < self.trials or self._asked % BETWEEN == 0):
            return None
        return self._starts[0] if new is None or self._asked % 2 else new

    def _failed(self, trial: Any, reason: str, kind: str) -> bool:
        """Record that the function gave no strategy, and return whether that is new: the same values do so again."""
        point = frozenset(trial.params.items())
        new = point not in self._known
        if new:
            self._known[point] = trial.number
            row = Row(trial.number, "rejected", dict(trial.params), reason=reason, kind=kind)
            self._count(row)
            self._record(trial, row)
        self._tell_row(trial, self.rows[self._known[point]])
        return new

    def _prune(self, trial: Any, strategy: Strategy, pruned: Pruned) -> None:
        row = Row(
            trial.number,
            "rejected",
            strategy.params,
            reason=pruned.reason,
            kind=pruned.rule,
            device_bytes=pruned.device_bytes,
        )
        self._count(row)
        self._learn(row, strategy)
        self._record(trial, row)
        self._tell_row(trial, row)

    def _settle(self) -> None:
        """Tell the oldest candidate's outcome to the sampler."""
        item = self._pending[0]
        if item.ticket is None:
            self._tell_row(item.trial, self.rows[item.number])
        else:
            row = self._row(item.trial.number, item.strategy, self.evaluator.result(item.ticket))
            self._learn(row, item.strategy)
            self._record(item.trial, row)
            self._tell_row(item.trial, row)
        self._pending.popleft()

    def _tell_row(self, trial: Any, row: Row) -> None:
        """Tell the sampler a candidate's objective, and how far it is from fitting, which leads to fitting ones."""
        over = self._over(row)
        if over is not None:
            trial.set_constraint("fits", over)
        if row.period_s is None:
            self._tell(trial, None, TrialState.PRUNED)
        else:
            self._tell(trial, objective_of(row), TrialState.COMPLETE)

    def _over(self, row: Row) -> float | None:
        """Return the least excess of a candidate over the limit, as a part of it; None if memory did not decide."""
        limit = self.problem.memory_limit
        if row.kind in (*TOO_MUCH, "memory") or row.state == "complete":
            return (
                None if limit is None or row.device_bytes is None else row.device_bytes / limit - 1
            )
        return None if row.kind == "slower" else UNUSABLE

    def _tell(self, trial: Any, value: float | None, state: TrialState) -> None:
        try:
            self.study.tell(trial, value, state)
        except RuntimeError as e:  # how samplers that enumerate a space say that it is at its end
            if "Study.stop" not in str(e):
                raise
            self._ended, self.exhausted = True, self._one_by_one

    def _record(self, trial: Any, row: Row) -> None:
        trial.set_user_attr(ATTRIBUTE, row.as_dict())
        self.rows[row.number] = row
        if self.progress is not None:
            best = next(iter(self.complete()), None)
            rejected = sum(r.state == "rejected" for r in self.rows.values())
            self.progress(
                SearchProgress(min(self._spent, self.trials), self.trials, rejected, best)
            )

    def _learn(self, row: Row, strategy: Strategy | None) -> None:
        self.rows[row.number] = row
        if strategy is not None:
            self.strategies[row.number] = strategy
            self._known[self._identity(strategy)] = row.number

    def _count(self, row: Row) -> None:
        """Count a candidate as a trial, or as one that a rule rejects for nothing."""
        if row.kind in RULES:
            self.pruned[str(row.kind)] += 1
        if row.kind not in RULES or self.pruned.total() > PRUNED * self.trials:
            self._spent += 1

    def _threshold(self) -> float:
        """Return the value of the last of the leaders; no worse candidate can become one."""
        values = sorted({objective_of(r) for r in self.rows.values() if r.state == "complete"})
        return values[self.leaders - 1] if len(values) >= self.leaders else float("inf")

    def problem_of(self, strategy: Strategy) -> TuningProblem:
        """Return the problem of a strategy: the search's, or that of the job that its params choose."""
        return self.problem if self.cases is None else self.cases.case(strategy).problem

    def _identity(self, strategy: Strategy) -> object:
        """Return a key that is equal for candidates that make the same plan of the same job."""
        plan = _simplest(strategy)
        return plan if self.cases is None else (id(self.cases.case(strategy)), plan)

    def _row(self, number: int, strategy: Strategy, outcome: Outcome) -> Row:
        row = _row(number, strategy.params, outcome)
        problem = self.problem_of(strategy)
        if problem.objective == "period" or row.period_s is None:
            return row
        return replace(row, value=row.period_s * problem.weight(strategy))


def _is_finite(study: optuna.Study) -> bool:
    """Return whether every parameter that was seen has few values, so that a space can be gone through one by one."""
    seen = {d for trial in study.get_trials(deepcopy=False) for d in trial.distributions.values()}
    return all(_values(d) <= MOST_VALUES for d in seen)


def _values(distribution: BaseDistribution) -> float:
    match distribution:
        case CategoricalDistribution(choices=choices):
            return len(choices)
        case (
            IntDistribution(low=low, high=high, step=step)
            | FloatDistribution(low=low, high=high, step=int() | float() as step)
        ):
            return (high - low) / step + 1
    return float("inf")


def _simplest(strategy: Strategy) -> Strategy:
    """Return a strategy that is equal for all that make the same plan by arguments without effect."""
    return Strategy(strategy.mesh, directives.simplest(strategy.directives))


def _row(number: int, params: Any, outcome: Outcome) -> Row:
    if isinstance(outcome, Refused):
        return Row(number, "rejected", dict(params), reason=outcome.reason, kind=outcome.kind)
    return _scored(Row(number, "complete", dict(params)), outcome)


def _scored(row: Row, found: Scored) -> Row:
    row = replace(
        row,
        period_s=found.period_s,
        step_s=found.step_s,
        peak_bytes=found.peak_bytes,
        device_bytes=found.device_bytes,
        source=found.source,
        notes=found.notes,
        low_s=found.low_s,
        high_s=found.high_s,
    )
    return (
        replace(row, state="rejected", reason=found.reason, kind="memory") if found.reason else row
    )
