"""Give coordinates to model parts: `region` inside the model's code, `tag` from outside, `layer` by itself.

A coordinate is a name and an integer. Nested regions and tagged modules merge name by name, the inner one wins:

    with piper.region(stage=0):                     # in forward; also a decorator: @piper.region(stage=0)
        x = self.embed(tokens)
    piper.tag(model, {"layers.0-3": dict(stage=0), "layers.4-7": dict(stage=1), "head*": dict(stage=1)})
    piper.tag(model, {"layers.4-7": dict(stage=1), "...": dict(stage=0)})        # "...": all the rest

`replace="name"` in a tag replaces a module's forward by a registered function (see `replacements.py`).
`opaque=True` lets autograd run this part (see `opaque.py`). Selectors see it as the coordinate opaque=1.

The number of the outermost ModuleList entry that runs an operation is its coordinate `layer`, unless the user gives
one. Several outermost ModuleLists (an encoder's and a decoder's) are numbered consecutively, in the order of their
registration.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import annotate

from piper_capture.torch_api import replacements
from piper_ir.ground.errors import CaptureError, SelectorError

REST = "..."
"""The pattern of `tag` for all operations to which nothing else gives a coordinate."""

PREFIX = "piper."
"""The prefix of the key of a region's coordinate in a node's meta["custom"].

There is one flat key per coordinate, because torch merges nested annotations by key.
"""

ATTRIBUTE = "_piper_coords"
"""The attribute of a tagged module that holds coordinate -> (value, pattern)."""

LAYER = "layer"
OPAQUE = "opaque"


@contextmanager
def region(*, opaque: bool = False, **coords: int) -> Iterator[None]:
    """Give every operation of the block, or of the decorated function, these coordinates: `region(stage=0)`.

    It does nothing outside of capture. Values are integers; capture refuses others with the line of the operation. With
    `opaque` autograd runs this part, and its backward is not cut into input and weight gradient. Use it for operators
    that have no portable form or cannot be made functional.
    """
    if not torch.compiler.is_compiling():
        yield
        return
    marks = coords | ({OPAQUE: _opaque(opaque)} if opaque is not False else {})
    with annotate({PREFIX + name: value for name, value in marks.items()}):
        yield


def _opaque(value: Any) -> Any:
    """Return 1 for True, since coordinates are integers; return anything else unchanged, to be refused later."""
    return 1 if value is True else value


def tag(model: nn.Module, patterns: Mapping[str, Mapping[str, int | str]]) -> nn.Module:
    """Give modules coordinates from outside; return `model`.

    A pattern is matched against dotted module names as by fnmatch (`*` also matches dots); a component such as `0-3` is
    an inclusive range of indexes. A tagged module's coordinates hold for everything that runs inside it, and
    `opaque=True` works as for `region`. With `replace="name"` a function that is registered under this name
    replaces the module's forward in captures. The pattern "..." is all the rest: every operation of the model, also in
    the model's own forward, to which no other pattern and no region gives that coordinate.

    Raises SelectorError for a pattern without match, for two patterns that give one module different values, and for a
    replacement that does not exist or does not fit the module.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern, settings in patterns.items():
        if not isinstance(settings, Mapping):
            raise SelectorError(
                f"tag {pattern!r}: {settings!r} stands here; coordinates are needed, such as dict(stage=0)"
            )
        coords: Any = {key: value for key, value in settings.items() if key != replacements.REPLACE}
        _check_coords(pattern, coords)
        if pattern == REST:
            _stamp("the model itself", model, pattern, coords)
            continue
        matched = [name for name in modules if matches(pattern, name)]
        if not matched:
            raise SelectorError(
                f"tag: no module matches {pattern!r}; the model has {examples(list(modules))}"
            )
        for name in matched:
            _stamp(name, modules[name], pattern, coords)
            if replacements.REPLACE in settings:
                replacements.mark(name, modules[name], pattern, settings[replacements.REPLACE])
    return model


def _stamp(name: str, module: nn.Module, pattern: str, coords: Mapping[str, int]) -> None:
    stamped: dict[str, tuple[int, str]] = module.__dict__.setdefault(ATTRIBUTE, {})
    for key, value in coords.items():
        value = _opaque(value) if key == OPAQUE else value
        before, by = stamped.setdefault(key, (value, pattern))
        if before != value:
            raise SelectorError(
                f"tag: patterns {by!r} and {pattern!r} disagree for module {name!r}: {key}={before} and "
                f"{key}={value}; make them match different modules"
            )


