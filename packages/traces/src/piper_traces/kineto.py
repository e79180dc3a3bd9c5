"""Read files of `torch.profiler.profile.export_chrome_trace`: Kineto's Chrome JSON, also gzipped."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from piper_ir.ground.errors import FormatError
from piper_ir.tools import unread
from piper_traces.events import DeviceEvent, HostEvent, RankEvents, SentMessage, kind_of

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_READ = (*_DEVICE, "cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_STEP = re.compile(r"^ProfilerStep#(\d+)$")
_RANK = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
_ON_HOST = re.compile(r"^gloo:(\w+)$")
_OPS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "send": "p2p",
    "recv": "p2p",
    "broadcast": "broadcast",
}
"""The names of collectives in torch's ProcessGroupNCCL and ProcessGroupGloo, as they are called here."""
_BYTES = {
    "float": 4, "float32": 4, "int": 4, "int32": 4, "double": 8, "float64": 8, "long": 8, "int64": 8, "half": 2, "float16": 2,
    "bfloat16": 2, "byte": 1, "char": 1, "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""The bytes of an element by the names that c10's ScalarType prints."""
LONGEST_US = 86400e6
"""The longest event that is believed: a day."""


def read_ranks(paths: Iterable[str | Path]) -> list[RankEvents]:
    """Return the events of several ranks' files, by rank.

    Raises FormatError for a file that is no trace, for two files of the same rank, one that stands twice, and for files
    of several jobs.
    """
    paths = [Path(path) for path in paths]
    if twice := [path for path in dict.fromkeys(paths) if paths.count(path) > 1]:
        raise FormatError(f"{twice[0]} is given twice; give one file of each rank")
    ranks = [read_events(path) for path in paths]
    by_rank: dict[int, str] = {}
    for one in ranks:
        if one.rank in by_rank and one.rank >= 0:
            raise FormatError(
                f"{one.path} and {by_rank[one.rank]} are both of rank {one.rank}; give one file of each rank"
            )
        by_rank[one.rank] = one.path
    worlds = {one.world: one.path for one in ranks if one.world}
    if len(worlds) > 1:
        several = " and ".join(f"{path} of {world} ranks" for world, path in worlds.items())
        raise FormatError(f"the traces are of several jobs, {several}; give those of one")
    return sorted(ranks, key=lambda r: r.rank)


def read_events(path: str | Path) -> RankEvents:
    """Return the events of a file; raise FormatError if it is no trace of torch's profiler."""
    document = _document(Path(path))
    events = document.get("traceEvents")
    if not isinstance(events, list):
        raise FormatError(
            f"{path}: no traceEvents; a file that torch.profiler's export_chrome_trace wrote is expected"
        )
    base = _number(document.get("baseTimeNanoseconds", 0)) / 1e9
    try:
        return _events(str(path), document, [e for e in events if isinstance(e, dict)], base)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{path}: an event lacks a part, or is other than torch.profiler writes it ({error}); a file "
            f"that torch.profiler wrote is expected"
        ) from error


def _document(path: Path) -> Mapping[str, Any]:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        document = json.loads(text.decode(errors="replace"), strict=False)
    except OSError as error:
        advice = "give a file that torch.profiler's export_chrome_trace wrote"
        raise FormatError(unread("the trace", path, error, advice)) from error
    except (EOFError, zlib.error) as error:
        raise FormatError(f"{path}: the file is cut off or damaged ({error})") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{path}: no JSON ({error}); a file that torch.profiler's export_chrome_trace wrote is expected"
        ) from error
    if isinstance(document, list):  # Chrome's format of events alone
        return {"traceEvents": document}
    if not isinstance(document, dict):
        raise FormatError(f"{path}: JSON, but no trace: an object with traceEvents is expected")
    return document


def _events(
    path: str, document: Mapping[str, Any], events: Sequence[Mapping[str, Any]], base: float
) -> RankEvents:
    """Return the events of a document; raise KeyError, TypeError or ValueError for one that lacks a part."""
    complete = [e for e in events if e.get("ph") == "X" and e.get("dur") is not None]
    for e in complete:
        if e.get("cat") in _READ:
            _check_times(e)
    launches = {
        e["args"]["correlation"]: base + (e["ts"] + e["dur"]) / 1e6
        for e in complete
        if "runtime" in str(e.get("cat")) or "driver" in str(e.get("cat"))
        if "correlation" in e.get("args", {})
    }
    info = document.get("distributedInfo") or {}
    devices = document.get("deviceProperties") or [{}]
    on_device = [_device_event(e, base, launches) for e in complete if e.get("cat") in _DEVICE]
    ranges, steps = list[HostEvent](), list[tuple[int, float, float]]()
    messages = list[DeviceEvent]()
    for e in complete:
        if e.get("cat") != "user_annotation":
            continue
        start, end = _interval(e, base)
        if step := _STEP.match(e["name"]):
            steps.append((int(step[1]), start, end))
        elif on_host := _ON_HOST.match(e["name"]):
            message = _gloo_message(on_host[1], e, info)
            messages.append(DeviceEvent(e["name"], 0, start, end, "message", None, message))
        else:
            ranges.append(HostEvent(e["name"], f"{e.get('pid')}/{e.get('tid')}", start, end))
    found = on_device or [*messages, *_operators(complete, base)]
    rank = info.get("rank")
    if rank is None and (named := _RANK.search(Path(path).name)):
        rank = int(named[1])
    return RankEvents(
        path,
        -1 if rank is None else int(rank),
        int(info.get("world_size") or 0),
        str(devices[0].get("name", "")) if on_device else "",
        str(document.get("host_name", "")),
        bool(on_device),
        sorted(found, key=lambda e: e.start),
        sorted(ranges, key=lambda r: r.start),
        sorted(steps, key=lambda s: s[1]),
        str(document.get("piper_program", "")),
    )


