"""Chrome traces: what is written is what a viewer reads, and the schema check can tell."""

import json
from pathlib import Path
from typing import Any

from packages.report.tests import samples
from packages.report.tests.chrome_documents import problems
from piper_ir.ground.trace import MemSample, Span, Trace
from piper_report.pages.chrome import chrome_trace, write_chrome
from tests.helpers.cases import each_case

TRACE = Trace(
    "key",
    "simulated",
    (
        Span(0, "compute", 0, "a.F@0", 0.0, 1e-3, flops=10, source="given"),
        Span(0, "compute", 1, "a.F@1", 1e-3, 3e-3, source="given"),
        Span(0, "0>1", 2, "send", 1e-3, 1e-3, ready=5e-4, bytes=7),
        Span(1, "0>1", 0, "recv", 1e-3, 1e-3, bytes=7),
    ),
    (MemSample(0, 0, 0.0, {"activation": 3}), MemSample(0, 1, 1e-3, {"param": 4})),
    step=2,
    notes={"cluster": "h100-80g-sxm:8"},
)


def events(phase: str) -> list[dict[str, Any]]:
    return [e for e in chrome_trace(TRACE)["traceEvents"] if e["ph"] == phase]


def test_a_written_trace_has_no_problems(tmp_path: Path) -> None:
    write_chrome(TRACE, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert problems(document) == []
    assert document == chrome_trace(TRACE)
    assert document["otherData"] == {
        "plan": "key",
        "kind": "simulated",
        "step": 2,
        "cluster": "h100-80g-sxm:8",
    }


def test_spans_are_microseconds_on_rank_and_stream() -> None:
    first, second, send, recv = events("X")
    assert (second["ts"], second["dur"], second["pid"], second["tid"]) == (1000.0, 2000.0, 0, 0)
    assert send["args"] == {"instr": 2, "ready_us": 500.0, "source": "measured", "bytes": 7}
    assert (
        first["args"]["flops"] == 10
        and first["cat"] == "compute"
        and send["cat"] == "communication"
    )
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events("M") if e["name"] == "thread_name"
    }
    assert names == {(0, 0): "compute", (0, 1): "0>1", (1, 0): "0>1"}
    assert (send["pid"], send["tid"]) == (0, 1) and (recv["pid"], recv["tid"]) == (1, 0)


def test_each_counter_has_all_categories_of_its_rank() -> None:
    assert [e["args"] for e in events("C")] == [
        {"activation": 3, "param": 0},
        {"activation": 0, "param": 4},
    ]


def test_measured_memory_is_a_counter_of_one_category() -> None:
    executed = Trace(
        "key", "executed", (TRACE.spans[0],), (MemSample(0, 0, 1e-3, {"measured": 5}),)
    )
    document = chrome_trace(executed)
    assert problems(document) == []
    (counter,) = [e for e in document["traceEvents"] if e["ph"] == "C"]
    assert (counter["pid"], counter["ts"], counter["args"]) == (0, 1000.0, {"measured": 5})


def test_an_empty_trace_is_a_good_document() -> None:
    assert problems(chrome_trace(Trace("", "executed", ()))) == []


def test_lanes_are_sorted_compute_first() -> None:
    places = [
        (e["name"], e["pid"], e["tid"], e["args"]["sort_index"])
        for e in events("M")
        if e["name"].endswith("sort_index")
    ]
    assert places == [
        ("process_sort_index", 0, 0, 0),
        ("process_sort_index", 1, 0, 1),
        ("thread_sort_index", 0, 0, 0),
        ("thread_sort_index", 0, 1, 1),
        ("thread_sort_index", 1, 0, 0),
    ]


