"""Checks of what stands in a file: a schema is a function of a value and of its place, which returns the value or says what is
wrong with it, where, and what would be accepted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from piper_ir.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Where:
    """A file and the keys that lead to a place in it."""

    file: str
    keys: tuple[str, ...] = ()

    def at(self, key: str) -> Where:
        return Where(self.file, (*self.keys, key))

    def item(self, k: int) -> Where:
        return Where(self.file, (*self.keys[:-1], f"{self.keys[-1]}[{k}]"))

    def error(self, message: str) -> ClusterError:
        return ClusterError(f"{self.file}: {'.'.join(self.keys)}{': ' if self.keys else ''}{message}")


Check = Callable[[Any, Where], Any]


def table(known: Mapping[str, Check]) -> Check:
    """A table with these keys, none of which must be there."""

    def check(value: Any, where: Where) -> dict[str, Any]:
        for key in _table(value, where):
            if key not in known:
                raise where.at(key).error(f"no such key; known here: {', '.join(known)}")
        return {k: known[k](v, where.at(k)) for k, v in value.items()}

    return check


def mapping(each: Check) -> Check:
    """A table with any keys."""
    return lambda value, where: {k: each(v, where.at(k)) for k, v in _table(value, where).items()}


def list_of(each: Check) -> Check:
    """A list of any length."""

    def check(value: Any, where: Where) -> list[Any]:
        if not isinstance(value, list):
            raise where.error(f"{value!r} stands here; a list is needed")
        return [each(v, where.item(k)) for k, v in enumerate(value)]

    return check


def list_of_n(n: int, each: Check) -> Check:
    """A list of n."""

    def check(value: Any, where: Where) -> list[Any]:
        found: list[Any] = list_of(each)(value, where)
        if len(found) != n:
            raise where.error(f"{len(found)} of them; {n} are needed")
        return found

    return check


def text_or(other: Check) -> Check:
    """Text, or something else."""
    return lambda value, where: value if isinstance(value, str) else other(value, where)


def list_or(many: Check, other: Check) -> Check:
    """A list, or something else."""
    return lambda value, where: many(value, where) if isinstance(value, list) else other(value, where)


def one_of(*accepted: str | bool) -> Check:
    """One of a few values."""

    def check(value: Any, where: Where) -> Any:
        if not any(value == a and type(value) is type(a) for a in accepted):
            raise where.error(f"{value!r} stands here; one of {', '.join(map(_as_written, accepted))} is needed")
        return value

    return check


def TEXT(value: Any, where: Where) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise where.error(f"{value!r} stands here; text is needed")
    return value


def number(*, whole: bool, least: float, above: bool) -> Check:
    """A finite number from `least` on, or above it."""
    kind = "whole number" if whole else "number"
    needed = f"a {kind} above {least:g}" if above else f"a {kind} from {least:g} on"

    def check(value: Any, where: Where) -> Any:
        right = isinstance(value, int) or (isinstance(value, float) and not whole)
        if not right or isinstance(value, bool) or not math.isfinite(value) or not (value > least if above else value >= least):
            raise where.error(f"{value!r} stands here; {needed} is needed")
        return value

    return check


POSITIVE = number(whole=False, least=0, above=True)
NOT_NEGATIVE = number(whole=False, least=0, above=False)
COUNT = number(whole=True, least=1, above=False)
INDEX = number(whole=True, least=0, above=False)
FACTOR = number(whole=False, least=1, above=False)


def FRACTION(value: Any, where: Where) -> Any:
    """A number above 0, and at most 1."""
    if POSITIVE(value, where) > 1:
        raise where.error(f"{value!r} stands here; a fraction, above 0 and at most 1, is needed")
    return value


def _table(value: Any, where: Where) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise where.error(f"{value!r} stands here; a table of keys and values is needed")
    return value


def _as_written(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
