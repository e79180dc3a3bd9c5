"""Read clusters from files: TOML for people, JSON for programs, one schema. Units are bytes, bytes/s, FLOP/s, seconds.

    name = "lab"
    device = "h100-80g-sxm"                  # built in; or a table [device], see below
    nodes = { count = 4, devices = 8 }
    [links.inter]
    bandwidth = 48.5e9                       # of one NIC
    nics_per_node = 4
    [[slow_ranks]]
    rank = 5
    factor = 1.2

Measured kernels, `[[kernel]]`, are described in `piper_simulator.cluster.kernel_table`; kernel stacks, `[stacks.NAME]`
and `[attention.NAME]`, in `piper_simulator.cluster.stacks`.

`[device]` with `base = "h100-80g-sxm"` changes single constants of a built-in device, links and communication model
included. Without `base` it gives all constants that have no default. If nodes differ, `nodes` is a list of tables, one
for each run of nodes, with a `device` and `[nodes.links]` of its own, which go before the links of the file. An unknown
key is an error.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from piper_ir.ground.codec import unique_keys
from piper_ir.ground.errors import ClusterError
from piper_ir.tools import unread
from piper_simulator.cluster.checks import (
    COUNT,
    FACTOR,
    FRACTION,
    INDEX,
    TEXT,
    Check,
    KeyPath,
    checks_of,
    list_of,
    list_of_each,
    list_or,
    mapping,
    one_of,
    table,
    text_or,
)
from piper_simulator.cluster.cluster import Cluster, NodeKind
from piper_simulator.cluster.device import Device
from piper_simulator.cluster.kernel_table import SCHEMA as KERNELS
from piper_simulator.cluster.kernel_table import read_kernels
from piper_simulator.cluster.messages_file import read_messages
from piper_simulator.cluster.nccl import Nccl
from piper_simulator.cluster.network import Links, Network, SlowLink
from piper_simulator.cluster.software import with_stack
from piper_simulator.cluster.stacks import (
    ATTENTION_KERNELS,
    GENERATIONS,
    STACKS,
    TABLES,
    described_stacks,
)

_ELSEWHERE = ("stack", "kernels", "notes")
"""The fields of a device that have tables or keys of their own in a file."""
_DEVICE = (
    {"base": TEXT}
    | {key: check for key, check in checks_of(Device).items() if key not in _ELSEWHERE}
    | {"generation": one_of(*GENERATIONS), "allocator_factor": FACTOR}
    | dict.fromkeys(
        ("matmul_fraction", "memory_fraction"), FRACTION
    )  # a what-if may raise one above 1, a file may not
    | {"matmul_fractions": mapping(FRACTION)}
)
_LINKS, _NETWORK = checks_of(Links), checks_of(Network)
_LINK_KINDS = ("intra", "inter", "host")


def _keys(prefix: str) -> dict[str, Check]:
    """Return the checks of the fields that begin with `prefix`, by the rest of their names."""
    return {
        field.removeprefix(prefix): check
        for field, check in _LINKS.items()
        if field.startswith(prefix)
    }


_INTRA, _INTER = (
    {key: _keys(f"{which}_")[key] for key in ("kind", "bandwidth", "latency")}
    for which in ("intra", "inter")
)
_HOST = _keys("host_")
_COUNTS = {"count": COUNT, "devices": COUNT}
_OF_NODES = table(
    {
        "intra": table(_INTRA),
        "inter": table(_INTER | {"nics_per_node": COUNT}),
        "host": table(_HOST),
    }
)
SCHEMA = table(
    {
        **dict.fromkeys(("name", "notes", "stack"), TEXT),
        **TABLES,
        "sources": mapping(TEXT),
        "device": text_or(table(_DEVICE)),
        "nodes": list_or(
            list_of(table(_COUNTS | {"device": text_or(table(_DEVICE)), "links": _OF_NODES})),
            table(_COUNTS),
        ),
        "links": table(
            {
                "intra": table(_INTRA),
                "host": table(_HOST),
                "inter": table(
                    _INTER
                    | {"nics_per_node": COUNT}
                    | {k: _NETWORK[k] for k in ("rails", "oversubscription")}
                ),
            }
        ),
        "communication": table(
            {"model": _LINKS["communication"], "messages": TEXT, "nccl": table(checks_of(Nccl))}
        ),
        "slow_ranks": list_of(table({"rank": INDEX, "factor": FACTOR})),
        "slow_links": list_of(table({"nodes": list_of_each(INDEX, INDEX), "factor": FACTOR})),
        "kernel": KERNELS,
    }
)
"""The check of a whole cluster file."""


def read_cluster(path: Path, devices: Mapping[str, NodeKind]) -> Cluster:
    """Return the cluster of a file, which may rest on the built-in `devices`; raise ClusterError with file and keys."""
    where = KeyPath(str(path))
    settings = SCHEMA(_parsed(path), where)
    settings |= _stack(settings, where)
    nodes = settings.get("nodes", {})
    try:
        if isinstance(nodes, list):
            cluster = Cluster.joined(
                [_one_kind(*of, path, devices) for of in _runs(settings, nodes, where)]
            )
        else:
            cluster = _one_kind(settings, where, path, devices)
        ranks, links = _slow(settings, where)
        if "stack" in settings:
            cluster = with_stack(cluster, settings["stack"])
        cluster = replace(
            cluster, network=replace(cluster.network, slow_links=links), slow_ranks=ranks
        )
        odd = "; ".join(_in_other_units(cluster))
        return (
            cluster.each_device(lambda d: replace(d, notes="; ".join(filter(None, (odd, d.notes)))))
            if odd
            else cluster
        )
    except ClusterError as e:
        text = str(e)
        raise ClusterError(text if text.startswith(f"{path}: ") else f"{path}: {text}") from None


PLAUSIBLE = {
    "bandwidth": (1e6, "bytes/s"),
    "memory_bytes": (1e5, "bytes"),
    "peak_flops": (1e9, "FLOP/s"),
}
"""The least plausible number of each kind, and its unit: smaller ones are likely GB/s, GB or MB, and TFLOP/s."""


def _in_other_units(cluster: Cluster) -> Iterator[str]:
    """Yield a warning for each number that is too small for its unit."""
    found = {
        **{f"links.{name}_bandwidth": min(getattr(links, f"{name}_bandwidth") for links in cluster.network.links)
           for name in _LINK_KINDS},
        "device.memory_bandwidth": min(d.memory_bandwidth for _, d in cluster.nodes),
        "device.memory_bytes": min(d.memory_bytes for _, d in cluster.nodes),
        "device.peak_flops": min(min(d.peak_flops.values()) for _, d in cluster.nodes),
    }  # fmt: skip
    for name, value in found.items():
        least, unit = next(known for kind, known in PLAUSIBLE.items() if name.endswith(kind))
        if value < least:
            yield f"{name} = {value:g} is hardly in {unit}, its unit"


def _stack(file: Mapping[str, Any], where: KeyPath) -> dict[str, Any]:
    """Return the kernel stack that a file names, its own or a built-in one, as `stack`; nothing if it names none."""
    for table_name, built_in in (("attention", ATTENTION_KERNELS), ("stacks", STACKS)):
        for name in file.get(table_name, {}):
            if name in built_in:
                raise (
                    where.at(table_name)
                    .at(name)
                    .error(
                        f"the name is built in; give yours another one than {', '.join(built_in)}"
                    )
                )
    stacks = {**STACKS, **described_stacks(file, ATTENTION_KERNELS, where, STACKS)}
    if "stack" not in file:
        return {}
    return {"stack": stacks[one_of(*stacks)(file["stack"], where.at("stack"))]}


def _runs(
    found: dict[str, Any], nodes: Sequence[Mapping[str, Any]], where: KeyPath
) -> Iterator[tuple[dict[str, Any], KeyPath]]:
    """Yield a file for each run of nodes, and the place of its device."""
    if not nodes:
        raise where.at("nodes").error("none stand here; at least one is needed")
    tables = (
        [where.at("communication").at("messages")]
        if "messages" in found.get("communication", {})
        else []
    )
    tables += [where.at("kernel")] if "kernel" in found else []
    for at in tables:
        raise at.error("a table holds for one kind of device; leave it out where `nodes` is a list")
    for k, run in enumerate(nodes):
        at = where.at(f"nodes[{k}]")
        if "device" not in run and "device" not in found:
            raise at.error("device is missing, here or for the whole file")
        links = {
            which: found.get("links", {}).get(which, {}) | run.get("links", {}).get(which, {})
            for which in _LINK_KINDS
        }
        one = (
            found
            | {"nodes": run}
            | ({"links": links} if "links" in found or "links" in run else {})
        )
        yield (
            one | ({"device": run["device"]} if "device" in run else {}),
            at if "device" in run else where,
        )


def _one_kind(
    found: Mapping[str, Any], where: KeyPath, path: Path, devices: Mapping[str, NodeKind]
) -> Cluster:
    """Return the cluster of a file with one type of device and nothing slow; `where` is the device's place."""
    base, name = _base(found, where, devices)
    file = KeyPath(str(path))
    per_node = found.get("nodes", {}).get("devices", 1)
    device = (
        _device(found) | {"name": name} | ({"notes": found["notes"]} if "notes" in found else {})
    )
    device |= (
        {"kernels": read_kernels(found["kernel"], where.at("kernel"))} if "kernel" in found else {}
    )
    links = _links(found, file, per_node, base) | _communication(found, file, path, base)
    if base is None:
        _complete(device, links, where)
        kind = NodeKind(Device(**device), Links(**links))
    else:
        kind = NodeKind(replace(base.device, **device), replace(base.links, **links))
    inter = found.get("links", {}).get("inter", {})
    network = Network(
        (kind.links,), **{k: inter[k] for k in ("rails", "oversubscription") if k in inter}
    )
    nodes = found.get("nodes", {}).get("count", 1)
    return Cluster(((nodes, kind.device),), network, per_node, label=found.get("name", path.stem))


