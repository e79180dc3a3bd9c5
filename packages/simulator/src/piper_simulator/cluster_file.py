"""Clusters as files: TOML for people, JSON for programs, one schema. Units are SI: bytes, bytes/s, FLOP/s, seconds.

    name = "lab"
    device = "h100-80g-sxm"                  # built in; or a table [device], see below
    nodes = { count = 4, devices = 8 }
    [links.inter]
    bandwidth = 48.5e9                       # of one NIC
    nics_per_node = 4
    [[slow_ranks]]
    rank = 5
    factor = 1.2

Measured kernels, `[[kernel]]`: `piper_simulator.kernel_rows`.

`[device]` with `base = "h100-80g-sxm"` changes single constants of a built-in device, links and communication model included;
without `base` it gives all that have no default. Where nodes differ `nodes` is a list of tables, one for each run of nodes, with
a `device` and `[nodes.links]` of its own, which go before those of the file. A key that is not known is an error.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from piper_ir.costs import CommDuration, Duration
from piper_ir.errors import ClusterError
from piper_simulator.checks import (
    COUNT,
    FACTOR,
    FRACTION,
    INDEX,
    NOT_NEGATIVE,
    POSITIVE,
    TEXT,
    Where,
    list_of,
    list_of_n,
    list_or,
    mapping,
    one_of,
    table,
    text_or,
)
from piper_simulator.cluster import INTER, INTRA, MODELS, Cluster, SlowLink
from piper_simulator.communication import OPS
from piper_simulator.kernel_rows import SCHEMA as KERNELS
from piper_simulator.kernel_rows import read_kernels
from piper_simulator.nccl import Nccl
from piper_simulator.stacks import GENERATIONS, STACKS

_DEVICE = (
    {"base": TEXT, "name": TEXT, "peak_flops": mapping(POSITIVE), "synchronous": one_of(True, False), "memory_bytes": COUNT}
    | {"generation": one_of(*GENERATIONS), "memory_steps": list_of(list_of_n(2, NOT_NEGATIVE))}
    | {"memory_bandwidth": POSITIVE, "allocator_factor": FACTOR}
    | dict.fromkeys(("matmul_fraction", "memory_fraction"), FRACTION)
    | dict.fromkeys(("launch_s", "host_issue_s"), NOT_NEGATIVE)
    | dict.fromkeys(("context_bytes", "group_bytes", "p2p_bytes", "sms"), INDEX)
)
_INTRA = {"kind": one_of(*INTRA), "bandwidth": POSITIVE, "latency": NOT_NEGATIVE}
_INTER = {"kind": one_of(*INTER), "bandwidth": POSITIVE, "latency": NOT_NEGATIVE}
_COUNTS = {"count": COUNT, "devices": COUNT}
_NCCL = (
    {"ll_max": list_of_n(3, POSITIVE)}
    | dict.fromkeys(("ll_fraction", "hop_factor", "net_hop_factor", "pass_bandwidth"), POSITIVE)
    | dict.fromkeys(("nvls_bandwidth", "start_s"), NOT_NEGATIVE)
)
_OF_NODES = table({"intra": table(_INTRA), "inter": table(_INTER | {"nics_per_node": COUNT})})
SCHEMA = table(
    {
        **dict.fromkeys(("name", "notes"), TEXT),
        "stack": one_of(*STACKS),
        "sources": mapping(TEXT),
        "device": text_or(table(_DEVICE)),
        "nodes": list_or(list_of(table(_COUNTS | {"device": text_or(table(_DEVICE)), "links": _OF_NODES})), table(_COUNTS)),
        "links": table(
            {
                "intra": table(_INTRA),
                "inter": table(_INTER | dict.fromkeys(("nics_per_node", "rails"), COUNT) | {"oversubscription": FACTOR}),
            }
        ),
        "communication": table({"model": one_of(*MODELS), "messages": TEXT, "nccl": table(_NCCL)}),
        "slow_ranks": list_of(table({"rank": INDEX, "factor": FACTOR})),
        "slow_links": list_of(table({"nodes": list_of_n(2, INDEX), "factor": FACTOR})),
        "kernel": KERNELS,
    }
)
"""What a file may hold."""

COLUMNS = ("op", "ranks", "nodes", "bytes", "seconds")
"""Of a table of messages, a CSV file; lines that begin with # say where it comes from."""