def _check_times(event: Mapping[str, Any]) -> None:
    if not 0 <= event["dur"] <= LONGEST_US:
        raise ValueError(f"{event['name']} takes {event['dur']} us")
    if not math.isfinite(event["ts"]):
        raise ValueError(f"{event['name']} begins at {event['ts']} us")


def _interval(event: Mapping[str, Any], base: float) -> tuple[float, float]:
    return base + event["ts"] / 1e6, base + (event["ts"] + event["dur"]) / 1e6


def _operators(complete: Sequence[Mapping[str, Any]], base: float) -> Iterator[DeviceEvent]:
    """Yield the operators of a CPU without messages, each for the time in which it calls no others, by thread."""
    by_thread: dict[object, list[Mapping[str, Any]]] = {}
    for e in complete:
        if e.get("cat") == "cpu_op":
            by_thread.setdefault(e.get("tid"), []).append(e)
    for thread, events in enumerate(by_thread.values()):
        for name, start, end in _own_times(sorted(events, key=lambda e: (e["ts"], -e["dur"]))):
            if end > start and (kind := kind_of(name)) != "message":
                yield DeviceEvent(name, thread, base + start / 1e6, base + end / 1e6, kind)


def _own_times(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """Yield the pieces of each event outside of the events that it contains; events are in order of start."""
    under_way: list[tuple[str, float]] = []
    now = 0.0
    for e in [*events, None]:
        start = math.inf if e is None else e["ts"]
        while under_way and under_way[-1][1] <= start:
            name, end = under_way.pop()
            yield name, now, end
            now = max(now, end)
        if e is not None:
            if under_way:
                yield under_way[-1][0], now, start
            under_way.append((str(e["name"]), start + e["dur"]))
            now = start


def _device_event(
    event: Mapping[str, Any], base: float, launches: Mapping[Any, float]
) -> DeviceEvent:
    args, name = event.get("args") or {}, str(event["name"])
    kind = "copy" if event["cat"] != "kernel" else kind_of(name)
    return DeviceEvent(
        name,
        int(_number(args.get("stream", event.get("tid", 0)))),
        *_interval(event, base),
        kind,
        launches.get(args.get("correlation")),
        _nccl_message(args) if kind == "message" else None,
    )


def _nccl_message(args: Mapping[str, Any]) -> SentMessage | None:
    """Return the sizes of a message from the arguments that newer versions of torch give a kernel of NCCL."""
    if "Collective name" not in args:
        return None
    called = str(args["Collective name"])
    item = _BYTES.get(str(args.get("dtype", "")).lower(), 0)
    elements = max(_number(args.get("In msg nelems", 0)), _number(args.get("Out msg nelems", 0)))
    ranks = args.get("Process Group Ranks", "")
    named = str(args.get("Process Group Description") or "")
    if named in ("", "undefined"):
        named = str(args.get("Process Group Name", ""))
    return SentMessage(
        _OPS.get(called, called),
        int(elements) * item,
        int(_number(args.get("Group size", 0))),
        tuple([int(n) for n in re.findall(r"\d+", str(ranks))]) if "..." not in str(ranks) else (),
        named,
    )


def _gloo_message(op: str, event: Mapping[str, Any], info: Mapping[str, Any]) -> SentMessage:
    """Return the sizes of a message of gloo, from the shapes of the tensors if they were recorded."""
    args = event.get("args") or {}
    item = _BYTES.get(str((args.get("Input type") or [""])[0]).lower(), 0)
    elements = 1
    for n in (args.get("Input Dims") or [[0]])[0] or [0]:
        elements *= int(n)
    world = int(info.get("world_size") or 0)
    return SentMessage(_OPS.get(op, op), elements * item, world, group="" if world else "gloo")


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float, str)) and str(value).strip() else 0.0
