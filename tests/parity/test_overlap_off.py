"""Protect that without overlap no compute runs beside reductions and gathers, and that the numbers stay the same."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import piper
from piper_ir.plan.plan import Plan
from piper_ir.verify import check
from tests.helpers import compositions
from tests.helpers.compositions import Composition
from tests.helpers.judged import judge
from tests.helpers.slow_devices import slow_devices

CASE = Composition("gpt", 2, 2, 4, "1f1b", optimizer="adamw", clip=0.05, bucket_mb=0.002)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_plan_without_overlap_trains_what_one_device_trains(zero: int, schedule: str) -> None:
    model = "gpt_untied" if schedule == "1f1b" else "deep"
    judge(replace(CASE, model=model, schedule=schedule, zero=zero, overlap_states=False))


COMPUTES = re.compile(r"(layer|root)[\d.]*\.[FBIW]@")
"""The begin of the name of an instruction that computes a chunk."""


def together(plan: Plan) -> float:
    """Return the seconds of a simulated step in which a device computes beside a message of its buckets."""
    spans = piper.simulate(plan, "h100x4").trace.spans
    kinds = ("reduce", "gather", "scatter")
    total = 0.0
    for rank in range(plan.mesh.world):
        mine = [s for s in spans if s.rank == rank]
        compute = [s for s in mine if s.stream == "compute" and COMPUTES.match(s.name)]
        sent = [s for s in mine if any(kind in s.stream for kind in kinds)]
        assert sent
        total += sum(
            max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in compute for b in sent
        )
    return total


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_no_compute_runs_beside_a_message_of_buckets(zero: int) -> None:
    """And with overlap some does, so that the measure can fail."""
    case = replace(CASE, model="deep", zero=zero)
    beside, alone = (
        compositions.compiled(replace(case, overlap_states=on)).plan for on in (True, False)
    )
    assert together(beside) > 0 == pytest.approx(together(alone), abs=1e-12)
    assert not check(alone)
    on = slow_devices("h100x4")
    times = [piper.simulate(plan, on, contention=False).step_s for plan in (beside, alone)]
    assert times[0] < times[1]
