"""Evaluate torch-level graph nodes at a given number of rows: symbols become integers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from piper_capture.torch_api import _torch
from piper_capture.torch_api.replacements import WAY_OUT
from piper_ir.ground.errors import CaptureError
from piper_ops import is_model_code

DROPPED = frozenset(
    {
        "_log_api_usage_once",
        "_assert_async",
        "_assert_scalar",
        "_assert",
        "_assert_tensor_metadata",
        "_check",
    }
)
"""The functions without a tensor result that have no effect on a training step."""


def line_of(node: fx.Node) -> str:
    """Return the user's "file:line (code)" for a node, or the node's name."""
    frame = frame_of(node)
    return f"{frame[0]}:{frame[1]} ({frame[2]})" if frame else str(node.format_node() or node)


def frame_of(node: fx.Node) -> tuple[str, str, str] | None:
    """Return the file, the line and the code of the user's line that made a node; None if it is not known."""
    return _frame(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=4096)
def _frame(trace: str) -> tuple[str, str, str] | None:
    """Return the frame of the user's line in a stack trace, which many nodes have in common."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', trace)
    own = [f for f in frames if is_model_code(f[0])] or frames
    return (own[-1][0], own[-1][1], own[-1][2].strip()) if own else None


def is_size(node: fx.Node) -> bool:
    """Return whether a node's value is an integer, float, bool or torch.Size.

    Such a node is never computed: its value follows from the number of rows.
    """
    value = node.meta.get("example_value")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | torch.Size | int | float):
        return True
    return (
        isinstance(value, tuple | list)
        and bool(value)
        and all(isinstance(v, torch.SymInt | int | float) for v in value)
    )


def tensors_of(node: fx.Node) -> tuple[Tensor, ...]:
    """Return the symbolic tensors that a node makes."""
    value = node.meta.get("example_value")
    items = value if isinstance(value, tuple | list) else (value,)
    return tuple(v for v in items if isinstance(v, Tensor))


def concrete_size(node: fx.Node, rows: int) -> Any:
    """Return the value of a size node at this number of rows."""
    try:
        return _torch.size_at(node.meta["example_value"], rows)
    except LookupError as error:
        raise CaptureError(
            f"{line_of(node)}: a size or Python number depends on values of tensors ({error}); sizes may depend on "
            f"the number of rows only: use operations with static shapes, such as torch.where or masks"
        ) from error


def concrete_shape(tensor: Tensor, rows: int, node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor at this number of rows; raise CaptureError if it depends on values."""
    if _torch.data_dependent(tensor):
        raise CaptureError(
            f"{line_of(node)}: makes a tensor whose shape depends on values of tensors; use operations with static "
            f"shapes, such as torch.where, masks, or a fixed capacity. A loss leaves rows or tokens out by "
            f"ignore_index, or by a mask: of x[mask] it may take functions of each element or row, torch's losses, "
            f"sums and means. {WAY_OUT}"
        )
    return tuple(int(_torch.size_at(s, rows)) for s in tensor.shape)


def concrete_call(
    node: fx.Node, env: Mapping[fx.Node, Any], rows: int, device: torch.device | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the args and kwargs of a node: tensors from `env`, and numbers in place of sizes.

    If given, `device` replaces every device in the user's code, and is added to factory calls without one.
    """

    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return env[value] if value in env else concrete_size(value, rows)
        if isinstance(value, torch.device):
            return device or value
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return _torch.size_at(value, rows)
        return value

    args = map_aggregate(node.args, leaf)
    kwargs = dict(map_aggregate(node.kwargs, leaf))
    if device is not None and (is_factory(node) or kwargs.get("device") is not None):
        kwargs["device"] = device
    return args, kwargs


def is_factory(node: fx.Node) -> bool:
    """Return whether a node is a torch function that makes a tensor without tensor arguments, such as torch.arange."""
    return (
        node.op == "call_function"
        and isinstance(node.meta.get("example_value"), Tensor)
        and not isinstance(node.target, _torch.OpOverload)
        and getattr(node.target, "__module__", None) in (None, "torch", "torch.functional")
        and not any(tensors_of(n) for n in node.all_input_nodes)
    )


def canonical_text(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """Return a text that is equal for nodes that compute the same at every number of rows, given names of inputs."""

    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return names[value] if value in names else _size_text(value)
        return value

    target = node.target
    if not isinstance(target, str):
        target = str(target) if isinstance(target, _torch.OpOverload) else _qualified(target)
    args, kwargs = map_aggregate(node.args, leaf), map_aggregate(node.kwargs, leaf)
    return f"{node.op} {target} {args!r} {sorted(kwargs.items())!r}"


def _qualified(target: Any) -> str:
    """Return a function's name; that of a higher-order operator, whose repr has its address, is `__name__` alone."""
    named = (getattr(target, name, None) for name in ("__qualname__", "__name__"))
    return (
        f"{getattr(target, '__module__', None)}.{next(filter(None, named), None) or repr(target)}"
    )


def _size_text(node: fx.Node) -> str:
    """Return the values of a size at a few numbers of rows as text, so that the name of its symbol does not matter."""
    return f"size{[concrete_size(node, rows) for rows in (2, 3, 5, 7, 143)]}"
