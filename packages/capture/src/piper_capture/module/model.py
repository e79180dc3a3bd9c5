"""Prepare the user's model and batch for capture: fake tensors, names, rows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from piper_capture.module import shared
from piper_capture.module.rebound_functions import rebind_functions
from piper_capture.torch_api import _torch
from piper_capture.torch_api.replacements import replace_tagged
from piper_capture.values.casts import Casts
from piper_ir.ground.errors import CaptureError
from piper_ir.tools import user_code
from piper_ops import Constant, batch_leaves, batch_pair, is_shared

BatchMaker = Callable[[range], tuple[Any, Any]]
"""A function from rows to (inputs, targets), each with len(rows) rows."""

Loss = Callable[[Any, Any], Any] | None
"""A function from (output, targets) to the mean over the rows, or to (sum, weight); None if the model returns it."""

SUBMODULES = "_modules"
"""The attribute of a module that holds its submodules, which are checked separately."""

ASKED_ROWS = 2
"""The number of rows of the example batch: with two, a function that ignores its argument shows."""

DEVICES = (
    "Model, loss and batch are written for the CPU, and a run moves them to the devices of its ranks: leave "
    ".cuda(), .to('cuda') and device='cuda' out. A tensor that forward makes takes the device of another one: "
    "device=x.device"
)


OWN_LOSS = (
    "Without Job(loss=...) the model's output is the loss: a floating-point scalar, a tuple that begins with one, "
    "or an output with `loss`. Models of transformers compute it when they get labels: let batch return them among "
    "the inputs. Or give a function of (output, targets), such as `lambda out, _: out.loss`"
)


def fake_model(
    model: nn.Module | Callable[[], nn.Module], mode: _torch.FakeTensorMode, casts: Casts
) -> nn.Module:
    """Return the model with fake parameters and buffers, in the dtypes of `casts`; the user's module is not touched."""
    return _faked(model if isinstance(model, nn.Module) else built_model(model), mode, casts)


def built_model(model: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that a callable makes, with fake tensors, so that a model of any size takes no memory.

    A constructor that reads values of tensors (`.item()`, numpy) fails on fake tensors; it then runs on real ones.
    """
    with _devices_left_out(), user_code("model()", CaptureError):
        try:
            with _torch.fake_construction(), warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", "Accessing the data pointer of FakeTensor"
                )  # torch accesses it, to copy modules
                built = model()
        except (RuntimeError, TypeError, ValueError):
            built = model()
    if not isinstance(built, nn.Module):
        raise CaptureError(
            f"model() returned {type(built).__name__}; it must return a torch.nn.Module"
        )
    return built


@contextmanager
def _devices_left_out() -> Iterator[None]:
    """Explain the error of a constructor that asks for a missing device."""
    try:
        yield
    except CaptureError as error:
        if not names_device(str(error)):
            raise
        raise CaptureError(f"{error}. {DEVICES}") from error


def names_device(text: str) -> bool:
    """Return whether an error of torch's is about a device that the user's code names."""
    return any(
        sign in text
        for sign in (
            "not linked with support for",
            "not compiled with",
            "is not on the expected device",
        )
    )


def _check(model: nn.Module) -> None:
    """Raise CaptureError for hooks, lazy or complex parameters and sparse gradients, which a capture cannot hold."""
    for name, tensor, _ in named_tensors(model):
        if is_lazy(tensor):
            raise CaptureError(
                f"{name!r} has no shape yet: a lazy module gets its sizes from its first batch. Give them in the "
                f"constructor, such as nn.Linear(inputs, outputs) in place of nn.LazyLinear(outputs)"
            )
    for name, p in model.named_parameters():
        if p.is_complex():
            raise CaptureError(
                f"parameter {name!r} is {p.dtype}; parameters are floating-point here. Keep real and imaginary "
                f"parts as two parameters, and make torch.complex(real, imaginary) of them in forward"
            )
        if p._backward_hooks:
            raise CaptureError(
                f"parameter {name!r} has a hook on its gradient, which a plan would not run. To change a gradient, "
                f"write a torch.autograd.Function whose backward is the hook, and use its "
                f"Function.apply(parameter) in forward"
            )
        if getattr(p, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter {name!r} has a hook on its accumulated gradient, which a plan would not run. Change "
                f"accumulated gradients in the optimizer, Job(optimizer=...), and clip them with Job(clip_norm=...)"
            )
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"module {name!r} has a hook on its backward, which a plan would not run. To change a gradient, "
                f"write a torch.autograd.Function whose forward returns its input and whose backward is the hook, "
                f"and call its apply on the module's input or output in forward; what only looks at gradients is "
                f"left out"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise CaptureError(
                f"{name!r} is an embedding with sparse gradients; build it with sparse=False"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise CaptureError(
                f"{name!r} is an embedding that rescales its weight in forward (max_norm={module.max_norm:g}), as no plan "
                f"does with parameters; build it without max_norm, and rescale what it returns"
            )


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
        memo[id(tensor)] = (
            _torch.fake_parameter(fake, tensor.requires_grad) if is_parameter else fake
        )
    fake_copy = _copied(model, memo)
    rebind_functions(fake_copy, memo)
    replace_tagged(fake_copy)
    fake_copy.__dict__[shared.ATTRIBUTE] = shared.shared_tensors(named)
    return fake_copy


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a model around the tensors in `memo`; an attribute that cannot be copied is refused by name."""
    attributes = {
        f"{name}.{key}".strip("."): value
        for name, m in model.named_modules()
        for key, value in vars(m).items()
    }
    for value in attributes.values():
        if isinstance(value, _torch.CustomOpDef):  # a process has one custom op of each name
            memo[id(value)] = value
    before = dict(memo)
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, copy.Error) as error:
        kept = {
            name: value
            for name, value in attributes.items()
            if name.rpartition(".")[2] != SUBMODULES
        }
        name = next(
            (name for name, value in kept.items() if not _can_be_copied(value, dict(before))),
            "an attribute",
        )
        raise CaptureError(
            f"the model cannot be copied, as capture does: {name}: {error}. Keep open files, locks and the like in "
            f"a global variable of the model's module, or give their class a __deepcopy__ that returns the object "
            f"itself"
        ) from error


