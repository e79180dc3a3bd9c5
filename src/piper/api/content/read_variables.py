"""Find the values that code reads beside its arguments: variables around it, globals, and attributes of modules.

Whose a module is decides how far it is looked into: the user's, another installed package's, or known: torch's, Piper's
and Python's own.
"""

from __future__ import annotations

import builtins
import os
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from piper_ir.tools import PACKAGES
from piper_runtime.rank import Home, Import, cells, full_name, home_of, is_foreign, names_in

PURE = PACKAGES | {
    "abc", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses", "enum", "fractions", "functools", "itertools",
    "math", "numbers", "operator", "piper", "string", "torch", "types", "typing", "_abc", "_collections", "_collections_abc",
    "_functools", "_operator",
}  # fmt: skip
"""The packages whose functions depend on nothing but their arguments; `IMPURE` lists exceptions."""
IMPURE = ("torch.serialization", "torch.hub", "torch.distributed", "torch.cuda", "torch.storage", "torch.jit")  # fmt: skip
ANYTHING = frozenset({"eval", "exec", "globals"})
"""The built-in functions through which traced code may read variables that it does not name."""
READERS = ANYTHING | {"open", "input", "locals", "vars", "compile", "__import__", "id", "hash"}
"""The built-in functions whose result depends on more than their arguments."""
OF_THE_PROCESS = frozenset({
    "find_spec", "get_device_capability", "get_device_name", "getrecursionlimit", "hash", "id", "is_available", "is_initialized",
    "libc_ver", "mac_ver", "machine", "node", "platform", "processor", "release", "system", "uname", "win32_ver",
})  # fmt: skip
"""The functions of Python and torch that a trace follows, and that say something else in another process or machine."""
ASKS = ("from_file", "get_", "is_", "are_", "has_", "current_", "initial_seed", "device_count", "cpu_count")  # fmt: skip
"""The beginnings of the names of torch's functions that read a file, or say how a process or machine is set up."""
REFLECTIVE = frozenset({"getattr", "hasattr", "vars", "__dict__", "__getattribute__", "attrgetter"})
"""The names in code that may read attributes whose names it does not say."""


class Unseen(Exception):
    """Report that a value may depend on something that cannot be looked into."""


def read_by(function: types.FunctionType, runs: bool) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the variables that a function reads, and of the attributes of modules that it reads.

    Raises Unseen if it may read more.
    """
    read, imported, names = names_in(function.__code__)
    space = function.__globals__
    home = home_of(space.get("__name__"))
    values = list(zip(function.__code__.co_freevars, cells(function), strict=True))
    values += [(name, space[name]) for name in read if name in space]
    unbound = [name for name in read if name not in space]
    if home == "user" and not (READERS if runs else ANYTHING).isdisjoint(unbound):
        raise Unseen
    asked = OF_THE_PROCESS if home == "user" else frozenset()
    known = vars(builtins)
    values += [(n, known[n]) for n in unbound if n in known and (n in asked or _is_added(n))]
    for request in imported:
        values += _imported(request, space, runs)
    reads = _ModuleReads(names, runs, asked)
    if not runs and "modules" in names and home == "installed":
        reads.done.add(id(sys))  # the modules found there are the rest of the package behind it
    for name, value in values:
        if isinstance(value, types.ModuleType):
            yield from reads.of(name, value)
        else:
            yield name, value


def _is_added(name: str) -> bool:
    """Return whether someone has put a name among the built-in ones, or another value in the place of one."""
    value = vars(builtins)[name]
    if value is Ellipsis or value is NotImplemented:
        return False
    return not callable(value) or home_of(getattr(value, "__module__", None)) != "known"


def _imported(
    request: Import, space: Mapping[str, object], runs: bool
) -> Iterator[tuple[str, types.ModuleType]]:
    """Yield the modules that a statement in a function imports.

    Raises Unseen for one of the user's that is not imported yet, since its code is not known before it runs.
    """
    base = full_name(request, space)
    module = sys.modules.get(base)
    if module is None:
        known = base.partition(".")[0] in sys.stdlib_module_names | PACKAGES | {"torch", "piper"}
        if runs or (not known and home_of(space.get("__name__")) == "user"):
            raise Unseen
        return
    first = base.partition(".")[0]
    if not request.items and first in sys.modules:  # import a.b binds a
        yield first, sys.modules[first]
    yield base, module
    for item in request.items:
        inner = sys.modules.get(f"{base}.{item}")
        if inner is not None:
            yield f"{base}.{item}", inner
        elif item != "*" and not hasattr(module, item) and home_of(module.__name__) == "user":
            raise Unseen


@dataclass
class _ModuleReads:
    """Find the attributes of modules that a function may read.

    Attributes:
        names: the names in its code.
        runs: whether it runs, and is not traced.
        asked: the names of functions of known modules that count.
        done: the ids of modules that need no look any more.
    """

    names: frozenset[str]
    runs: bool
    asked: frozenset[str]
    done: set[int] = field(default_factory=set)

    def of(self, path: str, module: types.ModuleType) -> Iterator[tuple[str, object]]:
        """Yield (path, value) of the attributes of a module, and of its modules that the code names.

        Raises Unseen if they are not known.
        """
        if id(module) in self.done:
            return
        self.done.add(id(module))
        home = home_of(module.__name__)
        for name in self._read(module, home):
            value = getattr(module, name, None)
            if self.runs and home == "known" and callable(value) and name.startswith(ASKS):
                raise Unseen
            if isinstance(value, types.ModuleType):
                if name in self.names:
                    yield from self.of(f"{path}.{name}", value)
            elif home != "known" or self._counts(name, value):
                yield f"{path}.{name}", value
            elif value is os.getenv:
                yield "os.environ", os.environ

    def _read(self, module: types.ModuleType, home: Home) -> list[str]:
        """Return the names of a module's attributes that the code may read; raise Unseen if they are not known."""
        reflects = bool(self.names & REFLECTIVE)
        if module is torch.ops and reflects:  # in any namespace
            raise Unseen
        if home == "known" and (
            (module is sys and "modules" in self.names)
            or (self.runs and not is_pure(module.__name__))
        ):
            raise Unseen
        if home == "user" and "__getattr__" in vars(module):
            raise Unseen
        known = vars(module).keys() | (vars(type(module)).keys() - vars(types.ModuleType).keys())
        if home == "known" and "__dir__" in vars(module):
            known |= set(dir(module))  # it imports names on first use, and lists them all
        read = self.names & known
        if home == "user" and reflects:
            read |= {name for name in vars(module) if not name.startswith("__")}
        return sorted(read)

    def _counts(self, name: str, value: object) -> bool:
        """Return whether an attribute of a known module counts: data, classes, functions of others, and `asked`."""
        return (
            self.runs
            or isinstance(value, type)
            or not callable(value)
            or is_foreign(value)
            or name in self.asked
        )


def is_pure(module: str) -> bool:
    """Return whether functions of a known module depend on nothing but their arguments."""
    return module.partition(".")[0] in PURE and not module.startswith(IMPURE)
