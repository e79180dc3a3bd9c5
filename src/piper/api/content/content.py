"""Digest the content of a user's callables.

Digests are equal for equal code and values, wherever they live in memory. A model, a batch or a loss is a function, a
class, a bound method, a partial or an instance. Its behaviour follows from its code, its default arguments, the
variables of the functions around it, and the globals that it reads, and from the same of every function, class and
object that these lead to. All of that is part of the digest, with these limits:

- torch, Piper and Python's own library count by name, and by the data of theirs that the code names (`os.environ`).
- A custom operator counts by its registrations with `torch.library`, whichever way the code names it. One that
  was registered in C++, or piece by piece, has no content.
- Of other installed packages the code and the plain globals that it reads count, not the rest of the package behind it.
- Nothing counts by which object it is: a value that cannot be looked into (an open file), or that is too large, has no
  content, and neither has an object that leads to it.

Code that Dynamo traces cannot read files, clocks or random numbers, or it is refused. Code that runs, such as the
gradient of a custom operator, can: it is looked into with `runs=True`, and has a content only if all that it calls is
its own code or a part of torch and Python that is known to depend on its arguments alone. A function that a trace calls
instead of looking into it, such as one with `torch.compiler.assume_constant_result`, is code that runs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from piper.api.content.objects_in_packages import PLAIN, made_in_python, of_the_user
from piper.api.content.read_variables import OF_THE_PROCESS, Unseen, is_pure, read_by
from piper_ops import storage_key
from piper_runtime.rank import Home, cells, home_of, is_foreign

MOST_BYTES = 2**20
"""The most bytes of one tensor, array or other buffer that are looked into."""
MOST_VALUES = 1_000_000
"""The most values in all that are looked into."""

LEAST_HASH = 2**32
"""The size from which a number in an attribute called a hash is taken for one of Python's, which have 64 bits."""

CONTAINERS = (list, tuple, set, frozenset, dict, types.MappingProxyType)
BASES = (int, float, complex, str, bytes, bytearray)
OPS = ("torch._ops", "torch.library")
"""The modules of the types around registered operators, which count by name: all else in them is torch's caches."""
OWN_OPS = frozenset({
    "aten", "prim", "prims", "piper", "c10d", "_c10d_functional", "higher_order", "inductor", "mkldnn", "profiler", "quantized",
})  # fmt: skip
"""The namespaces of torch's and Piper's own operators."""
_INERT = (logging.Logger, type(threading.Lock()), type(threading.RLock()))
"""The types of objects that traced code cannot ask for anything."""
_PYTHONS_OWN = frozenset({
    "__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__", "__abstractmethods__",
    "__slotnames__",
})  # fmt: skip
"""The attributes that Python puts into each class."""


@dataclass(frozen=True)
class Content:
    """Hold the content of some values.

    Attributes:
        digest: equal digests mean equal values; unequal ones may do so too.
        lines: a digest of the places of their code, by file and line.
        elsewhere: whether another process may take them for something else, for their code asks how a process or
            machine is set up.
    """

    digest: str
    lines: str
    elsewhere: bool


_OF_MODULES = frozenset(name for name, value in vars(torch.nn.Module()).items() if value == {})
"""The attributes of torch's modules that hold submodules, tensors and hooks, and are mostly empty."""


def content_of(*values: object, runs: bool = False) -> str | None:
    """Return the digest of some values; None if it is not known. See `contents_of`."""
    content = contents_of(*values, runs=runs)
    return None if content is None else content.digest


def contents_of(*values: object, runs: bool = False, tensors: bool = False) -> Content | None:
    """Return the content of some values.

    None says that it is not known: something cannot be looked into, or with `runs`, calling the values may give other
    results for reasons that lie elsewhere. With `tensors` the values of tensors count, even if nothing runs.
    """
    walk = _Walk(runs, tensors)
    try:
        for value in values:
            walk.add(value)
        walk.finish()
    except Unseen:
        return None
    return Content(walk.digest.hexdigest(), walk.lines.hexdigest(), walk.elsewhere)


