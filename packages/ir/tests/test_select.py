"""Selections match nodes by their coordinates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ir.ground.errors import SelectorError
from piper_ir.ground.select import ANY, NONE, Where, where
from tests.helpers.cases import each_case

NODE = {"stage": 1, "mb": 3, "phase": "F", "op": "compute"}


@each_case(
    ("terms", "matched"),
    [
        ({}, True),
        ({"stage": 1}, True),
        ({"stage": 0}, False),
        ({"stage": (0, 1)}, True),
        ({"stage": [0, 1]}, True),
        ({"stage": (0, 2)}, False),
        ({"stage": range(1, 4)}, True),
        ({"stage": range(2, 4)}, False),
        ({"stage": ANY}, True),
        ({"stage": NONE}, False),
        ({"expert": ANY}, False),
        ({"expert": NONE}, True),
        ({"expert": 0}, False),
        ({"phase": "F"}, True),
        ({"phase": ("B", "I")}, False),
        ({"phase": ("B", "F"), "mb": 3, "expert": NONE}, True),
        ({"phase": "F", "mb": 2}, False),
    ],
)
def test_all_terms_must_match(terms: dict[str, Any], matched: bool) -> None:
    assert where(**terms).matches(NODE) is matched


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)),
)
def test_exact_terms_match_supersets_only(terms: dict[str, int], coords: dict[str, int]) -> None:
    assert where(**terms).matches(coords) == (terms.items() <= coords.items())


def test_selections_are_values() -> None:
    assert where(mb=1, stage=0) == where(stage=0, mb=1) == Where((("stage", 0),), mb=1)
    assert len({where(mb=range(2)), where(mb=(0, 1)), where(mb=(1, 0))}) == 2
    assert (
        str(where(stage=(0, 2), phase="F", mb=ANY, expert=NONE))
        == "where(expert=NONE, mb=ANY, phase='F', stage=(0, 2))"
    )
    assert str(where()) == "where()"


@each_case("value", [(), range(0), None, 1.5, True, {"a": 1}, (1, None), b"F"])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(
        SelectorError,
        match=r"^where\(stage=.*\): a value is an int, a name, a non-empty tuple or range",
    ):
        where(stage=value)
