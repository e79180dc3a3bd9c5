"""Check the values of another system's options: each has a kind, and all that are wrong are named at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from piper_interop.neutral.foreign import Foreign, OptionValue
from piper_interop.neutral.options import OptionRow, nearest_name
from piper_ir.ground.errors import JobError
from piper_ir.tools import count_text


@dataclass(frozen=True)
class OptionKind:
    """Say which values an option takes.

    Attributes:
        words: the values in words, for messages: "a whole number from 1".
        types: of the values; () for any.
        choices: the texts that are taken; () for any.
        least: of numbers; None for any; likewise `most`.
        empty: whether null is a value, too.
    """

    words: str
    types: tuple[type, ...] = ()
    choices: tuple[Any, ...] = ()
    least: float | None = None
    most: float | None = None
    empty: bool = False

    @property
    def or_none(self) -> OptionKind:
        """Return the kind that takes null, too."""
        return replace(self, words=f"{self.words}, or null", empty=True)

    def takes(self, value: Any) -> bool:
        """Return whether a value is of this kind."""
        if value is None or not self.types:
            return self.empty or not self.types
        if type(value) not in self.types or (isinstance(value, float) and not isfinite(value)):
            return False
        if isinstance(value, float) and int in self.types and float not in self.types:
            return False
        if self.choices and value not in self.choices:
            return False
        small = self.least is not None and value < self.least
        return not small and (self.most is None or value <= self.most)

    def plain(self, value: Any) -> Any:
        """Return a value in the form that `takes` expects: 5e8 is a whole number, and "true" a truth value."""
        whole = isinstance(value, float) and value.is_integer()
        if whole and int in self.types and float not in self.types:
            return int(value)
        if bool in self.types and str not in self.types and str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        if isinstance(value, str) and value not in self.choices and value.upper() in self.choices:
            return value.upper()  # as Accelerate reads the names of PyTorch's choices
        return value


ANY = OptionKind("any value")
BOOL = OptionKind("true or false", (bool,))
INT = OptionKind("a whole number", (int,))
COUNT = OptionKind("a whole number from 1", (int,), least=1)
SIZE = OptionKind("a whole number from 0", (int,), least=0)
NUMBER = OptionKind("a number", (int, float))
FROM_ZERO = replace(NUMBER, words="a number from 0", least=0)
FRACTION = replace(NUMBER, words="a number from 0 to 1", least=0, most=1)
TEXT = OptionKind("a text", (str,))
LIST = OptionKind("a list", (list,))
TEXTS = OptionKind("a text or a list of texts", (str, list))
OBJECT = OptionKind("an object", (dict,))


def one_of(*choices: str) -> OptionKind:
    """Return the kind of texts of a list."""
    return OptionKind(f"one of {', '.join(choices)}", (str,), choices)


def checked(
    system: str, source: str, values: Mapping[str, OptionValue], kinds: Mapping[str, OptionKind]
) -> dict[str, OptionValue]:
    """Return options with values of their kinds; options that no kind names stay as they are.

    Raises JobError that names all options of another kind.
    """
    foreign = Foreign(system, "", source, values)
    wrong: list[str] = []
    plain_values: dict[str, OptionValue] = {}
    for name, value in values.items():
        kind = kinds.get(nearest_name(kinds, name), ANY)
        plain = kind.plain(value.value)
        plain_values[name] = replace(value, value=plain)
        if not kind.takes(plain):
            wrong.append(f"  {name}={value.text}{foreign.at(name)}: {kind.words} is expected")
    if wrong:
        told = count_text(len(wrong), "option has", "options have")
        raise JobError("\n".join([f"{source}: {told} wrong values", *wrong]))
    return plain_values


OptionSpec = tuple[OptionKind, OptionRow | tuple[OptionRow, ...]]
"""The values that an option takes, with its rows."""