def read_cluster(path: Path, devices: Mapping[str, Cluster]) -> Cluster:
    """The cluster of a file; `devices`: the built-in ones, on which it may rest. ClusterError with file and keys."""
    where = Where(str(path))
    found = SCHEMA(_parsed(path), where)
    nodes = found.get("nodes", {})
    try:
        if isinstance(nodes, list):
            cluster = Cluster.joined([_one_kind(*of, path, devices) for of in _runs(found, nodes, where)])
        else:
            cluster = _one_kind(found, where, path, devices)
        return replace(cluster, **_slow(found, where))
    except ClusterError as e:
        text = str(e)
        raise ClusterError(text if text.startswith(f"{path}: ") else f"{path}: {text}") from None


def _runs(found: dict[str, Any], nodes: Sequence[Mapping[str, Any]], where: Where) -> Iterator[tuple[dict[str, Any], Where]]:
    """A file for each run of nodes, and where its device stands."""
    if not nodes:
        raise where.at("nodes").error("none stand here; at least one is needed")
    tables = [where.at("communication").at("messages")] if "messages" in found.get("communication", {}) else []
    tables += [where.at("kernel")] if "kernel" in found else []
    for at in tables:
        raise at.error("a table holds for one kind of device; leave it out where `nodes` is a list")
    for k, run in enumerate(nodes):
        at = where.at(f"nodes[{k}]")
        if "device" not in run and "device" not in found:
            raise at.error("device is missing, here or for the whole file")
        links = {
            which: found.get("links", {}).get(which, {}) | run.get("links", {}).get(which, {}) for which in ("intra", "inter")
        }
        one = found | {"nodes": run} | ({"links": links} if "links" in found or "links" in run else {})
        yield one | ({"device": run["device"]} if "device" in run else {}), at if "device" in run else where


def _one_kind(found: Mapping[str, Any], where: Where, path: Path, devices: Mapping[str, Cluster]) -> Cluster:
    """Without what is slow. `where`: of the device."""
    base, name = _base(found, where, devices)
    numbers = _device(found) | _places(found, Where(str(path)), base) | _communication(found, Where(str(path)), path, base)
    numbers |= {"label": found.get("name", path.stem), "device": name}
    numbers |= {"notes": found["notes"]} if "notes" in found else {}
    numbers |= {"kernels": read_kernels(found["kernel"], where.at("kernel"))} if "kernel" in found else {}
    if base is not None:
        return replace(base, **numbers)
    _complete(numbers, where)
    return Cluster(**numbers)


