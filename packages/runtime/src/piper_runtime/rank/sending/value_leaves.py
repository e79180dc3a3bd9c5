"""Take a value apart into leaves that can be compared in another process, each with a text for people."""

from __future__ import annotations

import argparse
import contextvars
import datetime
import decimal
import fractions
import functools
import hashlib
import pathlib
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

import torch

from piper_runtime.rank.sending.code_names import cells, home_of, names_in


class Leaf(NamedTuple):
    """Hold a text for people, and a digest of the content; the digest is "" if only the text is compared."""

    text: str
    digest: str


LeavesByPath = dict[str, Leaf]
"""The type of leaves by path in the value, such as "[key].attribute"."""
MOST_DEPTH, MOST_LEAVES = 8, 2000
"""The depth and the number of the leaves of one value; leaves beyond are not compared."""
MOST_BYTES = 2**20
"""The most bytes of an array or text that are read; a larger one is read at its ends, half as many bytes each."""
MOST_TEXT = 60
MOST_ITEMS = 200_000
"""The most items of a list of numbers or texts that are read."""
_OF_PYTEST = "@pytest_ar"
"""A name in code whose assertions pytest has rewritten, so that it differs from that of another process."""

_PLAIN = (
    bool, int, float, complex, str, bytes, bytearray, type(None), type(...), range, slice, torch.dtype, torch.device, torch.Size,
    datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, fractions.Fraction, pathlib.PurePath, re.Pattern,
)  # fmt: skip
_PARTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (types.MethodType, ("__func__", "__self__")),
    (functools.partial, ("func", "args", "keywords")),
    (property, ("fget", "fset")),
)
"""The types of values that are nothing but their parts, with the attributes that hold these."""
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace, threading.local)


def leaves_of(value: object, written: Set[str] = frozenset()) -> LeavesByPath:
    """Return the leaves of a value, without attributes that have a name in `written`."""
    return dict(islice(_leaves(value, "", written, ()), MOST_LEAVES))


def _leaves(
    value: Any, path: str, written: Set[str], around: tuple[int, ...]
) -> Iterator[tuple[str, Leaf]]:
    """Yield the leaves of a value at a path; the objects `around` it are not visited again."""
    if id(value) in around or len(around) > MOST_DEPTH:
        return
    around = (*around, id(value))
    if (leaf := _single(value)) is not None:
        yield path, leaf
        return
    inner = _wrapped(value)
    if inner is None:
        inner = []
        match value:
            case object() if (view := _view(value)) is not None:
                yield path, _buffer(value, view)
                inner = _beside_buffer(value, view)
            case types.FunctionType():
                yield from _function(value, path, written, inner)
            case Mapping():
                inner = [(f"[{_short(repr(key))}]", item) for key, item in _items(value)]
                inner.append((" (length)", len(value)))
            case list() | tuple() | deque():
                yield from _sequence(value, path, inner)
            case set() | frozenset():
                items = [
                    repr(sorted((p, leaf.digest) for p, leaf in _leaves(item, "", written, around)))
                    for item in value
                ]
                yield path, Leaf(f"a set of {len(value)}", _digest(repr(sorted(items)).encode()))
            case _:
                yield path, _leaf(f"of {type(value).__module__}.{type(value).__qualname__}")
                inner = _of_object(value, written)
    for step, item in inner:
        yield from _leaves(item, path + step, written, around)


def _single(value: Any) -> Leaf | None:
    """Return the leaf of a value that has no parts; None for another value."""
    match value:
        case Enum():
            return _leaf(str(value))
        case object() if isinstance(value, _PLAIN):
            return _leaf(repr(value))
        case torch.Tensor():
            return _tensor(value)
        case types.BuiltinFunctionType():
            return _leaf(f"the function {value.__module__}.{value.__qualname__}")
        case type():
            return _leaf(f"the class {value.__module__}.{value.__qualname__}")
    return None


def _wrapped(value: Any) -> list[tuple[str, object]] | None:
    """Return the parts of a value that is nothing but these; None for another value."""
    for kind, names in _PARTS:
        if isinstance(value, kind):
            return [(f".{name}", getattr(value, name)) for name in names]
    if isinstance(value, weakref.ref):
        return [("()", value())]
    if isinstance(value, contextvars.ContextVar):
        return [(".get()", value.get(None))]
    if isinstance(value, classmethod | staticmethod):
        return [("", value.__func__)]
    return None


def _beside_buffer(value: Any, view: memoryview) -> list[tuple[str, object]]:
    """Return the attributes of a buffer, and its items if they are objects."""
    attributes = getattr(value, "__dict__", {}).items()
    parts: list[tuple[str, object]] = [(f".{name}", item) for name, item in attributes]
    if "O" in view.format and hasattr(value, "tolist"):
        parts.append(("[:]", value.tolist()))
    return parts


