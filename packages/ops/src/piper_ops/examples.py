"""Example values of calls, each kind of call run once: fake tensors are slow, and in a large model most calls are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Examples:
    """Values of calls of one graph. Calls of the same function with equal constants, and tensors of the same sizes, strides,
    dtypes, devices and requires_grad, share their value: nothing else of an example value counts."""

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}

    def of(self, key: Any, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args). `key`: stands for the function."""
        call = (key, torch.is_grad_enabled(), _facts(args))
        if call not in self._found:
            self._found[call] = function(*args)
        return self._found[call]


def _facts(value: Any) -> Any:
    """Equal for values that give the same example. Sizes that are symbols count as their expressions."""
    if isinstance(value, Tensor):
        sizes = _facts(tuple(value.shape)), _facts(value.stride())
        return type(value), sizes, value.dtype, value.device, value.layout, value.requires_grad
    if isinstance(value, tuple | list):
        return type(value), *map(_facts, value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(value), value.node.expr
    return type(value), value
