"""Find the names that a function writes beside its local variables.

Caches and counters are such, and values that are loaded on first use.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import types
from collections.abc import Iterator
from itertools import islice

MUTATORS = frozenset({
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert", "intersection_update", "pop",
    "popitem", "popleft", "remove", "reverse", "setdefault", "sort", "symmetric_difference_update", "update",
})  # fmt: skip
"""The methods that change containers."""


OF_THE_PROCESS = frozenset({
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "now", "utcnow", "today", "getpid",
    "uuid1", "uuid4", "mkdtemp", "mkstemp", "TemporaryDirectory", "NamedTemporaryFile", "strftime",
})  # fmt: skip
"""The functions whose results differ by process on purpose: times, and names of runs and of folders."""


def names_of_the_process(module: types.ModuleType) -> frozenset[str]:
    """Return the names that a module sets to a time, or to a name of the process.

    They are "name" for a variable, and ".name" for an attribute.
    """
    try:
        tree = ast.parse(
            "".join(linecache.getlines(str(vars(module).get("__file__"))))
        )  # inspect asks the module for names
    except SyntaxError:
        return frozenset()
    assigned: set[str] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and node.value is not None
            and _asks_the_process(node.value)
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned.update(name for target in targets for name in islice(_names(target), 1))
    return frozenset(assigned)


def _asks_the_process(value: ast.expr) -> bool:
    called = [node.func for node in ast.walk(value) if isinstance(node, ast.Call)]
    return any(getattr(func, "attr", getattr(func, "id", "")) in OF_THE_PROCESS for func in called)


def names_written(function: types.FunctionType, *, makes: bool = False) -> frozenset[str]:
    """Return the names that a function changes beside its local variables.

    They are "name" for a global, ".name" for an attribute, and "(name)" for a variable of a function around it. There
    are none if its source is not known. If the function `makes` an object, the object's attributes are left out.
    """
    return _names_written(function.__code__, makes)


@functools.lru_cache(maxsize=4096)
def _names_written(code: types.CodeType, makes: bool) -> frozenset[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return frozenset()
    self_name = code.co_varnames[:1] if makes else ()
    written: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                written.update(names)
                continue
            case ast.Subscript(ctx=ast.Store() | ast.Del()):
                chain = _names(node.value)
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                chain = _names(node)
            case ast.Call(func=ast.Attribute(value=owner, attr=method)) if method in MUTATORS:
                chain = _names(owner)
            case _:
                continue
        parts = tuple(chain)
        if parts[-1:] != self_name or not self_name:
            written.update(parts)
    return frozenset(
        (written - _locals(code)) | {f"({name})" for name in written.intersection(code.co_freevars)}
    )


def _locals(code: types.CodeType) -> set[str]:
    """Return the local variables of some code and of the functions in it."""
    inner = [
        name
        for part in code.co_consts
        if isinstance(part, types.CodeType)
        for name in _locals(part)
    ]
    return {*code.co_varnames, *code.co_cellvars, *code.co_freevars, *inner}


def _names(node: ast.expr) -> Iterator[str]:
    """Yield the variable and the attributes in a chain such as `self.cache[key].parts`."""
    while True:
        match node:
            case ast.Name(id=name):
                yield name
                return
            case ast.Attribute(value=inner, attr=name):
                yield f".{name}"
                node = inner
            case ast.Subscript(value=inner):
                node = inner
            case _:
                return
