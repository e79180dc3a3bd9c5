"""Score the strategies that differ from one in a single argument, and say how that word changes the prediction.

A person who writes a strategy seldom knows all arguments of its directives, and a search tries its space only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from piper_autotune.scoring.evaluators import Evaluator, Here, Outcome
from piper_autotune.scoring.scoring import Scored
from piper_autotune.space.problem import Programs, TuningProblem, Under
from piper_autotune.space.rules import PruningRules
from piper_compiler import Strategy
from piper_compiler.directives import Directive, partition, replicate
from piper_ir.program.program import Program
from piper_ir.tools import size_text, time_text

FASTER, SMALLER = 0.005, 0.05
"""The least relative gains of period, and of the fullest device's bytes, for which a change is told."""
SLOWER = 0.01
"""The relative loss of period that is accepted for less memory; more memory does no harm if it fits."""


@dataclass(frozen=True, slots=True)
class OneWord:
    """Hold the effect of one word.

    Attributes:
        words: the directive with the argument.
        before: the prediction without it.
        after: the prediction with it.
        strategy: the strategy with it.
    """

    words: str
    before: Scored
    after: Scored
    strategy: Strategy | None = None

    @property
    def period_change(self) -> float:
        """Return the relative growth of the period."""
        return self.after.period_s / self.before.period_s - 1 if self.before.period_s else 0.0

    @property
    def step_change(self) -> float:
        """Return the relative growth of the first step."""
        return self.after.step_s / self.before.step_s - 1 if self.before.step_s else 0.0

    @property
    def bytes_change(self) -> int:
        """Return by how many bytes the fullest device holds more."""
        return self.after.device_bytes - self.before.device_bytes

    @property
    def helps(self) -> bool:
        """Return whether to tell it: it is faster and fits, or smaller and hardly slower, or makes the plan fit.

        For a plan that does not fit, a faster change with no more memory is told, too: it stays so when the plan fits.
        """
        faster = self.period_change <= -FASTER
        if self.before.reason:
            much_smaller = self.after.device_bytes < (1 - SMALLER) * self.before.device_bytes
            return not self.after.reason or much_smaller or (faster and self.bytes_change <= 0)
        smaller = (
            self.bytes_change <= -SMALLER * self.before.device_bytes
            and self.period_change <= SLOWER
        )
        return not self.after.reason and (faster or smaller)

    @property
    def text(self) -> str:
        """Return a line such as 'partition(at="cost"): 1.1 s per step (-7.6 %), 55 GiB (-5 GiB)'."""
        return self.told(self.before.period_s)

    def told(self, period_s: float) -> str:
        """Return the line beside another prediction of the period without the word, which may know contention."""
        fits = (
            ""
            if not self.before.reason
            else "; it still does not fit"
            if self.after.reason
            else "; it fits"
        )
        sign = "+" if self.bytes_change > 0 else ""
        return (
            f"{self.words}: {time_text(period_s * (1 + self.period_change))} per step "
            f"({self.period_change * 100:+.1f} %), {size_text(self.after.device_bytes)} on the fullest device "
            f"({sign}{size_text(self.bytes_change)}){fits}"
        )


def alternatives(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Yield the strategies with one other argument, each with its words: stages by cost, shared optimizer states."""
    items = strategy.directives
    for k, item in enumerate(items):
        changed: Directive | None = None
        if isinstance(item, partition) and item.at == "even" and item.stages > 1:
            words, changed = 'partition(at="cost")', replace(item, at="cost")
        elif isinstance(item, replicate) and not any(
            (item.shards.optim, item.shards.grads, item.shards.params)
        ):
            if strategy.mesh.degree(item.over) > 1:
                words, changed = "replicate(zero=1)", replace(item, zero=1)
        if changed is not None:
            yield (
                words,
                Strategy(
                    strategy.mesh, (*items[:k], changed, *items[k + 1 :]), params=strategy.params
                ),
            )


def one_word(
    evaluator: Evaluator, strategy: Strategy, *, engine: bool, before: Scored | None = None
) -> tuple[OneWord, ...]:
    """Return the effect of each alternative that can be compiled; `before` is a score that is known.

    Both sides are scored in the same way: by the event engine, or by the sweep, which knows no contention.
    """
    asked = [
        (words, other, evaluator.submit(other, engine)) for words, other in alternatives(strategy)
    ]
    if not asked:
        return ()
    own: Outcome = (
        evaluator.result(evaluator.submit(strategy, engine)) if before is None else before
    )
    outcomes = [(words, other, evaluator.result(ticket)) for words, other, ticket in asked]
    if not isinstance(own, Scored):
        return ()
    return tuple(
        OneWord(words, own, after, other)
        for words, other, after in outcomes
        if isinstance(after, Scored)
    )


@dataclass(frozen=True)
class WayOut:
    """Say how a plan that does not fit can be made to fit.

    Attributes:
        change: the first change that fits, with its price; None if none of the tried ones does.
        tried: how many changes were tried.
        least: of the compiled changes that do not fit, the one that holds least.
    """

    change: OneWord | None
    tried: int
    least: OneWord | None = None


class ScoredHere:
    """Score one strategy beside others of the same problem, in this process."""

    def __init__(
        self,
        problem: TuningProblem,
        at_rows: Callable[[int], Program] | None = None,
        under: Under | None = None,
        *,
        engine: bool,
    ) -> None:
        programs = Programs(problem, at_rows, under)
        self._evaluator, self._rules, self._engine = (
            Here(problem, programs),
            PruningRules(problem, programs),
            engine,
        )

    def score(self, strategy: Strategy) -> Outcome:
        """Return the score of a strategy, or why there is none."""
        return self._evaluator.result(self._evaluator.submit(strategy, self._engine))

    def one_word(self, strategy: Strategy, before: Scored | None = None) -> tuple[OneWord, ...]:
        """Return the effect of each alternative of a strategy; `before` is its own score, if that is known."""
        return one_word(self._evaluator, strategy, engine=self._engine, before=before)

    def way_out(self, before: Scored, changes: Iterable[tuple[str, Strategy]]) -> WayOut:
        """Return the first change that fits; a change that cannot fit by its lower bounds is not compiled."""
        tried, least = 0, None
        for words, strategy in changes:
            tried += 1
            if self._rules.check(strategy) is not None:
                continue
            after = self.score(strategy)
            if not isinstance(after, Scored):
                continue
            change = OneWord(words, before, after, strategy)
            if not after.reason:
                return WayOut(change, tried)
            if least is None or after.device_bytes < least.after.device_bytes:
                least = change
        return WayOut(None, tried, least)
