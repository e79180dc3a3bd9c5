"""Tensors are taken apart for the devices of axes, and put together again."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piper_ir.ground.mesh import Mesh
from piper_ir.program.layout import DimPart, Layout, whole_shape
from piper_runtime.rank import materialize
from piper_runtime.rank.values.layouts import OwnParts, part_of, runs, whole_of
from piper_runtime.weights import LazyTensors
from tests.helpers.safetensors_writer import write_safetensors
from tests.helpers.seeded_models import unusual_job

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
    held = torch.cat(
        [parts[MESH.rank(dict(tp=t, cp=c, dp=0))].flatten() for t in range(2) for c in range(3)]
    )
    assert set(held.tolist()) == set(whole.flatten().tolist())


@given(layouts(), st.data())
def test_runs_say_where_elements_lie_in_the_whole(
    case: tuple[tuple[int, ...], Layout], data: st.DataObject
) -> None:
    shape, layout = case
    whole = torch.arange(prod(whole_shape(shape, layout, dict(MESH.sizes)))).reshape(
        whole_shape(shape, layout, dict(MESH.sizes))
    )
    rank, begin = data.draw(st.integers(0, MESH.world - 1)), data.draw(st.integers(0, prod(shape)))
    end = data.draw(st.integers(begin, prod(shape)))
    found = [
        torch.arange(run.whole, run.whole + run.numel)
        for run in runs(shape, layout, MESH, rank, range(begin, end))
    ]
    assert (
        torch.cat([torch.arange(0), *found]).tolist()
        == part_of(whole, layout, MESH, rank).flatten()[begin:end].tolist()
    )


def test_the_heads_of_a_fused_weight_are_in_each_third() -> None:
    weight = torch.arange(12.0)  # queries 0 to 3, keys 4 to 7, values 8 to 11
    layout = (DimPart("tp", 0, outer=3),)
    assert part_of(weight, layout, Mesh(tp=2), 1).tolist() == [2, 3, 6, 7, 10, 11]


def test_parameters_are_taken_when_they_are_asked_for() -> None:
    own = OwnParts(
        {"a": torch.arange(4.0), "b": torch.zeros(2)}, {"a": (DimPart("tp", 0),)}, Mesh(tp=2), 1
    )
    assert own["a"].tolist() == [2, 3] and own["b"].tolist() == [0, 0]
    assert list(own) == ["a", "b"] and len(own) == 2 and "c" not in own


def test_a_device_reads_its_own_bytes_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of a weight are many small ranges, and heads of a fused one are three."""
    state = {"columns": torch.randn(6, 8), "fused": torch.randn(12, 2)}
    path = write_safetensors(tmp_path / "x.safetensors", state)
    layouts: dict[str, Layout] = {
        "columns": (DimPart("tp", 1),),
        "fused": (DimPart("tp", 0, outer=3),),
    }
    job = unusual_job(Two, init=path)
    given = materialize(job).params
    read: list[int] = []
    flat = LazyTensors.flat
    monkeypatch.setattr(
        LazyTensors, "flat", lambda s, n, a, b: (read.append(b - a), flat(s, n, a, b))[1]
    )
    for rank in range(2):
        own = OwnParts(given, layouts, Mesh(tp=2), rank)
        for name, tensor in state.items():
            found = own[name]
            assert torch.equal(
                found, part_of(tensor, layouts[name], Mesh(tp=2), rank).to(found.dtype)
            )
    assert sum(read) == sum(t.numel() for t in state.values())


class Two(torch.nn.Module):
    """Two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.columns, self.fused = (torch.nn.Parameter(torch.zeros(*s)) for s in ((6, 8), (12, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.columns[:, :2] @ self.fused[:2]