def _parsed(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        advice = "docs/clusters.md shows how one is written"
        if "@" in str(path):
            advice += "; a stack's own file follows built-in devices, as in h100x8@mine.toml"
        raise ClusterError(unread("the cluster file", path, e, advice)) from None
    try:
        return (
            json.loads(text, object_pairs_hook=unique_keys)
            if path.suffix == ".json"
            else tomllib.loads(text)
        )
    except (RecursionError, ValueError) as e:
        raise ClusterError(
            f"{path}: not {'JSON' if path.suffix == '.json' else 'TOML'}: {e}"
        ) from None


def _base(
    found: Mapping[str, Any], where: KeyPath, devices: Mapping[str, NodeKind]
) -> tuple[NodeKind | None, str]:
    """Return the built-in device on which a file rests, and the name of the file's own."""
    described = found.get("device")
    if described is None:
        raise where.error(
            f'device is missing: device = "NAME" with one of {", ".join(devices)}, or a table '
            f"[device]"
        )
    at = where.at("device")
    base, name = (
        (described, None)
        if isinstance(described, str)
        else (described.get("base"), described.get("name"))
    )
    if base is None:
        if name is None:
            raise at.error("name is missing; a device without a base needs one")
        return None, name
    if base not in devices:
        raise (at if isinstance(described, str) else at.at("base")).error(
            f"no device {base!r}; known: {', '.join(devices)}"
        )
    return devices[base], name or base


def _device(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants of the device, and the stack of kernels on it."""
    described = found["device"] if isinstance(found["device"], dict) else {}
    constants = {k: v for k, v in described.items() if k not in ("base", "name", "memory_steps")}
    if "memory_steps" in described:
        constants["memory_steps"] = tuple(
            (least, fraction) for least, fraction in sorted(described["memory_steps"], reverse=True)
        )
    return constants | ({"stack": found["stack"]} if "stack" in found else {})


def _links(
    found: Mapping[str, Any], where: KeyPath, per_node: int, base: NodeKind | None
) -> dict[str, Any]:
    """Return the settings in a file for the links of a type of device."""
    links = found.get("links", {})
    settings = {
        f"{which}_{k}": v
        for which in _LINK_KINDS
        for k, v in links.get(which, {}).items()
        if k in _INTRA or which == "host"
    }
    inter, at = links.get("inter", {}), where.at("links").at("inter")
    nics = inter.get("nics_per_node", per_node)
    if inter.get("rails", 1) > nics:
        raise at.at("rails").error(
            f"{inter['rails']} rails with {nics} NICs per node; at most as many are possible"
        )
    if nics != per_node:  # a device has its part of them
        of_one = settings.get(
            "inter_bandwidth", base.links.inter_bandwidth if base is not None else None
        )
        if of_one is None:
            raise at.error("bandwidth is missing: bytes/s of one NIC")
        settings["inter_bandwidth"] = of_one * nics / per_node
    return settings


def _slow(
    found: Mapping[str, Any], where: KeyPath
) -> tuple[dict[int, float], tuple[SlowLink, ...]]:
    """Return slow ranks and slow links; the cluster checks whether they exist."""
    ranks: dict[int, float] = {}
    for rank, factor, at in _entries(found, where, "slow_ranks", "rank"):
        if rank in ranks:
            raise at.error(f"rank {rank} is there twice; give one factor")
        ranks[rank] = factor
    links = [
        SlowLink(ends[0], ends[1], factor)
        for ends, factor, _ in _entries(found, where, "slow_links", "nodes")
    ]
    return ranks, tuple(links)


def _entries(
    found: Mapping[str, Any], where: KeyPath, name: str, key: str
) -> Iterator[tuple[Any, float, KeyPath]]:
    """Yield each slow rank or link with its factor and its place."""
    for k, each in enumerate(found.get(name, ())):
        at = where.at(f"{name}[{k}]")
        for needed in (key, "factor"):
            if needed not in each:
                raise at.error(f"{needed} is missing")
        yield each[key], each["factor"], at


def _communication(
    found: Mapping[str, Any], where: KeyPath, path: Path, base: NodeKind | None
) -> dict[str, Any]:
    """Return the model of messages, its constants, and the table of messages from a file beside this one."""
    of, settings = found.get("communication", {}), {}
    if "model" in of:
        settings["communication"] = of["model"]
    if "nccl" in of:
        constants = of["nccl"] | (
            {"ll_max": tuple(of["nccl"]["ll_max"])} if "ll_max" in of["nccl"] else {}
        )
        settings["nccl"] = replace(base.links.nccl if base is not None else Nccl(), **constants)
    if "messages" in of:
        settings["messages"] = read_messages(
            path.parent / of["messages"], where.at("communication").at("messages")
        )
    elif base is not None and "links" in found:
        settings["messages"] = ()  # measured on other links
    return settings


def _complete(device: Mapping[str, Any], links: Mapping[str, Any], where: KeyPath) -> None:
    """Raise a ClusterError for a device without a base that lacks a constant without a default."""
    missing = [f"device.{field}" for field in _required(Device) if field not in device]
    missing += [
        f"links.{field.replace('_', '.')}" for field in _required(Links) if field not in links
    ]
    if missing:
        raise where.error(f"{', '.join(missing)} missing; a device without a base gives them all")


def _required(record: type) -> list[str]:
    """Return the fields of a dataclass that have no default."""
    return [f.name for f in fields(record) if f.default is MISSING and f.default_factory is MISSING]
