"""Owners of the peak add up to the peak."""

from packages.ir.tests.plans_for_tests import good_plan
from packages.report.tests import samples
from piper_ir.fold.memory import peak
from piper_ir.fold.memory_owners import owners
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Instr, Part, Plan, RolePlan, Value
from piper_ir.program.ops import Compute
from piper_ir.program.program import Chunk, Input, Liveness, Output, Signature
from tests.helpers.cases import each_case

PLANS = {
    "by hand": good_plan(),
    "pipeline": samples.plan(),
    "deep": samples.plan_of(pp=4, microbatches=6, kept_after_I=1 << 19),
    "no values": samples.plan_of(pp=1, dp=1, microbatches=1, activation=0),
}


@each_case("plan", PLANS.values(), ids=PLANS)
def test_they_add_up_to_the_peak_in_every_category(plan: Plan) -> None:
    for role in plan.roles:
        found, most = owners(plan, role), peak(plan, role)
        by_category: dict[str, int] = {}
        for o in found:
            by_category[o.category] = by_category.get(o.category, 0) + o.bytes
        assert by_category == most.bytes and sum(by_category.values()) == most.total
        assert [o.bytes for o in found] == sorted((o.bytes for o in found), reverse=True)


def test_an_input_given_back_before_the_peak_counts_for_what_is_left_of_it() -> None:
    """The chunk's code frees its input of 100 bytes while it makes its output of 40: at most 110 bytes at once."""
    x, y = (
        Value(v, TensorSpec((n,), "uint8"), "activation")
        for v, n in (("x:out0@0", 100), ("y:out0@0", 40))
    )
    signature = Signature(("in0",), ("out0",), liveness=Liveness((0,), ((10,), (40,))))
    ports = {"in0": x.spec, "out0": y.spec}
    chunk = Chunk(
        "y",
        {},
        (Input("value", "x:out0", x.spec),),
        (Output("value", y.spec),),
        ports,
        {"F": signature},
    )
    part = Part("y.F@0", Compute("y", "F"), 0, (x.id,), (y.id,), (x.id,))
    role = RolePlan("r", {}, (0,), (Instr("compute", (part,)),), ("compute",), allocs_first=(x.id,))
    plan = Plan("k", Mesh(), 1, 1, (), (role,), (), (), {v.id: v for v in (x, y)}, (chunk,))
    (role,) = plan.roles
    assert peak(plan, role).total == 110
    assert [(o.name, o.bytes) for o in owners(plan, role)] == [
        ("x:out0@0", 70),
        ("y", 40),
    ]  # nothing writes x


def test_a_pipelines_first_stage_holds_its_microbatches_in_flight() -> None:
    plan = samples.plan_of(pp=3, microbatches=5)
    held = {o.name: o for o in owners(plan, plan.role("pp0")) if o.category == "activation"}
    assert held["stage0"].bytes == 3 << 20 and held["stage0"].mbs == (0, 1, 2)
    bucket = next(o for o in owners(plan, plan.role("pp0")) if o.category == "param")
    assert bucket.name.endswith(": stage0.weight") and bucket.mbs == ()
