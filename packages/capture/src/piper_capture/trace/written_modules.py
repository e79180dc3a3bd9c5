"""Plan the calls of modules that run as their author wrote them (`piper_ops.written.as_written`).

Such a module depends on values of tensors, which a capture does not have. So the capture runs it on real random
tensors, at a few numbers of rows, to find the shapes of its results and any side effects. All rows of an argument are
equal there, so that sizes inside, such as the number of an expert's tokens, grow with the rows.
"""

from __future__ import annotations

import io
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]  # it has no types
import torch
from torch import Tensor, nn

from piper_capture.module.model import named_tensors
from piper_capture.torch_api import _torch
from piper_capture.torch_api.replacements import WAY_OUT as EXPERTS_WAY_OUT
from piper_ir.ground.errors import CaptureError
from piper_ir.ground.sizes import Affine, Dim, fit
from piper_ops import (
    LoadedModule,
    MadeTensor,
    ModuleCall,
    RowsAt,
    is_model_code,
    storage_key,
    tensors_in,
)

LARGEST = 2**31
"""The most bytes that a module and its arguments may have, since a capture allocates them."""

WAY_OUT = (
    "Keep that outside of the module, in one of its own, or write it with operations of static "
    "shapes (torch.where, masks)"
)

_RANDOM = re.compile("[0-9a-f]{32}")

ASKED = "A gradient is asked for of a tensor that has none, as the batch: call x.requires_grad_() before x is used"


