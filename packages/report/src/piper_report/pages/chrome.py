"""Write a Trace in Chrome's trace-event format, for chrome://tracing and ui.perfetto.dev.

A rank is a process, a stream is a thread. Each instruction is one complete event ("X") in microseconds; memory by
category is a counter ("C"). The format is described in "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from piper_ir.ground.trace import BATCH, Trace
from piper_ir.plan.plan import COMPUTE
from piper_ir.tools import named_ranks, write_whole

MICROSECONDS = 1e6
CATEGORIES = {COMPUTE: "compute", BATCH: "batch"}


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """Return the trace as a JSON object: metadata, then spans, then memory, with times in microseconds."""
    threads: dict[tuple[int, str], int] = {}
    ranks = sorted({s.rank for s in trace.spans} | {m.rank for m in trace.memory})
    streams: dict[int, set[str]] = {rank: set() for rank in ranks}
    for s in (*trace.spans, *trace.waits):
        streams[s.rank].add(s.stream)
    for rank in ranks:
        for tid, stream in enumerate(
            sorted(streams[rank], key=lambda name: (name != COMPUTE, name))
        ):
            threads[rank, stream] = tid
    alike = {same[0]: same for same in trace.alike}
    names = {rank: named_ranks(alike.get(rank, (rank,))) for rank in ranks}
    events: list[dict[str, Any]] = [
        _metadata("process_name", rank, 0, name) for rank, name in names.items()
    ]
    events += [
        _metadata("thread_name", rank, tid, stream) for (rank, stream), tid in threads.items()
    ]
    for s in (*trace.spans, *trace.waits):
        args: dict[str, Any] = {
            "instr": s.instr,
            "ready_us": s.ready * MICROSECONDS,
            "source": s.source,
        }
        args |= {
            k: v
            for k, v in (
                ("bytes", s.bytes),
                ("flops", s.flops),
                ("inside_us", s.inside_s * MICROSECONDS),
            )
            if v
        }
        event = {"ph": "X", "name": s.name, "cat": CATEGORIES.get(s.stream, "communication")}
        times = {"ts": s.start * MICROSECONDS, "dur": (s.end - s.start) * MICROSECONDS}
        events.append(
            event | {"pid": s.rank, "tid": threads[s.rank, s.stream]} | times | {"args": args}
        )
    events += _counters(trace)
    other = {"plan": trace.plan_key, "kind": trace.kind, "step": trace.step, **trace.notes}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def write_chrome(trace: Trace, path: Path) -> None:
    """Write the trace as a .json file; raise OSError when the path cannot be written."""
    write_whole(path, json.dumps(chrome_trace(trace), separators=(",", ":")))


def _metadata(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}}


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
