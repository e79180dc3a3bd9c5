"""Record a model's constructor: run it once on tensors without bytes, and write down its calls on each storage.

The tensors are fake ones that claim to be on the CPU. Meta tensors would not do: functions of torch check for them and
skip work on them. `nn.init.trunc_normal_` is one: it draws until all numbers lie within its bounds, and on meta it
returns at once.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from piper_ir.ground.errors import JobError
from piper_ir.tools import user_code, user_line
from piper_runtime.weights.recording import TRUNCATED, RecordedCall, Recording, StorageView
from piper_runtime.weights.shared_memory import check_separate

ADVICE = (
    "The constructor runs once without numbers, so that each tensor can be made by itself: compute numbers that it "
    "reads (.item(), .tolist(), numpy, `if tensor`) with Python's math, or use init='model', which makes the whole "
    "model at once"
)
TensorsByName = Mapping[str, Tensor]
"""A model's tensors by name."""

_ZEROS = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
    )
    + ("zeros", "zeros_like", "new_zeros")
)
"""The operators whose results are zeros here; a storage begins with zeros, so that they need no call."""
_FILLS = frozenset(
    f"aten::{name}_"
    for name in (
        "normal",
        "uniform",
        "fill",
        "zero",
        "copy",
        "exponential",
        "random",
        "log_normal",
        "cauchy",
        "geometric",
    )
)
"""The operators that give their first argument new content without reading it."""
_LITERALS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""The operators that torch.tensor(...) calls with a tensor that holds the given numbers."""
_RECORDING = threading.RLock()
"""The lock that lets one constructor be recorded at a time, as a function of torch is replaced meanwhile."""


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no bytes, because a recorded constructor made it."""
    return isinstance(tensor, FakeTensor)


def record(
    make: Callable[[], nn.Module],
    seed: int,
    asked: str,
    named: Callable[[nn.Module], TensorsByName],
) -> tuple[nn.Module, Recording]:
    """Run a constructor on fake tensors; return the model, whose tensors are fake, and how to make each of them.

    `named` gives the tensors of the model that are wanted. `asked` names in errors the setting that needs it. Raises
    JobError for a constructor that reads values of tensors, has a generator of its own, or uses another device.
    """
    fakes = _OneMode(allow_non_fake_inputs=True)
    log = _ConstructorLog(fakes, asked)
    try:
        with (
            _RECORDING,
            user_code("Job.model()", JobError),
            warnings.catch_warnings(),
            _replaced(nn.init, "_no_grad_trunc_normal_", log.truncate),
            _replaced(torch.utils, "swap_tensors", _swap),
            fakes,
            log,
        ):
            warnings.filterwarnings(
                "ignore", "Accessing the data pointer of FakeTensor"
            )  # torch does, to copy modules
            model = make()
    except JobError as error:
        raise _explained(error, asked) from error.__cause__
    if not isinstance(model, nn.Module):
        raise JobError(f"Job.model returned a {type(model).__name__}; an nn.Module is needed")
    places = {name: log.place(name, tensor) for name, tensor in named(model).items()}
    check_separate(
        {name: log.given[p.storage] for name, p in places.items() if p.storage in log.given}
    )
    calls = dict(enumerate(log.calls))
    return model, Recording(
        seed, torch.get_default_dtype(), calls, log.sizes, log.constants, places
    )


def _explained(error: JobError, asked: str) -> JobError:
    cause = error.__cause__
    if isinstance(cause, DataDependentOutputException | DynamicOutputShapeException):
        return JobError(
            f"{asked}: Job.model() reads values of a tensor ({cause.func}){user_line(cause)}. {ADVICE}"
        )
    if isinstance(
        cause, RuntimeError | TypeError | ValueError
    ):  # as torch says that a fake tensor has no numbers
        said = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
        return JobError(f"{asked}: Job.model() raised {said}{user_line(cause)}. {ADVICE}")
    return JobError(f"{error}{user_line(error)}" if cause is None else f"{asked}: {error}")


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of torch for this thread until the context ends; the new one is given the old one first."""
    before, thread = getattr(owner, name), threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (
            function(before, *args, **kwargs)
            if threading.get_ident() == thread
            else before(*args, **kwargs)
        )

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _swap(before: Callable[..., Any], tensor: Tensor, other: Tensor) -> None:
    """Give a parameter another content, as modules do to cast it: torch cannot swap fake tensors."""
    if is_fake(tensor) and is_fake(other):
        tensor.data = other.data
    else:
        before(tensor, other)


class _OneMode(FakeTensorMode):
    """Stay one mode if its tensors are copied deeply, as by constructors that clone layers."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _OneMode:
        return self


