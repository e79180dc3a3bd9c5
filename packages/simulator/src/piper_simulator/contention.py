"""What the messages of a plan ask of a cluster: links, NICs, memory and SMs (see `piper_simulator.rates` for what follows).

A message of B bytes per rank carries B over the wire point-to-point, 2 (n - 1) / n B around a ring of n ranks, and takes of each
link on its way the part (wire bytes / duration) / (link's bytes/s) while it runs. What a message takes beyond its bytes at the
rate of its links is latency, in which others use them; a message that was measured faster than that takes all of its link.

Links are one-way. A *port* of a device carries what stays on its node, a *NIC* what leaves or enters the node. A ring passes out
of and into the port of each member; at a node's border it is spread over the NICs of its members there. A role stands for its
ranks: the instances of a channel run at the same time, and a resource counts all of them that pass through it.

Compute loses SMs and memory bandwidth to messages. f_sm: 0.15 of the SMs beside NVLink and 0.02 beside a NIC (Calculon's
`processor_usage`, cost-model.md 4), or the SMs that `stream(..., sms=)` names. f_memory: bytes that the message reads and writes
on a rank, per second, over the memory's bandwidth. A message that is given fewer SMs than saturate its links moves its bytes more
slowly in proportion: 10 for NVLink and 2 for a NIC (NCCL moves 24 and 38.7 GB/s per channel within a node of Ampere and Hopper,
17.8 and 36 from node to node, and a channel occupies an SM; cost-model.md 3; ports of 231 and 370, NICs of 23.5 and 48.5 GB/s).
Transfers of a stream with `sms=0` are moved by copy engines: they take links and memory but no SMs, at full speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from piper_ir.errors import ClusterError
from piper_ir.ops import COMM
from piper_ir.plan import Channel, Plan
from piper_ir.timing import Prepared
from piper_simulator.cluster import Cluster
from piper_simulator.model import Work
from piper_simulator.rates import Flow

PORT_SM_SHARE, NIC_SM_SHARE = 0.15, 0.02
PORT_SMS, NIC_SMS = 10, 2
"""Fraction of the SMs that a message takes; SMs that saturate its link. Sources: see the module."""

Resource = tuple[str, int]
"""Kind of link with its direction; number of the device (port) or of the NIC."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """All that contention reads of a cluster. `port`, `nic`: bytes/s per direction of a device's port and of a NIC; `nics`: of
    those on a node; `memory`: bytes/s; `sms` of a device, 0 where unknown."""

    name: str
    per_node: int
    port: float
    nic: float
    nics: int
    memory: float
    sms: int

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def nic_of(self, rank: int) -> int:
        """The devices of a node are spread over its NICs in order."""
        node, local = divmod(rank, self.per_node)
        return node * self.nics + local * self.nics // self.per_node

    def capacity(self, resource: Resource) -> float:
        return self.port if resource[0].startswith("port") else self.nic


def wiring(cluster: Cluster) -> Wiring:
    """Each device has a NIC of its own."""
    return Wiring(
        name=cluster.name,
        per_node=cluster.per_node,
        port=cluster.intra_bandwidth,
        nic=cluster.inter_bandwidth,
        nics=cluster.per_node,
        memory=cluster.memory_bandwidth,
        sms=cluster.sms,
    )


@dataclass(slots=True)
class Route:
    """Of a channel's messages. `wire`: wire bytes of an instance per byte of the message. `passes`: resource -> how often the
    wire bytes of an instance pass through it, all instances together. `slowest`: seconds per wire byte of one instance at its
    tightest resource. `port`: whether it uses ports. `touched`: bytes that a rank reads and writes per wire byte."""

    wire: float
    touched: int
    passes: dict[Resource, float] = field(default_factory=dict)
    slowest: float = 0.0
    port: bool = False

    def add(self, passes: Mapping[Resource, float], wires: Wiring) -> None:
        """One more instance, which runs at the same time as the others."""
        for resource, times in passes.items():
            self.passes[resource] = self.passes.get(resource, 0.0) + times
            self.slowest = max(self.slowest, times / wires.capacity(resource))
            self.port = self.port or resource[0].startswith("port")


@dataclass(frozen=True, slots=True)
class End:
    """Where a message meets a role. `named`: the SMs that its stream names there, None for none, 0 for copy engines; `sms`, and
    bytes/s of `memory`, of the device."""

    named: int | None
    sms: int
    memory: float


def flows(plan: Plan, prepared: Prepared, work: Sequence[Work], wires: Wiring) -> list[Flow]:
    """Per group of `prepared` what it asks for; `work` per node. ClusterError for a stream that takes as many SMs as a device
    has, or where the cluster does not say how many that are."""
    demands = _Demands(plan, prepared.roles, wires)
    ops = [instr.parts[0].op for _, _, instr in plan.instructions()]
    out = []
    for members in prepared.groups:
        op = ops[members[0]]
        assert isinstance(op, COMM), "groups are of communication"
        out.append(demands.flow(plan.channel(op.channel), work[members[0]]))
    return out


def contends(found: Sequence[Flow]) -> bool:
    """Whether any message can slow anything down."""
    return any(f.seconds and (f.shares or any(map(any, f.takes.values()))) for f in found)


class _Demands:
    """Flows of one plan's messages; equal messages of a channel have the same."""

    def __init__(self, plan: Plan, roles: Sequence[str], wires: Wiring) -> None:
        self.wires = wires
        self.index = {role: r for r, role in enumerate(roles)}
        self.routes = {c.id: _route(plan, c, wires) for c in plan.channels}
        self.shared = shared_resources(self.routes, wires)
        self.sms = _sms(plan, wires)
        self.known: dict[tuple[str, int, float], Flow] = {}

    def flow(self, channel: Channel, work: Work) -> Flow:
        key = channel.id, work.bytes, work.seconds
        if key not in self.known:
            self.known[key] = self._flow(len(self.known), channel, work)
        return self.known[key]

    def _flow(self, id: int, channel: Channel, work: Work) -> Flow:
        ends = {
            self.index[role]: End(self._sms_at(channel, k), self.wires.sms, self.wires.memory)
            for k, role in enumerate(channel.roles)
        }
        return demand(id, self.routes[channel.id], work.bytes, work.seconds, ends, self.wires, self.shared)

    def _sms_at(self, channel: Channel, k: int) -> int | None:
        """What the stream of an end names. Copy engines cannot add, so a reduction does without them."""
        named = self.sms.get((channel.roles[k], channel.streams[k]))
        return None if channel.kind == "group" and not named else named


