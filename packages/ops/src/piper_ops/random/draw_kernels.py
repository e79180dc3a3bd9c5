"""Compute random operations of torch from counted numbers (`piper_ops.random.draws`), each element from its own.

docs/random_numbers.md has the formulas. A result has the shape, dtype and order of dimensions that torch's has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload


class NumberSource(Protocol):
    """Describe the numbers of one draw; see `piper_ops.random.draws.DrawnNumbers`."""

    def below(self, shape: Sequence[int], chance: float, device: torch.device) -> Tensor: ...
    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor: ...
    def open(self, shape: Sequence[int], device: torch.device, stream: int = 0) -> Tensor: ...
    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor: ...
    def integers(
        self, shape: Sequence[int], low: int, high: int, device: torch.device
    ) -> Tensor: ...


@dataclass(frozen=True)
class _Call:
    """Hold a call of a random operation: its arguments by name, and the form of its result."""

    given: Mapping[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _call(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call:
    names = [a.name for a in op._schema.arguments]
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    bound = {**defaults, **dict(zip(names, args)), **kwargs}
    if not isinstance(bound.get("dtype"), torch.dtype):
        bound["dtype"] = None  # a schema has a number for the default of integers
    tensors = [
        t for name in ("self", "input", "mean", "std") if isinstance(t := bound.get(name), Tensor)
    ]
    if tensors:
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        dtype, device = (
            bound.get("dtype") or tensors[0].dtype,
            bound.get("device") or tensors[0].device,
        )
    else:
        shape = torch.Size([bound["n"]] if "n" in bound else bound["size"])
        dtype, device = (
            bound.get("dtype") or torch.get_default_dtype(),
            bound.get("device") or torch.device("cpu"),
        )
    return _Call(bound, tuple(shape), dtype, torch.device(device))


def _dropout(call: _Call, numbers: NumberSource) -> tuple[Tensor, Tensor]:
    x, p, train = call.given["input"], call.given["p"], call.given["train"]
    if train is False or not x.numel():
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = _like(x, numbers.below(call.shape, 1.0 - p, call.device))
    return x.mul(kept).mul_(0.0 if p == 1 else 1.0 / (1.0 - p)), kept


def _rrelu(call: _Call, numbers: NumberSource) -> tuple[Tensor, Tensor]:
    """Return x * slope, and the slopes: random where x <= 0, else 1."""
    x, lower, upper = call.given["self"], call.given["lower"], call.given["upper"]
    slopes = numbers.uniform(call.shape, call.dtype, call.device).mul_(upper - lower).add_(lower)
    slopes = torch.where(x <= 0, slopes, torch.ones_like(slopes))
    return x * slopes, slopes


def _bernoulli(call: _Call, numbers: NumberSource) -> Tensor:
    chance = call.given.get("p", call.given["self"])
    if isinstance(chance, Tensor):
        return (numbers.open(call.shape, call.device) < chance).to(call.dtype)
    return numbers.below(call.shape, chance, call.device).to(call.dtype)


def _uniform(call: _Call, numbers: NumberSource) -> Tensor:
    low, high = call.given.get("from", 0.0), call.given.get("to", 1.0)
    drawn = numbers.uniform(call.shape, call.dtype, call.device)
    return drawn if (low, high) == (0.0, 1.0) else drawn.mul_(high - low).add_(low)


def _normal(call: _Call, numbers: NumberSource) -> Tensor:
    mean, std = call.given.get("mean", 0.0), call.given.get("std", 1.0)
    result: Tensor = (numbers.normal(call.shape, call.device) * std + mean).to(call.dtype)
    return result


def _log_normal(call: _Call, numbers: NumberSource) -> Tensor:
    result: Tensor = (
        (numbers.normal(call.shape, call.device) * call.given["std"] + call.given["mean"])
        .exp_()
        .to(call.dtype)
    )
    return result


def _exponential(call: _Call, numbers: NumberSource) -> Tensor:
    return numbers.open(call.shape, call.device).log_().div_(-call.given["lambd"]).to(call.dtype)


def _cauchy(call: _Call, numbers: NumberSource) -> Tensor:
    turns = numbers.open(call.shape, call.device).sub_(0.5).mul_(math.pi)
    return turns.tan_().mul_(call.given["sigma"]).add_(call.given["median"]).to(call.dtype)


def _geometric(call: _Call, numbers: NumberSource) -> Tensor:
    return (
        numbers.open(call.shape, call.device)
        .log_()
        .div_(math.log1p(-call.given["p"]))
        .ceil_()
        .to(call.dtype)
    )


def _integers(call: _Call, numbers: NumberSource) -> Tensor:
    given = call.given
    low, high = (
        (given["from"], given["to"])
        if "from" in given
        else (given.get("low", 0), given.get("high", given.get("to")))
    )
    return numbers.integers(call.shape, int(low), int(high), call.device).to(_integer_dtype(call))


def _integer_dtype(call: _Call) -> torch.dtype:
    """Return the dtype of integers: the requested one, the dtype of the filled tensor, or int64."""
    return call.given.get("dtype") or (call.dtype if "self" in call.given else torch.int64)


def _order(call: _Call, numbers: NumberSource) -> Tensor:
    return (
        numbers.open(call.shape, call.device)
        .argsort(stable=True)
        .to(call.given.get("dtype") or torch.int64)
    )


def _multinomial(call: _Call, numbers: NumberSource) -> Tensor:
    """Return indexes: without replacement the largest of share / exponential, with it the first whose sum is above."""
    shares, count = call.given["self"].double(), call.given["num_samples"]
    if not call.given["replacement"] or count == 1:
        waits = numbers.open(call.shape, call.device).log_().neg_()
        result: Tensor = (shares / waits).topk(count, -1).indices
        return result
    sums = shares.cumsum(-1)
    drawn = numbers.open((*call.shape[:-1], count), call.device) * sums[..., -1:]
    return torch.searchsorted(sums, drawn, right=True).clamp_(max=call.shape[-1] - 1)


KERNELS: Mapping[str, Callable[[_Call, NumberSource], Any]] = {
    "native_dropout": _dropout, "rrelu_with_noise": _rrelu, "rrelu_with_noise_functional": _rrelu,
    "bernoulli": _bernoulli, "bernoulli_": _bernoulli, "rand": _uniform, "rand_like": _uniform, "uniform": _uniform,
    "uniform_": _uniform, "randn": _normal, "randn_like": _normal, "normal": _normal, "normal_": _normal,
    "normal_functional": _normal, "log_normal": _log_normal, "log_normal_": _log_normal, "exponential": _exponential,
    "exponential_": _exponential, "cauchy": _cauchy, "cauchy_": _cauchy, "geometric": _geometric,
    "geometric_": _geometric, "randint": _integers, "randint_like": _integers, "random": _integers,
    "random_": _integers, "randperm": _order, "multinomial": _multinomial,
}  # fmt: skip
"""The random operations of aten that are computed from counted numbers, by name."""
_INTEGERS = ("randint", "randint_like", "random", "random_", "randperm", "multinomial")


def is_draw(op: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> bool:
    """Return whether an operation draws random numbers: it has torch's tag, and its arguments do not turn draws off.

    Arguments turn them off in attention kernels without dropout, and in rrelu outside of training.
    """
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    names = [a.name for a in op._schema.arguments]
    bound = (
        {a.name: a.default_value for a in op._schema.arguments}
        | dict(zip(names, args))
        | dict(kwargs or {})
    )
    return (
        bool(bound.get("dropout_p", True))
        and bool(bound.get("training", True))
        and "_backward" not in op._schema.name
    )


def refusal_of_draw(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> str:
    """Return why an operation cannot be computed from counted numbers, "" if it can. `dtype` is its result's."""
    name = op._schema.name.removeprefix("aten::")
    if (
        name not in KERNELS
        or (name in ("random", "random_") and op._overloadname == "default")
        or op._overloadname == "Tensor_out"
    ):
        return f"torch's {name.strip('_')} is not among the operations that Piper can draw by row"
    if op is torch.ops.aten.randint_like.Tensor:
        return "torch's randint_like with a tensor of bounds is not among the operations that Piper can draw by row"
    if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
        return "a torch.Generator of one's own goes on from microbatch to microbatch"
    if not (
        dtype.is_floating_point
        or (not dtype.is_complex and name in (*_INTEGERS, "bernoulli", "bernoulli_"))
    ):
        return f"numbers of {str(dtype).removeprefix('torch.')} are not drawn by row"
    return ""


def draw_from_numbers(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], numbers: NumberSource
) -> Any:
    """Run an operation of `KERNELS` on the numbers of a source; it changes the tensors that torch's would change."""
    call, name = _call(op, args, kwargs), op._schema.name.removeprefix("aten::")
    drawn = KERNELS[name](call, numbers)
    if name == "rrelu_with_noise":
        call.given["noise"].copy_(drawn[1])
        return drawn[0]
    if name in ("native_dropout", "rrelu_with_noise_functional"):
        return drawn
    into = (
        call.given.get("out")
        if "out" in call.given
        else call.given["self"]
        if name.endswith("_")
        else None
    )
    if into is not None:
        return into.copy_(drawn)
    like = call.given.get("self")
    return _like(like, drawn) if isinstance(like, Tensor) and like.shape == drawn.shape else drawn


def _like(given: Tensor, drawn: Tensor) -> Tensor:
    """Return a drawn tensor with its dimensions in memory in the order of the given one."""
    return (
        drawn if given.is_contiguous() else torch.empty_like(given, dtype=drawn.dtype).copy_(drawn)
    )
