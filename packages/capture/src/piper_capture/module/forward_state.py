"""Track the Python state that forward changes from call to call: attributes, lists, globals, closures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from piper_capture.torch_api._torch import Change, noted_changes
from piper_capture.values.varying_values import Unknown, unknown_like

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    range,
    torch.dtype,
    torch.device,
    torch.Size,
)
_FIXED = (type, FunctionType, BuiltinFunctionType, ModuleType, nn.Module)
"""The types of values that are compared by identity: their attributes are places of their own."""
_MISSING = object()
_UNREACHABLE = (AttributeError, TypeError, LookupError, ValueError, NameError, SyntaxError)
"""The errors of an expression for a place that cannot be read or assigned."""
_TICKS = count()
_MADE_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


class KeptState:
    """Hold the Python state that calls of one step change, and its values before.

    Attributes:
        changes: The changes by any call, by place.
        known: Names of the model's tensors, whose changes the capture tracks elsewhere.
    """

    def __init__(self, local: Mapping[str, object], space: dict[str, Any]) -> None:
        self.changes: dict[str, Change] = {}
        self.known: frozenset[str] = frozenset()
        self._scope = {"L": dict(local), "G": space}
        self._originals: dict[str, tuple[object, list[Any] | None]] = {}
        self._before: dict[str, str] = {}
        self._unknown: dict[str, Unknown] = {}

    @contextmanager
    def call(self) -> Iterator[None]:
        """Note the changes by a call that is traced in this context. Forgotten places are unknown to the call."""
        self._before.clear()
        for place, unknown in self._unknown.items():
            self._run(f"{place} = value", unknown)
        with noted_changes(self._note):
            yield

    def moving(self) -> tuple[Change, ...]:
        """Return the changes of places that the last call left with another value, except forgotten places."""
        known = {
            place: before for place, before in self._before.items() if place not in self._unknown
        }
        return tuple(
            self.changes[place]
            for place, before in known.items()
            if looks(self._get(place)) != before
        )

    def forget(self, change: Change) -> bool:
        """Make the value of a place unknown to later calls; return whether the place can be assigned."""
        unknown = unknown_like(self._get(change.place))
        try:
            self._run(f"{change.place} = value", unknown)
        except _UNREACHABLE:  # an item of a tuple, a read-only property
            return False
        self._unknown[change.place] = unknown
        return True

    def as_found(self) -> bool:
        """Return whether every changed place has its value from before the first call, like a flag that is reset.

        The next call is then like the first. A value that cannot be compared for certain counts as changed.
        """
        return all(self._is_again(place, *original) for place, original in self._originals.items())

    def _is_again(self, place: str, value: object, content: list[Any] | None) -> bool:
        now = self._get(place)
        if content is not None:
            return now is value and _same(content, _content(now))
        return _same(value, now) and (
            value is _MISSING or type(value) in _PLAIN or isinstance(value, _FIXED)
        )

    def restore(self) -> None:
        """Restore the values from before the first call: globals and closures are the user's own."""
        for place, (value, content) in reversed(self._originals.items()):
            try:
                self._run(f"del {place}" if value is _MISSING else f"{place} = value", value)
            except _UNREACHABLE:
                pass  # the place could never be assigned, or no longer exists
            _refill(value, content)

    def _note(self, change: Change) -> None:
        if change.name in self.known:
            return
        place = change.place
        self.changes.setdefault(place, change)
        if place not in self._originals:
            value = self._get(place)
            self._originals[place] = value, _content(value)
        if place not in self._before:
            self._before[place] = looks(self._get(place))

    def _get(self, place: str) -> object:
        try:
            return eval(place, {}, self._scope)
        except _UNREACHABLE:
            return _MISSING

    def _run(self, statement: str, value: object) -> None:
        exec(statement, {}, {**self._scope, "value": value})


def _same(one: object, other: object) -> bool:
    """Return whether two values are one object or equal plain values, item by item for tuples and lists."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) in _PLAIN and one == other


def _content(value: object) -> list[Any] | None:
    """Return the items of a container that forward may change in place; None for other values."""
    return (
        list(value.items())
        if isinstance(value, dict)
        else list(value)
        if isinstance(value, list | set | deque)
        else None
    )


def _refill(value: Any, content: list[Any] | None) -> None:
    """Give a container its earlier items."""
    if content is None:
        return
    value.clear()
    if isinstance(value, dict):
        for key, item in content:
            value[key] = item
    else:
        value.update(content) if isinstance(value, set) else value.extend(content)


def looks(value: object, inside: tuple[int, ...] = ()) -> str:
    """Return a text that is equal for two values only if forward cannot tell them apart.

    For tensors it has their dtype, shape and requires_grad. An opaque value has another text every time.
    """
    if (text := _leaf_looks(value)) is not None:
        return text
    if id(value) in inside:
        return f"again {inside.index(id(value))}"
    parts = None if value is _MISSING else _parts(value)
    if parts is None:
        return f"tick {next(_TICKS)}"
    inside = (*inside, id(value))
    return f"{type(value).__qualname__} [{', '.join(looks(part, inside) for part in parts)}]"


def _leaf_looks(value: object) -> str | None:
    """Return the text of a value that forward cannot look into; None for other values."""
    if type(value) in _PLAIN:
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, Tensor):
        return f"tensor {value.dtype} {tuple(value.shape)} {value.requires_grad}"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return f"size {value.node.expr}"
    return f"{type(value).__name__} {id(value)}" if isinstance(value, (*_FIXED, Unknown)) else None


def _parts(value: object) -> list[object] | None:
    """Return the items or attributes of a value, None for an opaque one."""
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, set | frozenset):
        return sorted(value, key=looks)
    if isinstance(value, list | tuple | deque):
        return list(value)
    if all(kind.__flags__ & _MADE_IN_PYTHON for kind in type(value).__mro__[:-1]):
        return [part for pair in _attributes(value) for part in pair]
    return None


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an object of a Python class, from its dictionary and its slots."""
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = [k for k, v in vars(kind).items() if isinstance(v, MemberDescriptorType)]
        yield from ((name, getattr(value, name)) for name in slots if hasattr(value, name))
