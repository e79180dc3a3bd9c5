"""Find what code reads beside its arguments: variables around it, globals, and what modules hold.

Whose a module is decides how far it is looked into: the user's, another installed package's, or known: torch's, Piper's
and Python's own.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from piper_ir.tools import PACKAGES

Home = Literal["user", "installed", "known"]

_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_TORCH = f"{Path(torch.__file__).parent}/"
_STDLIB = f"{sysconfig.get_paths()['stdlib']}/"

PURE = PACKAGES | {
    "abc", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses", "enum", "fractions", "functools", "itertools",
    "math", "numbers", "operator", "piper", "string", "torch", "types", "typing", "_abc", "_collections", "_collections_abc",
    "_functools", "_operator",
}  # fmt: skip
"""The packages whose functions depend on nothing but their arguments; `IMPURE` lists exceptions."""
IMPURE = ("torch.serialization", "torch.hub", "torch.distributed", "torch.cuda", "torch.storage", "torch.jit")
READERS = frozenset({"open", "input", "globals", "locals", "vars", "eval", "exec", "compile", "__import__", "id", "hash"})
"""The built-in functions whose result depends on more than their arguments."""
REFLECTIVE = frozenset({"getattr", "hasattr", "vars", "__dict__", "__getattribute__", "attrgetter"})
"""The names in code that may read attributes whose names it does not say."""


class Unseen(Exception):
    """Report that a value may depend on something that cannot be looked into."""


def cells(function: types.FunctionType) -> Iterator[object]:
    """Yield the variables of the functions around this one; "unset" for one that has no value yet."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield "unset"


def read_by(function: types.FunctionType, runs: bool) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the variables that a function reads, and of what it reads of modules.

    Raises Unseen where it may read more.
    """
    read, imported, names = _names(function.__code__)
    space = function.__globals__
    package = space.get("__package__") or ""
    values = list(zip(function.__code__.co_freevars, cells(function), strict=True))
    values += [(name, space[name]) for name in read if name in space]
    if runs and ("from_file" in names or any(name in READERS and name not in space for name in read)):
        raise Unseen
    for name in imported:
        modules = {full: sys.modules[full] for full in (name, f"{package}.{name}") if full in sys.modules}
        if runs and not modules:
            raise Unseen
        values += modules.items()
    done: set[int] = set()
    for name, value in values:
        if isinstance(value, types.ModuleType):
            yield from _read_of(name, value, names, done, runs)
        else:
            yield name, value


def _read_of(
    path: str, module: types.ModuleType, names: frozenset[str], done: set[int], runs: bool
) -> Iterator[tuple[str, object]]:
    """Yield the attributes of a module that code with these names may read. Raises Unseen where they are not known."""
    if id(module) in done:
        return
    done.add(id(module))
    home = home_of(module.__name__)
    if module is torch.ops and names & REFLECTIVE:  # in any namespace
        raise Unseen
    if home == "known" and ((module is sys and "modules" in names) or (runs and not is_pure(module.__name__))):
        raise Unseen
    known = vars(module).keys() | vars(type(module)).keys()
    if home == "known" and "__dir__" in vars(module):  # it imports names on first use, and lists them all
        known |= set(dir(module))
    read = names & known
    if home == "user" and names & REFLECTIVE:
        read |= {name for name in vars(module) if not name.startswith("__")}
    for name in sorted(read):
        value = getattr(module, name, None)
        if isinstance(value, types.ModuleType):
            if name in names:
                yield from _read_of(f"{path}.{name}", value, names, done, runs)
        elif home != "known" or runs or isinstance(value, type) or not callable(value) or is_foreign(value):
            yield f"{path}.{name}", value
        elif value is os.getenv:
            yield "os.environ", os.environ


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]:
    """Return the names that some code uses, with those of the functions in it.

    They are the globals that it reads, the modules that it imports, and all its names. A text may be a name too, as in
    getattr(settings, "depth").
    """
    read: dict[str, None] = {}
    imported: dict[str, None] = {}
    names = set(code.co_names) | {constant for constant in code.co_consts if isinstance(constant, str)}
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL:
            read[instruction.argval] = None
        elif instruction.opname == "IMPORT_NAME":
            imported[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            read |= dict.fromkeys(inner[0])
            imported |= dict.fromkeys(inner[1])
            names |= inner[2]
    return tuple(read), tuple(imported), frozenset(names)


def home_of(name: object) -> Home:
    """Return whose the code of a module is."""
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or not isinstance(name, str):
        return "user"
    spec = getattr(module, "__spec__", None)
    return _home_of(name, getattr(module, "__file__", None), getattr(spec, "origin", None))


@functools.lru_cache(maxsize=4096)
def _home_of(name: str, file: str | None, origin: str | None) -> Home:
    top = name.partition(".")[0]
    if top in PACKAGES or top == "piper" or origin in ("built-in", "frozen"):
        return "known"
    if file is None:
        return "user"
    if file.startswith(_TORCH):
        return "known"
    if not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts):
        return "installed"
    return "known" if file.startswith(_STDLIB) else "user"


def is_foreign(value: object) -> bool:
    """Return whether a function that torch, Piper or Python's library holds was put there by someone else."""
    return isinstance(value, types.FunctionType) and home_of(value.__globals__.get("__name__")) != "known"


def is_pure(module: str) -> bool:
    """Return whether functions of a known module depend on nothing but their arguments."""
    return module.partition(".")[0] in PURE and not module.startswith(IMPURE)