def _check_coords(pattern: str, coords: Mapping[str, int]) -> None:
    for key, value in coords.items():
        check_coordinate(key, _opaque(value) if key == OPAQUE else value, f"tag {pattern!r}")


def check_coordinate(name: str, value: object, where: str) -> None:
    """Raise CaptureError unless `name` is an identifier and `value` a non-negative integer."""
    if not name.isidentifier():
        raise CaptureError(f"{where}: coordinate name {name!r} is not an identifier")
    if name == OPAQUE:
        if value is not True and value != 1:
            raise CaptureError(f"{where}: opaque={value!r}; write opaque=True, or leave opaque out")
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CaptureError(
            f"{where}: coordinate {name}={value!r} is not a non-negative integer; region and tag take coordinates, "
            f"each a name of your choice with an integer, such as stage=0, and the option opaque=True"
        )


@cache
def _compile(pattern: str) -> tuple[re.Pattern[str], tuple[range, ...]]:
    """Return the pattern as a regular expression with one group per range."""
    parts: list[str] = []
    ranges: list[range] = []
    for component in pattern.split("."):
        bounds = re.fullmatch(r"(\d+)-(\d+)", component)
        if bounds:
            low, high = int(bounds[1]), int(bounds[2])
            if low > high:
                raise SelectorError(
                    f"tag: the range {component!r} in {pattern!r} is empty; the smaller index comes first"
                )
            ranges.append(range(low, high + 1))
            parts.append(r"(\d+)")
        else:
            parts.append(
                fnmatch.translate(component).removeprefix("(?s:").rpartition(")")[0]
            )  # without the anchor
    return re.compile(r"(?s:" + r"\.".join(parts) + r")\Z"), tuple(ranges)


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern of `tag` matches a dotted name."""
    expression, ranges = _compile(pattern)
    match = expression.match(name)
    return match is not None and all(
        int(number) in allowed for number, allowed in zip(match.groups(), ranges, strict=True)
    )


def examples(names: list[str]) -> str:
    """Return some names of modules for a message."""
    shown = ", ".join(names[:8])
    return f"{shown}, ... ({len(names)} modules)" if len(names) > 8 else shown or "no submodules"


def is_opaque(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether an operation is in an opaque region or module; `modules` are by id, as in nn_module_stack."""
    if PREFIX + OPAQUE in (node.meta.get("custom") or {}):
        return True
    stack = (modules.get(key.split("@")[0]) for key in node.meta.get("nn_module_stack") or {})
    return any(OPAQUE in module_coords(module) for module in stack if module is not None)


def layer_indexes(model: nn.Module) -> dict[int, int]:
    """Return for each module in an outermost ModuleList, by its id, the number of its entry.

    The entries of all outermost lists are numbered consecutively, in the order of `named_modules`: if encoder.layers
    has 2 entries and is registered first, decoder.layers starts at 2. A list or entry that is registered twice keeps
    its first numbers.
    """
    number_by_id: dict[int, int] = {}
    for number, entry in enumerate(outermost_entries(model, set())):
        for inner in entry.modules():
            number_by_id.setdefault(id(inner), number)
    return number_by_id


def outermost_entries(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yield the entries of the outermost ModuleLists, except lists and modules whose ids are in `seen`."""
    for child in module.children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        if isinstance(child, nn.ModuleList):
            yield from (
                entry for entry in child if entry is not None
            )  # Informer's last layer has no convolution
        else:
            yield from outermost_entries(child, seen)


def module_coords(module: nn.Module) -> dict[str, int]:
    """Return the coordinates given to a module by `tag`."""
    return {name: value for name, (value, _) in module.__dict__.get(ATTRIBUTE, {}).items()}


def rest_coords(module: nn.Module) -> dict[str, int]:
    """Return the coordinates that the pattern "..." gives a module; all other coordinates have precedence."""
    return {
        name: value
        for name, (value, pattern) in module.__dict__.get(ATTRIBUTE, {}).items()
        if pattern == REST
    }