def filled(
    shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, integers: int
) -> Tensor:
    """Return a tensor with numbers that most code accepts: between 0 and 1, or integers below `integers`."""
    if dtype.is_floating_point:
        return torch.rand(tuple(shape), generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.ones(tuple(shape), dtype=dtype)
    return (torch.arange(_product(shape)) % integers).view(tuple(shape)).to(dtype)


def equal_rows(
    shape: Sequence[int],
    blocks: Sequence[int],
    dtype: torch.dtype,
    generator: torch.Generator,
    integers: int,
) -> Tensor:
    """Return an argument whose rows are equal.

    `blocks` has the entries per row in each dimension, 0 if the size does not depend on the rows.
    """
    tensor = filled(
        [b or size for size, b in zip(shape, blocks, strict=True)], dtype, generator, integers
    )
    for dim, (size, block) in enumerate(zip(shape, blocks, strict=True)):
        tensor = tensor.index_select(dim, torch.arange(size) % block) if block else tensor
    return tensor


def weights_like(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return a tensor with numbers of the size of weights: between -0.1 and 0.1."""
    numbers = filled(shape, dtype, generator, 1)
    return (numbers - 0.5) * 0.2 if dtype.is_floating_point else numbers


def blocks_of(shape: Sequence[Dim]) -> tuple[int, ...]:
    """Return the entries per row in each dimension of a shape, 0 if the size does not depend on the rows."""
    return tuple(0 if not isinstance(d, Affine) else d.b if not d.a else 1 for d in shape)


def pickled(name: str, module: nn.Module) -> bytes:
    """Return a module without its tensors; raise CaptureError for one that cannot be pickled."""
    numbers = {id(t): k for k, t in enumerate(own_tensors(module).values())}

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return None
            if id(value) not in numbers:
                raise CaptureError(
                    f"module {name!r} runs as it is, and holds a tensor of shape {tuple(value.shape)} that is no "
                    f"parameter, buffer or attribute of a module inside; register it with register_buffer"
                )
            return numbers[id(value)], isinstance(value, nn.Parameter)

        def reducer_override(self, value: Any) -> Any:
            reduced = super().reducer_override(value)
            if not isinstance(value, type | TypeVar) or not isinstance(reduced, tuple):
                return reduced
            # cloudpickle names a class by a random number, and the names of code would be others in each process
            make, arguments, *more = reduced
            own = [None if _is_random(argument) else argument for argument in arguments]
            return make, tuple(own), *more

    file = io.BytesIO()
    try:
        Pickler(file).dump(module)
    except CaptureError:
        raise
    except Exception as error:  # any error of a user's object while it is pickled
        raise CaptureError(
            f"module {name!r} runs as it is, for which it must be pickled: {error}"
        ) from error
    return file.getvalue()


def _is_random(argument: object) -> bool:
    return isinstance(argument, str) and _RANDOM.fullmatch(argument) is not None


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module by name, a tied one by its first name."""
    named_by_id: dict[int, tuple[str, Tensor]] = {}
    for name, tensor, _ in named_tensors(module):
        named_by_id.setdefault(id(tensor), (name, tensor))
    return dict(named_by_id.values())


class Leaves(CaptureError):
    """Report that no graph can hold a module's return value; the parent module may run as it is instead."""


@dataclass
class Planned:
    """Hold a module of a capture that runs as it is, and its calls.

    Attributes:
        name: its dotted name.
        kind: the name of its class.
        module: the pickled module.
        problem: the error of a call that cannot run as it is.
        calls: the calls by text of their arguments: dtypes and shapes of tensors, values of others.
    """

    name: str
    kind: str
    module: bytes
    problem: CaptureError | None = None
    calls: dict[str, ModuleCall] = field(default_factory=dict)

    def __call__(self, own: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        try:
            return self.call(own, args, kwargs).empty(tensors_in(own, args, kwargs))
        except CaptureError as error:
            self.problem = error
            raise

    def call(self, own: Sequence[Tensor], args: Any, kwargs: Any) -> ModuleCall:
        """Return the planned call for arguments of these dtypes and shapes."""
        tensors = tensors_in(own, args, kwargs)
        shapes = [(t.dtype, [_size(s) for s in t.shape]) for t in tensors]
        rest = _torch.pytree.tree_map(
            lambda leaf: "tensor" if isinstance(leaf, Tensor) else repr(leaf), (args, kwargs)
        )
        key = f"{shapes} {rest}"
        if key not in self.calls:
            self.calls[key] = self._planned(own, args, kwargs, tensors)
        return self.calls[key]

    def _planned(
        self, own: Sequence[Tensor], args: Any, kwargs: Any, tensors: Sequence[Tensor]
    ) -> ModuleCall:
        size = sum(t.element_size() * _product(_torch.size_at(tuple(t.shape), 5)) for t in tensors)
        if size > LARGEST:
            raise CaptureError(
                f"module {self.name!r} depends on values of tensors, so that a capture must run it for real, which "
                f"would take {size / 2**30:.1f} GiB for its weights and arguments. {EXPERTS_WAY_OUT}"
            )
        integers = self._integers(own, args, kwargs)
        trials = [
            _Trial(self, own, args, kwargs, rows, seed, integers)
            for rows, seed in ((2, 0), (3, 0), (5, 0), (2, 1))
        ]
        rows = next(_rows_in(tensors), None)
        return ModuleCall(
            self.kind,
            self.module,
            self._results(trials),
            rows,
            any(t.random for t in trials),
            integers,
        )

    def _integers(self, own: Sequence[Tensor], args: Any, kwargs: Any) -> int:
        """Return the bound of integers that the module accepts, such as expert indices: a size of its weights, or 1."""
        integer_args = [
            t
            for t in tensors_in((), args, kwargs)
            if not t.is_floating_point() and t.dtype != torch.bool
        ]
        for size in (
            sorted({int(t.shape[0]) for t in own if t.dim()}, reverse=True) if integer_args else ()
        ):
            try:
                _Trial(self, own, args, kwargs, 2, 0, size)
            except (
                CaptureError
            ):  # the size is too large, or the module fails anyway, which the trials proper report
                continue
            return size
        return 1

    def _results(self, trials: Sequence[_Trial]) -> Any:
        """Return the nest of the call's results, with sizes affine in the rows."""
        wrong = next((kind for t in trials for kind in _unfit(t.results)), "")
        if wrong:
            raise self._leaves(
                f"it returns a {wrong}; a tensor, or a tuple or list of tensors and None, can leave it"
            )
        flat, forms = zip(*(_torch.pytree.tree_flatten(t.results) for t in trials))
        if any(form != forms[0] for form in forms):
            raise self._leaves(
                f"it returns {forms[0]} for some values of its arguments, and {forms[-1]} for others"
            )
        return _torch.pytree.tree_unflatten([self._made(leaves) for leaves in zip(*flat)], forms[0])

    def _made(self, leaves: Sequence[Any]) -> MadeTensor | None:
        if any(leaf is None for leaf in leaves):
            if any(leaf is not None for leaf in leaves):
                raise self._leaves(
                    "it returns None for some values of its arguments, and a tensor for others"
                )
            return None
        at2, at3, at5, other = (tuple(leaf.shape) for leaf in leaves)
        if len({len(at2), len(at3), len(at5), len(other)}) == 1 and at2 == other:
            shape = [fit(a, b) for a, b in zip(at2, at3)]
            if at5 == tuple(s.a + s.b * 5 if isinstance(s, Affine) else s for s in shape):
                return MadeTensor(
                    tuple((s.a, s.b) if isinstance(s, Affine) else (s, 0) for s in shape),
                    leaves[0].dtype,
                )
        raise self._leaves(
            f"the shape of what it returns depends on values of tensors ({list(at2)} and {list(other)} for the "
            f"same shapes of its arguments), and sizes that only a run knows cannot leave it"
        )

    def _leaves(self, what: str) -> Leaves:
        return Leaves(str(self.refused(what)))

    def refused(self, what: str, way_out: str = WAY_OUT) -> CaptureError:
        """Return the error for a module that cannot run as it is."""
        return CaptureError(
            f"module {self.name!r} depends on values of tensors, and cannot run as it is: {what}. {way_out}"
        )


class _Trial:
    """Run a module once, at a number of rows.

    Attributes:
        results: its return value.
        random: whether it drew random numbers.
    """

    def __init__(
        self,
        planned: Planned,
        own: Sequence[Tensor],
        args: Any,
        kwargs: Any,
        rows: int,
        seed: int,
        integers: int,
    ) -> None:
        self._planned = planned
        with _torch.real_tensors(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            generator = torch.Generator().manual_seed(seed)
            real = [
                weights_like(tuple(map(int, t.shape)), t.dtype, generator).requires_grad_(
                    t.requires_grad
                )
                for t in own
            ]
            arguments = _torch.pytree.tree_map(
                lambda leaf: _argument(leaf, rows, generator, integers, spread=bool(seed)),
                (tuple(args), dict(kwargs)),
            )
            loaded = LoadedModule(planned.module)
            self._run(loaded, real, *arguments)

    def _run(self, loaded: LoadedModule, own: list[Tensor], args: Any, kwargs: Any) -> None:
        known = tensors_in(own, args, kwargs)
        versions = [t._version for t in known]
        before = {id(m): _looks(m) for m in loaded.module.modules()}
        watch = _Watch(known)
        with loaded.given(own) as module:
            try:
                with watch:
                    self.results = module(*args, **kwargs)
            except _torch.RUN_ERRORS as error:
                said = f"on random numbers it fails: {str(error).partition(chr(10))[0]}{_line_of(error)}"
                raise self._planned.refused(
                    said, ASKED if "not require grad" in said else WAY_OUT
                ) from error
            changed = loaded.replaced(own)
        changed += [
            name for m in loaded.module.modules() for name in _differences(before[id(m)], _looks(m))
        ]
        if changed or any(t._version != v for t, v in zip(known, versions)):
            what = (
                f"its forward keeps something in {', '.join(changed)}"
                if changed
                else "its forward changes a tensor in place"
            )
            raise self._planned.refused(f"{what}, which no later call would find")
        if watch.outsiders:
            raise self._planned.refused(
                f"it uses a tensor of shape {watch.outsiders[0]} that is none of its parameters, "
                f"buffers and arguments"
            )
        self.random = watch.random


class _Watch(_torch.TorchDispatchMode):
    """Note draws of random numbers, and tensors that derive from neither parameters, buffers nor arguments."""

    supports_higher_order_operators = True

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self.random, self.outsiders = False, list[tuple[int, ...]]()
        self._known = {storage_key(t): t for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        read = [t for t in _torch.pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func is not torch.ops.aten.lift_fresh.default:  # of a literal that forward makes
            self.outsiders += [tuple(t.shape) for t in read if storage_key(t) not in self._known]
        result = func(*args, **(kwargs or {}))
        self._known |= {
            storage_key(t): t for t in _torch.pytree.tree_leaves(result) if isinstance(t, Tensor)
        }
        return result


def _line_of(error: BaseException) -> str:
    """Return " at file:line (code)" of the user's line that raised an error, "" if none did."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_model_code(f.filename)]
    return f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


def _unfit(results: Any) -> Iterator[str]:
    """Yield the types of return values that no graph can hold."""
    if type(results) in (tuple, list):
        for item in results:
            yield from _unfit(item)
    elif results is not None and not isinstance(results, Tensor):
        yield type(results).__name__


def _looks(module: nn.Module) -> dict[str, int]:
    """Return the ids of a module's attributes, parameters and buffers by name."""
    inside = {f"{name}": id(value) for name, value in vars(module).items()}
    return inside | {
        name: id(value) for name, value in (*module._buffers.items(), *module._parameters.items())
    }


def _differences(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    return [f"self.{name}" for name in {**before, **after} if before.get(name) != after.get(name)]


def _rows_in(tensors: Sequence[Tensor]) -> Iterator[RowsAt]:
    """Yield the dimensions whose size gives the number of rows."""
    for k, tensor in enumerate(tensors):
        for dim, size in enumerate(tensor.shape):
            sizes = fit(*(int(_torch.size_at(size, rows)) for rows in (2, 3)))
            if _torch.is_symbolic(size) and isinstance(sizes, Affine):
                yield RowsAt(k, dim, (sizes.a, sizes.b))


def _size(size: Any) -> tuple[int, ...]:
    return tuple(int(_torch.size_at(size, rows)) for rows in (2, 3, 5))


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _argument(
    leaf: Any, rows: int, generator: torch.Generator, integers: int, *, spread: bool
) -> Any:
    """Return an argument of a trial; with `spread` its numbers have both signs and its rows differ."""
    if not isinstance(leaf, Tensor):
        return leaf
    sizes = [fit(*(int(_torch.size_at(size, r)) for r in (2, 3))) for size in leaf.shape]
    shape = [int(_torch.size_at(size, rows)) for size in leaf.shape]
    if spread and leaf.is_floating_point():
        argument = torch.randn(shape, generator=generator).to(leaf.dtype)
    else:
        argument = equal_rows(shape, blocks_of(sizes), leaf.dtype, generator, integers)
    return (
        argument.requires_grad_().clone() if leaf.requires_grad else argument
    )  # no leaf, as in the model


@contextmanager
def planning(calls: Mapping[str, Planned]) -> Iterator[None]:
    """Let the calls of modules with these keys be planned instead of run."""
    from piper_ops import PLANNING

    PLANNING.update(calls)
    try:
        yield
    finally:
        for name in calls:
            del PLANNING[name]
