"""Classify optimizers by the unit of their updates: elements, whole parameters, or several parameters at once.

torch's own are known by exact class, since a subclass may do anything. `elementwise` and `per_parameter` declare a
user's own class, or one of torch's that may do more than is known here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from piper_ir.ground.errors import JobError
from piper_runtime.rank.optimizers.batched_muon import BatchedMuon

ELEMENTWISE: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW)
"""The optimizers that run on flat buckets by torch's fused kernels, by exact class."""

TRIED: tuple[type[Optimizer], ...] = (
    *ELEMENTWISE,
    ASGD,
    Adadelta,
    Adagrad,
    Adamax,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)
"""The optimizers that update each element by itself as torch writes them, by exact class.

A trial shows whether they do so under their settings, too.
"""

SEPARABLE: tuple[type[Optimizer], ...] = (*TRIED, Adafactor, Muon, BatchedMuon)
"""The optimizers whose update of a parameter depends on that parameter only, by exact class.

Any other may couple parameters (a norm over all of them), and a rank of a pipeline sees only its own.
"""

OF_MATRICES: tuple[type[Optimizer], ...] = (BatchedMuon,)
"""The optimizers that update each matrix [..., rows, columns] of a parameter by itself, by exact class.

Devices may have some of the matrices each.
"""

REFUSED = {
    "LBFGS": "it calls the loss several times per step",
    "SparseAdam": "it needs sparse gradients",
}

KEEPS_TO = (
    "it reads its parameters from param_groups in step(), skips those without a gradient, keeps what it needs of a "
    "parameter in state[parameter], and makes that in the first step"
)
"""The rules that an optimizer of the user's must keep to, for messages."""

_Kind = TypeVar("_Kind", bound=type[Optimizer])
_elementwise: set[type[Optimizer]] = set()
_per_parameter: set[type[Optimizer]] = set()


def elementwise(kind: _Kind) -> _Kind:
    """Declare that an optimizer updates each element by itself, from the element's own gradient and state alone.

    It then works with states that ranks share (`zero=1` to 3) and with parameters in parts (`shard`), and over stages.
    `compile` checks it on a small tensor: steps on parts must be parts of the steps on the whole. Returns the class, so
    that it may stand above it as a decorator. JobError for anything but a class of optimizers.
    """
    _elementwise.add(_checked("elementwise", kind))
    return kind


def per_parameter(kind: _Kind) -> _Kind:
    """Declare that an optimizer updates each parameter by itself, but may need it whole, as for matrix updates.

    It then works over stages. `compile` checks it on small tensors: a step on two parameters must equal the steps on
    each of them alone. Returns the class, so that it may stand above it as a decorator. JobError for anything but a
    class of optimizers.
    """
    _per_parameter.add(_checked("per_parameter", kind))
    return kind


def _checked(name: str, kind: _Kind) -> _Kind:
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise JobError(
            f"piper.{name}({kind!r}): a class of optimizers is needed, such as piper.{name}(Lion)"
        )
    if kind.__name__ in REFUSED:
        raise JobError(
            f"piper.{name}({kind.__name__}): it cannot run on a plan: {REFUSED[kind.__name__]}"
        )
    return kind


def declared_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's class was declared element-wise; torch's that are known need no declaration."""
    return type(optimizer) in _elementwise and type(optimizer) not in ELEMENTWISE


def declared_per_parameter(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's class was declared to update each parameter by itself."""
    return type(optimizer) in _per_parameter and type(optimizer) not in SEPARABLE


def separable(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to update each parameter by itself."""
    return type(optimizer) in SEPARABLE or type(optimizer) in _per_parameter | _elementwise


@dataclass(frozen=True)
class Declaring:
    """Call a function of the user's in another process, after the declarations that were made in this one."""

    function: Callable[..., Any]
    elementwise: tuple[type[Optimizer], ...]
    per_parameter: tuple[type[Optimizer], ...]

    def __call__(self, *args: Any) -> Any:
        """Make the declarations, then call the function."""
        _elementwise.update(self.elementwise)
        _per_parameter.update(self.per_parameter)
        return self.function(*args)


def with_declarations(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of named parameters that takes the declarations of this process with it."""
    if not (_elementwise or _per_parameter):
        return function
    by_name = [
        tuple(sorted(kinds, key=lambda k: k.__qualname__))
        for kinds in (_elementwise, _per_parameter)
    ]
    return Declaring(function, *by_name)
