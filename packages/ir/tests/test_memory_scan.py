"""The memory scan agrees with a slow count by hand, on the cases that its rules name."""

from dataclasses import replace

import pytest

from piper_ir.fold.memory import Usage, peak, scan, with_peaks
from piper_ir.ground.errors import PlanError
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Category, Channel, Instr, Part, Plan, RolePlan, State, Value
from piper_ir.program.ops import Add, Compute, Recv
from piper_ir.program.program import Chunk, Input, Liveness, Output, Signature
from tests.helpers.cases import each_case

F = Compute("c", "F")


def byte(n: int) -> TensorSpec:
    return TensorSpec((n,), "uint8")


def value(id: str, n: int, category: Category = "activation") -> Value:
    return Value(id, byte(n), category)


def plan(
    *program: Instr, values: tuple[Value, ...], liveness: Liveness | None = None, **role: object
) -> Plan:
    """Return a plan of one role with this program; chunk c reads a value of 100 bytes and writes one of 40."""
    spec = byte(100)
    signature = Signature(("in0",), ("out0",), liveness=liveness or Liveness())
    chunk = Chunk(
        "c",
        {},
        (Input("value", "x", spec),),
        (Output("value", byte(40)),),
        {"in0": spec, "out0": byte(40)},
        {"F": signature},
    )
    roles = (replace(RolePlan("r", {}, (0,), program, ("compute",)), **role),)  # type: ignore[arg-type]  # fields by name
    channels = (Channel("ch", "p2p", ("q", "r"), ("in", "in")),)
    return Plan("k", Mesh(), 1, 1, (), roles, channels, (), {v.id: v for v in values}, (chunk,))


X, Y = value("x", 100), value("y", 40)
STATES = (State("param", "w", 7), State("grad", "b", 5, True))


def usages(p: Plan) -> list[Usage]:
    return list(scan(p, p.roles[0]))


def test_states_and_first_values_are_always_there() -> None:
    step = Instr("compute", (Part("f", F, reads=("x",), writes=("y",)),))
    p = plan(step, values=(X, Y), states=STATES, allocs_first=("x",))
    assert usages(p) == [Usage(0, 152, {"param": 7, "grad": 5, "activation": 140})]


def test_frees_before_come_first_and_allocs_after_come_last() -> None:
    first = Instr("compute", (Part("f", F, reads=("x",), writes=("y",)),), allocs_after=("z",))
    second = Instr(
        "compute",
        (Part("a", Add(), reads=("y",), writes=("s",), frees=("y",)),),
        frees_before=("x",),
    )
    z, s = value("z", 1000, "gradient"), value("s", 40, "gradient")
    p = plan(first, second, values=(X, Y, z, s), allocs_first=("x",))
    assert usages(p) == [
        Usage(0, 1140, {"activation": 140, "gradient": 1000}),  # after the buffer was made
        Usage(1, 1080, {"activation": 40, "gradient": 1040}),  # y and s together, x gone
    ]
    assert peak(p, p.roles[0]).instr == 0


def test_a_part_frees_before_the_next_part_runs() -> None:
    parts = (
        Part("f", F, reads=("x",), writes=("y",), frees=("x",)),
        Part("a", Add(), reads=("y",), writes=("s",)),
    )
    p = plan(Instr("compute", parts), values=(X, Y, value("s", 40)), allocs_first=("x",))
    assert usages(p)[0].total == 140, "not 180: x is gone when s is made"


def test_communication_neither_allocates_nor_frees() -> None:
    receive = Instr("in", (Part("recv", Recv("ch"), writes=("x",)),))
    p = plan(receive, values=(X,), allocs_first=("x",))
    assert usages(p) == []
    assert peak(p, p.roles[0]) == Usage(0, 100, {"activation": 100})


def test_temporaries_are_workspace() -> None:
    """The step holds 90 bytes while the input lives: 50 beyond the output of 40."""
    step = Instr("compute", (Part("f", F, reads=("x",), writes=("y",)),))
    p = plan(step, values=(X, Y), liveness=Liveness((0,), ((90,), (40,))), allocs_first=("x",))
    assert usages(p) == [Usage(0, 190, {"activation": 140, "workspace": 50})]


def test_an_input_that_dies_early_lowers_the_peak() -> None:
    """The output is made after the input was read for the last time, so x and y are never alive together."""
    step = Instr("compute", (Part("f", F, reads=("x",), writes=("y",), frees=("x",)),))
    p = plan(
        step,
        values=(replace(X, category="gradient"), Y),
        liveness=Liveness((0,), ((0,), (40,))),
        allocs_first=("x",),
    )
    (most,) = usages(p)
    assert most.total == 100, "not 140"
    assert sum(most.bytes.values()) == most.total


@each_case("dies", [True, False])
def test_equal_parts_with_different_deaths_are_told_apart(dies: bool) -> None:
    """The workspace is computed once per chunk, step and set of dying inputs."""
    u, v = value("u", 100), value("v", 40)
    first = Instr("compute", (Part("f", F, reads=("u",), writes=("v",), frees=("u", "v")),))
    second = Instr(
        "compute", (Part("f", F, reads=("x",), writes=("y",), frees=("x",) if dies else ()),)
    )
    p = plan(
        first,
        second,
        values=(X, Y, u, v),
        liveness=Liveness((0,), ((0,), (40,))),
        allocs_first=("u", "x"),
    )
    assert [m.total for m in usages(p)] == [200, 100 if dies else 140]


def test_with_peaks_fills_the_fields() -> None:
    step = Instr("compute", (Part("f", F, reads=("x",), writes=("y",), frees=("x", "y")),))
    role = with_peaks(plan(step, values=(X, Y), states=STATES, allocs_first=("x",))).roles[0]
    assert (role.peak_bytes, role.peak_at, role.peak_by_category) == (
        152,
        0,
        {"param": 7, "grad": 5, "activation": 140},
    )


def test_a_second_free_is_refused() -> None:
    step = Instr("compute", (Part("f", F, reads=("x",), writes=("y",), frees=("x",)),))
    again = Instr("compute", (Part("a", Add(), writes=(), frees=("x",)),))
    p = plan(step, again, values=(X, Y), allocs_first=("x",))
    with pytest.raises(
        PlanError, match="role r, instruction 1 a: frees x, which is not alive there"
    ):
        usages(p)