def _sequence(
    value: Sequence[object], path: str, inner: list[tuple[str, object]]
) -> Iterator[tuple[str, Leaf]]:
    """Yield the leaf of a sequence of plain values; add the items of another one, and the length, to `inner`."""
    if all(isinstance(item, _PLAIN) for item in islice(value, MOST_ITEMS)):
        yield path, _leaf(repr(list(islice(value, MOST_ITEMS))))
    else:
        inner += [(f"[{i}]", item) for i, item in enumerate(islice(value, MOST_LEAVES))]
    inner.append((" (length)", len(value)))


def _of_object(value: object, written: Set[str]) -> list[tuple[str, object]]:
    """Return the tensors of a module, and the attributes of a user's object or a plain namespace."""
    if isinstance(value, torch.nn.Module):
        return [(f".{name}", t) for name, t in value.state_dict(keep_vars=True).items()]
    if isinstance(value, _NAMESPACES) or home_of(type(value).__module__) == "user":
        attributes = ((f".{name}", item) for name, item in _attributes(value))
        return [(name, item) for name, item in attributes if name not in written]
    return []


def _function(
    value: types.FunctionType, path: str, written: Set[str], inner: list[tuple[str, object]]
) -> Iterator[tuple[str, Leaf]]:
    """Yield the leaf of a function: its name, and the code of a user's function.

    Adds its default arguments, its attributes, and the variables of functions around it, to `inner`.
    """
    home, text = (
        home_of(value.__globals__.get("__name__")),
        f"the function {value.__module__}.{value.__qualname__}",
    )
    compared = home == "user" and _OF_PYTEST not in names_in(value.__code__)[2]
    yield path, Leaf(text, _digest(_code(value.__code__).encode()) if compared else "")
    if home == "user":
        inner += [
            (f"(default {index})", item) for index, item in enumerate(value.__defaults__ or ())
        ]
        inner += [(f"({name})", item) for name, item in (value.__kwdefaults__ or {}).items()]
        around = zip(value.__code__.co_freevars, cells(value))
        marks = (
            (name, item)
            for name, item in vars(value).items()
            if not name.startswith("__") and f".{name}" not in written
        )
        inner += [(f".{name}", item) for name, item in marks]
        inner += [
            (f"(variable {name})", item) for name, item in around if f"({name})" not in written
        ]


def _code(code: types.CodeType) -> str:
    constants = [
        _code(part) if isinstance(part, types.CodeType) else _constant(part)
        for part in code.co_consts
    ]
    return repr(
        (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, constants)
    )


def _constant(value: object) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _tensor(value: torch.Tensor) -> Leaf:
    look = f"a tensor of {value.dtype} {list(value.shape)}"
    if (
        value.layout is not torch.strided
        or value.is_meta
        or type(value) not in (torch.Tensor, torch.nn.Parameter)
    ):
        return _leaf(look)
    raw = (
        value.detach()
        .resolve_conj()
        .resolve_neg()
        .cpu()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
    )
    return Leaf(look, _digest(_ends(raw)))


def _view(value: object) -> memoryview | None:
    """Return the memory of an array, a number of numpy's, or another buffer."""
    try:
        return memoryview(value)  # type: ignore[arg-type]  # raises without a buffer
    except (TypeError, ValueError, BufferError):
        return None


def _buffer(value: object, view: memoryview) -> Leaf:
    """Return the leaf of a buffer; of one of objects, or a large one with gaps, its look alone is compared."""
    look = f"a {type(value).__name__} of {view.format!r} {list(view.shape or ())}"
    if "O" in view.format or not (view.c_contiguous or view.nbytes <= MOST_BYTES):
        return _leaf(look)
    return Leaf(
        _short(repr(value)) if not view.shape else look,
        _digest(_ends(view.cast("B") if view.c_contiguous else view.tobytes())),
    )


def _ends(data: Any) -> bytes:
    if len(data) <= MOST_BYTES:
        return bytes(data)
    return bytes(data[: MOST_BYTES // 2]) + bytes(data[-MOST_BYTES // 2 :])


def _items(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    try:
        return list(islice(value.items(), MOST_LEAVES))
    except (
        Exception
    ):  # of whatever kind: of another package's container, which is then compared by its length
        return []


def _attributes(value: Any) -> Iterator[tuple[str, object]]:
    """Yield an object's attributes, without the values that a `cached_property` keeps."""
    kinds = type(value).__mro__
    slots = [
        name for kind in kinds for name in vars(kind).get("__slots__", ()) if isinstance(name, str)
    ]
    for name, item in (
        *getattr(value, "__dict__", {}).items(),
        *((n, getattr(value, n)) for n in slots if hasattr(value, n)),
    ):
        if not any(isinstance(vars(kind).get(name), functools.cached_property) for kind in kinds):
            yield name, item


def _leaf(text: str) -> Leaf:
    return Leaf(_short(text), _digest(text.encode("utf-8", "surrogatepass")))


def _short(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 3]}..."


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
