"""Clusters: what a device and its links can do. Constants from public sources, each named in its docstring.

A cluster is named `<device>:<per node>[*<nodes>]`, e.g. `h100-80g-sxm:8*4`; `h100x8` and `h100x8*4` are short for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from piper_ir.errors import ClusterError

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices, `per_node` on each of `nodes` nodes; rank r is on node r // per_node.

    `peak_flops`: FLOP/s by dtype, dense; `matmul_fraction` of it is reached by matmul and attention. `memory_bandwidth` in
    bytes/s; `memory_fraction` of it is reached by kernels bound by memory. `launch_s`: host seconds per kernel;
    `host_issue_s`: per instruction of a plan. `synchronous`: the host runs the kernels itself (a CPU), so launches add to
    their time instead of hiding behind it. `intra_*` and `inter_*`: links within and between nodes: reached bytes/s per
    device and direction, seconds per hop. `context_bytes` are gone on a device before the first tensor; `allocator_factor`:
    reserved over allocated bytes; `group_bytes` and `p2p_bytes`: of a communicator. `notes`: what of these
    numbers is assumed or not calibrated, empty when nothing is; every prediction shows it as a warning."""

    device: str
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: int
    intra_bandwidth: float
    intra_latency: float
    inter_bandwidth: float
    inter_latency: float
    per_node: int = 1
    nodes: int = 1
    matmul_fraction: float = 1.0
    memory_fraction: float = 1.0
    launch_s: float = 0.0
    host_issue_s: float = 0.0
    synchronous: bool = False
    context_bytes: int = 0
    allocator_factor: float = 1.0
    group_bytes: int = 0
    p2p_bytes: int = 0
    notes: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.peak_flops:
            raise ClusterError(f"cluster {self.device}: peak_flops is empty; give FLOP/s for at least one dtype")
        numbers = {
            **{f"peak_flops[{k}]": v for k, v in self.peak_flops.items()},
            **{k: getattr(self, k) for k in ("memory_bandwidth", "intra_bandwidth", "inter_bandwidth", "per_node", "nodes")},
            **{k: getattr(self, k) for k in ("memory_bytes", "matmul_fraction", "memory_fraction", "allocator_factor")},
        }
        for name, value in numbers.items():
            if not value > 0:
                raise ClusterError(f"cluster {self.device}: {name} is {value!r}; a positive number is needed")
        for name in ("intra_latency", "inter_latency", "launch_s", "host_issue_s", "context_bytes", "group_bytes", "p2p_bytes"):
            if not getattr(self, name) >= 0:
                raise ClusterError(f"cluster {self.device}: {name} is {getattr(self, name)!r}; it cannot be negative")

    @property
    def devices(self) -> int:
        return self.per_node * self.nodes

    @property
    def name(self) -> str:
        """As `load_cluster` reads it."""
        return CPU if self.device == CPU else f"{self.device}:{self.per_node}" + (f"*{self.nodes}" if self.nodes > 1 else "")

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def peak(self, dtype: str) -> float:
        """FLOP/s in a dtype; that of the slowest one known when it is not known (see `guess`)."""
        return self.peak_flops.get(dtype) or min(self.peak_flops.values())

    def guess(self, dtype: str) -> str:
        """What `peak` takes for a dtype that it does not know, as a warning."""
        slowest = min(self.peak_flops, key=lambda d: self.peak_flops[d])
        return f"{self.name}: no FLOP/s known for {dtype}; computed with those of {slowest}, {self.peak(dtype) / 1e12:g} TFLOP/s"

    @property
    def warnings(self) -> tuple[str, ...]:
        """`notes` with the cluster's name; none when there is nothing to warn of."""
        return (f"{self.name}: {self.notes}",) if self.notes else ()


def _nvidia(
    device: str,
    flops: tuple[float, float, float],
    matmul_fraction: float,
    bandwidth: tuple[float, float],
    mebibytes: int,
    links: tuple[float, float],
) -> Cluster:
    """A device and what all NVIDIA devices share. `flops`: TFLOP/s in bf16, fp32 (torch's default: without TF32) and fp64;
    `bandwidth`: TB/s of memory and the fraction reached; `links`: GB/s reached within and between nodes.

    Links: latency per hop 1.9 and 4.0 us (NCCL's LL128 ring on NVLink and network; cost-model.md 3). Launch 5 us and issue
    1.1 us (a no-op instruction, plan-rules.md 21) are assumptions until calibrated. Memory outside torch (cost-model.md 5):
    context 0.47 GiB, first communicator of a group 1.27 GiB (2.00 with it, 0.73 after it is destroyed), reserved 1.05 x
    allocated; a point-to-point communicator 4 MiB x 32 channels (unverified)."""
    bf16, fp32, fp64 = (x * 1e12 for x in flops)
    return Cluster(
        device=device,
        peak_flops={"bfloat16": bf16, "float16": bf16, "float32": fp32, "float64": fp64},
        memory_bandwidth=bandwidth[0] * 1e12,
        memory_bytes=mebibytes * MIB,
        intra_bandwidth=links[0] * 1e9,
        intra_latency=1.9e-6,
        inter_bandwidth=links[1] * 1e9,
        inter_latency=4.0e-6,
        matmul_fraction=matmul_fraction,
        memory_fraction=bandwidth[1],
        launch_s=5e-6,
        host_issue_s=1.1e-6,
        context_bytes=int(0.47 * GIB),
        allocator_factor=1.05,
        group_bytes=int(1.27 * GIB),
        p2p_bytes=128 * MIB,
        notes="public constants; launch, issue and communicator memory are not calibrated",
    )


