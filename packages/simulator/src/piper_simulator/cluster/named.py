"""Find clusters by name: built-in ones, this machine, and clusters from files.

A built-in cluster is named `<device>:<per node>[*<nodes>][@<stack>]`, e.g. `h100-80g-sxm:8*4`; `h100x8` and `h100x8*4`
are short. `a100x8*2+h100x8*2` is two nodes of one device and then two of another. `h100x8@eager` uses published facts
about eager PyTorch's kernels, and `h100x8@mine.toml` a stack's own file. Devices are files in the folder data/, in the
format of `piper_simulator.cluster.cluster_file`, each constant with its source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from piper_ir.ground.errors import ClusterError
from piper_ir.ground.limits import MOST_RANKS
from piper_simulator.cluster.cluster import Cluster, NodeKind
from piper_simulator.cluster.cluster_file import read_cluster
from piper_simulator.cluster.device import CPU, FLOAT8, Device
from piper_simulator.cluster.network import Links
from piper_simulator.cluster.software import with_stack
from piper_simulator.cluster.stacks import STACKS, read_software
from piper_simulator.cluster.wrong_names import unknown_cluster

T = TypeVar("T", Device, Links)
_DATA = Path(__file__).parent / "data"
_NVIDIA = (
    "a100-80g-sxm",
    "a100-40g-sxm",
    "h100-80g-sxm",
    "h100-96g-hbm2e-500w",
    "h200-141g-sxm",
    "gh200-96g",
    "b200-sxm",
    "gb200-186g",
)


def _built_in(device: str) -> Cluster:
    return replace(read_cluster(_DATA / f"{device}.toml", {}), label="")


DEVICES: Mapping[str, NodeKind] = {device: _built_in(device).kinds[0] for device in _NVIDIA}
"""The built-in devices by name, each with its links to others."""
ALIASES = {
    "a100": "a100-80g-sxm",
    "a100-40g": "a100-40g-sxm",
    "h100": "h100-80g-sxm",
    "h200": "h200-141g-sxm",
    "gh200": "gh200-96g",
    "b200": "b200-sxm",
    "gb200": "gb200-186g",
}
PRODUCTS = {
    "NVIDIA A100-SXM4-80GB": "a100-80g-sxm",
    "NVIDIA A100-SXM4-40GB": "a100-40g-sxm",
    "NVIDIA H100 80GB HBM3": "h100-80g-sxm",
    "NVIDIA H200": "h200-141g-sxm",
    "NVIDIA B200": "b200-sxm",
}
"""The names of devices in clusters, by their names in the driver."""
FILES = (".toml", ".json")
MOST_DIGITS, KEPT = 18, 40
"""The digits of a count in a name, and the characters of a name with more of them that a message repeats."""
_LOCAL = _built_in(CPU)


def cpu_local(
    *,
    matmul_flops: float | None = None,
    memory_bandwidth: float | None = None,
    link_bandwidth: float | None = None,
    link_latency: float | None = None,
    launch_s: float | None = None,
    host_issue_s: float | None = None,
    memory_bytes: int | None = None,
) -> Cluster:
    """Return this machine as a cluster, one process per rank, with any number of ranks.

    The arguments are numbers that the caller measured: float32 FLOP/s of one process's matmul, bytes/s of its memory
    and between two processes, seconds of a one-way message, per kernel and per instruction. Others come from
    data/cpu-local.toml, and `notes` says which.
    """
    measured = {
        "matmul_flops": matmul_flops,
        "memory_bandwidth": memory_bandwidth,
        "link_bandwidth": link_bandwidth,
        "link_latency": link_latency,
        "launch_s": launch_s,
        "host_issue_s": host_issue_s,
    }
    missing = [k for k, v in measured.items() if v is None]
    cluster = _LOCAL.each_device(
        lambda device: _changed(
            device,
            peak_flops=None
            if matmul_flops is None
            else {"float32": matmul_flops, "float64": matmul_flops / 2, FLOAT8: matmul_flops},
            memory_bandwidth=memory_bandwidth,
            memory_bytes=memory_bytes,
            launch_s=launch_s,
            host_issue_s=host_issue_s,
            notes=f"assumed, not measured: {', '.join(missing)}" if missing else "",
        )
    )
    return cluster.each_links(
        lambda links: _changed(
            links,
            intra_bandwidth=link_bandwidth,
            inter_bandwidth=link_bandwidth,
            intra_latency=link_latency,
            inter_latency=link_latency,
        )
    )


def _changed(record: T, **changes: Any) -> T:
    """Return a record with the changes that are not None."""
    return replace(record, **{name: value for name, value in changes.items() if value is not None})


def product_cluster(product: str, count: int) -> Cluster:
    """Return one node with `count` CUDA devices that their driver calls `product`.

    An unknown product gets the constants of an A100, and `notes` says so.
    """
    known = PRODUCTS.get(product)
    if known is not None:
        return DEVICES[known].cluster(per_node=count)
    name = re.sub(r"[^a-z0-9]+", "-", product.lower()).strip("-")
    a100 = DEVICES[ALIASES["a100"]].cluster(per_node=count)
    notes = f"nothing is known of a {product}; computed as {a100.device.name}"
    return a100.each_device(lambda device: replace(device, name=name, notes=notes))


def load_cluster(name: str | Path) -> Cluster:
    """Return a cluster by name (see the module), or from a file: a Path, or text that ends in .toml or .json.

    Raises ClusterError for an unknown name, with its wrong part and the nearest one, and for a file of a cluster or a
    stack that is not right, with its keys.
    """
    if not isinstance(name, str | Path):
        raise ClusterError(
            f"a {type(name).__name__} names no cluster; a name such as h100x8, or the path of a "
            f"cluster file, is needed"
        )
    if isinstance(name, Path):
        return read_cluster(name, DEVICES)
    text = name.strip()
    if text.lower() == CPU:
        return cpu_local()
    places, at, stack = text.partition("@")
    named = _places(places.lower())
    if text.lower().endswith(FILES):
        if named is None or not stack or Path(text).exists():
            return read_cluster(Path(name), DEVICES)
        return with_stack(named, read_software(Path(stack), STACKS))
    stack = stack.lower()
    if named is None or (at and stack not in STACKS):
        raise ClusterError(unknown_cluster(name, DEVICES, ALIASES))
    return with_stack(named, STACKS[stack]) if at else named


def _places(text: str) -> Cluster | None:
    """Return the nodes of built-in devices by name, joined by "+", or None for an unknown name."""
    parts = [_nodes(place) for place in text.split("+")]
    known = [part for part in parts if part is not None]
    return Cluster.joined(known) if len(known) == len(parts) else None


def _nodes(text: str) -> Cluster | None:
    """Return the nodes of one built-in device by name, or None for an unknown name."""
    match = re.fullmatch(r"([a-z][a-z0-9-]*?)[:x]([1-9]\d*)(?:\*([1-9]\d*))?", text)
    device = ALIASES.get(match[1], match[1]) if match is not None else ""
    if match is None or device not in DEVICES:
        return None
    counts = (match[2], match[3] or "1")
    if any(len(count) > MOST_DIGITS for count in counts):
        raise ClusterError(f"cluster {text[:KEPT]}...: at most {MOST_RANKS} devices are accepted")
    return DEVICES[device].cluster(per_node=int(counts[0]), nodes=int(counts[1]))
