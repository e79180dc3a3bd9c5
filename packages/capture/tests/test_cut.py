"""Where the captured graph is cut and what crosses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piper_capture import capture, region, tag
from piper_capture.chunks.cut import cut
from piper_capture.trace.dynamo import capture_forward
from piper_ir.program.program import Chunk, Program
from tests.helpers.models import CASES, SkipMLP, TinyGPT, captured


def program(model: object, case: str = "gpt") -> Program:
    given = CASES[case]
    return capture(model, partial(given.batch, 0), given.loss).program  # type: ignore[arg-type]  # torch types


def regions(model: Callable[[], nn.Module], case: str) -> list[tuple[str, dict[str, int]]]:
    """Names and coordinates only, without tracing the chunks."""
    given = CASES[case]
    found = cut(capture_forward(model, partial(given.batch, 0), given.loss))
    return [(p.region.id, p.region.coords) for p in found.pieces]


def refs(chunk: Chunk, kind: str) -> list[str]:
    return [i.ref for i in chunk.inputs if i.kind == kind]


def test_layers_are_chunks_by_themselves_and_equal_ones_share_code() -> None:
    found = captured("gpt").program
    assert [c.id for c in found.chunks] == ["root", "layer0", "layer1", "layer2", "root.1"]
    assert [dict(c.coords) for c in found.chunks] == [
        {},
        {"layer": 0},
        {"layer": 1},
        {"layer": 2},
        {},
    ]
    assert len({c.code for c in found.chunks[1:4]}) == 1
    assert [refs(c, "value") for c in found.chunks] == [
        [],
        ["root:out0"],
        ["layer0:out0"],
        ["layer1:out0"],
        ["layer2:out0"],
    ]
    assert refs(found.chunks[0], "batch") == ["inputs"]
    assert refs(found.chunks[-1], "batch") == ["targets"]


def test_a_tied_parameter_appears_once_and_in_both_chunks() -> None:
    found = captured("gpt").program
    (tied,) = [p for p in found.params if p.tied]
    assert (tied.name, tied.tied) == ("embed.weight", ("head.weight",))
    assert "embed.weight" in refs(found.chunks[0], "param")
    assert "embed.weight" in refs(found.chunks[-1], "param")
    assert not any(p.tied for p in captured("gpt_untied").program.params)


def test_tags_give_stages_and_the_rest_joins_its_producer() -> None:
    def tagged() -> nn.Module:
        return tag(TinyGPT(layers=4), {"layers.0-1": {"stage": 0}, "layers.2-3": {"stage": 1}})

    found = regions(tagged, "gpt")
    assert [name for name, _ in found] == [
        *("root", "stage0_layer0", "stage0_layer1", "stage1_layer2", "stage1_layer3", "stage1")
    ]
    assert found[-1][1] == {"stage": 1}


def test_values_go_straight_to_their_consumers() -> None:
    by_id = {c.id: c for c in captured("skip").program.chunks}
    assert list(by_id) == ["stage0", "stage1", "stage2", "stage3"]
    assert len(refs(by_id["stage1"], "value")) == 2
    assert all(r.startswith("stage1:") for r in refs(by_id["stage2"], "value"))
    assert {r.split(":")[0] for r in refs(by_id["stage3"], "value")} == {"stage0", "stage2"}
    assert len(by_id["stage0"].outputs) == 3
    assert [i.ref for c in by_id.values() for i in c.inputs if i.kind == "batch"] == [
        "inputs.0",
        "targets",
    ]


def test_independent_branches_do_not_read_each_other_and_stay_whole() -> None:
    by_id = {c.id: c for c in captured("branches").program.chunks}
    assert list(by_id) == ["branch0", "branch1", "branch2", "branch3"]
    assert {r.split(":")[0] for r in refs(by_id["branch1"], "value")} == {"branch0"}
    assert {r.split(":")[0] for r in refs(by_id["branch2"], "value")} == {"branch0"}
    assert {r.split(":")[0] for r in refs(by_id["branch3"], "value")} == {
        "branch0",
        "branch1",
        "branch2",
    }


def test_views_of_buffers_are_repeated_where_they_are_used() -> None:
    found = captured("llama").program
    layers = [c for c in found.chunks if "layer" in c.coords]
    assert len({c.code for c in layers}) == 1
    assert all(refs(c, "buffer") == ["cos", "sin"] and len(refs(c, "value")) == 1 for c in layers)
    assert [b.persistent for b in found.buffers] == [False, False]


def test_a_region_entered_twice_is_visited_twice() -> None:
    class Back(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            with region(stage=0):
                x = self.a(x)
            with region(stage=1):
                x = self.b(x)
            with region(stage=0):
                return self.a(x)

    assert regions(Back, "skip") == [
        ("stage0", {"stage": 0}),
        ("stage1", {"stage": 1}),
        ("stage0.1", {"stage": 0}),
    ]


def test_operations_between_layers_join_the_layer_before() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x)) + x
            return x

    assert [name for name, _ in regions(Residual, "skip")] == ["layer0", "layer1", "layer2", "root"]


def test_nested_lists_count_at_the_outermost_and_slices_keep_their_index() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.groups = nn.ModuleList(
                nn.ModuleList(nn.Linear(16, 16) for _ in range(2)) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            for group in self.groups[1:]:
                for layer in group:
                    x = layer(x)
            return x

    found = program(Nested, "skip")
    assert [c.id for c in found.chunks] == ["layer1", "layer2", "root"]
    assert [p.name for p in found.params if not p.trained] == [
        f"groups.0.{i}.{kind}" for i in range(2) for kind in ("weight", "bias")
    ]


def test_a_value_changed_in_place_is_a_new_value_for_later_readers() -> None:
    by_id = {c.id: c for c in captured("in_place").program.chunks}
    assert {r.split(":")[0] for r in refs(by_id["stage1"], "value")} == {"stage0"}
    assert {r.split(":")[0] for r in refs(by_id["stage2"], "value")} == {"stage1"}
    assert len(refs(by_id["stage2"], "value")) == 2


def test_buffers_that_change_are_outputs_and_say_whether_they_vary() -> None:
    found = captured("buffers").program
    outputs = {
        o.ref: (c.coords.get("part"), o.varies)
        for c in found.chunks
        for o in c.outputs
        if o.kind == "buffer"
    }
    assert outputs == {"count": (1, False), "mean": (1, True)}
    assert {b.name: b.persistent for b in found.buffers} == {
        "scale": True,
        "count": True,
        "mean": True,
        "mask": False,
    }
    last = [c for c in found.chunks if c.coords.get("part") == 2]
    assert all(not refs(c, "buffer") for c in last)  # they read the new values


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    found = captured("frozen").program
    assert {p.name for p in found.params if p.trained} == {
        "layers.1.bias",
        "layers.2.weight",
        "layers.2.bias",
        "head.weight",
        "head.bias",
    }
    first, second = found.chunks[0], found.chunks[1]
    assert all(first.steps[s].empty and second.steps[s].empty for s in ("I", "W"))
    assert not any(o.needs_grad for o in (*first.outputs, *second.outputs))
    assert [c.id for c in found.chunks if not c.steps["I"].empty] == ["layer2", "root.1"]


def test_only_the_loss_has_a_seed_and_the_weight_has_none() -> None:
    last = captured("keywords").program.chunks[-1]
    assert [(o.kind, o.needs_grad) for o in last.outputs] == [("loss", True), ("weight", False)]
    assert captured("keywords").program.loss_kind == "sum"
    assert captured("gpt").program.loss_kind == "sum"  # over tokens that are not ignored
    assert captured("opaque").program.loss_kind == "mean"
    assert [b.name for b in captured("keywords").program.batch] == [
        "inputs.tokens",
        "inputs.mask",
        "targets.next",
        "targets.mask",
    ]


def test_region_and_tag_that_contradict_each_other() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            with region(stage=0):
                return self.a(x)

    with pytest.raises(ValueError, match="region says stage=0, tag says stage=1"):
        regions(lambda: tag(Inside(), {"a": {"stage": 1}}), "skip")


@pytest.mark.long
def test_the_program_is_the_same_every_time_and_from_every_device() -> None:
    with torch.device("meta"):
        on_meta = SkipMLP()
    programs = [program(m, "skip") for m in (SkipMLP, on_meta, SkipMLP())]
    assert programs[0] == programs[1] == programs[2]
    assert programs[0].key == programs[2].key


class Square(torch.autograd.Function):
    """A function with a backward of its own, which a trace has as a higher-order operator."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # one gradient
        return gradient * 2 * context.saved_tensors[0]


class Squares(SkipMLP):
    """Squares, whose operators have no qualified name: a repr has the address, another in each process."""

    def forward(self, x: Tensor) -> Tensor:
        squared: Tensor = Square.apply(super().forward(x))  # type: ignore[no-untyped-call]  # torch does not type it
        return squared


def test_texts_of_chunks_have_no_addresses() -> None:
    given = CASES["skip"]
    found = cut(capture_forward(Squares, partial(given.batch, 0), given.loss))
    texts = [found.text(piece) for piece in found.pieces]
    assert any("autograd_function_apply" in text for text in texts)
    assert not any(" at 0x" in text for text in texts)
