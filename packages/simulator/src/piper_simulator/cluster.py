"""What a device, its nodes and the links between them can do. Built-in ones, by name: `piper_simulator.clusters`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Literal

from piper_ir.costs import CommDuration, Costs
from piper_ir.errors import ClusterError
from piper_ir.limits import MOST_RANKS
from piper_simulator.kernel_table import KernelDuration, KernelTable
from piper_simulator.nccl import Nccl
from piper_simulator.stacks import GENERATIONS, Stack

GIB = 1 << 30
MIB = 1 << 20
CPU = "cpu-local"

Model = Literal["ring", "nccl"]
MODELS: tuple[Model, ...] = ("ring", "nccl")
INTRA = ("nvswitch", "nvlink", "pcie", "host")
INTER = ("infiniband", "roce", "ethernet", "host")
"""Kinds of links within and between nodes; `host`: the memory of one machine."""

_POSITIVE = (
    *("memory_bandwidth", "memory_bytes", "memory_fraction", "matmul_fraction", "allocator_factor"),
    *("intra_bandwidth", "inter_bandwidth", "per_node", "nodes", "rails"),
)
_NOT_NEGATIVE = ("intra_latency", "inter_latency", "launch_s", "host_issue_s", "context_bytes", "group_bytes", "p2p_bytes", "sms")


@dataclass(frozen=True, slots=True)
class SlowLink:
    """The link between two nodes, or with `a == b` those within a node, takes `factor` times as long."""

    a: int
    b: int
    factor: float


@dataclass(frozen=True, slots=True)
class Nodes:
    """The `count` nodes from `first` on have devices of another kind: those of the cluster `device`, of which the constants of a
    device, its links and its messages count."""

    first: int
    count: int
    device: Cluster


@dataclass(frozen=True)
class Cluster:
    """Devices, `per_node` on each of `nodes` nodes; rank r of a plan is on node r // per_node, so the mesh's rank order (tp
    fastest, pp slowest) decides what crosses nodes. All are equal, as described here, but for those of the nodes in `others`:
    what depends on the device asks `of(rank)`.

    `peak_flops`: FLOP/s by dtype, dense; `matmul_fraction` of it is reached by matmul and attention. `memory_bandwidth` in
    bytes/s; `memory_fraction` of it is reached by kernels bound by memory. `launch_s`: host seconds per kernel;
    `host_issue_s`: per instruction of a plan. `synchronous`: the host runs the kernels itself (a CPU), so launches add to
    their time instead of hiding behind it. `intra_*` and `inter_*`: links within and between nodes: reached bytes/s per
    device and direction, seconds per hop. `context_bytes` are gone on a device before the first tensor; `allocator_factor`:
    reserved over allocated bytes; `group_bytes` and `p2p_bytes`: of a communicator; `sms`: streaming multiprocessors, 0 where
    there are none or their number is not known. `notes`: what of these numbers is assumed or not calibrated, empty when nothing
    is; every prediction shows it as a warning.

    `communication`: the model of messages that no table has, see `piper_simulator.communication`; `nccl`: constants of the one
    of that name; `messages`: the table. With several `rails` device k of a node is on rail k modulo their number, and a switch
    joins each rail; what changes rails, or all traffic between nodes where there is one rail, reaches 1 / `oversubscription` of
    the bandwidth. `slow_ranks`: rank -> how many times as long its instructions take. `label`: name of a cluster that is not
    built in.

    `stack`: whose kernels run the model; without one all kernels reach the same fractions. With one these count as well:
    `generation` of the device, and `memory_steps`: (bytes from which on, fraction of the memory bandwidth), largest first.
    `kernels`: measured kernels, which come before any formula."""

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
    sms: int = 0
    notes: str = field(default="", compare=False)
    communication: Model = "ring"
    nccl: Nccl = field(default_factory=Nccl)
    messages: tuple[CommDuration, ...] = ()
    intra_kind: str = "nvswitch"
    inter_kind: str = "infiniband"
    rails: int = 1
    oversubscription: float = 1.0
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    slow_links: tuple[SlowLink, ...] = ()
    stack: Stack | None = None
    generation: str = ""
    memory_steps: tuple[tuple[float, float], ...] = ()
    kernels: tuple[KernelDuration, ...] = ()
    label: str = field(default="", compare=False)
    others: tuple[Nodes, ...] = ()

    def __post_init__(self) -> None:
        if not self.peak_flops:
            raise self._error("peak_flops is empty; give FLOP/s for at least one dtype")
        numbers = {f"peak_flops[{k}]": v for k, v in self.peak_flops.items()} | {k: getattr(self, k) for k in _POSITIVE}
        for name, value in numbers.items():
            if not isinstance(value, int | float) or not value > 0:
                raise self._error(f"{name} is {value!r}; a positive number is needed")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value >= 0:
                raise self._error(f"{name} is {value!r}; a number is needed, and it cannot be negative")
        if self.per_node * self.nodes > MOST_RANKS:
            raise self._error(f"{self.per_node} devices on each of {self.nodes} nodes; at most {MOST_RANKS} devices are accepted")
        for name, known in (
            ("communication", MODELS),
            ("intra_kind", INTRA),
            ("inter_kind", INTER),
            ("generation", ("", *GENERATIONS)),
        ):
            kind = getattr(self, name)
            if kind not in known:
                raise self._error(f"{name} is {kind!r}; one of {', '.join(filter(None, known))} is needed")
        self._check_others()
        self._check_slower()

    def _check_others(self) -> None:
        """ClusterError for nodes of another kind that are not there, are there twice, or cannot be beside the first."""
        reached = 0
        for other in self.others:
            last = other.first + other.count - 1
            if not reached <= other.first <= last < self.nodes:
                raise self._error(
                    f"others: nodes {other.first} to {last} are not there, or not in order; the nodes are 0 to {self.nodes - 1}"
                )
            reached = last + 1
            if other.device.others:
                raise self._error("others: the device of some nodes is a cluster of several kinds; one kind is needed")
            if other.device.synchronous != self.synchronous:
                raise self._error(f"others: {other.device.device} and {self.device}: devices beside a CPU are not simulated")

    def _check_slower(self) -> None:
        """ClusterError for what slows a rank, a link or a memory and is not there or impossible."""
        for rank, factor in self.slow_ranks.items():
            if not 0 <= rank < self.devices:
                raise self._error(f"slow_ranks: rank {rank} is not there; the ranks are 0 to {self.devices - 1}")
            self._check_factor(f"slow_ranks: rank {rank}", factor)
        seen = set()
        for link in self.slow_links:
            for node in (link.a, link.b):
                if not 0 <= node < self.nodes:
                    raise self._error(f"slow_links: node {node} is not there; the nodes are 0 to {self.nodes - 1}")
            ends = frozenset((link.a, link.b))
            if ends in seen:
                raise self._error(f"slow_links: the link of nodes {link.a} and {link.b} is there twice; give one factor")
            seen.add(ends)
            self._check_factor(f"slow_links: nodes {link.a} and {link.b}", link.factor)
        self._check_factor("oversubscription", self.oversubscription)
        for least, fraction in self.memory_steps:
            if not fraction > 0:
                raise self._error(
                    f"memory_steps: the fraction from {least:g} bytes on is {fraction!r}; a positive number is needed"
                )

    def _check_factor(self, what: str, factor: float) -> None:
        if not 1 <= factor < float("inf"):
            raise self._error(f"{what}: the factor is {factor!r}; a number from 1 on is needed (2: it takes twice as long)")

    def _error(self, message: str) -> ClusterError:
        return ClusterError(f"cluster {self.label or self.device}: {message}")

    @property
    def devices(self) -> int:
        return self.per_node * self.nodes

    @property
    def name(self) -> str:
        """As `load_cluster` reads it, unless the cluster is described in a file."""
        if self.label or self.device == CPU:
            return self.label or CPU
        runs = [(device, len(list(of))) for device, of in groupby(self.kinds[k].device for k in self._kind_of_node)]
        parts = [f"{device}:{self.per_node}" + (f"*{nodes}" if nodes > 1 else "") for device, nodes in runs]
        return "+".join(parts) + (f"@{self.stack.name}" if self.stack is not None else "")

    @cached_property
    def kinds(self) -> tuple[Cluster, ...]:
        """A cluster of one kind of device for each that is here, the first one's first: as many nodes and the same network, and
        nothing of slow ranks. Nodes of equal devices are of one kind."""
        if not self.others:
            return (self,)
        return tuple(self._kinds_and_nodes[0])

    @cached_property
    def _kind_of_node(self) -> tuple[int, ...]:
        return (0,) * self.nodes if not self.others else tuple(self._kinds_and_nodes[1])

    @cached_property
    def _kinds_and_nodes(self) -> tuple[list[Cluster], list[int]]:
        kinds, of_node = [self._as_kind(self)], [0] * self.nodes
        for other in self.others:
            kind = self._as_kind(other.device)
            if kind not in kinds:
                kinds.append(kind)
            of_node[other.first : other.first + other.count] = [kinds.index(kind)] * other.count
        return kinds, of_node

    def _as_kind(self, device: Cluster) -> Cluster:
        """A device in this cluster, as if there were no others."""
        return replace(
            device,
            per_node=self.per_node,
            nodes=self.nodes,
            rails=self.rails,
            oversubscription=self.oversubscription,
            slow_links=self.slow_links,
            slow_ranks={},
            others=(),
            label=device.device,
        )

    @staticmethod
    def joined(parts: Sequence[Cluster]) -> Cluster:
        """The nodes of several clusters in a row as one, with the network, and what is slow, of the first. ClusterError unless
        all have as many devices per node."""
        first, at, others = parts[0], parts[0].nodes, []
        for part in parts[1:]:
            if part.per_node != first.per_node:
                raise first._error(
                    f"{part.per_node} devices per node of {part.device} and {first.per_node} of {first.device}; the same number "
                    "is needed everywhere"
                )
            others.append(Nodes(at, part.nodes, part))
            at += part.nodes
        return replace(first, nodes=at, others=tuple(others))

    def kind_of(self, rank: int) -> int:
        """The index in `kinds` of a rank's device."""
        return self._kind_of_node[rank // self.per_node] if self.others else 0

    def of(self, rank: int) -> Cluster:
        """The kind of a rank's device: its constants are those of this one."""
        return self.kinds[self.kind_of(rank)]

    def each(self, change: Callable[[Cluster], Cluster]) -> Cluster:
        """The same change to every kind of device: to their constants, which are fields of a cluster, and to what is common."""
        changed = change(replace(self, others=()))
        return replace(changed, others=tuple(replace(o, device=change(o.device)) for o in self.others))

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def rail_of(self, rank: int) -> int:
        return rank % self.per_node % self.rails

    def peak(self, dtype: str) -> float:
        """FLOP/s in a dtype; that of the slowest one known when it is not known (see `guess`)."""
        return self.peak_flops.get(dtype) or min(self.peak_flops.values())

    def peak_of(self, world: int, dtype: str) -> float:
        """FLOP/s of the first `world` ranks together."""
        if not self.others:
            return world * self.peak(dtype)
        return sum(self.of(rank).peak(dtype) for rank in range(world))

    def guess(self, dtype: str) -> str:
        """What `peak` takes for a dtype that it does not know, as a warning."""
        slowest = min(self.peak_flops, key=lambda d: self.peak_flops[d])
        return f"{self.name}: no FLOP/s known for {dtype}; computed with those of {slowest}, {self.peak(dtype) / 1e12:g} TFLOP/s"

    @property
    def warnings(self) -> tuple[str, ...]:
        """`notes` with the cluster's name, of kinds that differ in them with theirs; none when there is nothing to warn of."""
        if len({kind.notes for kind in self.kinds}) == 1:
            return (f"{self.name}: {self.notes}",) if self.notes else ()
        return tuple(f"{kind.name}: {kind.notes}" for kind in self.kinds if kind.notes)

    @cached_property
    def table(self) -> Costs:
        """`messages`, to be looked up."""
        return Costs(comm=self.messages)

    @cached_property
    def kernel_table(self) -> KernelTable:
        """`kernels`, to be looked up."""
        return KernelTable(self.kernels)