class _ConstructorLog(TorchDispatchMode):
    """Write down the calls that change storages or make them."""

    def __init__(self, fakes: FakeTensorMode, asked: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.calls: list[RecordedCall] = []
        self.sizes: dict[int, int] = {}
        self.constants: dict[int, Tensor] = {}
        self.given: dict[
            int, Tensor
        ] = {}  # as they were given, by storage; alive, so that each has its own address
        self._fakes, self._asked, self._draws = fakes, asked, 0
        self._numbers: dict[int, int] = {}
        self._alive: list[
            Any
        ] = []  # storages and tensors, so that no other storage gets the address of one

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LITERALS and not is_fake(args[0]):
            result = func(*args, **kwargs)
            self._keep(self._new(result), args[0])
            return result
        args, kwargs = pytree.tree_map(self._argument, (args, kwargs))
        result = func(*args, **kwargs)
        self._add(
            func,
            args,
            kwargs,
            [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)],
        )
        return result

    def place(self, name: str, tensor: Tensor) -> StorageView:
        """Return a tensor of the finished model as a view of its storage."""
        if tensor.device.type != "cpu":
            raise JobError(
                f"Job.model() makes {name!r} on device {tensor.device}, where {self._asked} gives it no values. "
                f"Make the model on the CPU, without torch.device(...) or .to(...): a run moves it to the devices "
                f"of its ranks"
            )
        return self._view(self._faked(tensor))

    def truncate(
        self,
        before: object,
        tensor: Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: Any = None,
    ) -> Tensor:
        """Write down a call of `nn.init.trunc_normal_`, in place of its inner function.

        Code that has imported the outer one by name calls the inner one too.
        """
        fake = self._argument(tensor)
        self._argument(generator)
        view, fills = self._view(fake), self._covers(fake)
        reads = () if fills else (view.storage,)
        args = (view, mean, std, a, b)
        self.calls.append(
            RecordedCall(TRUNCATED, args, {}, (None,), reads, (view.storage,), fills, self._draw())
        )
        return tensor

    def _add(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]
    ) -> None:
        """Write down a call that was made; views and calls without effect on a storage are left out."""
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        draw = self._draw() if torch.Tag.nondeterministic_seeded in func.tags else None
        changed = [
            t for t in pytree.tree_leaves(_written(func, args, kwargs)) if isinstance(t, Tensor)
        ]
        op = func._schema.name
        places = tuple(None if self._known(t) else self._new_view(t) for t in results)
        new = [place.storage for place in places if place is not None]
        if op in _ZEROS or not (changed or new):
            return
        fills = op in _FILLS and self._covers(changed[0])
        reads = [self._number(t) for t in (inputs[1:] if fills else inputs)]
        writes = dict.fromkeys([*(self._number(t) for t in changed), *new])
        args, kwargs = pytree.tree_map(
            lambda leaf: self._view(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        name = f"{op}.{func._schema.overload_name}" if func._schema.overload_name else op
        self.calls.append(
            RecordedCall(
                name, args, kwargs, places, tuple(dict.fromkeys(reads)), tuple(writes), fills, draw
            )
        )

    def _draw(self) -> int:
        self._draws += 1
        return self._draws - 1

    def _argument(self, leaf: Any) -> Any:
        """Return an argument with fake tensors only; refuse generators and storages, which cannot be written down."""
        if isinstance(leaf, torch.Generator):
            raise JobError(
                f"{self._asked}: Job.model() draws from a torch.Generator of its own; leave generator= out, since "
                f"every draw has a seed of its own, made of Job.seed and the number of the draw, or use "
                f"init='model'"
            )
        if isinstance(leaf, torch.UntypedStorage):
            raise JobError(
                f"{self._asked}: Job.model() works on a storage (torch.load, Tensor.set_). Give the path of "
                f"weights as init=, or use init='model'"
            )
        return self._faked(leaf) if isinstance(leaf, Tensor) else leaf

    def _faked(self, tensor: Tensor) -> Tensor:
        """Return the fake tensor for a tensor that torch did not make in the constructor, such as a numpy array's."""
        if is_fake(tensor):
            return tensor
        fake = self._fakes.from_tensor(tensor)
        storage, key = fake.untyped_storage(), tensor.untyped_storage()._cdata
        if storage._cdata not in self._numbers:
            number = self._numbers.setdefault(key, len(self.sizes))
            self._numbers[storage._cdata] = number
            self._alive += [storage, tensor, fake]
            if number not in self.sizes:
                self.sizes[number] = storage.nbytes()
                self._keep(number, tensor)
        return fake

    def _keep(self, number: int, tensor: Tensor) -> None:
        """Keep the numbers of a tensor from elsewhere as they are now; its array may be filled with others later."""
        self.constants[number], self.given[number] = _bytes(tensor), tensor

    def _known(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._numbers

    def _new(self, tensor: Tensor) -> int:
        """Return a new number, for the storage of a tensor that a call has made."""
        storage = tensor.untyped_storage()
        number = self._numbers[storage._cdata] = len(self.sizes)
        self.sizes[number] = storage.nbytes()
        self._alive.append(storage)
        return number

    def _new_view(self, tensor: Tensor) -> StorageView:
        self._new(tensor)
        return self._view(tensor)

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is None:
            raise JobError(
                f"{self._asked}: Job.model() uses a tensor whose making torch does not show; use init='model'"
            )
        return number

    def _view(self, tensor: Tensor) -> StorageView:
        flags = (tensor.is_conj(), tensor.is_neg())
        return StorageView(
            self._number(tensor),
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            *flags,
        )

    def _covers(self, tensor: Tensor) -> bool:
        """Return whether a tensor has all bytes of its storage."""
        return tensor.is_contiguous() and tensor.nbytes == self.sizes[self._number(tensor)]


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return positions and names of the arguments that an operator changes."""
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (k, a.name) for k, a in arguments if a.alias_info is not None and a.alias_info.is_write
    )


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    return [args[k] if k < len(args) else kwargs.get(name) for k, name in _written_arguments(func)]


def _bytes(tensor: Tensor) -> Tensor:
    """Return a copy of all bytes of a real tensor's storage."""
    with unset_fake_temporarily():
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()
