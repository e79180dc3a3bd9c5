"""Check values, by the types of the records that hold them.

A check is a function of a value and of its place. It returns the value, or raises a ClusterError that names the
problem, its place, and the accepted values. The fields of a record name their checks in their types (`memory_bandwidth:
Positive`), so that one declaration checks the values of a file (`checks_of`) and of a program (`check_fields`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from piper_ir.ground.errors import ClusterError


@dataclass(frozen=True, slots=True)
class KeyPath:
    """Name a place: a file or an object, and the keys that lead to it."""

    file: str
    keys: tuple[str, ...] = ()

    def at(self, key: str) -> KeyPath:
        return KeyPath(self.file, (*self.keys, key))

    def item(self, k: int) -> KeyPath:
        return KeyPath(self.file, (*self.keys[:-1], f"{self.keys[-1]}[{k}]"))

    def error(self, message: str) -> ClusterError:
        return ClusterError(
            f"{self.file}: {'.'.join(self.keys)}{': ' if self.keys else ''}{message}"
        )


MOST_BITS = 1024
"""The bits of the largest finite float; integers of more are not written out."""

Check = Callable[[Any, KeyPath], Any]


def table(known: Mapping[str, Check]) -> Check:
    """Accept a table with these keys, all of which may be left out."""

    def check(value: Any, where: KeyPath) -> dict[str, Any]:
        for key in _table(value, where):
            if key not in known:
                raise where.at(key).error(f"no such key; known here: {', '.join(known)}")
        return {k: known[k](v, where.at(k)) for k, v in value.items()}

    return check


def mapping(each: Check, *, least: int = 0) -> Check:
    """Accept a table with any keys, at least `least` of them."""

    def check(value: Any, where: KeyPath) -> dict[Any, Any]:
        if len(_table(value, where)) < least:
            raise where.error(f"{len(value)} entries stand here; at least {least} is needed")
        return {k: each(v, where.at(str(k))) for k, v in value.items()}

    return check


def list_of(each: Check) -> Check:
    """Accept a list of any length."""

    def check(value: Any, where: KeyPath) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise where.error(f"{value!r} stands here; a list is needed")
        return [each(v, where.item(k)) for k, v in enumerate(value)]

    return check


def list_of_each(*each: Check) -> Check:
    """Accept a list with one entry for each of these checks."""
    entries = list_of(lambda value, where: value)

    def check(value: Any, where: KeyPath) -> list[Any]:
        values = entries(value, where)
        if len(values) != len(each):
            raise where.error(f"{len(values)} of them; {len(each)} are needed")
        return [one(v, where.item(k)) for k, (one, v) in enumerate(zip(each, values, strict=True))]

    return check


def text_or(other: Check) -> Check:
    """Accept text, or something else."""
    return lambda value, where: value if isinstance(value, str) else other(value, where)


def list_or(many: Check, other: Check) -> Check:
    """Accept a list, or something else."""
    return lambda value, where: (
        many(value, where) if isinstance(value, list) else other(value, where)
    )


def one_of(*accepted: str | bool) -> Check:
    """Accept one of a few values."""
    needed = ", ".join(_as_written(a) for a in accepted if a != "")

    def check(value: Any, where: KeyPath) -> Any:
        if not any(value == a and type(value) is type(a) for a in accepted):
            raise where.error(f"{value!r} stands here; one of {needed} is needed")
        return value

    return check


def TEXT(value: Any, where: KeyPath) -> str:
    """Accept text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise where.error(f"{value!r} stands here; text is needed")
    return value


def number(*, whole: bool, least: float, above: bool) -> Check:
    """Accept a finite number from `least` on, or above it."""
    kind = "whole number" if whole else "number"
    needed = f"a {kind} above {least:g}" if above else f"a {kind} from {least:g} on"

    def check(value: Any, where: KeyPath) -> Any:
        right = isinstance(value, int) or (isinstance(value, float) and not whole)
        if (
            not right
            or isinstance(value, bool)
            or not is_finite(value)
            or not (value > least if above else value >= least)
        ):
            finite = "" if not right or is_finite(value) else ", and finite,"
            raise where.error(f"{shown(value)} stands here; {needed}{finite} is needed")
        return value

    return check


def is_finite(value: Any) -> bool:
    """Return whether a number is finite also as a float, which integers of hundreds of digits are not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def shown(value: object) -> str:
    """Return a value as messages show it; Python writes no integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


POSITIVE = number(whole=False, least=0, above=True)
NOT_NEGATIVE = number(whole=False, least=0, above=False)
COUNT = number(whole=True, least=1, above=False)
INDEX = number(whole=True, least=0, above=False)
FACTOR = number(whole=False, least=1, above=False)

Text = Annotated[str, TEXT]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Count = Annotated[int, COUNT]
Index = Annotated[int, INDEX]
Factor = Annotated[float, FACTOR]
"""A field type, with its check: how many times as long something takes."""
Bandwidth = Annotated[float, number(whole=False, least=1, above=False)]
"""A field type, with its check: bytes per second."""


def FRACTION(value: Any, where: KeyPath) -> Any:
    """Accept a number above 0 and at most 1."""
    if POSITIVE(value, where) > 1:
        raise where.error(f"{value!r} stands here; a fraction, above 0 and at most 1, is needed")
    return value


_KNOWN: dict[type, Mapping[str, Check]] = {}


def checks_of(record: type) -> Mapping[str, Check]:
    """Return the check of each field of a dataclass, by the field's name."""
    if record not in _KNOWN:
        hints = get_type_hints(record, include_extras=True)
        _KNOWN[record] = {f.name: check_of(hints[f.name]) for f in fields(record) if f.init}
    return _KNOWN[record]


def check_of(hint: Any) -> Check:
    """Return the check that a type names; records have checked themselves, so their types accept any value."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        check: Check = hint.__metadata__[0]
        return check
    if origin is Literal:
        return one_of(*arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return list_of_each(*map(check_of, arguments))
    if origin is tuple:
        return list_of(check_of(arguments[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return mapping(check_of(arguments[1]))
    return one_of(True, False) if hint is bool else lambda value, where: value


def check_fields(record: Any, name: str) -> None:
    """Check all fields of a dataclass; raise ClusterError with `name` and the field."""
    where = KeyPath(name)
    for field, check in checks_of(type(record)).items():
        check(getattr(record, field), where.at(field))


def _table(value: Any, where: KeyPath) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise where.error(f"{value!r} stands here; a table of keys and values is needed")
    return value


def _as_written(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
