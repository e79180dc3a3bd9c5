"""Find replacements of torch's functions, and of the methods of its modules.

A trace goes through modules of torch, which call these by names that the user's code does not show. The object that a
name stands for now counts: a patch may be older than Piper's import, and may be another function of torch's own.
"""

from __future__ import annotations

import functools
import types

import torch
import torch.nn.modules

from piper_runtime.rank import function_of, home_of, is_foreign

_FUNCTIONS = (torch, torch.nn.functional, torch.nn.init, torch.fft, torch.linalg, torch.special)
_NO_FUNCTION = (types.ModuleType, type, bool, int, float, str)
_DYNAMO = "torch._dynamo"
"""The module that puts functions of its own in place of some, which change no result."""


def replaced_in_torch() -> list[tuple[str, object]]:
    """Return (name, value) of functions of torch that do not belong to their name.

    The value is a foreign function or object itself, and of another function of torch's its full name. Some aliases are
    torch's own, and in every list.
    """
    replacements: list[tuple[str, object]] = []
    owners: list[types.ModuleType | type] = [*_FUNCTIONS, torch.Tensor, *_classes_of_modules()]
    for owner in owners:
        inside = f"{owner.__qualname__}." if isinstance(owner, type) else ""
        path = (
            f"{owner.__module__}.{owner.__qualname__}"
            if isinstance(owner, type)
            else owner.__name__
        )
        for name, value in list(vars(owner).items()):
            function = function_of(value)
            if (replaced := _replacement(function, inside, name)) is not None:
                replacements.append((f"{path}.{name}", replaced))
    return replacements


def _replacement(function: object, inside: str, name: str) -> object:
    """Return the value that counts for a function under another one's name; None for one under its own name."""
    if isinstance(function, _NO_FUNCTION) or not callable(function):
        return None
    known = getattr(function, "__qualname__", None)
    if is_foreign(function) or (known is None and home_of(type(function).__module__) != "known"):
        return function
    if not isinstance(known, str):
        return function if isinstance(function, functools.partial) else None
    module = str(getattr(function, "__module__", None))
    written = isinstance(function, types.FunctionType)
    if module.startswith(_DYNAMO) or (
        known == inside + name if written else known.rpartition(".")[2] == name
    ):
        return None
    return f"{module}.{known}"


def _classes_of_modules() -> list[type]:
    """Return the classes of torch's modules, and their base classes in torch."""
    kinds = [kind for kind in vars(torch.nn).values() if isinstance(kind, type)]
    return list(
        dict.fromkeys(
            base for kind in kinds for base in kind.__mro__ if base.__module__.startswith("torch.")
        )
    )
