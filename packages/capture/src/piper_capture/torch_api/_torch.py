"""Hold all of torch's private API that the Dynamo capture uses (torch >= 2.11)."""

from __future__ import annotations

import functools
import logging
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo import guards, symbolic_convert
from torch._dynamo.eval_frame import reset_code
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import functions as dynamo_functions
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
    VariableTracker,
)
from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable
from torch._guards import TracingContext
from torch._library.custom_ops import CustomOpDef as CustomOpDef
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributions import kl
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from piper_capture.torch_api.attributes import attribute_name
from piper_ir.tools import no_garbage_collection

pytree = _pytree
"""The module of torch that flattens nested containers."""

_Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

CAPTURE_ERRORS = (TorchDynamoException, ConstraintViolationError, GuardOnDataDependentSymNode)
"""The errors that torch.compile raises for code that it cannot capture as one graph."""

RuntimeFailure = TorchRuntimeError
"""The error that Dynamo raises when an operator itself fails on the shapes of the batch."""

RUN_ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)
"""The errors of an operator that cannot run on meta tensors, or that the user's code calls wrongly."""

SET_GRAD = torch._C._set_grad_enabled
"""The function that stands for `torch.no_grad()` in Dynamo's graph."""


ENTER_AUTOCAST, EXIT_AUTOCAST = (
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)
"""The functions that stand for `torch.autocast()` in Dynamo's graph: the first returns the second's argument."""


def fake_cpu() -> FakeTensorMode:
    """Return a mode whose tensors claim to be on the CPU and have no bytes.

    Unlike meta tensors they mix with tensors that a model makes without `device=`, and literals such as
    torch.tensor([1.0]) keep their values.
    """
    return FakeTensorMode(shape_env=ShapeEnv())


@contextmanager
def fake_construction() -> Iterator[None]:
    """Make fake tensors in a constructor; it may use real ones, such as loaded weights.

    Reading an unknown value of a fake tensor raises an error, instead of returning a symbol. `Module.double()` and the
    like swap fake parameters, which torch refuses where something refers to them weakly. The mode's memo does that to
    the results of operations that it meets for the first time.
    """
    mode, swap = _OneMode(allow_non_fake_inputs=True), torch.utils.swap_tensors
    memo = mode.fake_tensor_converter.meta_converter.tensor_memo

    def swapped(t1: torch.Tensor, t2: torch.Tensor) -> None:
        for key in [key for key, tensor in memo.items() if tensor is t1 or tensor is t2]:
            del memo[key]
        swap(t1, t2)  # type: ignore[no-untyped-call]  # torch has no types there

    with in_place(torch.utils, {"swap_tensors": swapped}), mode:
        yield


class _OneMode(FakeTensorMode):
    """Stay one mode when its tensors are deep-copied, as by constructors that clone layers.

    Otherwise each deep copy of a tensor would also copy the mode, and tensors of two modes do not mix.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _OneMode:
        return self


def fake_tensor(mode: FakeTensorMode, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a fake tensor, as `torch.empty(shape, dtype=dtype)` in a mode of `fake_cpu`, in a tenth of its time."""
    return FakeTensor(
        mode, torch.empty(tuple(shape), dtype=dtype, device="meta"), torch.device("cpu")
    )


