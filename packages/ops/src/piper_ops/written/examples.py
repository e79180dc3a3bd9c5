"""Compute example values of calls, once for each kind of call, since fake tensors are slow and most calls are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Examples:
    """Keep the example values of the calls of one graph.

    Calls of the same function with equal constants, and with tensors of the same sizes, strides, dtypes, devices and
    requires_grad, share one value: nothing else about an example value matters.
    """

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}

    def of(self, key: Any, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`, computed once per kind of call; `key` stands for the function."""
        call = (key, torch.is_grad_enabled(), _facts(args))
        if call not in self._found:
            self._found[call] = function(*args)
        return self._found[call]


def _facts(value: Any) -> Any:
    """Return the facts that decide an example value; symbolic sizes are compared by their expressions."""
    if isinstance(value, Tensor):
        sizes = _facts(tuple(value.shape)), _facts(value.stride())
        return type(value), sizes, value.dtype, value.device, value.layout, value.requires_grad
    if isinstance(value, tuple | list):
        return type(value), *map(_facts, value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(value), value.node.expr
    return type(value), value
