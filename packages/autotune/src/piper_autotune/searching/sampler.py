"""Define the default sampler: TPE, and every other trial a neighbour of one of the best candidates so far."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

START = 12
"""The number of random trials before the others, to learn from."""
LEADERS = 4
"""The number of candidates whose neighbours are tried; most neighbours of the first are tried first."""

CONTINUOUS = 4
"""The number of trials that differ in numbers without steps alone, before two other values are changed at once."""
RETRIES = 20
"""The number of random points tried for one that is new."""

Point = frozenset[tuple[str, Any]]


class GuidedSampler(BaseSampler):
    """Propose candidates by TPE, and neighbours of the best ones.

    Spaces of strategies have steep walls (memory) and long flat valleys (bucket sizes). There a density estimate of few
    trials is blunt, and one step from a good candidate finds a better one. Neighbours change one value (then two) of a
    leader to one close by; none is tried twice, and a candidate that TPE proposes again is replaced. TPE samples the
    parameters that a changed value brings along.

    Numbers without steps come last, since most of them make no difference of 1 %: they stay at a leader's values until
    its neighbours in all else are tried, and then change `CONTINUOUS` times beside the same other values.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._tpe = TPESampler(seed=seed, n_startup_trials=START)
        self._random = random.Random(seed)
        self._chosen: dict[str, Any] = {}
        self._proposed: set[Point] = set()

    def reseed_rng(self) -> None:
        self._tpe.reseed_rng()
        self._random.seed()

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the space of TPE, or of the point that is proposed instead."""
        self._chosen = {}
        space = self._tpe.infer_relative_search_space(study, trial)
        trials = study.get_trials(deepcopy=False)
        done = [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        if len(done) < START:
            return space
        seen = {frozenset(t.params.items()) for t in trials} | self._proposed
        if not trial.number % 2:
            sampled = self._tpe.sample_relative(study, trial, space)
            self._chosen = {
                name: self._settled(study, name, space[name], value)
                for name, value in sampled.items()
            }
            if frozenset(self._chosen.items()) not in seen:
                return space
        proposal = self._neighbour(leaders(done), seen) or self._anywhere(
            self._random.choice(done), seen
        )
        if proposal is None:
            return space
        self._chosen, space = proposal
        # its trial may have more names, and would not be recognised
        self._proposed.add(frozenset(self._chosen.items()))
        return space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._chosen or self._tpe.sample_relative(study, trial, search_space)

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        value = self._tpe.sample_independent(study, trial, param_name, param_distribution)
        return self._settled(study, param_name, param_distribution, value)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._tpe.before_trial(study, trial)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._tpe.after_trial(study, trial, state, values)

    def _settled(self, study: Study, name: str, distribution: BaseDistribution, value: Any) -> Any:
        """Return the best trial's value of a number without steps that is sampled beside others; else the value."""
        trials = study.get_trials(deepcopy=False)
        done = [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        if (
            not isinstance(distribution, FloatDistribution)
            or distribution.step is not None
            or len(done) < START
            or not any(_discrete(t) for t in done)
        ):
            return value
        held = next((t.params[name] for t in leaders(done) if name in t.params), value)
        return held if distribution.low <= held <= distribution.high else value

    def _neighbour(
        self, among: Sequence[FrozenTrial], seen: set[Point]
    ) -> tuple[dict[str, Any], dict[str, BaseDistribution]] | None:
        """Return a point next to a leader, and its space."""
        for around in (
            lambda leader: self._around(leader, 1, _discrete(leader)),
            lambda leader: self._beside(leader, seen),
            lambda leader: self._around(leader, 2, _discrete(leader)),
            lambda leader: self._around(leader, 1, _continuous(leader)),
            lambda leader: self._around(leader, 2, [*_discrete(leader), *_continuous(leader)]),
        ):
            for leader in among:
                options = [p for p in around(leader) if frozenset(p.items()) not in seen]
                if options:
                    return self._random.choice(options), dict(leader.distributions)
        return None

    def _beside(self, leader: FrozenTrial, seen: set[Point]) -> Iterator[dict[str, Any]]:
        """Yield points that differ from a leader in numbers without steps alone, unless enough were tried."""
        same = {(name, leader.params[name]) for name in _discrete(leader)}
        if sum(same <= point for point in seen) <= CONTINUOUS:
            yield from self._around(leader, 1, _continuous(leader))

    def _anywhere(
        self, like: FrozenTrial, seen: set[Point]
    ) -> tuple[dict[str, Any], dict[str, BaseDistribution]] | None:
        """Return a random point with the names of another trial, which was not tried."""
        for _ in range(RETRIES):
            point = {name: self._drawn(d) for name, d in like.distributions.items()}
            if frozenset(point.items()) not in seen:
                return point, dict(like.distributions)
        return None

    def _drawn(self, distribution: BaseDistribution) -> Any:
        match distribution:
            case CategoricalDistribution(choices=choices):
                return self._random.choice(choices)
            case IntDistribution(low=low, high=high, step=step, log=log):
                if log:
                    return round(math.exp(self._random.uniform(math.log(low), math.log(high))))
                return self._random.randrange(low, high + 1, step)
            case FloatDistribution(low=low, high=high, step=step, log=log):
                if log:
                    return min(
                        high,
                        max(low, math.exp(self._random.uniform(math.log(low), math.log(high)))),
                    )
                return (
                    self._random.uniform(low, high)
                    if step is None
                    else low + step * self._random.randint(0, int((high - low) / step))
                )
        raise TypeError(f"no values are drawn from a {type(distribution).__name__}")

    def _around(
        self, trial: FrozenTrial, steps: int, names: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        """Yield the points that differ from a trial by one step in one or in two of the parameters."""
        for name in names:
            for value in self._close(trial.distributions[name], trial.params[name]):
                point = {**trial.params, name: value}
                if steps == 1:
                    yield point
                    continue
                for other in names[names.index(name) + 1 :]:
                    for second in self._close(trial.distributions[other], trial.params[other]):
                        yield {**point, other: second}

    def _close(self, distribution: BaseDistribution, value: Any) -> list[Any]:
        match distribution:
            case CategoricalDistribution(choices=choices):
                return _categories(choices, value)
            case IntDistribution(low=low, high=high, step=step, log=log):
                near = (
                    [value * 2, value // 2, value + 1, value - 1]
                    if log
                    else [value + k * step for k in (1, -1, 2, -2, 4, -4)]
                )
                return [v for v in dict.fromkeys(near) if low <= v <= high and v != value]
            case FloatDistribution(low=low, high=high, step=step, log=log):
                if step is not None:
                    near = [value + k * step for k in (1, -1, 2, -2)]
                elif log:
                    near = [
                        value * self._random.uniform(1.05, 2.0),
                        value / self._random.uniform(1.05, 2.0),
                    ]
                else:
                    near = [
                        value + sign * self._random.uniform(0.01, 0.2) * (high - low)
                        for sign in (1, -1)
                    ]
                return [v for v in near if low <= v <= high]
        return []


def _is_continuous(distribution: BaseDistribution) -> bool:
    return isinstance(distribution, FloatDistribution) and distribution.step is None


def _discrete(trial: FrozenTrial) -> list[str]:
    """Return the parameters of a trial that have values to choose from, without numbers that have no steps."""
    return [n for n, d in trial.distributions.items() if not d.single() and not _is_continuous(d)]


def _continuous(trial: FrozenTrial) -> list[str]:
    return [n for n, d in trial.distributions.items() if not d.single() and _is_continuous(d)]


def _categories(choices: Sequence[Any], value: Any) -> list[Any]:
    """Return the neighbours of a choice: numbers have neighbours, names are all equally far."""
    if all(isinstance(c, int | float) and not isinstance(c, bool) for c in choices):
        ordered = sorted(choices)
        at = ordered.index(value)
        return [ordered[i] for i in (at - 1, at + 1) if 0 <= i < len(ordered)]
    return [c for c in choices if c != value]


def leaders(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the best distinct trials.

    Feasible ones come first, by value, the ones without a value last; the others follow by how little they lack.
    """
    trial_by_point: dict[Point, FrozenTrial] = {}
    for trial in sorted(trials, key=_order):
        trial_by_point.setdefault(frozenset(trial.params.items()), trial)
    return list(trial_by_point.values())[:LEADERS]


def _order(trial: FrozenTrial) -> tuple[float, float, int]:
    lacks = sum(max(0.0, v) for v in trial.constraints.values())
    return lacks, trial.value if trial.value is not None else float("inf"), trial.number
