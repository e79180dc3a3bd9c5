"""Call the set-up functions that a model runs under a lock in its first forward (torch >= 2.11).

Dynamo does not trace into locks. Models of transformers install hooks under one when their hidden states are first
asked for. The function that takes the lock runs once, on the captured model, before the next trace, which then finds
its work done. Its arguments must be modules and constants, and the next trace must not come to the lock again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

from piper_capture.torch_api._torch import in_place

LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CONSTANTS = (bool, int, float, str, bytes, type(None))


class LockedCalls:
    """Hold the calls of one capture to functions that take a lock."""

    def __init__(self) -> None:
        self._made: set[tuple[CodeType, tuple[object, ...]]] = set()
        self._found: tuple[FunctionType, tuple[Any, ...]] | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the function whose trace reaches a lock while the context is active."""
        self._found = None
        enter = InstructionTranslatorBase.setup_or_before_with

        def noting(tx: InstructionTranslatorBase, instruction: Any) -> None:
            if isinstance(getattr(tx.stack[-1], "value", None), LOCKS):
                self._found = _call_of(tx)
            enter(tx, instruction)

        with in_place(InstructionTranslatorBase, {"setup_or_before_with": noting}):
            yield

    def make(self) -> bool:
        """Make the call that was noted last; return False if there is none, or if it has been made before."""
        if self._found is None:
            return False
        function, args = self._found
        key = function.__code__, tuple(id(g) if isinstance(g, nn.Module) else g for g in args)
        if key in self._made:
            return False
        self._made.add(key)
        function(*args)
        return True


def _call_of(tx: InstructionTranslatorBase) -> tuple[FunctionType, tuple[Any, ...]] | None:
    """Return the traced function and its arguments; None if an argument is neither a module nor a constant."""
    code = tx.f_code
    if (
        code.co_freevars or code.co_kwonlyargcount or code.co_flags & 0b1100
    ):  # neither *args nor **kwargs
        return None
    args = []
    for name in code.co_varnames[: code.co_argcount]:
        variable = tx.symbolic_locals[name].realize()
        value = (
            variable.as_python_constant()
            if variable.is_python_constant()
            else getattr(variable, "value", None)
        )
        if not isinstance(value, nn.Module) and not (
            variable.is_python_constant() and isinstance(value, _CONSTANTS)
        ):
            return None
        args.append(value)
    return FunctionType(code, tx.f_globals), tuple(args)
