"""A mesh turns ranks into coordinates and back."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_ir.ground.errors import CompileError
from piper_ir.ground.mesh import AXES, Mesh
from tests.helpers.cases import each_case

MESHES = st.builds(
    lambda sizes, order: Mesh(order=order, **sizes),
    st.dictionaries(st.sampled_from(AXES), st.integers(1, 4)),
    st.lists(st.sampled_from(AXES), unique=True),
)


@given(MESHES)
def test_ranks_and_coordinates_are_a_bijection(mesh: Mesh) -> None:
    coords = [mesh.coords(r) for r in range(mesh.world)]
    assert [mesh.rank(c) for c in coords] == list(range(mesh.world))
    every = {
        tuple(sorted(zip(mesh.axes, c))) for c in product(*(range(mesh.size(a)) for a in mesh.axes))
    }
    assert {tuple(sorted(c.items())) for c in coords} == every


@given(MESHES, st.data())
def test_ranks_at_fixed_coordinates_are_those_that_have_them(
    mesh: Mesh, data: st.DataObject
) -> None:
    axes = data.draw(st.sets(st.sampled_from(mesh.axes))) if mesh.axes else set[str]()
    fixed = {a: data.draw(st.integers(0, mesh.size(a) - 1)) for a in axes}
    expected = [
        r for r in range(mesh.world) if all(mesh.coords(r)[a] == c for a, c in fixed.items())
    ]
    assert list(mesh.ranks(fixed)) == expected
    assert len(expected) == prod(mesh.size(a) for a in mesh.axes if a not in fixed)


def test_tensor_parallel_ranks_are_neighbours_and_stages_farthest_apart() -> None:
    mesh = Mesh(pp=2, dp=3, tp=4)
    assert mesh.axes == ("tp", "dp", "pp") and mesh.world == 24
    assert mesh.ranks({"pp": 0, "dp": 0}) == (0, 1, 2, 3)
    assert mesh.ranks({"pp": 0, "tp": 0}) == (0, 4, 8)
    assert mesh.ranks({"dp": 0, "tp": 0}) == (0, 12)
    assert mesh.coords(23) == {"tp": 3, "dp": 2, "pp": 1}


def test_an_order_says_which_ranks_are_neighbours() -> None:
    mesh = Mesh(pp=2, dp=3, tp=4, order=("tp", "pp"))
    assert mesh.axes == ("tp", "pp", "dp")
    assert mesh.ranks({"dp": 0, "tp": 0}) == (0, 4) and mesh.ranks({"pp": 0, "tp": 0}) == (0, 8, 16)
    assert str(mesh) == "Mesh(dp=3, pp=2, tp=4, order=('tp', 'pp'))" == str(eval(str(mesh)))
    assert mesh.split("tp", (2, 2)).axes == ("tp.1", "tp.0", "pp", "dp")
    assert Mesh(pp=2, dp=2, order=("dp", "pp")) == Mesh(pp=2, dp=2) == Mesh(pp=2, dp=2, order="dp")
    for order in (("tp", "tp"), ("data",)):
        with pytest.raises(
            CompileError, match="is unknown or stands twice; each of tp, cp, etp, ep"
        ):
            Mesh(pp=2, order=order)


def test_axes_of_size_one_do_not_matter() -> None:
    assert Mesh(pp=2, dp=1) == Mesh(pp=2) == Mesh((("pp", 2), ("ep", 1)))
    assert hash(Mesh(pp=2, dp=1)) == hash(Mesh(pp=2))
    assert Mesh().world == 1 and Mesh().ranks({}) == (0,) and Mesh().coords(0) == {}
    assert Mesh(pp=2).size("dp") == 1 and Mesh(pp=2).rank({"pp": 1, "dp": 0}) == 1
    assert str(Mesh(dp=2, pp=4, tp=1)) == "Mesh(pp=4, dp=2)"


@each_case(
    ("axes", "message"),
    [
        ({"px": 2}, "Mesh: unknown axis 'px'; the axes are cp, dp, ep, etp, pp, rep, tp"),
        ({"pp": 0}, "Mesh: axis pp has size 0; a positive integer is needed"),
        ({"pp": 1.5}, "axis pp has size 1.5"),
    ],
)
def test_bad_axes_are_refused(axes: dict[str, int], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        Mesh(**axes)
