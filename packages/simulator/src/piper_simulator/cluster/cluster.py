"""Describe a cluster: nodes of devices, and the network between them.

Clusters by name are in `piper_simulator.cluster.named`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

from piper_ir.ground.errors import ClusterError
from piper_ir.ground.limits import MOST_RANKS
from piper_simulator.cluster.checks import COUNT, INDEX, Count, Factor, KeyPath, check_fields
from piper_simulator.cluster.device import CPU, Device
from piper_simulator.cluster.network import Links, Network


@dataclass(frozen=True)
class NodeKind:
    """Describe one type of device in a cluster, with the links that join its devices to others."""

    device: Device
    links: Links

    def cluster(self, *, nodes: int = 1, per_node: int = 1) -> Cluster:
        """Return a cluster of this type alone."""
        return Cluster(((nodes, self.device),), Network((self.links,)), per_node)


def _check_nodes(nodes: object, where: KeyPath) -> None:
    """Raise a ClusterError unless these are runs of nodes."""
    needed = "a tuple of runs of nodes, each (how many, piper.Device), is needed"
    if not isinstance(nodes, tuple | list):
        raise where.error(f"a {type(nodes).__name__} stands here; {needed}")
    for k, run in enumerate(nodes):
        if not isinstance(run, tuple | list) or len(run) != 2 or not isinstance(run[1], Device):
            raise where.item(k).error(f"a {type(run).__name__} that is none stands here; {needed}")


@dataclass(frozen=True)
class Cluster:
    """Describe nodes with `per_node` devices each, and the network between them.

    Rank r of a plan is on node r // per_node, so the mesh's rank order (tp fastest, pp slowest) decides which messages
    cross nodes.

    Attributes:
        nodes: runs of equal nodes in order, each as (how many, their device).
        network: the links between devices.
        slow_ranks: rank -> how many times as long its instructions take.
        label: name of a cluster that is not built in.
    """

    nodes: tuple[tuple[int, Device], ...]
    network: Network
    per_node: Count = 1
    slow_ranks: Mapping[int, Factor] = field(default_factory=dict)
    label: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        _check_nodes(self.nodes, KeyPath(f"cluster {self.label}".rstrip()).at("nodes"))
        who = f"cluster {self.label or (self.nodes[0][1].name if self.nodes else 'without nodes')}"
        where = KeyPath(who)
        if not isinstance(self.network, Network):
            raise where.at("network").error(
                f"a {type(self.network).__name__} stands here; a piper.Network is needed"
            )
        check_fields(self, who)
        if not self.nodes:
            raise where.at("nodes").error("none stand here; at least one is needed")
        for k, (count, device) in enumerate(self.nodes):
            COUNT(count, where.at(f"nodes[{k}]"))
            if device.synchronous != self.synchronous:
                raise where.at("nodes").error(
                    f"{device.name} and {self.device.name}: devices beside a CPU are not simulated"
                )
        if self.devices > MOST_RANKS:
            total = f"{self.per_node} devices on each of {self.node_count} nodes"
            raise where.at("nodes").error(f"{total}; at most {MOST_RANKS} devices are accepted")
        if len(self.network.links) not in (1, len(self.nodes)):
            raise where.at("network.links").error(
                f"{len(self.network.links)} of them for {len(self.nodes)} runs of nodes; one for all, or one for "
                f"each, is needed"
            )
        self._check_slow(where)

    def _check_slow(self, where: KeyPath) -> None:
        """Raise a ClusterError for a slow rank or link that does not exist, or that is listed twice."""
        for rank in self.slow_ranks:
            INDEX(rank, where.at("slow_ranks"))
            if not 0 <= rank < self.devices:
                raise where.at("slow_ranks").error(
                    f"rank {rank} is not there; the ranks are 0 to {self.devices - 1}"
                )
        seen = set()
        at = where.at("slow_links")
        for link in self.network.slow_links:
            for node in (link.a, link.b):
                if not 0 <= node < self.node_count:
                    raise at.error(
                        f"node {node} is not there; the nodes are 0 to {self.node_count - 1}"
                    )
            ends = frozenset((link.a, link.b))
            if ends in seen:
                raise at.error(
                    f"the link of nodes {link.a} and {link.b} is there twice; give one factor"
                )
            seen.add(ends)

    @property
    def device(self) -> Device:
        """Return the device of the first node; all nodes have the same device if they are alike."""
        return self.nodes[0][1]

    @property
    def links(self) -> Links:
        """Return the links of the first node; all nodes have the same links if they are alike."""
        return self.network.links[0]

    @property
    def synchronous(self) -> bool:
        """Return whether the devices are CPUs, whose host runs the kernels itself."""
        return self.device.synchronous

    @cached_property
    def node_count(self) -> int:
        """Return the number of nodes."""
        return sum(count for count, _ in self.nodes)

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.per_node * self.node_count

    @property
    def name(self) -> str:
        """Return the name for `load_cluster`, or the label of a cluster from a file."""
        if self.label or self.device.name == CPU:
            return self.label or CPU
        runs = [
            (name, sum(n for n, _ in run))
            for name, run in groupby(self.nodes, key=lambda run: run[1].name)
        ]
        parts = [
            f"{device}:{self.per_node}" + (f"*{nodes}" if nodes > 1 else "")
            for device, nodes in runs
        ]
        return "+".join(parts) + (
            f"@{self.device.stack.name}" if self.device.stack is not None else ""
        )

    @property
    def kinds(self) -> tuple[NodeKind, ...]:
        """Return the types of devices, the first node's first; nodes of equal devices and links are of one kind."""
        return self._kinds_and_nodes[0]

    @cached_property
    def _kinds_and_nodes(self) -> tuple[tuple[NodeKind, ...], tuple[int, ...]]:
        links = (
            self.network.links
            if len(self.network.links) > 1
            else self.network.links * len(self.nodes)
        )
        kinds: list[NodeKind] = []
        of_node: list[int] = []
        for (count, device), own in zip(self.nodes, links, strict=True):
            kind = NodeKind(device, own)
            if kind not in kinds:
                kinds.append(kind)
            of_node += [kinds.index(kind)] * count
        return tuple(kinds), tuple(of_node)

    def kind_of(self, rank: int) -> int:
        """Return the index in `kinds` of a rank's device."""
        return self._kinds_and_nodes[1][rank // self.per_node] if len(self.nodes) > 1 else 0

    def of(self, rank: int) -> Device:
        """Return the device of a rank."""
        return self.kinds[self.kind_of(rank)].device

    def links_of(self, rank: int) -> Links:
        """Return the links of a rank's device."""
        return self.kinds[self.kind_of(rank)].links

    def name_of(self, kind: int) -> str:
        """Return a kind's name in warnings; if there is one kind only, the cluster's own name."""
        return self.name if len(self.kinds) == 1 else self.kinds[kind].device.name

    def only(self, kind: int) -> Cluster:
        """Return a cluster of as many nodes of one kind on the same network, without slow ranks."""
        one = self.kinds[kind]
        network = replace(self.network, links=(one.links,))
        return replace(self, nodes=((self.node_count, one.device),), network=network, slow_ranks={})

    def each_device(self, change: Callable[[Device], Device]) -> Cluster:
        """Return the cluster with a change to every type of device."""
        return replace(self, nodes=tuple([(count, change(device)) for count, device in self.nodes]))

    def each_links(self, change: Callable[[Links], Links]) -> Cluster:
        """Return the cluster with a change to the links of every type of device."""
        return replace(
            self, network=replace(self.network, links=tuple(map(change, self.network.links)))
        )

    @staticmethod
    def joined(parts: Sequence[Cluster]) -> Cluster:
        """Return the nodes of several clusters in a row as one cluster.

        The network, slow ranks and slow links come from the first. Raises ClusterError unless all have as many devices
        per node.
        """
        first, every = parts[0], list[NodeKind]()
        for part in parts:
            if part.per_node != first.per_node:
                raise ClusterError(
                    f"cluster {first.label or first.device.name}: {part.per_node} devices per node of "
                    f"{part.device.name} and {first.per_node} of {first.device.name}; the same number is needed "
                    f"everywhere"
                )
            every += [part.kinds[kind] for kind in part._kinds_and_nodes[1]]
        runs = [(len(list(nodes)), kind) for kind, nodes in groupby(every)]
        network = replace(first.network, links=tuple([kind.links for _, kind in runs]))
        return replace(
            first, nodes=tuple([(count, kind.device) for count, kind in runs]), network=network
        )

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def rail_of(self, rank: int) -> int:
        return rank % self.per_node % self.network.rails

    def peak_of(self, world: int, dtype: str) -> float:
        """Return the FLOP/s of the first `world` ranks together."""
        if len(self.kinds) == 1:
            return world * self.device.peak(dtype)
        return sum(self.of(rank).peak(dtype) for rank in range(world))

    def guess(self, dtype: str) -> str:
        """Return a warning that names the rate used for a dtype that the first device does not know."""
        return self.device.guess(dtype, self.name)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the devices' notes as warnings, with the cluster's name, or the name of each kind if they differ."""
        if len({kind.device.notes for kind in self.kinds}) == 1:
            return (f"{self.name}: {self.device.notes}",) if self.device.notes else ()
        return tuple(
            f"{kind.device.name}: {kind.device.notes}" for kind in self.kinds if kind.device.notes
        )