def _can_be_copied(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, memo)
    except (TypeError, copy.Error):
        return False
    return True


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

    Raises CaptureError for a leaf that is no tensor, number, bool, text or None.
    """
    tensor_by_name: dict[str, Tensor] = {}
    for name, leaf in batch_leaves(inputs, targets):
        if isinstance(leaf, Tensor):
            tensor_by_name[name] = leaf
        elif not isinstance(leaf, Constant):
            raise CaptureError(
                f"batch: {name} is a {type(leaf).__name__}; a batch holds tensors, and numbers, bools, texts and "
                f"None, which are constants of the model (torch.from_numpy makes tensors of arrays), in tuples, "
                f"lists, dicts, and dataclasses whose constructor takes all fields"
            )
    return tensor_by_name


@dataclass(frozen=True)
class Example:
    """Hold an example of a batch, with undefined content.

    Attributes:
        fixed: names of the tensors without a dimension of rows.
        joined: names of the tensors whose first dimension is rows times something; here these are two dimensions.
        sharing: pairs of names of tensors that share storage in the user's batch.
    """

    inputs: Any
    targets: Any
    fixed: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    sharing: tuple[tuple[str, str], ...] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        return flatten_batch(self.inputs, self.targets)

    @property
    def rows(self) -> dict[str, Tensor]:
        """Return the tensors that have rows, by name."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.fixed}

    @property
    def constants(self) -> tuple[tuple[str, str], ...]:
        """Return the constants by name, as texts."""
        leaves = batch_leaves(self.inputs, self.targets)
        return tuple((name, repr(leaf)) for name, leaf in leaves if isinstance(leaf, Constant))

    def map(self, function: Callable[[str, Any], Any]) -> Example:
        """Return the example with each tensor replaced by `function(name, tensor)`."""
        named = {id(tensor): name for name, tensor in self.tensors.items()}
        inputs, targets = _torch.pytree.tree_map(
            lambda leaf: function(named[id(leaf)], leaf) if id(leaf) in named else leaf,
            (self.inputs, self.targets),
        )
        return replace(self, inputs=inputs, targets=targets)