def fake_parameter(tensor: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    """Return a fake tensor as a parameter, as `nn.Parameter(tensor, requires_grad)`, without making a view of it."""
    tensor.requires_grad_(requires_grad)._is_param = True  # isinstance reads this attribute
    assert isinstance(tensor, torch.nn.Parameter)
    return tensor


def mark_rows(tensor: torch.Tensor) -> None:
    """Make the size of dimension 0 symbolic in the next capture."""
    torch._dynamo.mark_dynamic(tensor, 0)


real_tensors = unset_fake_temporarily
"""A context that makes real tensors, even while a capture has a fake tensor mode active."""


_CAPTURING = threading.RLock()


@contextmanager
def capturing() -> Iterator[None]:
    """Let one capture run at a time, without garbage collection: it changes torch and user classes for all threads."""
    with _CAPTURING, no_garbage_collection():
        yield


@contextmanager
def own_settings() -> Iterator[None]:
    """Set the Dynamo settings that a capture depends on, whatever the user has set. The caller is `capturing`."""
    loggers = [
        logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch._guards")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)  # their messages are in the exception as well
    try:
        with (
            dynamo_config.patch(
                automatic_dynamic_shapes=False,
                assume_static_by_default=True,
                suppress_errors=False,
                allow_rnn=True,
                use_numpy_random_stream=True,  # else torch draws in numpy's place, and the numbers differ
                # it scans all objects of the process, for garbage that the next collection finds as well
                run_gc_after_compile=False,
            ),
            _function_names_left_out(),
            _guards_not_timed(),
            _cached_results_marked(),
        ):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _function_names_left_out() -> Iterator[None]:
    """Leave out function names that Dynamo looks up only for a debug log.

    To find them Dynamo tokenizes every source file that it meets, which takes as long as to trace a layer.
    """
    if hasattr(symbolic_convert, "get_funcname"):
        with in_place(symbolic_convert, {"get_funcname": lambda filename, line: None}):
            yield
    else:
        yield


@contextmanager
def _guards_not_timed() -> Iterator[None]:
    """Leave out the timing of the guards, which flushes the processor's caches for a line of a log."""
    if hasattr(guards, "profile_guard_manager"):
        with in_place(guards, {"profile_guard_manager": lambda *_: 0.0}):
            yield
    else:
        yield


@contextmanager
def in_place(owner: Any, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace existing functions of a module or class, by name, until the context ends."""
    before = {name: getattr(owner, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(owner, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(owner, name, function)


@functools.cache
def choose_divergences() -> None:
    """Choose the function of each pair of distributions that torch's kl_divergence knows.

    It chooses and remembers one in the first call of a pair, by the order of classes, which Dynamo cannot trace.
    """
    for pair in set(kl._KL_REGISTRY).difference(kl._KL_MEMOIZE):
        kl._KL_MEMOIZE[pair] = kl._dispatch_kl(*pair)


@dataclass(frozen=True)
class Change:
    """Name a variable that existed before the traced code ran and that this code changes.

    Attributes:
        line: the user's line, if known.
        place: Dynamo's source expression for it. It starts at `L`, the arguments of the traced function, or at
            `G`, its globals.
    """

    name: str
    line: str
    place: str


@contextmanager
def noted_changes(noted: Callable[[Change], None]) -> Iterator[None]:
    """Call `noted` with each side effect that Dynamo sees in traced code, before it happens.

    Side effects are changes of attributes, lists, dicts, globals and closures, not of tensors in place. Attempts that
    Dynamo gives up are among them.
    """
    store, mutate = SideEffects.store_attr, SideEffects.mutation

    def note(item: Any, attribute: str | None) -> None:
        if (
            isinstance(item.mutation_type, AttributeMutationExisting | ValueMutationExisting)
            and item.source is not None
        ):
            if isinstance(
                item, TorchFunctionModeStackVariable
            ):  # it has no name, and the code that enters a mode also leaves it
                return
            source = item.source.name
            place = source if attribute is None else f"{source}.{attribute}"
            noted(
                Change(
                    attribute_name(source, attribute),
                    _user_line(TracingContext.extract_stack()),
                    place,
                )
            )

    def store_attr(effects: SideEffects, item: Any, name: str, value: Any, *rest: Any) -> None:
        note(item, name)
        store(effects, item, name, value, *rest)

    def mutation(effects: SideEffects, item: Any) -> None:
        note(item, None)
        mutate(effects, item)

    with in_place(SideEffects, {"store_attr": store_attr, "mutation": mutation}):
        yield


CACHED = "piper_cached"
"""The key in a graph node's meta for a result of a function under functools.lru_cache.

Its value is (the function's name, the line that calls it).
"""


@contextmanager
def _cached_results_marked() -> Iterator[None]:
    """Mark the graph nodes of return values of functions under functools.lru_cache: Dynamo traces through the cache."""
    wrapped = dynamo_functions.WrapperUserFunctionVariable
    call = wrapped.call_function

    def call_function(variable: Any, *args: Any) -> Any:
        result = call(variable, *args)
        if hasattr(variable.wrapper_obj, "cache_info"):
            said = variable.wrapper_obj.__qualname__, _user_line(TracingContext.extract_stack())
            VariableTracker.visit(lambda part: _mark(part, said), result)
        return result

    with in_place(wrapped, {"call_function": call_function}):
        yield


def _mark(part: Any, said: tuple[str, str]) -> None:
    proxy = getattr(part, "proxy", None)
    if isinstance(proxy, fx.Proxy):
        proxy.node.meta[CACHED] = said


def _user_line(stack: traceback.StackSummary) -> str:
    frame = user_frame(stack)
    return f"{frame.filename}:{frame.lineno} ({frame.line})" if frame is not None else ""


def user_frame(stack: traceback.StackSummary) -> traceback.FrameSummary | None:
    """Return the innermost frame outside of torch, if there is one."""
    return next((f for f in reversed(stack) if not f.filename.startswith(torch.__path__[0])), None)


def compile_once(function: Callable[..., Any], backend: _Backend) -> Callable[..., Any]:
    """Return `function` under torch.compile as one graph, without the code that earlier captures compiled of it."""
    reset_code(function.__code__)
    return torch.compile(function, backend=backend, fullgraph=True)


INVOKE = torch.ops.higher_order.invoke_subgraph
"""The call of a nested region in Dynamo's graph: (the region's graph, its name, *inputs) -> tuple of results."""

CAPTURED = "piper_captured"
"""The key in the meta of such a call for its missing inputs: a list of (position, tensor, example value)."""

MODULES = "piper_modules"
"""The key in the meta of a call that reuses another call's trace, for the modules of the call.

Its value maps the id of each module of the trace, as in nn_module_stack, to the module that replaces it.
"""


@contextmanager
def regions_apart() -> Iterator[None]:
    """Trace each call of the user's own nested regions separately: calls that Dynamo takes for equal may differ."""
    try:
        from torch._dynamo.variables import higher_order_ops, invoke_subgraph
    except ImportError:  # a torch that does not reuse traces
        yield
        return
    with (
        in_place(invoke_subgraph, {"find_reuse_match": lambda *call: None}),
        in_place(higher_order_ops, {"are_same_graph_modules": lambda *graphs: False}),
    ):
        yield


@contextmanager
def nested_forward(module: type[torch.nn.Module]) -> Iterator[None]:
    """Make each call of a module of this class a nested compile region."""
    own = "forward" in vars(module)
    before = module.forward
    marks = dict(vars(before))
    module.forward = torch.compiler.nested_compile_region(before)
    try:
        yield
    finally:
        vars(before).clear()  # torch leaves marks on the user's function
        vars(before).update(marks)
        if own:
            module.forward = before
        else:
            del module.forward


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code that Dynamo was tracing when it raised, outermost first."""
    stack = getattr(error, "real_stack", None)
    if stack:
        return list(stack)
    said = str(error).partition("from user code:")[
        2
    ]  # an error inside of Dynamo has the frames in its text alone
    return [
        traceback.FrameSummary(file, int(line), name) for file, line, name in _FRAME.findall(said)
    ]


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def is_symbolic(size: Any) -> bool:
    """Return whether a size is symbolic, so that it depends on the number of rows."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def data_dependent(tensor: torch.Tensor) -> bool:
    """Return whether the shape of a symbolic tensor depends on values of tensors."""
    return any(isinstance(s, torch.SymInt) and not of_rows(s.node.expr) for s in tensor.shape)


def is_transform(target: Any) -> bool:
    """Return whether a call enters or leaves a transform of torch.func (vmap, grad, jvp) in a captured graph."""
    home = getattr(target, "__module__", None) or ""
    return (
        home.startswith(("torch._functorch.predispatch", "torch._functorch.vmap"))
        or target in _HOOKS
    )


_HOOKS = (
    torch._C._autograd._saved_tensors_hooks_disable,
    torch._C._autograd._saved_tensors_hooks_enable,
)
"""The functions that gradient transforms call to forbid hooks on saved tensors."""


def data_dependent_size(value: Any) -> bool:
    """Return whether a Python number in a graph depends on values of tensors."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) and not of_rows(
        value.node.expr
    )


def size_at(value: Any, rows: int) -> Any:
    """Return the value of a symbolic int, float or bool (or of a nest of them) for a number of rows.

    Every symbol stands for the rows, because only dimension 0 of the batch is symbolic. A symbol that stands for a
    value of a tensor raises LookupError.
    """
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        kind = (
            int
            if isinstance(value, torch.SymInt)
            else float
            if isinstance(value, torch.SymFloat)
            else bool
        )
        return kind(expr_at(value.node.expr, rows))
    if isinstance(value, list | tuple):
        return tuple(size_at(v, rows) for v in value)
    return value


def expr_at(expr: Any, rows: int) -> Any:
    """Return the value of a sympy expression in row symbols for a number of rows."""
    symbols = getattr(expr, "free_symbols", ())
    if not of_rows(expr):
        raise LookupError(str(expr))
    return expr.subs(dict.fromkeys(symbols, rows)) if symbols else expr


def of_rows(expr: Any) -> bool:
    """Return whether a sympy expression depends on nothing but the rows."""
    return all(symbol.name.startswith("s") for symbol in getattr(expr, "free_symbols", ()))
