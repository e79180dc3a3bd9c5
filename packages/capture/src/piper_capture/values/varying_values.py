"""Stand in a trace for a value that differs from call to call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat)


class UnknownRead(BaseException):
    """Traced code asks for the value of an Unknown. User code that catches Exception does not catch this."""


class Unknown:
    """Replace a value that changes from call to call, while a later call is traced.

    Code may update it and store results computed from it, which are unknown as well. Any operation that would reveal
    the value raises, and torch refuses it as an operand. So a trace that completes has not used the value.

    Attributes:
        holds_numbers: Whether its items are unknown numbers; other items cannot be read.
    """

    def __init__(self, holds_numbers: bool) -> None:
        self.holds_numbers = holds_numbers

    def __getitem__(self, key: Any) -> Any:
        if self.holds_numbers:
            return self
        raise UnknownRead

    def __hash__(self) -> int:
        if (
            torch.compiler.is_dynamo_compiling()
        ):  # true in traced code; outside of it, Dynamo's own tables may hold this object
            raise UnknownRead
        return id(self)

    def _itself(self, *_: Any) -> Any:
        return self

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    def _read(self, *_: Any, **__: Any) -> Any:
        raise UnknownRead


_BINARY = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
_READS = (
    "bool", "eq", "ne", "lt", "le", "gt", "ge", "len", "iter", "contains", "float", "int", "index", "complex", "round", "trunc",
    "floor", "ceil", "str", "repr", "format", "call", "enter", "reversed",
)  # fmt: skip
_UPDATES = (
    "__setitem__",
    "__delitem__",
    "append",
    "appendleft",
    "extend",
    "insert",
    "add",
    "discard",
    "update",
    "clear",
)
for _name in _BINARY:
    for _kind in ("", "i", "r"):
        setattr(Unknown, f"__{_kind}{_name}__", Unknown._itself)
for _name in ("neg", "pos", "abs", "invert", "next"):
    setattr(Unknown, f"__{_name}__", Unknown._itself)
for _name in _READS:
    setattr(Unknown, f"__{_name}__", Unknown._read)
for _name in _UPDATES:
    setattr(Unknown, _name, Unknown._nothing)


def unknown_like(value: object) -> Unknown:
    """Return the Unknown that replaces a value that changes."""
    items = (
        list(value.values() if isinstance(value, Mapping) else value)
        if isinstance(value, Mapping | list)
        else []
    )
    return Unknown(bool(items) and all(isinstance(item, NUMBERS) for item in items))