def demand(
    id: int,
    route: Route,
    nbytes: int,
    seconds: float,
    ends: Mapping[int, End],
    wires: Wiring,
    shared: Mapping[Resource, int],
) -> Flow:
    """What a message of `nbytes` per rank asks for that takes `seconds` alone. `ends`: by role. `shared`: numbers of the
    resources that count (`shared_resources`)."""
    wire = route.wire * nbytes
    needed = PORT_SMS if route.port else NIC_SMS
    fewest = min((end.named for end in ends.values() if end.named), default=needed)
    seconds += min(seconds, wire * route.slowest) * max(0.0, needed / fewest - 1)
    if not seconds or not wire or not route.slowest:
        return Flow(id, seconds, {}, 0.0)
    rate = min(wire / seconds, 1 / route.slowest)
    shares = {shared[r]: n * rate / wires.capacity(r) for r, n in route.passes.items() if r in shared}
    usual = PORT_SM_SHARE if route.port else NIC_SM_SHARE
    takes = {}
    for role, end in ends.items():
        f_sm = usual if end.named is None else end.named / end.sms if end.named else 0.0
        takes[role] = f_sm, route.touched * rate / end.memory
    return Flow(id, seconds, shares, rate * route.slowest, takes)


def _sms(plan: Plan, wires: Wiring) -> dict[tuple[str, str], int]:
    """(role, stream) -> the SMs that the stream names, which hold for all communication on it."""
    out: dict[tuple[str, str], int] = {}
    for channel in plan.channels:
        for role, stream, n in zip(channel.roles, channel.streams, channel.sms):
            if n is None:
                continue
            out[role, stream] = n
            if n and n >= wires.sms:
                has = f"has {wires.sms} per device, and compute needs some" if wires.sms else "does not say how many a device has"
                raise ClusterError(f"stream {stream} of role {role} takes {n} SMs; {wires.name} {has}; name fewer, or none")
    return out


def _route(plan: Plan, channel: Channel, wires: Wiring) -> Route:
    """Through what all instances of a channel pass."""
    instances, p2p = _instances(plan, channel), channel.kind == "p2p"
    n = len(instances[0])
    route = Route(1.0, 1) if p2p else Route(2 * (n - 1) / n, 2)
    for members in instances:
        route.add(passes(wires, members, p2p), wires)
    return route


def _instances(plan: Plan, channel: Channel) -> list[tuple[int, ...]]:
    """`Plan.peers` of each instance, in time linear in its ranks."""
    mesh, first = plan.mesh, plan.role(channel.roles[0])
    if channel.kind == "p2p":
        there = plan.role(channel.roles[1]).placed
        return [(rank, mesh.rank({**mesh.coords(rank), **there})) for rank in first.ranks]
    free = [axis for axis in mesh.axes if axis not in channel.over and axis not in first.placed]
    found: dict[tuple[int, ...], list[int]] = {}
    for role in channel.roles:
        for rank in plan.role(role).ranks:
            coords = mesh.coords(rank)
            found.setdefault(tuple([coords[axis] for axis in free]), []).append(rank)
    return [tuple(sorted(members)) for members in found.values()]


def passes(wires: Wiring, members: Sequence[int], p2p: bool) -> dict[Resource, float]:
    """How often the wire bytes of one instance pass through each resource. A ring with one rank on each node uses no port; one of
    one rank moves nothing."""
    if p2p:
        source, destination = members
        if wires.node_of(source) == wires.node_of(destination):
            return {("port out", source): 1.0, ("port in", destination): 1.0}
        return {("nic out", wires.nic_of(source)): 1.0, ("nic in", wires.nic_of(destination)): 1.0}
    count = Counter(wires.node_of(rank) for rank in members)
    out: dict[Resource, float] = {}
    for rank in members if len(members) > 1 else ():
        if max(count.values()) > 1:
            out["port out", rank] = out["port in", rank] = 1.0
        if len(count) > 1:
            for nic in (("nic out", wires.nic_of(rank)), ("nic in", wires.nic_of(rank))):
                out[nic] = out.get(nic, 0.0) + 1 / count[wires.node_of(rank)]
    return out


def shared_resources(routes: Mapping[str, Route], wires: Wiring) -> dict[Resource, int]:
    """The resources that can ever be short of capacity, numbered; one stands for all that carry the same."""
    carried: dict[Resource, list[tuple[str, float]]] = {}
    for id, route in routes.items():
        for resource, times in route.passes.items():
            carried.setdefault(resource, []).append((id, times))
    out: dict[Resource, int] = {}
    seen: set[tuple[float, tuple[tuple[str, float], ...]]] = set()
    for resource, users in carried.items():
        capacity = wires.capacity(resource)
        (id, times), *others = users
        enough = not others and times / capacity <= routes[id].slowest * (1 + 1e-9)
        if not enough and (key := (capacity, tuple(users))) not in seen:
            seen.add(key)
            out[resource] = len(out)
    return out