def _parsed(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ClusterError(f"cannot read the cluster file {path}: {e}") from None
    try:
        return json.loads(text, object_pairs_hook=_once) if path.suffix == ".json" else tomllib.loads(text)
    except (RecursionError, ValueError) as e:
        raise ClusterError(f"{path}: not {'JSON' if path.suffix == '.json' else 'TOML'}: {e}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON; a key that stands twice is an error, as it is in TOML."""
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError(f"a key stands twice among {', '.join(k for k, _ in pairs)}")
    return out


def _base(found: Mapping[str, Any], where: Where, devices: Mapping[str, Cluster]) -> tuple[Cluster | None, str]:
    """The built-in device on which a file rests, and the name of its own."""
    described = found.get("device")
    if described is None:
        raise where.error(f'device is missing: device = "NAME" with one of {", ".join(devices)}, or a table [device]')
    at = where.at("device")
    base, name = (described, None) if isinstance(described, str) else (described.get("base"), described.get("name"))
    if base is None:
        if name is None:
            raise at.error("name is missing; a device without a base needs one")
        return None, name
    if base not in devices:
        raise (at if isinstance(described, str) else at.at("base")).error(f"no device {base!r}; known: {', '.join(devices)}")
    return devices[base], name or base


def _device(found: Mapping[str, Any]) -> dict[str, Any]:
    """Constants of the device, and the stack of kernels on it."""
    described = found["device"] if isinstance(found["device"], dict) else {}
    out = {k: v for k, v in described.items() if k not in ("base", "name", "memory_steps")}
    if "memory_steps" in described:
        out["memory_steps"] = tuple((least, fraction) for least, fraction in sorted(described["memory_steps"], reverse=True))
    return out | ({"stack": STACKS[found["stack"]]} if "stack" in found else {})


def _places(found: Mapping[str, Any], where: Where, base: Cluster | None) -> dict[str, Any]:
    """Nodes and links."""
    nodes, links = found.get("nodes", {}), found.get("links", {})
    out: dict[str, Any] = {"nodes": nodes.get("count", 1), "per_node": nodes.get("devices", 1)}
    for which in ("intra", "inter"):
        out |= {f"{which}_{k}": v for k, v in links.get(which, {}).items() if k in _INTRA}
    inter, at = links.get("inter", {}), where.at("links").at("inter")
    out |= {k: inter[k] for k in ("rails", "oversubscription") if k in inter}
    nics = inter.get("nics_per_node", out["per_node"])
    if inter.get("rails", 1) > nics:
        raise at.at("rails").error(f"{inter['rails']} rails with {nics} NICs per node; at most as many are possible")
    if nics != out["per_node"]:  # a device has its part of them
        of_one = out.get("inter_bandwidth", base.inter_bandwidth if base is not None else None)
        if of_one is None:
            raise at.error("bandwidth is missing: bytes/s of one NIC")
        out["inter_bandwidth"] = of_one * nics / out["per_node"]
    return out


def _slow(found: Mapping[str, Any], where: Where) -> dict[str, Any]:
    """Slow ranks and links. Whether they are there, the cluster says."""
    ranks: dict[int, float] = {}
    for rank, factor, at in _entries(found, where, "slow_ranks", "rank"):
        if rank in ranks:
            raise at.error(f"rank {rank} is there twice; give one factor")
        ranks[rank] = factor
    links = [SlowLink(ends[0], ends[1], factor) for ends, factor, _ in _entries(found, where, "slow_links", "nodes")]
    return {"slow_ranks": ranks, "slow_links": tuple(links)}


def _entries(found: Mapping[str, Any], where: Where, name: str, key: str) -> Iterator[tuple[Any, float, Where]]:
    """What is slow, by how much, and where that stands."""
    for k, each in enumerate(found.get(name, ())):
        at = where.at(f"{name}[{k}]")
        for needed in (key, "factor"):
            if needed not in each:
                raise at.error(f"{needed} is missing")
        yield each[key], each["factor"], at


def _communication(found: Mapping[str, Any], where: Where, path: Path, base: Cluster | None) -> dict[str, Any]:
    """Model, its constants, and the table of messages, a file beside this one."""
    of, out = found.get("communication", {}), {}
    if "model" in of:
        out["communication"] = of["model"]
    if "nccl" in of:
        constants = of["nccl"] | ({"ll_max": tuple(of["nccl"]["ll_max"])} if "ll_max" in of["nccl"] else {})
        out["nccl"] = replace(base.nccl if base is not None else Nccl(), **constants)
    if "messages" in of:
        out["messages"] = read_messages(path.parent / of["messages"], where.at("communication").at("messages"))
    elif base is not None and "links" in found:
        out["messages"] = ()  # measured on other links
    return out


def read_messages(path: Path, where: Where) -> tuple[CommDuration, ...]:
    """A table of measured messages: a CSV file with COLUMNS. ClusterError with file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise where.error(f"cannot read the table {path}: {e}") from None
    rows = [(n, line) for n, line in enumerate(lines, start=1) if line.strip() and not line.startswith("#")]
    if not rows or tuple(rows[0][1].split(",")) != COLUMNS:
        raise where.error(f"{path}: the first line is {rows[0][1] if rows else 'missing'}; {','.join(COLUMNS)} is needed")
    found: dict[tuple[str, int, int, int], CommDuration] = {}
    for n, line in rows[1:]:
        message = _message(line, f"{path}, line {n}")
        key = (message.op, message.group, message.nodes, message.bytes)
        if key in found:
            raise Where(f"{path}, line {n}").error("measured on a line before; one of them is needed")
        found[key] = message
    return tuple(found.values())


def _message(line: str, where: str) -> CommDuration:
    cells = line.split(",")
    at = Where(where)
    if len(cells) != len(COLUMNS):
        raise at.error(f"{len(cells)} values; {len(COLUMNS)} are needed: {','.join(COLUMNS)}")
    if cells[0] not in OPS:
        raise at.at("op").error(f"{cells[0]!r} stands here; one of {', '.join(OPS)} is needed")
    ranks, nodes, nbytes = (COUNT(_number(c), at.at(k)) for k, c in zip(COLUMNS[1:4], cells[1:4]))
    seconds = POSITIVE(_number(cells[4]), at.at(COLUMNS[4]))
    return CommDuration(cells[0], nbytes, ranks, Duration(seconds, "table"), nodes)


def _number(cell: str) -> Any:
    """A number, or the text that is none."""
    try:
        return int(cell) if cell.strip().isdigit() else float(cell)
    except ValueError:
        return cell


def _complete(numbers: Mapping[str, Any], where: Where) -> None:
    """ClusterError for a device without a base that lacks what has no default."""
    keys = {"intra_bandwidth": "links.intra.bandwidth", "intra_latency": "links.intra.latency"}
    keys |= {"inter_bandwidth": "links.inter.bandwidth", "inter_latency": "links.inter.latency"}
    required = [f.name for f in fields(Cluster) if f.default is MISSING and f.default_factory is MISSING]
    missing = [keys.get(k, f"device.{k}") for k in required if k not in numbers]
    if missing:
        raise where.error(f"{', '.join(missing)} missing; a device without a base gives them all")
