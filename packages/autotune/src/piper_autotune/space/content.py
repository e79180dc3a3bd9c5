"""Digest the code of a strategy function, so that two spaces can be told apart, in another process too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, CodeType
from typing import Any

PLAIN = (bool, int, float, str, type(None))


def content(thing: Any) -> list[object]:
    """Return the code of a function or of a partial, with the plain values that it uses."""
    if isinstance(thing, partial):
        return [
            *content(thing.func),
            *filter(_plain, thing.args),
            *(kv for kv in sorted(thing.keywords.items()) if _plain(kv)),
        ]
    return _of(thing)


def _of(function: Any) -> list[object]:
    code = getattr(function, "__code__", None)
    if code is None:
        return [getattr(function, "__qualname__", type(function).__qualname__), *_held(function)]
    cells = [_inside(cell) for cell in function.__closure__ or ()]
    used = [function.__globals__.get(name) for name in code.co_names]
    values = [
        *cells,
        *used,
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ]
    return [*_code(code), *(v for v in values if _plain(v))]


def _held(value: object) -> Iterator[object]:
    """Yield the plain values of a dataclass's fields, with the names of fields and the keys of mappings."""
    if _plain(value):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (*_held(key), *_held(item))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield field.name
            yield from _held(getattr(value, field.name))


def _inside(cell: CellType) -> object:
    """Return the value of a variable of a function around; "unset" for one that has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return "unset"


def _code(code: CodeType) -> list[object]:
    inner = [
        part
        for c in code.co_consts
        for part in (_code(c) if isinstance(c, CodeType) else [c] if _plain(c) else [])
    ]
    return [code.co_code, code.co_names, code.co_varnames, *inner]


def _plain(value: object) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple | list) and all(map(_plain, value)))
