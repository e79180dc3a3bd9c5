"""A fault in a file that a user may write is a FormatError, and sizes at the edge of what can be measured are looked
up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from packages.ir.tests.plans_for_tests import change_part, good_plan
from piper_ir.graph.graph_json import GraphDocument, from_document
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import FormatError
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import CommDuration, Costs, Duration, PartDuration, StepDuration
from piper_ir.program.ops import Seed
from piper_ir.program.program import Program
from piper_ir.verify import check
from tests.helpers.cases import each_case

PLAN = good_plan()


def test_a_kind_that_is_no_name() -> None:
    document = json.loads(dumps(PLAN))
    document["roles"][0]["program"][0]["parts"][0]["op"]["is"] = []
    with pytest.raises(FormatError, match=r'"is" is \[\]; one of '):
        loads(Plan, json.dumps(document))


def test_a_duration_that_is_too_large() -> None:
    document = json.loads(dumps(Costs(comm=(CommDuration("p2p", 8, 2, Duration(1.0)),))))
    document["comm"][0]["duration"]["seconds"] = 10**400
    with pytest.raises(
        FormatError, match="seconds: an integer of 401 digits is too large for a number"
    ):
        loads(Costs, json.dumps(document))


def test_a_dtype_that_does_not_exist() -> None:
    bad = change_part(PLAN, "pp1", "seed@0", op=Seed(0.25, "foo"))
    assert any("there is no dtype foo; one of " in v.message for v in check(bad))


@each_case(
    "costs",
    [
        {"comm": (CommDuration("p2p", -8, 2, Duration(1.0)),)},
        {"parts": (PartDuration("Add", -1, Duration(1.0)),)},
        {"steps": (StepDuration("code", "F", 0, Duration(1.0)),)},
    ],
)
def test_a_size_that_nobody_measured(costs: dict[str, Any]) -> None:
    with pytest.raises(
        FormatError, match=r"Costs: the duration of .* has \w+ -?\d; a number from [01] is expected"
    ):
        Costs(**costs)


def test_a_message_of_no_bytes_stands_for_itself() -> None:
    comm = [
        CommDuration("p2p", nbytes, 2, Duration(seconds))
        for nbytes, seconds in ((0, 1.0), (8, 2.0), (16, 4.0))
    ]
    found = [Costs(comm=tuple(comm)).of_comm("p2p", nbytes, 2) for nbytes in (0, 1, 4, 8, 12)]
    assert [None if f is None else round(f.seconds, 6) for f in found] == [1.0, None, 1.0, 2.0, 3.0]
    assert Costs(comm=tuple(comm[:2])).of_comm("p2p", 4, 2) is None


def test_points_that_are_too_near_are_no_line() -> None:
    parts = tuple(
        PartDuration("Add", amount, Duration(seconds))
        for amount, seconds in ((1000, 1e-9), (1001, 1.0))
    )
    assert Costs(parts=parts).of_part("Add", 2002) is None


def test_a_graph_with_microbatches_of_fewer_nodes() -> None:
    document = GraphDocument(PLAN.mesh, Program((), (), (), ()), {}, (), mbs=((0,),))
    with pytest.raises(
        FormatError,
        match="0 nodes and the microbatches of 1; one entry of mbs for each node is expected",
    ):
        from_document(document)
    assert not from_document(replace(document, mbs=())).sequence
