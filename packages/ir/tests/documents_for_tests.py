"""Derive Hypothesis strategies for documents of the IR from the types of their fields; they need not make sense."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from piper_ir.ground.mesh import AXES, Mesh
from piper_ir.ground.sizes import ITEM_BYTES, Affine, TensorSpec
from piper_ir.program.collectives import COLLECTIVES
from piper_ir.program.ops import Collective
from piper_ir.program.program import ExpertRegion

KNOWN = (
    "pp0",
    "compute",
    "reduce",
    "act",
    "tied",
    "own",
    "table",
    "embed",
    "head",
    "embed:out0",
    "in0",
    "tan0",
    "a@0",
    "h@1",
    "ga@0#pp0",
)
"""Names that plans_for_tests uses."""
AWKWARD = ("a", "@1", "+", "waits", "end", "a b", '"', "{", "")
"""Words that mean something in a plan's text, or need quotes there."""
NAMES = st.one_of(st.sampled_from(KNOWN), st.sampled_from(AWKWARD), st.text(max_size=3))


@cache
def documents(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for any value of a type hint of the IR; containers have at most two entries."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of([documents(a) for a in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is Sequence or (origin is tuple and args[-1] is Ellipsis):
        return st.lists(documents(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(documents(a) for a in args))
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(documents(args[0]), documents(args[1]), max_size=2)
    if kind is Mesh:
        return st.dictionaries(st.sampled_from(AXES), st.integers(1, 3)).map(
            lambda sizes: Mesh(**sizes)
        )
    if kind is Affine:
        return st.builds(Affine, st.integers(), st.integers().filter(bool))
    if is_dataclass(kind):
        return _built(kind)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        str: NAMES,
        int: st.integers(-10, 1 << 40),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return simple[kind]


def _built(kind: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    made = {
        f.name: documents(hints[f.name]) for f in fields(kind) if f.init and f.name != "version"
    }
    if kind is TensorSpec:
        made["dtype"] = st.sampled_from(list(ITEM_BYTES))
    if kind is Collective:  # the text of a plan names the kinds of the table only
        made["kind"] = st.sampled_from(list(COLLECTIVES))
    if kind is ExpertRegion:  # experts have a row and a place for it
        made["rows"] = made["places"] = st.integers(1, 1 << 20)
    return st.builds(kind, **made)
