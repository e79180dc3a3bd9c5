"""A fault in a file that a user may write is a FormatError, and sizes at the edge of what can be measured are looked
up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from packages.ir.tests.plans_for_tests import change_part, good_plan
from piper_ir.graph.graph_json import GraphDocument, from_document
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import FormatError, PiperError, PlanError
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import CommDuration, Costs, Duration, PartDuration, StepDuration
from piper_ir.program.ops import Seed
from piper_ir.program.program import Program
from piper_ir.verify import check, verify
from tests.helpers.cases import each_case

PLAN = good_plan()


LEFT_OUT = object()
ROLE, PROGRAM = ("roles", 0), ("roles", 0, "program")
SHAPE = ("values", "a@0", "spec", "shape", 0)
DAMAGED: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "a role that is a text": (ROLE, "pp0", r"roles\[0\]: an object \(RolePlan\) is expected, found a string"),
    "roles that are an object": (("roles",), {}, "roles: an array is expected, found an object"),
    "no mesh": (("mesh",), LEFT_OUT, "Plan lacks mesh"),
    "no version": (("version",), LEFT_OUT, '"version" is None'),
    "an axis of negative size": (("mesh", "sizes", 0, 1), -2, "axis dp has size -2"),
    "an axis of no device": (("mesh", "sizes", 0, 1), 0, "axis dp has size 0"),
    "an axis twice": (("mesh", "sizes", 0, 0), "pp", "Mesh: axis pp stands twice"),
    "rows that are a text": (("rows",), "2", "rows: an integer is expected, found a string"),
    "negative rows": (("rows",), -2, "the plan has -2 rows in a microbatch"),
    "no microbatches": (("microbatches",), 0, "the plan has 0 microbatches"),
    "very many microbatches": (("microbatches",), 10**30, "R26-scale.* 5e-31 is expected"),
    "an unknown op": ((*PROGRAM, 0, "parts", 0, "op", "is"), "Teleport", "\"is\" is 'Teleport'; one of Add, "),
    "an op without its fields": ((*PROGRAM, 0, "parts", 1, "op"), {"is": "Compute"}, "Compute lacks chunk, step"),
    "an unknown key": ((*PROGRAM, 0, "color"), "red", "unknown key 'color' in Instr; known are stream"),
    "an unknown chunk": ((*PROGRAM, 0, "parts", 1, "op", "chunk"), "ghost", "there is no chunk ghost"),
    "an unknown value": ((*PROGRAM, 0, "parts", 1, "reads"), ["ghost"], "there is no value ghost"),
    "an unknown channel": ((*PROGRAM, 1, "parts", 0, "op", "channel"), "ghost", "there is no channel ghost"),
    "a negative size": (SHAPE, -2, r"value a@0 is a float32\[-2,8\]"),
    "a huge size": (SHAPE, 10**30, r"R07-signature.*it writes a@0, a float32\[1000"),
    "an unknown dtype": (("values", "a@0", "spec", "dtype"), "float7", "unknown dtype 'float7'"),
    "a wait for itself": ((*PROGRAM, 1, "waits"), [["send", 1]], "waits for 1 instructions of send, of which 0"),
    "waits in a cycle": ((*PROGRAM, 0, "waits"), [["send", 1]], "waits for 1 instructions of send, of which 0"),
    "a wait for fewer than none": ((*PROGRAM, 1, "waits", 0, 1), -1, "it waits for -1 instructions"),
    "a wait for an unknown stream": ((*PROGRAM, 1, "waits", 0, 0), "ghost", "it waits for the stream ghost"),
    "a rank twice": ((*ROLE, "ranks"), [0, 0], r"R01-ranks: role pp0 \(ranks 0, 0\)"),
    "a rank that is a fraction": ((*ROLE, "ranks", 0), 0.5, "an integer is expected, found the number 0.5"),
    "a value freed twice": ((*PROGRAM, 0, "parts", 1, "frees"), ["x@0", "x@0"], "R14-freed-once.*it frees x@0"),
    "a bucket of negative size": (("buckets", 0, "numel"), -128, "has 512 bytes; -512 are expected"),
    "a microbatch that is not there": ((*PROGRAM, 0, "parts", 0, "mb"), 7, r"microbatch 7 is not in 0\.\.1"),
    "null for a chunk": (("chunks", 0), None, r"chunks\[0\]: an object \(Chunk\) is expected, found null"),
}  # fmt: skip


def damaged(path: tuple[str | int, ...], value: Any) -> str:
    """The text of the plan with another value at a place, or without the place's key."""
    document = json.loads(dumps(PLAN))
    place = document
    for key in path[:-1]:
        place = place[key]
    if value is LEFT_OUT:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(document)


@each_case("how", DAMAGED)
def test_a_damaged_plan_is_refused_by_name(how: str) -> None:
    path, value, says = DAMAGED[how]
    with pytest.raises((FormatError, PlanError), match=says):
        verify(loads(Plan, damaged(path, value)))


def places(document: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each value in a document."""
    if path:
        yield path
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, value in items:
        yield from places(value, (*path, key))


def test_any_damage_is_an_error_of_a_file_or_a_plan() -> None:
    """Few change nothing that a plan says, such as the name of a node."""
    rng = Random(0)
    every = list(places(json.loads(dumps(PLAN))))
    values = [None, -1, 0, "x", "", 10**30, [], {}, True, 1.5, [[1, -7]], -(2**40), LEFT_OUT]
    refused = 0
    for _ in range(200):
        try:
            verify(loads(Plan, damaged(rng.choice(every), rng.choice(values))))
        except PiperError:
            refused += 1
    assert 180 < refused < 200


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
