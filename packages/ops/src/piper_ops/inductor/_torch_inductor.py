"""Hold the private API of Inductor: compile a graph, or lower it and read the text that would run.

Inductor writes a module whose `call(args)` allocates buffers, launches kernels and frees. Lowering stops before any
kernel is compiled, so that a plan needs no compiler; the text is then run on meta tensors, with kernels that only note
their operands.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch._inductor.async_compile as async_compile
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
import torch._inductor.cpu_vec_isa as cpu_vec_isa
from torch import Tensor, fx
from torch._C import _len_torch_dispatch_stack
from torch._guards import TracingContext, tracing
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import CodeGen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piper_ops.inductor.decompositions import DECOMPOSITIONS

Spec = tuple[tuple[int, ...], str]
"""The shape and the dtype's name of a contiguous tensor."""

Function = Callable[[list[Tensor]], tuple[Tensor, ...]]
"""A function of a list, which it empties."""


def cache_folder() -> Path:
    """Return the folder of Inductor's cache on this machine; it exists."""
    folder = Path(cache_dir())
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def _find_vector_instructions() -> None:
    """Let Inductor find the CPU's vector instructions, by the flags alone if a process has seen that these are right.

    Inductor loads a program for each set of instructions in each process, which takes a CPU second, to see whether
    compiler and system can use it.
    """
    facts = f"{torch.__version__} {sorted(torch.cpu.get_capabilities().items())}"
    seen = cache_folder() / f"piper-cpu-{sha256(facts.encode()).hexdigest()[:16]}"
    by_flags = inductor_config.patch({"cpp.vec_isa_ok": True})
    if seen.exists():
        with by_flags:
            cpu_vec_isa.valid_vec_isa_list()  # which is asked once in a process
        return
    tried = cpu_vec_isa.valid_vec_isa_list()
    with by_flags:
        if tried == cpu_vec_isa.valid_vec_isa_list.__wrapped__():
            seen.touch()


SETTINGS = {
    "compile_threads": 1,  # a pool of processes would outlive the rank
    "fallback_random": True,
    "triton.cudagraphs": False,
    "keep_output_stride": True,
    "size_asserts": False,  # a plan says which tensors a fusion gets
    "alignment_asserts": False,
}
"""The settings of Inductor under which fusions are lowered and compiled."""

_UPDATED = "in_out_ptr"
"""The beginning of Inductor's name for an operand that a kernel both reads and writes."""

_BETWEEN = frozenset({"aten.sum.dim_IntList"})
"""The ops of torch that Inductor calls on a workspace of its own, between two kernels."""


def traced(function: Function, specs: Sequence[Spec], device: torch.device) -> tuple[Any, ...]:
    """Return the graph of a function in Inductor's ops, its fake arguments, and their mode."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        arguments = [
            torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in specs
        ]
        module = make_fx(
            lambda *given: function(list(given)),
            decomposition_table={**select_decomp_table(), **DECOMPOSITIONS},
        )(*arguments)
    module.graph.set_codegen(CodeGen())  # Inductor takes plain arguments and a plain tuple
    module.recompile()
    return module, arguments, mode


def compiled(function: Function, specs: Sequence[Spec], device: torch.device) -> Function:
    """Return the compiled form of a function; compiled kernels are kept on disk by Inductor's own cache.

    Kernels that were left unfinished there, as by a full disk or the end of a process, are compiled again.
    """
    _find_vector_instructions()
    removed: set[Path] = set()
    while True:
        module, arguments, mode = traced(function, specs, device)
        context = TracingContext(mode)  # without one, Inductor's cache is not asked
        try:
            with inductor_config.patch(SETTINGS), tracing(context):
                result: Any = compile_fx.compile_fx_inner(module, arguments, is_inference=True)
        except (ImportError, InductorError) as error:  # of a kept graph, or of one made anew
            refused = error.inner_exception if isinstance(error, InductorError) else error
            if not isinstance(refused, ImportError):
                raise
            kernel = Path(refused.path or "").resolve()  # as the system's loader names it
            own = kernel.suffix == ".so" and cache_folder().resolve() in kernel.parents
            if not own or kernel in removed:  # as where nothing in the cache's folder may run
                raise
            removed.add(kernel)
            kernel.unlink(missing_ok=True)
            continue
        call: Function = getattr(result, "current_callable", None) or result
        _show_allocations(call)
        return call


def _show_allocations(call: Any) -> None:
    """Let a compiled function allocate by torch's dispatcher where a dispatch mode may count its memory."""
    function = getattr(call, "__func__", call)
    namespace = getattr(function, "__globals__", {})
    for device in ("cpu", "cuda"):
        if (own := namespace.get(f"empty_strided_{device}")) is not None:
            namespace[f"empty_strided_{device}"] = _shown(own, device)


