"""JSON is written and read back, and every kind of bad text is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings

from packages.ir.tests.documents_for_tests import documents
from packages.ir.tests.plans_for_tests import chunks, good_plan
from piper_ir.graph.graph import Graph
from piper_ir.graph.graph_json import GraphDocument
from piper_ir.ground import codec
from piper_ir.ground.codec import decode, dumps, encode, loads
from piper_ir.ground.errors import FormatError, PlanError
from piper_ir.ground.select import Where, where
from piper_ir.ground.sizes import Affine, TensorSpec
from piper_ir.ground.trace import MemSample, Span, Trace
from piper_ir.plan.plan import Plan, Values
from piper_ir.program.ops import Collective, Op, Update
from piper_ir.program.program import Inside, Liveness, Program
from tests.helpers.cases import each_case

PROGRAM = Program(chunks(), loss_kind="sum")
TEXT = dumps(good_plan())


@pytest.mark.parametrize("kind", [Program, Plan, Trace], ids=lambda k: k.__name__)
def test_any_document_comes_back_equal(kind: type[Any]) -> None:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(documents(kind))
    def round_trip(document: Any) -> None:
        text = dumps(document)
        assert loads(kind, text) == document
        assert dumps(loads(kind, text)) == text
        assert loads(kind, dumps(document, indent=2)) == document

    round_trip()


def test_values_made_on_demand_are_those_of_a_dict() -> None:
    plan = good_plan()
    values = Values({v.id: (v.spec, v.category) for v in plan.values.values()})
    assert values == plan.values and plan.values == values and list(values) == list(plan.values)
    assert "nothing" not in values and values.get("nothing") is None
    lazy = replace(plan, values=values)
    assert (
        lazy.key == plan.key
        and lazy == plan == pickle.loads(pickle.dumps(lazy))
        and repr(lazy) == repr(plan)
    )
    first = next(iter(values))
    assert values != {**values, first: replace(values[first], category="workspace")}


def test_a_plan_comes_back_with_its_indexes_and_key() -> None:
    plan = loads(Plan, TEXT)
    assert plan == good_plan()
    assert plan.key == good_plan().key
    assert plan.chunk("head") == chunks()[1] and plan.role("pp1").ranks == (2, 3)


def test_keys_follow_content() -> None:
    other = Program(chunks(), loss_kind="mean")
    assert PROGRAM.key == Program(chunks(), loss_kind="sum").key != other.key


def test_defaults_are_left_out_and_come_back() -> None:
    trace = Trace("k", "simulated", (Span(0, "compute", 1, "F", 0.0, 1.0),))
    written = json.loads(dumps(trace))
    assert written == {
        "format": "Trace",
        "version": 1,
        "plan_key": "k",
        "kind": "simulated",
        "spans": [
            {"rank": 0, "stream": "compute", "instr": 1, "name": "F", "start": 0.0, "end": 1.0}
        ],
    }
    assert loads(Trace, dumps(trace)).spans[0].source == "measured"


def test_a_member_of_a_union_carries_its_class() -> None:
    part = json.loads(TEXT)["roles"][1]["program"][-1]["parts"][0]
    assert part["op"] == {"is": "Update", "buckets": ["tied", "own"], "clip": 1.0}
    assert decode(Op, part["op"], "op") == Update(("tied", "own"), clip=1.0)
    assert decode(
        Op, {"is": "Collective", "kind": "all_reduce", "channel": "c"}, "op"
    ) == Collective("all_reduce", "c")


def test_sizes_and_selections() -> None:
    spec = TensorSpec((Affine(1, 2), 8), "bfloat16")
    assert encode(spec) == {"shape": [[1, 2], 8], "dtype": "bfloat16"}
    assert decode(TensorSpec, encode(spec), "spec") == spec
    selection = where(stage=(0, 2), phase="F", mb=3, layer="ANY")
    assert decode(Where, json.loads(json.dumps(encode(selection))), "where") == selection


def test_an_integer_is_a_number_but_a_boolean_is_none() -> None:
    sample = decode(MemSample, {"rank": 0, "instr": 1, "time": 2, "bytes": {"param": 3}}, "sample")
    assert sample.time == 2.0 and isinstance(sample.time, float)
    with pytest.raises(FormatError, match=r"sample\.rank: an integer is expected, found a boolean"):
        decode(MemSample, {"rank": True, "instr": 1, "time": 2, "bytes": {}}, "sample")


def _changed(**changes: Any) -> str:
    return json.dumps({**json.loads(TEXT), **changes})


@each_case(
    ("text", "message"),
    [
        (
            _changed(colour="red"),
            "p.json: unknown key 'colour' in Plan; known are program_key, mesh",
        ),
        (_changed(rows="2"), "p.json.rows: an integer is expected, found a string"),
        (_changed(rows=2.5), "p.json.rows: an integer is expected, found the number 2.5"),
        (_changed(replicated="dp"), "p.json.replicated: an array is expected, found a string"),
        (_changed(values=[]), "p.json.values: an object is expected, found an array"),
        (_changed(loss_kind="median"), "p.json.loss_kind: 'median' is not one of 'mean', 'sum'"),
        (
            _changed(chunks=[3]),
            "p.json.chunks[0]: an object (Chunk) is expected, found the number 3",
        ),
        (
            _changed(mesh={"sizes": [["xx", 2]]}),
            "p.json.mesh: Mesh: unknown axis 'xx'; the axes are cp, dp, ep, etp, pp, rep, tp",
        ),
        (
            _changed(mesh={"sizes": [["pp", 2, 3]]}),
            "p.json.mesh.sizes[0]: 2 items are expected, found 3",
        ),
        (_changed(params=[{"name": "w"}]), "p.json.params[0]: Param lacks spec"),
        (
            _changed(params=[{"name": "w", "spec": {"shape": [], "dtype": "float31"}}]),
            "p.json.params[0].spec: unknown dtype 'float31'; known are float64",
        ),
        (
            _changed(params=[{"name": "w", "spec": {"shape": [[1]], "dtype": "bool"}}]),
            "shape[0]: a size [a, b] is expected",
        ),
        (
            _changed(params=[{"name": "w", "spec": {"shape": ["1"], "dtype": "bool"}}]),
            "shape[0]: an integer or a size [a, b] is expected, found a string",
        ),
        (_changed(channels=[{"id": 1}]), "p.json.channels[0]: Channel lacks kind, roles, streams"),
        (_changed(version=2), 'p.json: "version" is 2; this Piper reads version 1'),
        (_changed(version=None), 'p.json: "version" is None'),
        (_changed(format="Trace"), "p.json: \"format\" is 'Trace'; a Plan is expected here"),
        ("[]", "p.json: a JSON object is expected, found an array"),
        ("", "p.json: not JSON: Expecting value at line 1 column 1 (is the file truncated?)"),
        (
            "{'format': 1}",
            "p.json: not JSON: Expecting property name enclosed in double quotes at line 1 column 2",
        ),
        ("[" * 100_000, "p.json: not JSON that this Piper writes"),
        ("9" * 10_000, "p.json: not JSON that this Piper writes"),
    ],
    ids=range(22),
)
def test_bad_text_is_refused_with_the_place_and_what_is_expected(text: str, message: str) -> None:
    with pytest.raises(FormatError) as error:
        loads(Plan, text, "p.json")
    assert message in str(error.value)


def test_an_unknown_op_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        FormatError,
        match=r"op: .is. is 'Gather'; one of Add, Cast, Collective, Compute, .* is expected",
    ):
        decode(Op, {"is": "Gather", "channel": "c"}, "op")
    with pytest.raises(FormatError, match=r"op: unknown key 'bucket' in Send; known are channel"):
        decode(Op, {"is": "Send", "channel": "c", "bucket": "b"}, "op")


def test_a_file_cut_anywhere_is_called_truncated() -> None:
    cuts = range(1, len(TEXT), 37)
    for cut in cuts:
        with pytest.raises(FormatError, match="truncated"):
            loads(Plan, TEXT[:cut])


@dataclass(frozen=True)
class _Unwritable:
    items: object


def test_what_has_no_json_form_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no JSON form for set"):
        dumps(_Unwritable({1}))


@dataclass(frozen=True)
class Distances:
    """Stand for a class whose fields JSON cannot hold."""

    between: Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class DistancesDocument:
    FORMAT: ClassVar[str] = "Distances"

    rows: tuple[tuple[str, str, int], ...]


def test_a_class_that_json_cannot_hold_needs_a_registered_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "_DOCUMENT_FORMS", {})
    distances = Distances({("a", "b"): 3})
    with pytest.raises(
        TypeError,
        match=r"the keys of its field between are no strings; import the module that registers",
    ):
        dumps(distances)
    with pytest.raises(TypeError, match="no JSON form for Distances"):
        loads(Distances, '{"format": "Distances", "version": 1, "between": {}}')
    codec.register(
        Distances,
        DistancesDocument,
        lambda d: DistancesDocument(tuple((a, b, n) for (a, b), n in d.between.items())),
        lambda d: Distances({(a, b): n for a, b, n in d.rows}),
    )
    assert json.loads(dumps(distances)) == {
        "format": "Distances",
        "version": 1,
        "rows": [["a", "b", 3]],
    }
    assert loads(Distances, dumps(distances)) == distances


def test_a_graph_has_a_document_only_where_it_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert codec._DOCUMENT_FORMS[Graph].document is GraphDocument
    monkeypatch.delitem(codec._DOCUMENT_FORMS, Graph)
    with pytest.raises(TypeError, match="no JSON form for Graph"):
        loads(Graph, '{"format": "Graph", "version": 1}')


@each_case("inside", [(), ((Inside(1),),)])
def test_a_step_whose_entries_are_missing_says_so(inside: Any) -> None:
    consumed = (0, 1) if not inside else (0,)
    with pytest.raises(
        PlanError,
        match=r"2 segments and . entries of inside, and . inputs consumed; one segment more",
    ):
        Liveness(consumed, ((1,), (2,)), inside).peak({}, "cuda")
