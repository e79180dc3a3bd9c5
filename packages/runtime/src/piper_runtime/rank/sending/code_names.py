"""Find the names that code uses, and the owner of a module's code: the user, another installed package, or known.

Known are torch, Piper and Python's own library.
"""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

import torch

from piper_ir.tools import PACKAGES

Home = Literal["user", "installed", "known"]

_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_TORCH = f"{Path(torch.__file__).parent}/"
_STDLIB = f"{sysconfig.get_paths()['stdlib']}/"

OF_TORCH = ("piper", "functorch", "torchgen")
"""The further packages that count by name: Piper, and packages that torch installs beside itself."""


@dataclass(frozen=True)
class Import:
    """Hold a statement in a function that imports.

    Attributes:
        name: the module as it is written, without dots before it.
        level: the number of these dots.
        items: the names imported from the module; empty for `import a.b`.
    """

    name: str
    level: int
    items: tuple[str, ...]


def cells(function: types.FunctionType) -> Iterator[object]:
    """Yield the variables of the functions around this one; "unset" for one that has no value yet."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield "unset"


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[tuple[str, ...], tuple[Import, ...], frozenset[str]]:
    """Return the names that some code uses, with the names in its inner functions.

    They are the globals that it reads, the modules that it imports, and all its names. A text may be a name too, as in
    getattr(settings, "depth").
    """
    read: dict[str, None] = {}
    imported: dict[Import, None] = {}
    pushed: list[object] = []
    names = set(code.co_names) | {
        constant for constant in code.co_consts if isinstance(constant, str)
    }
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL:
            read[instruction.argval] = None
        elif instruction.opname == "IMPORT_NAME":
            level, items = pushed[-2:]  # the compiler pushes both right before
            imported[
                Import(
                    instruction.argval,
                    int(str(level)),
                    tuple(items) if isinstance(items, tuple) else (),
                )
            ] = None
        elif instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            pushed.append(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            read |= dict.fromkeys(inner[0])
            imported |= dict.fromkeys(inner[1])
            names |= inner[2]
    return tuple(read), tuple(imported), frozenset(names)


def full_name(request: Import, space: Mapping[str, object]) -> str:
    """Return the full name of the module that an import in a module with these variables names.

    Dots before the name count from the package of that module.
    """
    if not request.level:
        return request.name
    package = str(space.get("__package__") or space.get("__name__") or "").split(".")
    return ".".join(
        [*package[: len(package) - request.level + 1], *([request.name] if request.name else [])]
    )


def home_of(name: object) -> Home:
    """Return the owner of a module's code."""
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or not isinstance(name, str):
        return "user"
    spec = getattr(module, "__spec__", None)
    return _home_of(name, getattr(module, "__file__", None), getattr(spec, "origin", None))


@functools.lru_cache(maxsize=4096)
def _home_of(name: str, file: str | None, origin: str | None) -> Home:
    top = name.partition(".")[0]
    if top in PACKAGES or top in OF_TORCH or origin in ("built-in", "frozen"):
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
    return (
        isinstance(value, types.FunctionType)
        and home_of(value.__globals__.get("__name__")) != "known"
    )


def function_of(value: object) -> object:
    """Return the function behind an attribute of a class."""
    match value:
        case property():
            return value.fget
        case classmethod() | staticmethod():
            return value.__func__
        case _:
            return value


def origin_of(name: str) -> str | None:
    """Return the file that `import name` would load in a new process, found without importing."""
    path = None
    spec = None
    parts = name.split(".")
    for depth in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec.origin if spec is not None else None
