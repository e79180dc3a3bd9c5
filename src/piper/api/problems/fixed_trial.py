"""Answer the suggestions of a strategy for one choice of its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from piper_ir.ground.errors import JobError

Answer = TypeVar("Answer")


class FixedTrial:
    """Answer a strategy's `trial.suggest_*` calls with given values, as `-p name=value` does.

    Args:
        params: The values, by name.
        free: Names of integers that are answered whatever the strategy would accept.
        flag: The name of the option in messages.
    """

    def __init__(
        self, params: Mapping[str, str], free: Iterable[str] = (), flag: str = "-p"
    ) -> None:
        self._params, self._free, self._flag = dict(params), frozenset(free), flag
        self.answers: dict[str, Any] = {}
        """The answers so far, by name."""

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        text = self._text(name, f"one of {', '.join(map(str, choices))}")
        if name in self._free:
            return self._answer(name, int(text))
        for choice in choices:
            if str(choice) == text:
                return self._answer(name, choice)
        raise JobError(
            f"{self._flag} {name}={text}: one of {', '.join(map(str, choices))} is accepted"
        )

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        text = self._text(name, f"an integer in {low}..{high}")
        if name in self._free:
            return self._answer(name, int(text))
        if (
            not re.fullmatch(r"-?\d{1,18}", text, re.ASCII)
            or not low <= int(text) <= high
            or (not log and (int(text) - low) % step)
        ):
            raise JobError(
                f"{self._flag} {name}={text}: an integer in {low}..{high} (step {step}) is accepted"
            )
        return self._answer(name, int(text))

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        text = self._text(name, f"a number in {low}..{high}")
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        on_grid = step is None or abs((value - low) / step - round((value - low) / step)) < 1e-9
        if not low <= value <= high or not on_grid:
            steps = "" if step is None else f" (step {step})"
            raise JobError(
                f"{self._flag} {name}={text}: a number in {low}..{high}{steps} is accepted"
            )
        return self._answer(name, value)

    def skip(self, reason: str) -> NoReturn:
        """Raise JobError: the strategy leaves these values out."""
        values = ", ".join(f"{name}={value}" for name, value in self.answers.items())
        raise JobError(f"the strategy skips {values or 'this choice'}: {reason}")

    def _answer(self, name: str, value: Answer) -> Answer:
        self.answers[name] = value
        return value

    def _text(self, name: str, accepted: str) -> str:
        if name not in self._params:
            raise JobError(
                f"the strategy asks for {name!r}; give it as -p {name}=VALUE ({accepted})"
            )
        return self._params[name]

    def check_all_used(self, given: Iterable[str]) -> None:
        """Raise JobError for a name among `given` that the strategy did not ask for."""
        unknown = sorted(set(given) - self.answers.keys())
        if unknown:
            near = get_close_matches(unknown[0], self.answers, 1)
            raise JobError(
                f"{self._flag} {unknown[0]}=...: the strategy has no parameter of that name"
                f"{f', did you mean {near[0]}?' if near else ';'} "
                f"it has {', '.join(sorted(self.answers)) or 'none'}"
            )


class FirstChoices(FixedTrial):
    """Answer like `FixedTrial`, and a name without a value by its first choice, to learn which names are asked for."""

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        self._params.setdefault(name, str(next(iter(choices))))
        return super().suggest_categorical(name, choices)

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        self._params.setdefault(name, str(low))
        return super().suggest_int(name, low, high, step=step, log=log)

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        self._params.setdefault(name, str(low))
        return super().suggest_float(name, low, high, step=step, log=log)
