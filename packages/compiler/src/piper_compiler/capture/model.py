"""Prepare the user's model and batch for capture: fake tensors, names, rows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from piper_compiler.capture import _torch, shared
from piper_compiler.capture.casts import Casts
from piper_compiler.capture.replacements import replace_tagged
from piper_ir.errors import CaptureError
from piper_ir.tools import user_code

BatchMaker = Callable[[range], tuple[Any, Any]]
"""A function from rows to (inputs, targets), each with len(rows) rows."""

Loss = Callable[[Any, Any], Any]
"""A function from (output, targets) to the mean over the rows, or to (sum, weight)."""

ASKED_ROWS = 2
"""The rows that the user's batch function is asked for: two show a function that ignores its argument."""

DEVICES = (
    "Model, loss and batch are written for the CPU, and a run moves them to the devices of its ranks: leave .cuda(), "
    ".to('cuda') and device='cuda' out. A tensor that forward makes takes the device of another one: device=x.device"
)


def fake_model(model: nn.Module | Callable[[], nn.Module], mode: _torch.FakeTensorMode, casts: Casts) -> nn.Module:
    """Return the model with fake parameters and buffers, in the dtypes of `casts`; the user's module is not touched."""
    return _faked(model if isinstance(model, nn.Module) else built_model(model), mode, casts)


def built_model(model: Callable[[], nn.Module]) -> nn.Module:
    """Return what a callable makes with fake tensors, so that a model of any size takes no memory.

    A constructor that reads values of tensors (`.item()`, numpy) cannot run there; it then runs for real.
    """
    with _devices_left_out(), user_code("model()", CaptureError):
        try:
            with _torch.fake_construction(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # torch does, to copy modules
                built = model()
        except (RuntimeError, TypeError, ValueError):
            built = model()
    if not isinstance(built, nn.Module):
        raise CaptureError(f"model() returned {type(built).__name__}; it must return a torch.nn.Module")
    return built


@contextmanager
def _devices_left_out() -> Iterator[None]:
    """Explain the error of a constructor that asks for a device that is not here."""
    try:
        yield
    except CaptureError as error:
        if not names_device(str(error)):
            raise
        raise CaptureError(f"{error}. {DEVICES}") from error


def names_device(text: str) -> bool:
    """Return whether an error of torch's is about a device that the user's code names."""
    return any(sign in text for sign in ("not linked with support for", "not compiled with", "is not on the expected device"))


def _check(model: nn.Module) -> None:
    """Raise CaptureError for what a capture would silently leave out, or cannot hold."""
    for name, tensor, _ in named_tensors(model):
        if is_lazy(tensor):
            raise CaptureError(
                f"{name!r} has no shape yet: a lazy module gets its sizes from its first batch. Give them in the constructor, "
                "such as nn.Linear(inputs, outputs) in place of nn.LazyLinear(outputs)"
            )
    for name, p in model.named_parameters():
        if p.is_complex():
            raise CaptureError(
                f"parameter {name!r} is {p.dtype}; parameters are floating-point here. Keep real and imaginary parts as two "
                "parameters, and make torch.complex(real, imaginary) of them in forward"
            )
        if p._backward_hooks:
            raise CaptureError(
                f"parameter {name!r} has a hook on its gradient, which a plan would not run. To change a gradient, write "
                "a torch.autograd.Function whose backward is the hook, and use its Function.apply(parameter) in forward"
            )
        if getattr(p, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter {name!r} has a hook on its accumulated gradient, which a plan would not run. Change "
                "accumulated gradients in the optimizer, Job(optimizer=...), and clip them with Job(clip_norm=...)"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise CaptureError(f"{name!r} is an embedding with sparse gradients; build it with sparse=False")


def _faked(model: nn.Module, mode: _torch.FakeTensorMode, casts: Casts) -> nn.Module:
    _check(model)
    casts.check([name for name, _ in model.named_parameters()])
    memo: dict[int, Any] = {}
    named = [(name, tensor) for name, tensor, _ in named_tensors(model)]
    for name, tensor in named:
        if id(tensor) in memo:
            continue
        is_parameter = isinstance(tensor, nn.Parameter)
        target = casts.of_parameter(name, tensor) if is_parameter else casts.of_buffer(tensor)
        fake = _torch.fake_tensor(mode, tensor.shape, target)
        memo[id(tensor)] = _torch.fake_parameter(fake, tensor.requires_grad) if is_parameter else fake
    fake_copy = copy.deepcopy(model, memo)
    replace_tagged(fake_copy)
    fake_copy.__dict__[shared.ATTRIBUTE] = shared.shared_tensors(named)
    return fake_copy


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, tensor, in state_dict) for all parameters, buffers and plain tensor attributes.

    A tied tensor is yielded under each of its dotted names. Plain attributes (`self.mask = torch.ones(8)`) are treated
    as buffers that are not persistent.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield dot + name, parameter, True
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield dot + name, buffer, name not in module._non_persistent_buffers_set
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield dot + name, value, False


def flatten_batch(inputs: Any, targets: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by name, as in "inputs" (one tensor), "inputs.0", "inputs.mask", "targets.0.x".

    Raises CaptureError for a leaf that is neither a tensor nor None.
    """
    found: dict[str, Tensor] = {}
    for root, nest in (("inputs", inputs), ("targets", targets)):
        for path, leaf in _torch.pytree.tree_flatten_with_path(nest)[0]:
            name = ".".join([root, *(_key(part) for part in path)])
            if isinstance(leaf, Tensor):
                found[name] = leaf
            elif leaf is not None:
                raise CaptureError(f"batch: {name} is a {type(leaf).__name__}; a batch holds tensors (and None) only")
    return found


def _key(part: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)


def check_batch(batch: BatchMaker, rows: int, casts: Casts, most: int = ASKED_ROWS) -> tuple[Any, Any]:
    """Return example (inputs, targets) with `rows` rows and undefined content.

    They are made from a call of the user's function for two rows, or for one if `most` is one. Raises CaptureError
    where the function does not return a pair of nests of tensors whose first dimension is the rows.
    """
    asked = range(min(ASKED_ROWS, most))
    with user_code(f"batch(rows={asked})", CaptureError):
        result = batch(asked)
    if not isinstance(result, tuple) or len(result) != 2:
        raise CaptureError(f"batch returned {type(result).__name__}; it must return a pair (inputs, targets)")
    if not isinstance(result[0], Tensor | tuple | Mapping):
        raise CaptureError(
            f"batch returned inputs of type {type(result[0]).__name__}; "
            "inputs: a Tensor, tuple (positional) or dict (keyword) is accepted (torch.from_numpy makes tensors of arrays)"
        )
    for name, tensor in flatten_batch(*result).items():
        if tensor.dim() == 0 or tensor.shape[0] != len(asked):
            raise CaptureError(
                f"batch: {name} has shape {tuple(tensor.shape)} for {len(asked)} rows; the first dimension must be the rows: "
                "batch(step, rows) returns these rows of the global batch, such as x[rows.start : rows.stop], and not all of it"
            )

    def example(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.zeros((rows, *leaf.shape[1:]), dtype=casts.of_batch(leaf))

    inputs, targets = _torch.pytree.tree_map(example, result)
    return inputs, targets
