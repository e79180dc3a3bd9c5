"""Owners of the peak add up to the peak."""

import pytest

from packages.ir.tests.plans_for_tests import good_plan
from packages.report.tests import samples
from piper_ir.memory import peak
from piper_ir.plan import Plan
from piper_report.owners import owners

PLANS = {
    "by hand": good_plan(),
    "pipeline": samples.plan(),
    "deep": samples.plan_of(pp=4, microbatches=6, kept_after_I=1 << 19),
    "no values": samples.plan_of(pp=1, dp=1, microbatches=1, activation=0),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_they_add_up_to_the_peak_in_every_category(plan: Plan) -> None:
    for role in plan.roles:
        found, most = owners(plan, role), peak(plan, role)
        by_category: dict[str, int] = {}
        for o in found:
            by_category[o.category] = by_category.get(o.category, 0) + o.bytes
        assert by_category == most.bytes and sum(by_category.values()) == most.total
        assert [o.bytes for o in found] == sorted((o.bytes for o in found), reverse=True)


def test_a_pipelines_first_stage_holds_its_microbatches_in_flight() -> None:
    plan = samples.plan_of(pp=3, microbatches=5)
    held = {o.name: o for o in owners(plan, plan.role("pp0")) if o.category == "activation"}
    assert held["stage0"].bytes == 3 << 20 and held["stage0"].mbs == (0, 1, 2)
    bucket = next(o for o in owners(plan, plan.role("pp0")) if o.category == "param")
    assert bucket.name.endswith(": stage0.weight") and bucket.mbs == ()
