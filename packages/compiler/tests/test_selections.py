"""Selections of directives: those that match nothing or name an unknown coordinate are errors, the others match by value."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from packages.compiler.tests.test_directives import applied
from piper_compiler import Directive, describe, place, replicate, split, stream
from piper_ir.ground.errors import SelectorError
from piper_ir.ground.select import ANY, NONE, Where, where
from tests.helpers.cases import each_case


@each_case(
    "item",
    [
        split(where(layer=9), microbatches=2),
        place(where(layer=9), on=dict(pp=0)),
        replicate(where(layer=9)),
        stream(where(layer=9), "s"),
    ],
)
def test_a_selection_that_matches_nothing_is_an_error_that_says_what_there_is(
    item: Directive,
) -> None:
    with pytest.raises(SelectorError) as caught:
        applied(item)
    message = str(caught.value)
    assert message.startswith(f"{describe(item)} at test_selections.py:")
    assert "where(layer=9) matches no node. There are nodes with layer in 0, 1, 2, 3" in message


def test_an_unknown_coordinate_is_named() -> None:
    with pytest.raises(
        SelectorError, match=r"no coordinate 'expert'; there are chunk, layer, op, phase\."
    ):
        applied(place(where(expert=0), on=dict(pp=0)))


@each_case(
    ("selection", "layers"),
    [
        (where(), (0, 1, 2, 3)),
        (where(layer=2), (2,)),
        (where(layer=(0, 3)), (0, 3)),
        (where(layer=range(1, 3)), (1, 2)),
        (where(layer=ANY), (0, 1, 2, 3)),
        (where(expert=NONE), (0, 1, 2, 3)),
        (where(layer=(1, 9)), (1,)),
        (where(layer=range(4), chunk="stage3"), (3,)),
    ],
)
def test_selection_by_value_tuple_range_any_and_none(
    selection: Where, layers: Iterable[int]
) -> None:
    assert [n.id for n in applied().select(selection) if n.coords["phase"] == "F"] == [
        f"stage{k}.F" for k in layers
    ]
