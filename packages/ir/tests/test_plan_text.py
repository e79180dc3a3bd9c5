"""A plan's text has a line for each thing, and other plans have other texts."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from packages.ir.tests.documents_for_tests import documents
from packages.ir.tests.plans_for_tests import good_plan
from piper_ir.plan.plan import Plan
from piper_ir.plan.text import format_plan

GOOD = good_plan()
TEXT = format_plan(GOOD)
LINES = TEXT.split("\n")


@pytest.mark.long
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(documents(Plan), documents(Plan))
def test_other_plans_have_other_texts(one: Plan, other: Plan) -> None:
    assert (format_plan(one) == format_plan(other)) == (one == other)


def test_one_line_per_instruction_that_reads_well() -> None:
    assert (
        "   8 compute W embed @0 reads s@0 ga@0#pp0 gb@0#pp0 frees s@0 ga@0#pp0 gb@0#pp0 | waits recv#2 send#2 "
        "frees a@0 b@0" in LINES
    )
    assert "   4 send    Send act @1 node send.a@1 reads a@1 | waits compute#2" in LINES
    assert "value a@0 activation float32[2,8]" in LINES
    update = next(line for line in LINES if "Update tied own" in line)
    assert update.startswith(
        "  16 compute Update tied own clip 1.0 node update reads norm#pp1 frees norm#pp1 | waits "
        "reduce#3 send#4 frees"
    )
    tables = ("param", "buffer", "batch", "chunk", "channel", "bucket", "value", "role")
    count = sum(
        map(
            len,
            (
                GOOD.params,
                GOOD.buffers,
                GOOD.batch,
                GOOD.chunks,
                GOOD.channels,
                GOOD.buckets,
                GOOD.values,
                GOOD.roles,
            ),
        )
    )
    assert sum(line.split(" ")[0] in tables for line in LINES) == count
    assert sum(line.strip()[:1].isdecimal() for line in LINES) == sum(
        len(r.program) for r in GOOD.roles
    )
