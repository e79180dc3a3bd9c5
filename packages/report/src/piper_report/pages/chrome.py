"""Write a Trace in Chrome's trace-event format, for chrome://tracing and ui.perfetto.dev.

A rank is a process, a stream is a thread. Each instruction is one complete event ("X") in microseconds; memory by
category is a counter ("C"); an arrow ("s" to "f") leads from each send to its receive. The format is described in
"Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from piper_ir.ground.trace import BATCH, Span, Trace
from piper_ir.plan.plan import COMPUTE, Plan
from piper_ir.program.ops import Op, Recv, Send
from piper_ir.tools import named_ranks, write_whole
from piper_report.facts.transfers import transfers

MICROSECONDS = 1e6
CATEGORIES = {COMPUTE: "compute", BATCH: "batch"}
Threads = Mapping[tuple[int, str], int]
"""The numbers of threads by rank and stream."""


def chrome_trace(trace: Trace, plan: Plan | None = None) -> dict[str, Any]:
    """Return the trace as a JSON object: metadata, then spans, flows and memory, with times in microseconds.

    Only the plan says which send and which receive belong together, and where ranks are on the mesh.
    """
    threads = _threads(trace, plan)
    events = [*_names(trace, plan, threads)]
    events += [_complete(s, threads[s.rank, s.stream]) for s in (*trace.spans, *trace.waits)]
    if plan is not None:
        events += _flows(trace, plan, threads)
    events += _counters(trace)
    other = {"plan": trace.plan_key, "kind": trace.kind, "step": trace.step, **trace.notes}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _threads(trace: Trace, plan: Plan | None) -> Threads:
    """Return the number of each rank's streams, in the order in which they are shown: compute, the plan's, the rest."""
    streams: dict[int, set[str]] = {m.rank: set() for m in trace.memory}
    for s in (*trace.spans, *trace.waits):
        streams.setdefault(s.rank, set()).add(s.stream)
    threads = {}
    for rank in sorted(streams):
        order = plan.role_of(rank).streams if plan is not None else ()
        place = {name: n for n, name in enumerate(order)}
        for tid, name in enumerate(
            sorted(streams[rank], key=lambda n: (n != COMPUTE, place.get(n, len(order)), n))
        ):
            threads[rank, name] = tid
    return threads


def _names(trace: Trace, plan: Plan | None, threads: Threads) -> Iterator[dict[str, Any]]:
    """Yield the names and the places of processes and threads; a viewer sorts by the places."""
    alike = {same[0]: same for same in trace.alike}
    for rank in sorted({s.rank for s in trace.spans} | {m.rank for m in trace.memory}):
        ranks = alike.get(rank, (rank,))
        yield _metadata("process_name", rank, 0, name=named_ranks(ranks) + _at(ranks, plan))
        yield _metadata("process_sort_index", rank, 0, sort_index=rank)
    for (rank, stream), tid in threads.items():
        yield _metadata("thread_name", rank, tid, name=stream)
        yield _metadata("thread_sort_index", rank, tid, sort_index=tid)


def _at(ranks: Sequence[int], plan: Plan | None) -> str:
    """Return the coordinates that all of the ranks share, as " (pp=1, dp=0)"; "" without a plan."""
    if plan is None:
        return ""
    first, *others = [plan.mesh.coords(rank) for rank in ranks]
    shared = [
        f"{axis}={first[axis]}"
        for axis in reversed(plan.mesh.axes)  # as a mesh is printed
        if all(other[axis] == first[axis] for other in others)
    ]
    return f" ({', '.join(shared)})" if shared else ""


def _complete(s: Span, tid: int) -> dict[str, Any]:
    """Return a span as one event."""
    known = ("bytes", s.bytes), ("flops", s.flops), ("inside_us", s.inside_s * MICROSECONDS)
    return {
        "ph": "X",
        "name": s.name,
        "cat": CATEGORIES.get(s.stream, "communication"),
        "pid": s.rank,
        "tid": tid,
        "ts": s.start * MICROSECONDS,
        "dur": (s.end - s.start) * MICROSECONDS,
        "args": {"instr": s.instr, "ready_us": s.ready * MICROSECONDS, "source": s.source}
        | {k: v for k, v in known if v},
    }


def _flows(trace: Trace, plan: Plan, threads: Threads) -> Iterator[dict[str, Any]]:
    """Yield two events per transfer from rank to rank: within the send, and within the receive and not before that.

    A viewer ties an event to the span that is there at its time.
    """
    number = 0
    for ends in transfers(plan, trace):
        send = next((s for s in ends if isinstance(_op(plan, s), Send)), None)
        receive = next((s for s in ends if isinstance(_op(plan, s), Recv)), None)
        if send is None or receive is None:
            continue
        number += 1
        arrival = (max(send.start, receive.start) + max(send.start, receive.end)) / 2
        for phase, span, time in (("s", send, send.start), ("f", receive, arrival)):
            event = {"ph": phase, "id": number, "name": "transfer", "cat": "flow", "pid": span.rank}
            event |= {"tid": threads[span.rank, span.stream], "ts": time * MICROSECONDS}
            yield event | ({"bp": "e"} if phase == "f" else {})


def _op(plan: Plan, span: Span) -> Op:
    return plan.role_of(span.rank).program[span.instr].parts[0].op


def write_chrome(trace: Trace, path: Path, plan: Plan | None = None) -> None:
    """Write the trace as a .json file; raise OSError when the path cannot be written."""
    write_whole(path, json.dumps(chrome_trace(trace, plan), separators=(",", ":")))


def _metadata(kind: str, pid: int, tid: int, **value: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": value}


def _counters(trace: Trace) -> list[dict[str, Any]]:
    """Return the events of memory, each with all categories of its rank; a counter shows only its own event."""
    categories: dict[int, dict[str, int]] = {}
    for m in trace.memory:
        categories.setdefault(m.rank, {}).update(dict.fromkeys(m.bytes, 0))
    return [
        {
            "ph": "C",
            "name": "memory",
            "pid": m.rank,
            "ts": m.time * MICROSECONDS,
            "args": categories[m.rank] | dict(m.bytes),
        }
        for m in trace.memory
    ]