def _shown(own: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    """Return a function that allocates by Inductor's `own` function where no dispatch mode looks on."""

    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        if _len_torch_dispatch_stack():
            return _empty(device, size, stride, dtype)
        return own(size, stride, dtype)

    return empty


def _empty(device: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


class _Written(BaseException):
    """Carry the text that Inductor wrote, past its handlers of errors."""

    def __init__(self, text: str) -> None:
        self.text = text


def written(module: fx.GraphModule, arguments: Sequence[Tensor]) -> str:
    """Return the Python text that Inductor writes for a graph; nothing is compiled."""

    def stop(graph: Any) -> None:
        raise _Written(graph.codegen()[0].value)

    _find_vector_instructions()
    try:
        with (
            _in_place(GraphLowering, "compile_to_module", stop),
            inductor_config.patch({**SETTINGS, "fx_graph_cache": False}),
        ):
            compile_fx.compile_fx_inner(module, list(arguments), is_inference=True)
    except _Written as text:
        return text.text
    raise AssertionError("Inductor compiled a graph without writing a module")


class Launches:
    """Run Inductor's text on meta tensors, in the place of its compiler of kernels (`AsyncCompile`).

    Attributes:
        moved: for each kernel in order the bytes of its operands, counted as often as it moves them.
        peak: the most bytes of storages that were alive at once, beyond the arguments.
        results: the tensors that it returns.
        others: the names of the ops that it calls as they are, beside its kernels.
    """

    def __init__(self, text: str, arguments: Sequence[Tensor]) -> None:
        self.moved: list[int] = []
        namespace = self._loaded(text)
        given = [torch.empty_like(a, device="meta") for a in arguments]
        self.given = [a.untyped_storage() for a in given]
        with _Storages(self.given, self.moved) as storages:
            self.results: tuple[Tensor, ...] = tuple(namespace["call"](given))
        self.peak, self.others = storages.peak, storages.others

    def _loaded(self, text: str) -> dict[str, Any]:
        namespace: dict[str, Any] = {"__name__": "piper_lowered"}
        with _in_place(async_compile, "AsyncCompile", lambda: self):
            exec(text, namespace)  # Inductor's own text, in which only kernels are replaced
        for device in ("cpu", "cuda"):
            namespace[f"empty_strided_{device}"] = partial(_empty, "meta")
        namespace["reinterpret_tensor"] = torch.as_strided
        for check in ("assert_size_stride", "assert_alignment"):
            namespace[check] = lambda *given: None
        namespace["get_raw_stream"] = lambda index: 0
        return namespace

    def wait(self, namespace: Any) -> None:
        """Stand for the end of all compilations."""

    def _cpp(self, types: Sequence[str], text: str, **options: Any) -> Callable[..., None]:
        """Stand for the compilation of a kernel in C++."""
        return self._kernel(text[text.index("void") :])

    cpp_pybinding = _cpp

    def _in_triton(self, name: str, text: str, **options: Any) -> _Triton:
        """Stand for the compilation of a kernel in Triton."""
        return _Triton(self._kernel(text[text.index(f"def {name}(") :]))

    triton = _in_triton

    def _kernel(self, text: str) -> Callable[..., None]:
        header = text[text.index("(") : text.index(")")]
        named = [1 + name.startswith(_UPDATED) for name in re.findall(r"\b\w+ptr\d*\b", header)]

        def launch(*operands: Any, **options: Any) -> None:
            tensors = [o for o in operands if isinstance(o, Tensor)]
            self.moved.append(sum(each * t.nbytes for each, t in zip(named, tensors, strict=True)))

        return launch


class _Triton:
    """Stand for a kernel in Triton, which is launched by `run`."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run


class _Storages(TorchDispatchMode):
    """Count the bytes of live storages that operators return, and note the operators that launch kernels."""

    def __init__(self, known: Sequence[Any], moved: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._moved = moved
        self._alive = {id(storage): weakref.ref(storage) for storage in known}
        self.live = self.peak = 0
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) in _BETWEEN:
            self._moved.append(sum(t.nbytes for t in tree_leaves((args, result)) if _is(t)))
        elif func is not _ALLOCATE and not _returns_view(func):
            self.others.append(str(func))
        for leaf in tree_leaves(result):
            if _is(leaf):
                self._add(leaf.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def _add(self, storage: Any) -> None:
        known = self._alive.get(id(storage))
        if known is not None and known() is storage:
            return
        nbytes = storage.nbytes()
        self._alive[id(storage)] = weakref.ref(storage, lambda _: self._drop(nbytes))
        self.live += nbytes

    def _drop(self, nbytes: int) -> None:
        self.live -= nbytes


_ALLOCATE = torch.ops.aten.empty_strided.default


def _is(value: object) -> bool:
    return isinstance(value, Tensor)


def _returns_view(op: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


@contextlib.contextmanager
def _in_place(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
