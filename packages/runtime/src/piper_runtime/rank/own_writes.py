"""Find the names that a function writes beside its local variables: caches, counters, and what is loaded on first use."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator

MUTATORS = frozenset({
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "insert", "intersection_update", "pop",
    "popitem", "popleft", "remove", "reverse", "setdefault", "sort", "symmetric_difference_update", "update",
})  # fmt: skip
"""The methods that change containers."""


def names_written(function: types.FunctionType) -> frozenset[str]:
    """Return the globals ("name") and attributes (".name") that a function changes; none where its source is not known."""
    return _names_written(function.__code__)


@functools.lru_cache(maxsize=4096)
def _names_written(code: types.CodeType) -> frozenset[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Global(names=names):
                found.update(names)
            case ast.Subscript(ctx=ast.Store() | ast.Del()):
                found.update(_names(node.value))
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                found.update(_names(node))
            case ast.Call(func=ast.Attribute(value=owner, attr=method)) if method in MUTATORS:
                found.update(_names(owner))
    return frozenset(found - _locals(code))


def _locals(code: types.CodeType) -> set[str]:
    """Return the local variables of some code and of the functions in it."""
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _locals(part)]
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
