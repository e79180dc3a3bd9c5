"""Make the functions that a copied model holds refer to the copy: hooks, and functions that replace a forward.

`copy.deepcopy` leaves functions as they are, so that a hook made inside of a constructor (`lambda m, i, o: ...self...`)
would still read the original module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from piper_capture.torch_api.attributes import HOOKS

HOLDERS = (FunctionType, MethodType, partial, list, tuple, dict)
"""The types of attributes that may hold functions."""


def rebind_functions(model: nn.Module, memo: dict[int, Any]) -> None:
    """Replace the functions of a copied model that refer to original objects; `memo` is the memo of the deepcopy."""
    rebound = _Rebound(memo)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name in HOOKS:
                value.update({key: rebound.value(hook) for key, hook in value.items()})
            elif isinstance(value, HOLDERS):
                module.__dict__[name] = rebound.value(value)


class _Rebound:
    """Make new versions of functions that refer to copies."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._made: dict[
            int, tuple[Any, Any]
        ] = {}  # (old, new); the old one is kept alive, so that its id is not used again

    def value(self, value: Any) -> Any:
        """Return the value with copies in place of the original objects that it refers to."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if id(value) in self._made:
            return self._made[id(value)][1]
        return self._copy(value) if self._refers(value, set()) else value

    def _copy(self, value: Any) -> Any:
        """Return a copy of a value that refers to original objects."""
        match value:
            case FunctionType():
                return self._function(value)
            case MethodType():
                return MethodType(self.value(value.__func__), self.value(value.__self__))
            case partial():
                keywords = {key: self.value(item) for key, item in value.keywords.items()}
                return partial(self.value(value.func), *map(self.value, value.args), **keywords)
            case _ if type(value) in (list, tuple, set, frozenset, dict):
                return self._container(value)
            case _:
                return copy.deepcopy(value, self._memo)

    def _container(self, value: Any) -> Any:
        """Return a container of copies; a list or dict is registered before it is filled, since it may hold itself."""
        if not isinstance(value, list | dict):
            return type(value)(map(self.value, value))
        copied: Any = type(value)()
        self._made[id(value)] = value, copied
        if isinstance(value, dict):
            copied.update({key: self.value(item) for key, item in value.items()})
        else:
            copied.extend(map(self.value, value))
        return copied

    def _function(self, function: FunctionType) -> FunctionType:
        cells = tuple(CellType() for _ in function.__closure__ or ())
        copied = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        self._made[id(function)] = (
            function,
            copied,
        )  # registered before its cells are filled: a function may refer to itself
        copied.__defaults__ = tuple(map(self.value, function.__defaults__ or ())) or None
        copied.__kwdefaults__ = {
            key: self.value(item) for key, item in (function.__kwdefaults__ or {}).items()
        }
        copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
        copied.__dict__.update(function.__dict__)
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            if not _empty(old):
                cell.cell_contents = self.value(old.cell_contents)
        return copied

    def _refers(self, value: Any, seen: set[int]) -> bool:
        """Return whether a value is, or refers to, an object that was copied."""
        if id(value) in self._memo:
            return True
        if id(value) in seen:
            return False
        seen.add(id(value))
        return any(self._refers(part, seen) for part in _parts(value))


def _parts(value: Any) -> Iterable[Any]:
    """Return the values that a function, a method or a container refers to."""
    match value:
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or () if not _empty(cell)]
            return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        case MethodType():
            return [value.__func__, value.__self__]
        case partial():
            return [value.func, *value.args, *value.keywords.values()]
        case list() | tuple() | set() | frozenset():
            return value
        case Mapping():
            return value.values()
        case _:
            return ()


def _empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # reading an empty cell is an error
    except ValueError:
        return True
    return False
