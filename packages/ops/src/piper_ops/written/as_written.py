"""Run a module as its author wrote it, if no graph can hold it, such as a loop over the chosen experts.

A *call* is the text of everything but tensors: the pickled module without its tensors, and how the shapes of results
follow from the shapes of the arguments. So a call can be written into the source of a step, and runs in any process. On
tensors without content it gives results without content; on others it runs the module's own `forward`, with the given
tensors in place of the module's.
"""

from __future__ import annotations

import base64
import io
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class MadeTensor:
    """Describe a tensor that a call returns; a size a + b * rows is (a, b)."""

    shape: tuple[tuple[int, int], ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class RowsAt:
    """Hold the source of the number of rows: dimension `dim` of tensor `argument`, of the size a + b * rows."""

    argument: int
    dim: int
    size: tuple[int, int]

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """Return the number of rows, a symbol if the size is one."""
        return (tensors[self.argument].shape[self.dim] - self.size[0]) // self.size[1]


@dataclass(frozen=True)
class ModuleCall:
    """Hold a call without its tensors.

    Attributes:
        kind: the name of the module's class, for messages.
        module: the pickled module; tensors in it are numbers.
        results: a nest of `MadeTensor` and None.
        rows: the place that the rows are read from; None if no argument depends on them.
        random: whether it draws random numbers.
        integers: the number below which it takes integers as arguments, as far as a capture knows.
    """

    kind: str
    module: bytes
    results: Any
    rows: RowsAt | None
    random: bool
    integers: int

    @property
    def text(self) -> str:
        """Return the call as text."""
        return base64.b85encode(pickle.dumps(self)).decode()

    def empty(self, tensors: Sequence[Tensor]) -> Any:
        """Return results without content, on the device and with the symbols of the tensors."""
        rows = 0 if self.rows is None else self.rows.of(tensors)
        if self.random:
            torch.rand(
                (), device=tensors[0].device
            )  # who watches the ops sees that the call is random

        def one(leaf: MadeTensor | None) -> Tensor | None:
            return (
                None
                if leaf is None
                else tensors[0].new_empty([a + b * rows for a, b in leaf.shape], dtype=leaf.dtype)
            )

        return reached(pytree.tree_map(one, self.results, is_leaf=_is_result), wanted_of(tensors))

    def checked(self, results: Any, tensors: Sequence[Tensor], source: Tensor | None) -> Any:
        """Return the module's results; raise RuntimeError if their shapes or dtypes differ from the plan's.

        `source` is a tensor of the call whose gradient is wanted, if there is one.
        """
        rows = 0 if self.rows is None else self.rows.of(tensors)
        wanted, form = pytree.tree_flatten(self.results, is_leaf=_is_result)
        leaves, other = pytree.tree_flatten(results, is_leaf=lambda leaf: leaf is None)
        planned = [
            None if w is None else (tuple(a + b * rows for a, b in w.shape), w.dtype)
            for w in wanted
        ]
        actual = [(tuple(f.shape), f.dtype) if isinstance(f, Tensor) else f for f in leaves]
        if form != other or planned != actual:
            raise RuntimeError(
                f"{self.kind} returned {actual}, and {planned} in capture: what leaves a module that runs as it is "
                f"must have sizes that do not depend on values of tensors"
            )
        return reached(results, source)


def _is_result(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, MadeTensor)


class _Reached(torch.autograd.Function):
    """Return a tensor as one that depends on `source` in autograd, but gives it no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def wanted_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the first tensor whose gradient is wanted."""
    return next((t for t in tensors if t.requires_grad), None)


def reached(results: Any, source: Tensor | None) -> Any:
    """Return results of which each floating-point one requires a gradient if there is a `source` for it."""

    def one(leaf: Any) -> Any:
        ready = not isinstance(leaf, Tensor) or leaf.requires_grad or not leaf.is_floating_point()
        return leaf if ready or source is None else _Reached.apply(leaf, source)  # type: ignore[no-untyped-call]  # of torch's

    return pytree.tree_map(one, results) if torch.is_grad_enabled() else results


class LoadedModule:
    """Hold a module that was pickled without its tensors, and the places that they take for the time of a call."""

    def __init__(self, pickled: bytes) -> None:
        self._stand_ins: dict[int, Tensor] = {}
        self.module: nn.Module = _Unpickler(io.BytesIO(pickled), self._stand_in).load()
        numbers = {id(tensor): k for k, tensor in self._stand_ins.items()}
        self._places = [
            (home, key, numbers[id(t)]) for home, key, t in _held(self.module) if id(t) in numbers
        ]

    def _stand_in(self, number: int, parameter: bool) -> Tensor:
        if number not in self._stand_ins:
            tensor = torch.empty(0)
            self._stand_ins[number] = nn.Parameter(tensor) if parameter else tensor
        return self._stand_ins[number]

    @contextmanager
    def given(self, tensors: Sequence[Tensor]) -> Iterator[nn.Module]:
        """Give the module its tensors."""
        for home, key, number in self._places:
            home[key] = tensors[number]
        try:
            yield self.module
        finally:
            for home, key, number in self._places:
                home[key] = self._stand_ins[number]

    def replaced(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return the names of tensors that the module has replaced by other objects."""
        return [
            f"self.{key}" for home, key, number in self._places if home[key] is not tensors[number]
        ]

    def written(self, tensors: Sequence[Tensor], versions: Sequence[int]) -> list[str]:
        """Return the names of tensors that were changed in place since they had these versions."""
        return [
            f"self.{key}"
            for _, key, number in self._places
            if tensors[number]._version != versions[number]
        ]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, stand_in: Callable[[int, bool], Tensor]) -> None:
        super().__init__(file)
        self._stand_in = stand_in

    def persistent_load(self, pid: Any) -> Tensor:
        return self._stand_in(*pid)


def _held(module: nn.Module) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yield the tensors of a module with the dict or list that holds each, and its key there."""
    for each in module.modules():
        own = vars(each)
        lists = [v for v in own.values() if isinstance(v, list | dict) and v is not own["_modules"]]
        for home in (own, *lists):
            for key, value in home.items() if isinstance(home, dict) else enumerate(home):
                if isinstance(value, Tensor):
                    yield home, key, value


_LOADED = threading.local()


@cache
def call_of(text: str) -> ModuleCall:
    """Return the call that a text stands for."""
    call: ModuleCall = pickle.loads(base64.b85decode(text))
    return call


def loaded(text: str) -> LoadedModule:
    """Return the module of a call; each thread has its own, since a module has its tensors for the time of a call."""
    modules: dict[str, LoadedModule] = vars(_LOADED).setdefault("modules", {})
    if text not in modules:
        modules[text] = LoadedModule(call_of(text).module)
    return modules[text]


PLANNING: dict[str, Callable[[Sequence[Tensor], Any, Any], Any]] = {}
"""The calls of a capture that is under way, by name: functions of a module's tensors and its arguments."""


def as_written(
    call: str, own: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run a call: a module on its `own` tensors and the arguments of its forward."""
    if call in PLANNING:
        return PLANNING[call](own, args, kwargs)
    tensors = tensors_in(own, args, kwargs)
    if any(t.is_meta or isinstance(t, FakeTensor) for t in tensors):
        return call_of(call).empty(tensors)
    source = wanted_of(tensors)  # a forward may ask for gradients of more
    held, versions = loaded(call), [t._version for t in own]
    with held.given(own) as module:
        results = module(*args, **kwargs)
        changed = held.replaced(own) or held.written(own, versions)
    if changed:
        raise RuntimeError(
            f"{call_of(call).kind} changed {', '.join(dict.fromkeys(changed))} in its forward: no plan keeps that of "
            f"a module that runs as it is. Change it before training, or outside of the branch, loop or size that "
            f"depends on values"
        )
    return call_of(call).checked(results, tensors, source)


def tensors_in(own: Sequence[Tensor], args: Any, kwargs: Any) -> list[Tensor]:
    """Return all tensors that a call is given, the module's first."""
    return [t for t in pytree.tree_leaves((list(own), args, kwargs)) if isinstance(t, Tensor)]
