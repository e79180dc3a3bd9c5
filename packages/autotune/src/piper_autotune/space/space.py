"""Describe the search space that a strategy function spells out: its trial, and the space's name in a storage."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import StorageInternalError

from piper_autotune.space.content import PLAIN, content
from piper_compiler import Strategy
from piper_ir.ground.errors import PiperError, TuneError
from piper_ir.tools import user_code

StrategyFunction = Callable[[Any], Strategy]


class SpaceError(TuneError):
    """End a search whose space contradicts itself."""


class SkippedError(TuneError):
    """Leave out a candidate: its strategy function has called `trial.skip`."""


class StrategyFailedError(TuneError):
    """Reject a candidate whose strategy function raised, or returned something else than a strategy."""


class Space:
    """Keep the distributions that were seen under each name, over all trials."""

    def __init__(self) -> None:
        self._seen: dict[str, BaseDistribution] = {}

    def strategy(self, function: StrategyFunction, trial: Any) -> Strategy:
        """Call the user's function; `trial` is one of Optuna's.

        Raises:
            SpaceError: the function contradicts itself.
            SkippedError: the function left this candidate out.
            StrategyFailedError: the function raised, or returned something else.
            PiperError: a directive or recipe raised it.
            StorageInternalError: Optuna could not save a choice.
        """
        try:
            with user_code("strategy(trial)", StrategyFailedError):
                returned: object = function(Trial(trial, self))
        except SystemExit as e:
            raise StrategyFailedError(
                f"strategy(trial) ended the program with SystemExit({e.code!r})"
            ) from None
        except StrategyFailedError as e:
            if isinstance(
                e.__cause__, StorageInternalError
            ):  # of suggest_*: no fault of this candidate
                raise e.__cause__ from e.__cause__.__cause__
            raise
        if not isinstance(returned, Strategy):
            raise StrategyFailedError(
                f"strategy(trial) returned a {type(returned).__name__}; a piper.Strategy is needed"
            )
        with user_code(
            "hash(strategy)", StrategyFailedError
        ):  # a directive of the user's may not be hashable
            hash(returned)
        return returned.with_params(trial.params)

    def note(self, name: str, distribution: BaseDistribution, own: BaseDistribution | None) -> None:
        """Refuse a name that stands for two things.

        `own` is its distribution earlier in the same trial, where even the range must agree. Between trials the range
        of a number may change, its kind and the choices may not.
        """
        before = own or self._seen.setdefault(name, distribution)
        same = before == distribution if own is not None else _kind(before) == _kind(distribution)
        if not same:
            where = "in one trial" if own is not None else "in two trials"
            raise SpaceError(
                f"strategy(trial) uses the name {name!r} for two things {where}: {_text(before)} and "
                f"{_text(distribution)}; give each a name of its own"
            )


def _kind(distribution: BaseDistribution) -> object:
    """Return the part of a distribution that Optuna demands to be equal in all trials of a study."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    return type(distribution), getattr(distribution, "log", False)


def _text(distribution: BaseDistribution) -> str:
    match distribution:
        case CategoricalDistribution(choices=choices):
            return f"one of {', '.join(map(repr, choices))}"
        case IntDistribution() | FloatDistribution():
            kind = "an integer" if isinstance(distribution, IntDistribution) else "a number"
            return f"{kind} in {distribution.low}..{distribution.high}{' (log)' if distribution.log else ''}"
    return repr(distribution)


class Trial:
    """Wrap Optuna's trial, with the same methods and attributes, and notice names that stand for two things."""

    def __init__(self, trial: Any, space: Space) -> None:
        self._trial, self._space = trial, space
        self._own: dict[str, BaseDistribution] = {}

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Choose one of the choices: numbers, text, booleans or None."""
        bad = [c for c in choices if not isinstance(c, PLAIN)]
        if bad:
            raise SpaceError(
                f"strategy(trial): suggest_categorical({name!r}) has the choice {bad[0]!r}, a "
                f"{type(bad[0]).__name__}; choices are numbers, text, booleans or None, since they are saved: use "
                f"a name or an index, and look the rest up"
            )
        self._note(name, CategoricalDistribution(tuple(choices)))
        return self._trial.suggest_categorical(name, tuple(choices))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """Choose an integer in low..high, both included."""
        self._note(name, IntDistribution(low, high, log=log, step=step))
        chosen: int = self._trial.suggest_int(name, low, high, step=step, log=log)
        return chosen

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Choose a number in low..high."""
        self._note(name, FloatDistribution(low, high, log=log, step=step))
        chosen: float = self._trial.suggest_float(name, low, high, step=step, log=log)
        return chosen

    def skip(self, reason: str) -> NoReturn:
        """Leave this candidate out, for a reason that is shown beside it; it is no trial, as one that a rule rejects.

        It is for choices that do not go together, such as sizes that do not divide.
        """
        raise SkippedError(reason)

    def _note(self, name: str, distribution: BaseDistribution) -> None:
        self._space.note(name, distribution, self._own.get(name))
        self._own[name] = distribution

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trial, name)


def again(function: StrategyFunction, params: dict[str, Any]) -> Strategy | None:
    """Return the strategy that a function makes from values chosen before; None when it does not any more."""
    try:
        return Space().strategy(function, optuna.trial.FixedTrial(params))
    except (PiperError, ValueError):
        return None


def space_key(function: StrategyFunction, *facts: object) -> str:
    """Return a name that is the same for the same space, in another process too.

    It depends on the function's code, the plain values that it uses, and the facts.
    """
    digest = hashlib.sha256()
    for part in (*content(function), *facts):
        digest.update(f"{part!r};".encode())
    return digest.hexdigest()[:16]
