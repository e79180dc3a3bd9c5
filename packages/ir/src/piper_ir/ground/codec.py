"""Write the frozen dataclasses of the IR as JSON, and read them back strictly.

Unknown keys, wrong types and truncated text are errors. A dataclass becomes an object with a key per field that differs
from its default. In a union of dataclasses (ops, directives) the key "is" names the class. An Affine is written as [a,
b]. Top-level documents carry "format" (the class) and "version".

`register` names a document class that is written in place of another class. A Graph has one in
`piper_ir.graph.graph_json`, which must be imported before graphs are written or read.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from piper_ir.ground.errors import FormatError, PiperError
from piper_ir.ground.sizes import Affine

T = TypeVar("T")
D = TypeVar("D")
FORMAT_VERSION = 1

_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}

_PLAIN = frozenset({str, int, float, bool, type(None)})

Encoder = Callable[[Any], Any]
DecodeValue = Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class _DocumentForm:
    """Name the document class that is written in place of another class, and the functions that convert both ways."""

    document: type
    to_document: Callable[[Any], Any]
    from_document: Callable[[Any], Any]


_DOCUMENT_FORMS: dict[type, _DocumentForm] = {}
_PIECES: dict[type, Callable[[Any], Iterator[str]]] = {}


def register(
    kind: type[T], document: type[D], to_document: Callable[[T], D], from_document: Callable[[D], T]
) -> None:
    """Let `dumps` and `loads` write and read objects of class `kind` as documents of another class.

    The document's class attribute FORMAT is the name of the format, by default the class name.
    """
    _DOCUMENT_FORMS[kind] = _DocumentForm(document, to_document, from_document)


def register_pieces(kind: type[T], pieces: Callable[[T], Iterator[str]]) -> None:
    """Let documents of a class be written by a function that is quicker than `encode`, and yields the same text."""
    _PIECES[kind] = pieces


def dumps(document: Any, indent: int | None = None) -> str:
    """Return a dataclass as a JSON document with its format and version; the same object gives the same text."""
    if indent is None:
        return "".join(text_pieces(document))
    return json.dumps(_content(document), indent=indent)


def text_pieces(document: Any) -> Iterator[str]:
    """Return the text of `dumps` in pieces, for documents that are too large to join."""
    pieces = _PIECES.get(type(document))
    if pieces is not None:
        return pieces(document)
    return iter((json.dumps(_content(document), separators=(",", ":")),))


def _content(document: Any) -> dict[str, Any]:
    """Return the JSON object of a document."""
    form = _DOCUMENT_FORMS.get(type(document))
    if form is not None:
        document = form.to_document(document)
    head = {"format": _format(type(document)), "version": FORMAT_VERSION}
    return {**head, **encode(document)}


def loads(kind: type[T], text: str, where: str = "text") -> T:
    """Return the document of the given class that a text holds.

    Raises FormatError, which names the place (a path of keys) and the expected content, and CompileError if a value of
    a Graph has two writers.
    """
    form = _DOCUMENT_FORMS.get(kind)
    written: Any = kind if form is None else form.document
    document = decode(written, read_document(_format(written), FORMAT_VERSION, text, where), where)
    return cast(T, document if form is None else form.from_document(document))


def read_document(name: str, version: int, text: str, where: str) -> dict[str, Any]:
    """Return the content of a JSON document without its format and version; raise FormatError if these differ."""
    data = read_json(text, where)
    if not isinstance(data, dict):
        raise FormatError(f"{where}: a JSON object is expected, found {_kind(data)}")
    format_name, number = data.pop("format", None), data.pop("version", None)
    if format_name != name:
        raise FormatError(f'{where}: "format" is {format_name!r}; a {name} is expected here')
    if type(number) is not int or number != version:
        raise FormatError(f'{where}: "version" is {number!r}; this Piper reads version {version}')
    return data


def read_json(text: str, where: str) -> Any:
    """Return the content of a JSON text; raise FormatError if it is invalid, with a hint when its end is missing."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as e:
        rest = text[e.pos :].strip()
        within = any(word.startswith(rest) for word in ("true", "false", "null"))
        cut = within or e.pos >= len(text.rstrip()) - 1 or e.msg.startswith("Unterminated")
        hint = " (is the file truncated?)" if cut else ""
        raise FormatError(
            f"{where}: not JSON: {e.msg} at line {e.lineno} column {e.colno}{hint}"
        ) from None
    except (RecursionError, ValueError) as e:  # nested too deep; an integer of thousands of digits
        raise FormatError(f"{where}: not JSON that this Piper writes: {e}") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a JSON text, for `object_pairs_hook`; raise FormatError for a key that it has twice."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise FormatError(f"the key {twice!r} stands twice in one object; leave one of them out")
    return unique