def check_batch(
    batch: BatchMaker, rows: int, casts: Casts, most: int = ASKED_ROWS, shared: tuple[str, ...] = ()
) -> Example:
    """Return an example batch with `rows` rows.

    It is made from a call of the user's function for two rows, or for one if `most` is one. Raises CaptureError unless
    the function returns a pair of nests, or a mapping, whose tensors have the rows as their first dimension, or are
    declared to have none.
    """
    asked = range(min(ASKED_ROWS, most))
    sample = _called(batch, asked)
    fixed = {name for name, tensor in sample.tensors.items() if is_shared(tensor, name, shared)}
    _check_patterns(shared, sample.tensors)
    joined: dict[str, int] = {}
    for name, tensor in sample.tensors.items():
        if name in fixed or (tensor.dim() and tensor.shape[0] == len(asked)):
            continue
        parts = _parts_of_rows(batch, asked, name, tensor)
        if not parts:
            raise CaptureError(_without_rows(name, tensor, len(asked)))
        joined[name] = parts

    def example(name: str, leaf: Tensor) -> Tensor:
        shape = (
            leaf.shape
            if name in fixed
            else (rows, joined[name], *leaf.shape[1:])
            if name in joined
            else (rows, *leaf.shape[1:])
        )
        return torch.zeros(shape, dtype=casts.of_batch(name, leaf))

    sharing = sharing_memory(sample.tensors)
    return replace(
        sample.map(example), fixed=frozenset(fixed), joined=frozenset(joined), sharing=sharing
    )


def sharing_memory(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of names of tensors that share storage, such as one that is input and target."""
    pairs = shared.shared_tensors([(name, tensor.detach()) for name, tensor in tensors.items()])
    return tuple((pair.first, pair.second) for pair in pairs)


def _called(batch: BatchMaker, asked: range) -> Example:
    with user_code(f"batch(rows={asked})", CaptureError):
        result = batch(asked)
    pair = batch_pair(result)
    if pair is None:
        raise CaptureError(
            f"batch returned {type(result).__name__}; it must return a pair (inputs, targets), or a dict of inputs "
            f"alone, labels among them, where the model computes its loss itself"
        )
    if not isinstance(pair[0], Tensor | tuple | Mapping) and not is_dataclass(pair[0]):
        raise CaptureError(
            f"batch returned inputs of type {type(pair[0]).__name__}; inputs: a Tensor, tuple (positional), dict "
            f"(keyword) or dataclass is accepted (torch.from_numpy makes tensors of arrays)"
        )
    return Example(*pair)


def _check_patterns(shared: tuple[str, ...], tensors: Mapping[str, Tensor]) -> None:
    for pattern in shared:
        if not any(is_shared(torch.empty(0), name, (pattern,)) for name in tensors):
            raise CaptureError(
                f"Job(shared={pattern!r}): no tensor of the batch has this name; it has {', '.join(tensors)}"
            )


def _parts_of_rows(batch: BatchMaker, asked: range, name: str, tensor: Tensor) -> int:
    """Return the number of entries of dimension 0 per row; 0 if it is not the same for all rows."""
    parts, rest = divmod(tensor.shape[0], len(asked)) if tensor.dim() else (0, 0)
    if not parts or rest or len(asked) < ASKED_ROWS:
        return 0
    one = _called(batch, range(1)).tensors.get(name)
    return parts if one is not None and one.shape == (parts, *tensor.shape[1:]) else 0


def _without_rows(name: str, tensor: Tensor, asked: int) -> str:
    return (
        f"batch: {name} has shape {tuple(tensor.shape)} for {asked} rows; the first dimension must be the rows, or "
        f"as many entries for each row: batch(step, rows) returns these rows of the global batch, such as "
        f"x[rows.start : rows.stop], and not all of it. A tensor without rows (positions, offsets of fields) is "
        f"declared: piper.shared(tensor), or Job(shared={name!r}). Bags of different lengths (nn.EmbeddingBag) are "
        f"padded to one: [rows, length], with padding_idx{_behind(tensor, asked)}"
    )


def _behind(tensor: Tensor, asked: int) -> str:
    """Return the advice for a tensor with the rows in its second dimension, as torch's attention modules take it."""
    if tensor.dim() < 2 or tensor.shape[1] != asked:
        return ""
    return (
        ". Where a model takes the rows in dimension 1 (batch_first=False), transpose in its "
        "forward: x.transpose(0, 1)"
    )


def own_loss(output: Any) -> Any:
    """Return the loss that a model computes itself: its output, the first of several, or the one called `loss`."""
    if isinstance(output, tuple | list):
        return output[0]
    if isinstance(output, dict) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)


def join_rows(nest: Any, name: str, joined: frozenset[str]) -> Any:
    """Return a nest in which the tensors with these names have their first two dimensions flattened."""
    if isinstance(nest, dict):
        return {key: join_rows(item, f"{name}.{key}", joined) for key, item in nest.items()}
    if type(nest) is tuple or type(nest) is list:
        return type(nest)([join_rows(item, f"{name}.{k}", joined) for k, item in enumerate(nest)])
    return nest.flatten(0, 1) if name in joined else nest