DEVICES: Mapping[str, Cluster] = {
    c.device: c
    for c in (
        _nvidia("a100-80g-sxm", (312, 19.5, 19.5), 0.869, (2.0, 0.91), 81920, (231, 23.5)),
        _nvidia("h100-80g-sxm", (989, 67, 67), 0.803, (3.35, 0.90), 81559, (370, 48.5)),
    )
}
"""bf16 peak, best measured matmul fraction (MAMF) and memory bandwidth: ml-engineering, by cost-model.md 1; fp32 and fp64 (on
tensor cores) from NVIDIA's data sheets; memory as nvidia-smi reports it. Fraction of the memory bandwidth: SimuMax (A100),
Calculon from 100 MB on (H100), cost-model.md 1. Links: 8-GPU all-reduce bus bandwidth and the usable NIC (CX6, CX7),
cost-model.md 1."""

ALIASES = {"a100": "a100-80g-sxm", "h100": "h100-80g-sxm"}
CPU = "cpu-local"
_TYPICAL_CPU = {
    "matmul_flops": 5e10,
    "memory_bandwidth": 1e10,
    "link_bandwidth": 4.3e9,
    "link_latency": 1.55e-4,
    "launch_s": 5e-6,
    "host_issue_s": 2e-5,
}


def cpu_local(
    *,
    matmul_flops: float | None = None,
    memory_bandwidth: float | None = None,
    link_bandwidth: float | None = None,
    link_latency: float | None = None,
    launch_s: float | None = None,
    host_issue_s: float | None = None,
    memory_bytes: int = 8 * GIB,
) -> Cluster:
    """This machine, one process per rank, as many as wanted. Numbers that the caller measured: float32 FLOP/s of one
    process's matmul, bytes/s of its memory and between two processes, seconds of a one-way message, per kernel and per
    instruction. The others are typical of one slow core with gloo (1 KB round trip 0.31 ms, 4.3 GB/s, building-blocks.md; 20
    us per instruction is an assumption, docs/benchmarks.md measured 12) and `notes` says which."""
    measured = (matmul_flops, memory_bandwidth, link_bandwidth, link_latency, launch_s, host_issue_s)
    given = dict(zip(_TYPICAL_CPU, measured, strict=True))
    value = {k: _TYPICAL_CPU[k] if v is None else v for k, v in given.items()}
    missing = [k for k, v in given.items() if v is None]
    return Cluster(
        device=CPU,
        peak_flops={"float32": value["matmul_flops"], "float64": value["matmul_flops"] / 2},
        memory_bandwidth=value["memory_bandwidth"],
        memory_bytes=memory_bytes,
        intra_bandwidth=value["link_bandwidth"],
        intra_latency=value["link_latency"],
        inter_bandwidth=value["link_bandwidth"],
        inter_latency=value["link_latency"],
        per_node=1024,
        launch_s=value["launch_s"],
        host_issue_s=value["host_issue_s"],
        synchronous=True,
        notes=f"assumed, not measured: {', '.join(missing)}" if missing else "",
    )


def load_cluster(name: str) -> Cluster:
    """A cluster by name (see the module). ClusterError for a name that is not known, with all that are."""
    text = name.strip().lower()
    if text == CPU:
        return cpu_local()
    match = re.fullmatch(r"(?P<device>[a-z][a-z0-9-]*?)[:x](?P<per_node>[1-9]\d*)(\*(?P<nodes>[1-9]\d*))?", text)
    if match is not None:
        device = ALIASES.get(match["device"], match["device"])
        if device in DEVICES:
            return replace(DEVICES[device], per_node=int(match["per_node"]), nodes=int(match["nodes"] or 1))
    raise ClusterError(
        f"unknown cluster {name!r}; a cluster is <device>:<per node>[*<nodes>] with a device of {', '.join(DEVICES)} "
        f"(short: {', '.join(f'{a}x8' for a in ALIASES)}, {'h100x8*4'}), or {CPU}"
    )