def flow_ends(trace: Trace) -> list[tuple[Span, Span]]:
    """The span in which each flow starts, and that in which it ends."""
    document = chrome_trace(trace, samples.plan())
    assert problems(document) == []
    stream = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in document["traceEvents"]
        if e["name"] == "thread_name"
    }
    ends: dict[int, list[Span]] = {}
    for e in document["traceEvents"]:
        if e["ph"] in ("s", "f"):
            (span,) = (
                s
                for s in trace.spans
                if (s.rank, s.stream) == (e["pid"], stream[e["pid"], e["tid"]])
                and s.start <= e["ts"] / 1e6 + 1e-12
                and e["ts"] / 1e6 <= s.end + 1e-12
            )
            ends.setdefault(e["id"], []).append(span)
    return [(start, end) for start, end in ends.values()]


@each_case("kind", ["simulated", "executed"])
def test_each_send_has_one_flow_to_its_receive(kind: str) -> None:
    trace = samples.simulation().trace
    if kind == "executed":
        trace = samples.executed(trace)
    pairs = flow_ends(trace)
    sends = {s for s in trace.spans if s.name.startswith("send.")}
    receives = {s for s in trace.spans if s.name.startswith("recv.")}
    assert sends and len(pairs) == len(sends) == len(receives)
    assert {s for s, _ in pairs} == sends and {r for _, r in pairs} == receives
    for send, receive in pairs:
        value = send.name.removeprefix("send.").partition("#")[0]
        assert value == receive.name.removeprefix("recv.").partition("#")[0]
        assert send.rank % 2 == receive.rank % 2, "a transfer stays in its replica"


def test_flows_by_role_lead_from_role_to_role() -> None:
    pairs = flow_ends(samples.simulation().role_trace)
    assert {(s.rank, r.rank) for s, r in pairs} == {(0, 2), (2, 0)} and len(pairs) == 6


def test_names_have_the_place_on_the_mesh() -> None:
    made, plan = samples.simulation(), samples.plan()
    names = [
        [
            e["args"]["name"]
            for e in chrome_trace(trace, plan)["traceEvents"]
            if e["name"] == "process_name"
        ]
        for trace in (made.trace, made.role_trace)
    ]
    assert names[0][:2] == ["rank 0 (pp=0, dp=0)", "rank 1 (pp=0, dp=1)"]
    assert names[1] == ["ranks 0-1 (pp=0)", "ranks 2-3 (pp=1)"]


@each_case(
    ("change", "problem"),
    [
        ({"id": 99}, "its events are ['s']"),
        ({"ts": 1e9}, "it ends before it starts"),
        ({"tid": 7}, "its s is in no span"),
    ],
)
def test_the_check_of_flows_finds(change: dict[str, Any], problem: str) -> None:
    document = chrome_trace(samples.simulation().trace, samples.plan())
    next(e for e in document["traceEvents"] if e["ph"] == "s").update(change)
    assert problem in "\n".join(problems(document))


@each_case(
    ("phase", "index", "change", "found"),
    [
        ("X", 0, {"ph": "Q"}, "ph is 'Q'"),
        ("X", 0, {"dur": -1.0}, "dur is -1.0"),
        ("X", 0, {"ts": "0"}, "ts is '0'"),
        ("X", 0, {"tid": None}, "tid is None"),
        ("X", 0, {"name": ""}, "name is ''"),
        ("X", 0, {"dur": 1500.0}, "process 0, thread 0: events overlap"),
        ("X", 3, {"tid": 5}, "process 1, thread 5: no name"),
        ("C", 0, {"args": {"param": 1.5}}, "args is {'param': 1.5}"),
    ],
)
def test_the_schema_check_finds(phase: str, index: int, change: dict[str, Any], found: str) -> None:
    document = chrome_trace(TRACE)
    [e for e in document["traceEvents"] if e["ph"] == phase][index].update(change)
    assert found in "\n".join(problems(document))


def test_the_schema_check_finds_what_is_no_trace() -> None:
    assert (
        problems([])
        == problems({"traceEvents": {}})
        == ["an object with a list traceEvents is expected"]
    )
    assert problems({"traceEvents": [3]}) == ["event 0: an object is expected"]