class _Walk:
    """Visit values and everything that they lead to, breadth first, each object once."""

    def __init__(self, runs: bool, tensors: bool) -> None:
        self.digest, self.lines = (hashlib.blake2b(digest_size=16) for _ in range(2))
        self.elsewhere = False
        self._runs, self._tensors = runs, tensors
        self._seen: set[int] = set()
        self._storages: dict[int, int] = {}
        self._number: dict[tuple[int, bool], int] = {}
        self._objects: list[
            tuple[Any, Home, bool]
        ] = []  # holds each object, so that no other one gets its id meanwhile

    def add(self, value: Any, home: Home = "user") -> None:
        """Add one value; `home` tells whose code leads to it."""
        if _is_plain(value):
            self._token(type(value).__name__, repr(value))
        elif home == "installed" and not isinstance(value, tuple | list):
            self._all(f"installed {type(value).__qualname__}", of_the_user(value, self._seen))
        else:
            number = self._number.setdefault((id(value), self._runs), len(self._objects))
            if number == len(self._objects):
                self._objects.append((value, home, self._runs))
            self._token("object", number)

    def finish(self) -> None:
        """Visit the objects that were added, and the ones that they add."""
        done = 0
        while done < len(self._objects):
            value, home, self._runs = self._objects[done]
            done += 1
            if done > MOST_VALUES:
                raise Unseen
            self._object(value, home)

    def _object(self, value: Any, home: Home) -> None:
        for kinds, add in _BY_TYPE:
            if isinstance(value, kinds):
                return add(self, value)
        if type(value).__module__ in OPS:
            self._token(type(value).__qualname__, str(value).partition(" object at ")[0])
        else:
            self._instance(value, home)

    def _builtin(self, function: types.BuiltinFunctionType) -> None:
        owner = function.__self__
        self._check_known(function.__module__ or _module_of(owner), function.__name__)
        bound = None if isinstance(owner, types.ModuleType) else owner
        self._all(f"builtin {function.__module__} {function.__qualname__}", (bound,))

    def _module(self, module: types.ModuleType) -> None:
        """Add a module by its name; the values that code reads of it are added where the code names the module."""
        if home_of(module.__name__) != "known":
            raise Unseen
        self._check_known(module.__name__)
        self._token("module", module.__name__)

    def _function(self, function: types.FunctionType) -> None:
        home = home_of(function.__globals__.get("__name__"))
        self._token("function", home, function.__module__, function.__qualname__)
        for defaults in (
            function.__defaults__ or (),
            tuple((function.__kwdefaults__ or {}).items()),
        ):
            self.add(
                defaults, "installed" if home == "installed" else "user"
            )  # of a package, as its globals
        self._all("marks", (function.__dict__,))
        if home == "known":
            if function is os.getenv:
                self.add(os.environ)
            self._all("cells", cells(function))
            return self._check_known(function.__globals__.get("__name__"), function.__name__)
        self._runs |= home == "user" and _is_called_by_a_trace(
            function
        )  # transformers has such functions, too
        if self._runs and home == "installed":
            raise Unseen
        self.add(function.__code__)
        for name, value in read_by(function, self._runs):
            self._token("name", name)
            self.add(value, home)

    def _named_op(self, op: OpOverload[..., Any] | OpOverloadPacket[..., Any]) -> None:
        """Add an operator that code names as `torch.ops.<namespace>.<name>`, by the present definition of its name."""
        self._token("op", str(op))
        name = op.name() if isinstance(op, OpOverload) else op._qualified_op_name
        if name.partition("::")[0] in OWN_OPS:
            return
        definition = OPDEFS.get(name.partition(".")[0])
        if definition is None:
            raise Unseen
        self.add(definition)

    def _op(self, op: CustomOpDef) -> None:
        """Add the functions of a custom operator.

        No trace looks into its gradient: that runs, and may read anything.
        """
        casts = sorted((k, repr(v)) for k, v in vars(op).items() if k.startswith("_autocast"))
        self._token("custom op", op._qualname, op._schema, casts)
        self._all("kernels", (op._init_fn, op._backend_fns))
        self._runs = True
        self._all(
            "rules",
            (
                op._abstract_fn,
                op._setup_context_fn,
                op._backward_fn,
                op._vmap_fn,
                op._torch_dispatch_fns,
            ),
        )

    def _code(self, code: types.CodeType) -> None:
        self._token("code", code.co_code, code.co_exceptiontable, code.co_names, code.co_flags)
        self._token(code.co_varnames, code.co_cellvars, code.co_freevars)
        self._token(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        self.lines.update(repr((code.co_filename, code.co_firstlineno, code.co_linetable)).encode())
        self._all("constants", code.co_consts)

    def _class(self, kind: type) -> None:
        home = home_of(kind.__module__)
        self._token("class", home, kind.__module__, kind.__qualname__)
        if home == "known":
            self._check_known(kind.__module__)
            return self._all(
                "replaced",
                (part for pair in vars(kind).items() if is_foreign(pair[1]) for part in pair),
            )
        if self._runs and home == "installed":
            raise Unseen
        self._all("bases", (type(kind), *kind.__bases__))
        for name, value in vars(kind).items():
            method = isinstance(value, types.FunctionType | classmethod | staticmethod | property)
            if method or not (name in _PYTHONS_OWN or name.startswith("_abc_")):
                self._token("attribute", name)
                self.add(value, "user" if method else home)

    def _tensor(self, tensor: torch.Tensor) -> None:
        """Add a tensor: by its values if code runs, else by the properties that a trace knows."""
        self._token(
            "tensor",
            tensor.dtype,
            tensor.requires_grad,
            tensor.device,
            tensor.layout,
            type(tensor).__qualname__,
        )
        self._token(
            bool(tensor._backward_hooks), bool(getattr(tensor, "_post_accumulate_grad_hooks", None))
        )
        if is_lazy(tensor) or tensor.layout is not torch.strided:
            raise Unseen
        self._token(tuple(tensor.shape), tensor.is_conj(), tensor.is_neg())
        if self._runs or self._tensors:
            self._bytes(tensor)
            return
        storage = self._storages.setdefault(storage_key(tensor), len(self._storages))
        self._token(storage, tensor.stride(), tensor.storage_offset())
        self._all(
            "attributes",
            (part for pair in vars(tensor).items() if pair[0] not in _of_fakes() for part in pair),
        )

    def _bytes(self, tensor: torch.Tensor) -> None:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
        if not plain or tensor.numel() * tensor.element_size() > MOST_BYTES:
            raise Unseen
        self._token(bytes_of(tensor))

    def _instance(self, value: Any, home: Home) -> None:
        """Add an object by its type, its items, and its attributes."""
        self.add(type(value))
        installed = home_of(type(value).__module__) == "installed"
        attributes = {
            name: part
            for name, part in _attributes(value)
            if not (installed and _is_hash(name, part))
            and not (name in _OF_MODULES and isinstance(value, torch.nn.Module) and not part)
        }
        contains = isinstance(value, CONTAINERS)
        if contains:
            self._container(value, home)
        if _hidden(value):
            if (copied := _reduced(value)) is None:
                raise Unseen
            self._all("copied", copied)
        elif not contains and (view := _view(value)) is not None:
            self._buffer(view)
        elif (
            not contains
            and not attributes
            and not hasattr(value, "__dict__")
            and not made_in_python(type(value))
        ):
            raise Unseen
        self._all("attributes", (part for pair in attributes.items() for part in pair))

    def _container(self, value: Any, home: Home) -> None:
        self._token("items", len(value))
        if len(value) > MOST_VALUES:
            raise Unseen
        if isinstance(value, set | frozenset):
            items = [contents_of(i, runs=self._runs, tensors=self._tensors) for i in value]
            contents = [content for content in items if content is not None]
            if len(contents) < len(items):
                raise Unseen
            self._token(*sorted(content.digest for content in contents))
            self.lines.update("".join(sorted(content.lines for content in contents)).encode())
            self.elsewhere |= any(content.elsewhere for content in contents)
        elif isinstance(value, list | tuple):
            for item in value:
                self.add(item, home)
        else:
            for key, item in value.items():
                self.add(key)
                self.add(item)

    def _buffer(self, view: memoryview) -> None:
        if (
            view.nbytes > MOST_BYTES or "O" in view.format
        ):  # of an array of objects the bytes are addresses
            raise Unseen
        self._token(view.format, view.shape, view.tobytes())

    def _check_known(self, module: str | None, name: str = "") -> None:
        """Note that a known function asks the process; raise Unseen if it runs and depends on more than arguments."""
        self.elsewhere |= name in OF_THE_PROCESS
        if self._runs and not is_pure(module or "builtins"):
            raise Unseen

    def _all(self, what: str, values: Iterable[object]) -> None:
        parts = list(values)
        self._token(what, len(parts))
        for part in parts:
            self.add(part)

    def _token(self, *parts: object) -> None:
        text = repr(parts).encode("utf-8", "surrogatepass")
        self.digest.update(len(text).to_bytes(8, "big") + text)


_BY_TYPE: tuple[tuple[type | tuple[type, ...], Callable[[_Walk, Any], None]], ...] = (
    (types.FunctionType, _Walk._function),
    (types.CodeType, _Walk._code),
    (types.MethodType, lambda walk, v: walk._all("method", (v.__func__, v.__self__))),
    (types.BuiltinFunctionType, _Walk._builtin),
    (functools.partial, lambda walk, v: walk._all("partial", (v.func, v.args, v.keywords))),
    (property, lambda walk, v: walk._all("property", (v.fget, v.fset, v.fdel))),
    ((classmethod, staticmethod), lambda walk, v: walk._all(type(v).__name__, (v.__func__,))),
    (types.ModuleType, _Walk._module),
    # A decorator makes a new one of these in every call.
    (
        contextlib._GeneratorContextManager,
        lambda walk, v: walk._all("context", (v.func, v.args, v.kwds)),
    ),
    (weakref.ref, lambda walk, v: walk._all("weak", (v(),))),
    (_INERT, lambda walk, v: walk._token("inert", type(v).__qualname__)),
    (type, _Walk._class),
    (Enum, lambda walk, v: walk._all(f"enum {v.name}", (type(v),))),
    (torch.Tensor, _Walk._tensor),
    (CustomOpDef, _Walk._op),
    ((OpOverload, OpOverloadPacket), _Walk._named_op),
)
"""The way of adding an object, by its type; the first row that fits counts, and other objects are instances."""


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the values of a tensor that has some, in the order of its indexes."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def _is_called_by_a_trace(function: types.FunctionType) -> bool:
    """Return whether Dynamo calls a function while it traces, instead of looking into it."""
    rules = sys.modules.get("torch._dynamo.trace_rules")  # what marks a function loads it
    return "_dynamo_marked_constant" in vars(function) or (
        rules is not None and rules.is_callable_allowed(function)
    )


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of an instance's attributes, in its dictionary and in slots."""
    if isinstance(attributes := getattr(value, "__dict__", None), dict):
        yield from attributes.items()
    for kind in filter(made_in_python, type(value).__mro__):
        slots = [
            name
            for name, slot in vars(kind).items()
            if isinstance(slot, types.MemberDescriptorType)
        ]
        yield from (
            (f"{kind.__qualname__}.{name}", getattr(value, name))
            for name in slots
            if hasattr(value, name)
        )


def _is_hash(name: str, value: object) -> bool:
    """Return whether an attribute keeps a result of `hash`.

    That is another number in each process, because Python seeds the hash of texts anew.
    """
    return name.endswith("_hash") and type(value) is int and abs(value) >= LEAST_HASH


def _module_of(value: object) -> str | None:
    return getattr(value, "__module__", None) or type(value).__module__


def _view(value: Any) -> memoryview | None:
    """Return the bytes of an array or another buffer."""
    try:
        return memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None


@functools.cache
def _of_fakes() -> frozenset[str]:
    """Return the attributes that every fake tensor has."""
    with FakeTensorMode():
        return frozenset(
            (*vars(torch.nn.Parameter(torch.empty(1))), *vars(torch.empty(1)), "_is_param")
        )


def _hidden(value: object) -> list[str]:
    """Return the classes in C, by name, that hide content of an object from its attributes.

    Arrays and `threading.local` do not.
    """
    shown = (*CONTAINERS, threading.local)
    kinds = [k for k in type(value).__mro__[:-1] if not made_in_python(k) and k not in shown]
    return [k.__qualname__ for k in kinds if k in BASES or home_of(k.__module__) == "known"]


def _reduced(value: Any) -> list[object] | None:
    """Return the parts from which an object of Python's own library is copied; None if it cannot be."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # of whatever kind: what cannot be copied counts by identity
        return None
    if isinstance(reduced, str):
        return [reduced]
    return [*reduced[:3], *(list(items) for items in reduced[3:5] if items is not None)]


def _is_plain(value: object) -> bool:
    return type(value) in PLAIN or (
        type(value) is tuple and len(value) <= 16 and all(type(item) in PLAIN for item in value)
    )