def _format(kind: type) -> str:
    """Return the format name of a document class: its FORMAT if it stands for another class, else its name."""
    name: str = getattr(kind, "FORMAT", kind.__name__)
    return name


def encode(value: Any) -> Any:
    """Return a plain JSON value for a dataclass, container or scalar of the IR."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    return _encoder(kind)(value)


def decode(kind: Any, value: Any, where: str) -> Any:
    """Return the value of the expected type from its JSON value: the inverse of `encode`."""
    return _decoder(kind)(value, where)


def tagged(value: Any) -> dict[str, Any]:
    """Return a dataclass with its class name under "is", for members of an open or closed union."""
    return {"is": type(value).__name__, **encode(value)}


@cache
def _encoder(kind: type) -> Encoder:
    if kind is Affine:
        return lambda v: [v.a, v.b]
    if is_dataclass(kind):
        return _dataclass_encoder(kind)
    if issubclass(kind, Mapping):
        return lambda v: {str(k): encode(x) for k, x in v.items()}
    if issubclass(kind, Sequence):
        return lambda v: [encode(x) for x in v]
    raise TypeError(f"no JSON form for {kind.__name__}")


def _dataclass_encoder(kind: type) -> Encoder:
    hints = get_type_hints(kind)
    written: list[tuple[str, Any, bool]] = []
    for f in _written_fields(kind, hints):
        default = (
            f.default
            if f.default is not MISSING
            else f.default_factory()
            if f.default_factory is not MISSING
            else MISSING
        )
        written.append((f.name, default, _is_union_of_classes(hints[f.name])))

    def run(v: Any) -> dict[str, Any]:
        encoded: dict[str, Any] = {}
        for name, default, union in written:
            x = getattr(v, name)
            if default is MISSING or x != default:
                encoded[name] = tagged(x) if union and is_dataclass(x) else encode(x)
        return encoded

    return run


def _written_fields(kind: type, hints: Mapping[str, Any]) -> list[Field[Any]]:
    """Return the fields that are written; raise TypeError for one that JSON cannot hold."""
    written = [
        f for f in fields(kind) if f.init and f.metadata.get("json", True) and f.name != "version"
    ]
    for f in written:
        for option in _options(hints[f.name]):
            if _is_mapping(option) and not _is_text(get_args(option)[0]):
                raise TypeError(
                    f"no JSON form for {kind.__name__}: the keys of its field {f.name} are no strings; import the "
                    f"module that registers a document for {kind.__name__} (piper_ir.ground.codec.register)"
                )
    return written


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_text(hint: Any) -> bool:
    return hint is str or (
        get_origin(hint) is Literal and all(isinstance(option, str) for option in get_args(hint))
    )


def _is_class(option: Any) -> bool:
    """Return whether an option of a union is a dataclass that is written as an object."""
    return is_dataclass(option) and option is not Affine


def _is_union_of_classes(hint: Any) -> bool:
    return len([a for a in _options(hint) if _is_class(a)]) > 1


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), f"the number {value}")


def _fail(where: str, expected: str, value: Any) -> FormatError:
    return FormatError(f"{where}: {expected} is expected, found {_kind(value)}")


@cache
def _decoder(hint: Any) -> DecodeValue:
    origin = get_origin(hint)
    if origin in _GENERIC:
        return _GENERIC[origin](get_args(hint))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_decoder(get_args(hint)[1])
    if hint is Affine:
        return _affine
    if is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_decoder(hint)
    return _scalar_decoder(hint)


def _affine(value: Any, where: str) -> Affine:
    if not (isinstance(value, list) and len(value) == 2 and all(type(x) is int for x in value)):
        raise _fail(where, "a size [a, b]", value)
    return Affine(*value)


def _scalar_decoder(hint: Any) -> DecodeValue:
    accepted = {
        str: (str,),
        int: (int,),
        float: (int, float),
        bool: (bool,),
        type(None): (type(None),),
    }
    if hint is Any:
        return lambda value, where: value
    if hint not in accepted:
        raise TypeError(f"no JSON form for {hint}")

    def run(value: Any, where: str) -> Any:
        fits = isinstance(value, accepted[hint]) and (hint is bool or not isinstance(value, bool))
        if not fits:
            raise _fail(where, _NAMES[hint], value)
        if hint is not float:
            return value
        try:
            return float(value)  # an integer is a number
        except OverflowError:
            raise FormatError(
                f"{where}: an integer of {len(str(value))} digits is too large for a number"
            ) from None

    return run


def _literal_decoder(options: tuple[Any, ...]) -> DecodeValue:
    def run(value: Any, where: str) -> Any:
        if value not in options:
            raise FormatError(f"{where}: {value!r} is not one of {', '.join(map(repr, options))}")
        return value

    return run


def _tuple_decoder(args: tuple[Any, ...]) -> DecodeValue:
    repeated = len(args) == 2 and args[1] is Ellipsis
    items = [_decoder(a) for a in (args[:1] if repeated else args)]

    def run(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise _fail(where, "an array", value)
        if repeated:
            one = items[0]
            return tuple([one(x, f"{where}[{i}]") for i, x in enumerate(value)])
        if len(value) != len(items):
            raise FormatError(f"{where}: {len(items)} items are expected, found {len(value)}")
        return tuple(
            d(x, f"{where}[{i}]") for i, (d, x) in enumerate(zip(items, value, strict=True))
        )

    return run


def _mapping_decoder(item: Any) -> DecodeValue:
    inner = _decoder(item)

    def run(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _fail(where, "an object", value)
        return {k: inner(x, f"{where}.{k}") for k, x in value.items()}

    return run


def _union_decoder(options: tuple[Any, ...]) -> DecodeValue:
    classes: dict[str, DecodeValue] = {o.__name__: _decoder(o) for o in options if _is_class(o)}
    others = [o for o in options if not is_dataclass(o)]
    decoders = [(o, _decoder(o)) for o in others]
    affine_ok = Affine in options

    def run(value: Any, where: str) -> Any:
        if isinstance(value, dict) and len(classes) == 1:
            return next(iter(classes.values()))(value, where)
        if isinstance(value, dict) and classes:
            name = value.get("is")
            if not isinstance(name, str) or name not in classes:
                raise FormatError(
                    f'{where}: "is" is {name!r}; one of {", ".join(sorted(classes))} is expected'
                )
            return classes[name]({k: x for k, x in value.items() if k != "is"}, where)
        if isinstance(value, list) and affine_ok:
            return _affine(value, where)
        for _, decoder in decoders:
            try:
                return decoder(value, where)
            except FormatError:
                continue
        names = [_NAMES.get(o, "an array" if get_origin(o) is tuple else str(o)) for o in others]
        expected = " or ".join(
            names + ["a size [a, b]"] * affine_ok + [f"an object ({c})" for c in sorted(classes)]
        )
        raise _fail(where, expected, value)

    return run


_GENERIC: dict[Any, Callable[[tuple[Any, ...]], DecodeValue]] = {
    Union: _union_decoder,
    types.UnionType: _union_decoder,
    Literal: _literal_decoder,
    tuple: _tuple_decoder,
    Sequence: lambda args: _tuple_decoder((*args, ...)),
}
"""The maker of a decoder from the arguments of a generic type, by the type."""


def _dataclass_decoder(kind: type) -> DecodeValue:
    hints = get_type_hints(kind)
    init = _written_fields(kind, hints)
    required = {f.name for f in init if f.default is MISSING and f.default_factory is MISSING}
    decoders: dict[str, DecodeValue] = {}
    name = _format(kind)

    def run(value: Any, where: str) -> Any:
        if not decoders and init:  # built on first use: types may be recursive
            decoders.update({f.name: _decoder(hints[f.name]) for f in init})
        if not isinstance(value, dict):
            raise _fail(where, f"an object ({name})", value)
        for key in value:
            if key not in decoders:
                raise FormatError(
                    f"{where}: unknown key {key!r} in {name}; known are {', '.join(decoders)}"
                )
        missing = required - value.keys()
        if missing:
            raise FormatError(f"{where}: {name} lacks {', '.join(sorted(missing))}")
        decoded = {k: decoders[k](x, f"{where}.{k}") for k, x in value.items()}
        try:
            return kind(**decoded)
        except (
            PiperError
        ) as e:  # the class itself refuses the fields together; only here is it known where
            raise FormatError(f"{where}: {e}") from None

    return run
