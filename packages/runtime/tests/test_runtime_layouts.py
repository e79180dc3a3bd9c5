"""Tensors are taken apart for the devices of axes, and put together again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from piper_ir.layout import DimPart, Layout, whole_shape
from piper_ir.mesh import Mesh
from piper_runtime.rank.layouts import OwnParts, part_of, whole_of

MESH = Mesh(tp=2, cp=3, dp=2)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout]:
    """A local shape, and how the whole tensor is taken apart along tp and cp."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    parts = []
    for axis in draw(st.permutations(["tp", "cp"]))[: draw(st.integers(0, 2))]:
        dim, outer = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 2))
        parts.append((axis, dim, outer))
    sizes = [n * 4 for n in shape]  # so that each outer factor divides at every turn
    return tuple(sizes), tuple(DimPart(axis, dim, outer) for axis, dim, outer in parts)


@given(layouts())
def test_parts_make_the_whole(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    whole = torch.arange(float(torch.Size(whole_shape(shape, layout, dict(MESH.sizes))).numel()))
    whole = whole.reshape(whole_shape(shape, layout, dict(MESH.sizes)))
    parts = {rank: part_of(whole, layout, MESH, rank) for rank in range(MESH.world)}
    assert {tuple(p.shape) for p in parts.values()} == {shape}
    for rank in range(MESH.world):
        assert torch.equal(whole_of(parts, layout, MESH, rank), whole)
    held = torch.cat([parts[MESH.rank(dict(tp=t, cp=c, dp=0))].flatten() for t in range(2) for c in range(3)])
    assert set(held.tolist()) == set(whole.flatten().tolist())


def test_the_heads_of_a_fused_weight_are_in_each_third() -> None:
    weight = torch.arange(12.0)  # queries 0 to 3, keys 4 to 7, values 8 to 11
    layout = (DimPart("tp", 0, outer=3),)
    assert part_of(weight, layout, Mesh(tp=2), 1).tolist() == [2, 3, 6, 7, 10, 11]


def test_parameters_are_taken_when_they_are_asked_for() -> None:
    own = OwnParts({"a": torch.arange(4.0), "b": torch.zeros(2)}, {"a": (DimPart("tp", 0),)}, Mesh(tp=2), 1)
    assert own["a"].tolist() == [2, 3] and own["b"].tolist() == [0, 0]
    assert list(own) == ["a", "b"] and len(own) == 2 and "c" not in own
