"""Coordinates: region in code, tag from outside, layer by itself."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from piper_capture import region, tag
from piper_capture.module.tags import layer_indexes, module_coords
from piper_ir.ground.errors import CaptureError, SelectorError
from tests.helpers.cases import each_case
from tests.helpers.models import TinyGPT


def coords(model: nn.Module) -> dict[str, dict[str, int]]:
    return {
        name: found for name, module in model.named_modules() if (found := module_coords(module))
    }


def test_ranges_are_inclusive_and_patterns_match_dotted_names() -> None:
    model = tag(
        TinyGPT(layers=4),
        {"layers.0-1": {"stage": 0}, "layers.[23]": {"stage": 1}, "head*": {"stage": 1, "last": 1}},
    )
    assert coords(model) == {
        "layers.0": {"stage": 0},
        "layers.1": {"stage": 0},
        "layers.2": {"stage": 1},
        "layers.3": {"stage": 1},
        "head": {"stage": 1, "last": 1},
    }


def test_a_star_also_matches_dots() -> None:
    assert set(coords(tag(TinyGPT(layers=1), {"layers.0.*": {"part": 3}}))) == {
        f"layers.0.{n}" for n in ("norm1", "norm2", "qkv", "out", "up", "down")
    }


def test_a_pattern_without_match_is_an_error_that_lists_modules() -> None:
    with pytest.raises(
        SelectorError, match=r"no module matches 'layer\.0'; the model has embed, position, layers"
    ):
        tag(TinyGPT(), {"layer.0": {"stage": 0}})


def test_two_patterns_that_disagree_are_both_named() -> None:
    with pytest.raises(
        SelectorError,
        match=r"'layers\.0-1' and 'layers\.1' disagree for module 'layers\.1': stage=0 and stage=1",
    ):
        tag(TinyGPT(), {"layers.0-1": {"stage": 0}, "layers.1": {"stage": 1}})
    tag(TinyGPT(), {"layers.0-1": {"stage": 0}, "layers.1": {"stage": 0, "part": 1}})


def test_a_second_call_must_agree_with_the_first() -> None:
    model = tag(TinyGPT(), {"layers.0": {"stage": 0}})
    with pytest.raises(SelectorError, match="disagree"):
        tag(model, {"layers.*": {"stage": 1}})


@each_case(("pattern", "value"), [("layers.0", "a"), ("layers.0", True), ("layers.0", -1)])
def test_values_are_integers(pattern: str, value: object) -> None:
    with pytest.raises(CaptureError, match="not a non-negative integer"):
        tag(TinyGPT(), {pattern: {"stage": value}})  # type: ignore[dict-item]  # on purpose


def test_an_empty_range_is_an_error() -> None:
    with pytest.raises(SelectorError, match="empty"):
        tag(TinyGPT(), {"layers.2-1": {"stage": 0}})


def test_tags_do_not_change_the_state_dict() -> None:
    torch.manual_seed(0)
    plain = TinyGPT().state_dict()
    assert list(tag(TinyGPT(), {"head": {"stage": 0}}).state_dict()) == list(plain)


def test_layers_count_at_the_outermost_list() -> None:
    inner = [nn.ModuleList(nn.Linear(2, 2) for _ in range(3)) for _ in range(2)]
    model = nn.Module()
    model.groups = nn.ModuleList(inner)
    found = layer_indexes(model)
    assert [found[id(m)] for group in inner for m in group] == [0, 0, 0, 1, 1, 1]
    assert id(model) not in found


def test_sibling_lists_are_numbered_consecutively_in_the_order_of_registration() -> None:
    model = nn.Module()
    model.encoder, model.bridge, model.decoder = nn.Module(), nn.Linear(2, 2), nn.Module()
    model.encoder.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    model.decoder.layers = nn.ModuleList(
        [*(nn.Linear(2, 2) for _ in range(2)), model.encoder.layers[0]]
    )
    model.again = model.encoder  # the same module under a second name adds no layers
    model.last = nn.ModuleList([nn.Linear(2, 2)])
    found = layer_indexes(model)
    assert [found[id(m)] for m in (*model.encoder.layers, *model.decoder.layers, *model.last)] == [
        0,
        1,
        2,
        3,
        0,
        5,
    ]
    assert id(model.bridge) not in found


def test_region_is_nothing_outside_of_capture() -> None:
    @region(stage=1)
    def double(x: int) -> int:
        return 2 * x

    with region(stage=0):
        assert double(2) == 4
    with contextlib.suppress(ZeroDivisionError), region(stage=0):
        raise ZeroDivisionError
    assert torch.fx.traceback.current_meta == {}
