"""Names of files become names of a model: patterns, parts, transposed and stacked tensors; what does not fit is
named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from piper_ir.ground.errors import JobError
from piper_runtime.weights import (
    HeldTensor,
    Into,
    RenameTarget,
    TensorForm,
    matched,
    placed,
    rename_problem,
)
from piper_runtime.weights.renaming import PlacedTensor
from tests.helpers.cases import each_case


def given(renames: dict[str, RenameTarget], **tensors: Tensor) -> dict[str, PlacedTensor]:
    return placed({name.replace("__", "."): HeldTensor(t) for name, t in tensors.items()}, renames)


T = torch.arange(12.0).view(4, 3)


def test_patterns_fill_their_stars_in_order_and_the_first_that_matches_counts() -> None:
    found = given(
        {"h.*.ln_*.*": "layers.*.norm*.*", "h.*": None, "wte": "tokens", "wte*": "never"},
        h__0__ln_2__weight=T, h__10__attn__bias=T, wte=T, other=T,
    )  # fmt: skip
    assert found.keys() == {"layers.0.norm2.weight", "tokens", "other"}


def test_a_pattern_matches_whole_names_and_dots_are_dots() -> None:
    assert given({"a.b": "c"}, axb=T, a__b__c=T, a__b=T).keys() == {"axb", "a.b.c", "c"}


def test_parts_transposed_and_stacked_tensors_and_every_range_of_them() -> None:
    found = given(
        {
            "both": (Into("first", rows=(0, 1)), Into("rest", rows=(1, 4)), Into("turned", rows=(1, 3), transposed=True)),
            "e.*": Into("experts[*]", transposed=True),
        },
        both=T, e__1=T + 100, e__0=T,
    )  # fmt: skip
    expected = {
        "first": T[:1],
        "rest": T[1:],
        "turned": T[1:3].t(),
        "experts": torch.stack([T.t(), T.t() + 100]),
    }
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape and torch.equal(found[name].whole(), tensor), name
        flat = tensor.reshape(-1)
        for start in range(len(flat) + 1):
            for stop in range(start, len(flat) + 1):
                assert torch.equal(found[name].flat(start, stop), flat[start:stop]), (
                    name,
                    start,
                    stop,
                )


@each_case(
    ("renames", "tensors", "says"),
    [
        (
            {"*": "one"},
            {"a": T, "b": T},
            "'b' and 'a' both go to 'one'|'a' and 'b' both go to 'one'",
        ),
        ({"a": "b"}, {"a": T, "b": T}, "both go to 'b'"),
        ({"e.*": "e[*]"}, {"e__0": T, "e__2": T}, "nothing in the file goes to entry 1 of 'e'"),
        ({"e.*": "e[*]"}, {"e__0": T, "e": T}, "both go to 'e'"),
        ({"a": "e[0]", "b": "e[0]"}, {"a": T, "b": T}, "both go to 'e'"),
        ({"e.*": "e[*]"}, {"e__0": T, "e__1": T[1:]}, "entries of 'e', differ in shape"),
        (
            {"e.*": "e[*]"},
            {"e__0": T, "e__1": T.double()},
            "entries of 'e', differ in shape or dtype",
        ),
        (
            {"a": Into("b", rows=(2, 5))},
            {"a": T},
            r"'a' has shape \[4, 3\]; rename takes rows 2 to 5",
        ),
        (
            {"a": Into("b", transposed=True)},
            {"a": T[0]},
            r"'a' has shape \[3\]; rename transposes it",
        ),
    ],
)
def test_renames_that_do_not_fit_the_file_are_named(renames: Any, tensors: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        given(renames, **tensors)


@each_case(
    ("renames", "says"),
    [
        (3, "a mapping"),
        ({3: "a"}, "the pattern 3 is no text"),
        ({"a": 3}, "a name of the model, or None"),
        ({"a": (Into("b"), 3)}, "a name of the model, or None"),
        ({"a.*": "b.*.*"}, r"has more `\*` than"),
    ],
)
def test_mappings_that_are_none_are_named(renames: Any, says: str) -> None:
    problem = rename_problem(renames)
    assert problem is not None and re.search(says, problem), problem
    assert rename_problem({"a.*": "b", "c": None, "d": (Into("e"), Into("f"))}) is None


LOOKS = {"w": TensorForm((4, 3), torch.float64), "n": TensorForm((), torch.int64)}


def fitted(**tensors: Tensor) -> dict[str, PlacedTensor]:
    return matched(given({}, **tensors), LOOKS, ["w", "n"], {"tied": "w"})


def test_a_tied_tensor_may_have_any_of_its_names_and_is_one() -> None:
    n = torch.tensor(1)
    assert fitted(tied=T, n=n).keys() == fitted(w=T, n=n).keys() == {"w", "n"}
    assert torch.equal(fitted(tied=T.double(), w=T, n=n)["w"].whole(), T)
    with pytest.raises(
        JobError,
        match=r"'w' is tied to 'tied' in the model, and they differ in the files; untie them",
    ):
        fitted(tied=T, w=T + 1, n=n)


def test_what_is_missing_too_much_of_another_shape_or_kind_is_named() -> None:
    n = torch.tensor(1)
    with pytest.raises(
        JobError,
        match="the files lack 'w', 'n' of the model; the model has no place for 'x' of the files",
    ):
        fitted(x=T)
    with pytest.raises(
        JobError, match=r"'w' has shape \[4, 3\], and 'w' of the files has \[3, 4\]"
    ):
        fitted(w=T.t(), n=n)
    with pytest.raises(
        JobError, match=r"'n' is torch.int64, and 'n' of the files is torch.float32"
    ):
        fitted(w=T, n=n.float())
    with pytest.raises(
        JobError, match=r"'w' is torch.float64, and 'w' of the files is torch.int32"
    ):
        fitted(w=T.int(), n=n)
    with pytest.raises(JobError, match=r"'a', 'b', 'c', 'd' and 2 more of the files"):
        fitted(w=T, n=n, **dict.fromkeys("abcdef", T))
