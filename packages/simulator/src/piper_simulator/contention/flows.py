"""Compute the load of a plan's messages on a cluster: on links, NICs, memory and SMs.

`piper_simulator.contention.rates` computes the rates that follow from it. A message of B bytes per rank carries B over
the wire point-to-point, and in a collective of n ranks the bytes of `piper_ir.program.collectives.Law.wire`: 2 (n - 1)
/ n B for an all-reduce, (n - 1) / n B for the others. A rank touches 2 bytes of memory per wire byte of a collective,
for it reads the bytes that it sends and writes the ones that it receives. In an all-to-all each member sends 1 / (n -
1) of its wire bytes to each other one, as if point-to-point; the other collectives go around a ring.

While a message runs it takes of each link on its way the part (wire bytes / duration) / (link's bytes/s). The rest of a
message's duration, beyond its bytes at the rate of its links, is latency, in which others use them. A message that was
measured faster than that takes all of its link.

Links are one-way. A *port* of a device carries traffic within its node, a *NIC* traffic that leaves or enters the node.
A ring passes out of and into the port of each member that is not alone on its node. At a node's border it is spread
over the NICs of its members there. A NIC's part of the *spine*, 1 / `oversubscription` of it, carries the traffic that
changes rails; with one rail that is all traffic, and the NIC carries no more. Traffic between two nodes whose link is
*slow* shares the NIC's part of that link, 1 / factor of it. So a message that is alone takes as long as
`piper_simulator.durations.communication` says, apart from latency. A role stands for its ranks: the instances of a
channel run at the same time, and a resource counts all of them that pass through it.

Copies between devices and the host pass through a link of their own per device, and through the memory of their node,
which reads or writes each byte once, for all devices of the node together.

Compute loses SMs and memory bandwidth to messages. f_sm is 0.15 of the SMs beside NVLink and 0.02 beside a NIC
(`processor_usage` in the systems of Calculon, https://github.com/calculon-ai/calculon), or the SMs that `stream(...,
sms=)` names. f_memory is the bytes that the message reads and writes on a rank, per second, over the memory's
bandwidth. A message that is given fewer SMs than saturate its links moves its bytes more slowly in proportion. 10
saturate NVLink and 2 a NIC: NCCL's src/graph/tuning.cc moves 24 and 38.7 GB/s per channel within a node of Ampere and
Hopper, 17.8 and 36 from node to node, and a channel occupies an SM; ports move 231 and 370, NICs 23.5 and 48.5 GB/s.
Transfers of a stream with `sms=0` are moved by copy engines: they take links and memory but no SMs, at full speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from typing import TypeVar, assert_never

from piper_ir.fold.timing import Prepared
from piper_ir.ground.errors import ClusterError
from piper_ir.plan.plan import Channel, Plan
from piper_ir.program.collectives import TO_HOST, law_of
from piper_ir.program.ops import COMM, Op, message_op
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.contention.rates import Flow
from piper_simulator.durations.cost_model import Work
from piper_simulator.durations.instances import AxisPart, instances, parts_of_equal_nodes

PORT_SM_SHARE, NIC_SM_SHARE = 0.15, 0.02
PORT_SMS, NIC_SMS = 10, 2
"""The fractions of the SMs that a message takes, and the numbers that saturate its link (sources: see the module)."""

Used = TypeVar("Used")
"""The key of a route, of any type."""
Resource = tuple[str, int, int]
"""A kind of link with its direction, the number of its device (port) or NIC, and a slow link's other node (else -1)."""


@dataclass(frozen=True)
class Wiring:
    """Hold the facts about a cluster that contention depends on; the devices of a node share its `nics` in order.

    `nodes` are the ones whose links count, since all others are equal to one of them; None: all count.
    """

    cluster: Cluster
    nics: int
    nodes: frozenset[int] | None = None

    def nic_of(self, rank: int) -> int:
        node, local = divmod(rank, self.cluster.per_node)
        return node * self.nics + local * self.nics // self.cluster.per_node

    @cached_property
    def factors(self) -> Mapping[tuple[int, int], float]:
        """Return (node, other) -> the factor of the slow link between them; (node, node) is within a node."""
        both = {(x.a, x.b): x.factor for x in self.cluster.network.slow_links}
        return both | {(b, a): factor for (a, b), factor in both.items()}

    @cached_property
    def _known(self) -> dict[Resource, float]:
        return {}

    def capacity(self, resource: Resource) -> float:
        """Return the bytes/s of a resource."""
        what, _, far = resource
        node = self.node_of(resource)
        key = what, node, far
        if key not in self._known:
            self._known[key] = self._capacity(what, node, far)
        return self._known[key]

    def _capacity(self, what: str, node: int, far: int) -> float:
        """Return the bytes/s of one of a node's ports or NICs, which are all alike."""
        links, network = self.cluster.links_of(node * self.cluster.per_node), self.cluster.network
        if what.startswith("host link"):
            return links.host_bandwidth
        if what.startswith("host"):
            return links.host_memory_bandwidth
        if what.startswith("port"):
            return links.intra_bandwidth / self.factors.get((node, node), 1.0)
        through_spine = network.rails == 1 or "spine" in what
        bandwidth = links.inter_bandwidth / (network.oversubscription if through_spine else 1.0)
        return bandwidth / self.factors[node, far] if far >= 0 else bandwidth

    def node_of(self, resource: Resource) -> int:
        what, number, _ = resource
        if what.startswith("host memory"):
            return number
        return number // (
            self.cluster.per_node if what.startswith(("port", "host link")) else self.nics
        )

    def kind_of(self, resource: Resource) -> int:
        """Return the kind of device that a resource belongs to."""
        return self.cluster.kind_of(self.node_of(resource) * self.cluster.per_node)


def wiring(cluster: Cluster) -> Wiring:
    """Return the wiring of a cluster in which each device has a NIC of its own."""
    return Wiring(cluster, cluster.per_node)


@dataclass(slots=True)
class Route:
    """Say which resources the messages of a channel pass through.

    Attributes:
        wire: wire bytes of an instance per byte of the message.
        touched: bytes that a rank reads and writes per wire byte.
        passes: resource -> how often the wire bytes of an instance pass through it, all instances together.
        slowest: seconds per wire byte of one instance at its tightest resource.
        port: whether it uses ports.
    """

    wire: float
    touched: int
    passes: dict[Resource, float] = field(default_factory=dict)
    slowest: float = 0.0
    port: bool = False

    def add(self, passes: Mapping[Resource, float], wires: Wiring) -> None:
        """Add one more instance, which runs at the same time as the others."""
        for resource, times in passes.items():
            if wires.nodes is not None and wires.node_of(resource) not in wires.nodes:
                continue
            self.passes[resource] = self.passes.get(resource, 0.0) + times
            self.slowest = max(self.slowest, times / wires.capacity(resource))
            self.port = self.port or resource[0].startswith("port")


@dataclass(frozen=True, slots=True)
class End:
    """Describe a role at the end of a message.

    Attributes:
        named: the SMs that its stream names there; None if it names none, 0 for copy engines.
        memory: bytes/s of the device's memory.
    """

    named: int | None
    sms: int
    memory: float


def message_flows(
    plan: Plan, prepared: Prepared, work: Sequence[Work], wires: Wiring
) -> list[Flow]:
    """Return the load of each group of `prepared`, given the work per node.

    Raises ClusterError for a stream that takes as many SMs as a device has, or if the cluster does not say how many
    that are.
    """
    loads = PlanLoads(plan, prepared.roles, wires)
    ops = first_ops(plan)
    return [loads.of_group(ops[members[0]], work[members[0]]) for members in prepared.groups]


def slows_anything(found: Sequence[Flow]) -> bool:
    """Return whether any message can slow anything down."""
    return any(f.seconds and (f.shares or any(map(any, f.takes.values()))) for f in found)


class PlanLoads:
    """Make the flows of one plan's messages; equal messages of a channel have the same flow."""

    def __init__(
        self,
        plan: Plan,
        roles: Sequence[str],
        wires: Wiring,
        within: Sequence[tuple[Channel, str]] = (),
    ) -> None:
        """Prepare for a plan in whose steps there are messages of these kinds, on these channels."""
        equal = parts_of_equal_nodes(plan, wires.cluster)
        if equal:
            wires = replace(wires, nodes=_first_nodes(plan, equal, wires.cluster.per_node))
        self.wires = wires
        self.plan = plan
        self.index = {role: r for r, role in enumerate(roles)}
        self.routes = {
            (c.id, op): route(op, instances(plan, c, equal), wires)
            for c, op in (*_uses(plan), *within)
        }
        self.shared = shared_resources(self.routes, wires)
        self.sms = named_sms(plan, wires.cluster)
        self.known: dict[tuple[str, str, int, float], Flow] = {}

    def of_group(self, op: Op, work: Work) -> Flow:
        """Return the load of a communication."""
        assert isinstance(op, COMM), "groups are of communication"
        return self.flow(self.plan.channel(op.channel), message_op(op), work)

    def flow(self, channel: Channel, op: str, work: Work) -> Flow:
        key = channel.id, op, work.bytes, work.seconds
        if key not in self.known:
            self.known[key] = self._flow(len(self.known), channel, op, work)
        return self.known[key]

    def _flow(self, id: int, channel: Channel, op: str, work: Work) -> Flow:
        ends = {self.index[role]: self._end(channel, op, k) for k, role in enumerate(channel.roles)}
        return demand(
            id, self.routes[channel.id, op], work.bytes, work.seconds, ends, self.wires, self.shared
        )

    def _end(self, channel: Channel, op: str, k: int) -> End:
        device = self.wires.cluster.of(self.plan.role(channel.roles[k]).ranks[0])
        return End(self._sms_at(channel, op, k), device.sms, device.memory_bandwidth)

    def _sms_at(self, channel: Channel, op: str, k: int) -> int | None:
        """Return the SMs that the stream of an end names; a collective that sums cannot use copy engines."""
        named = self.sms.get((channel.roles[k], channel.streams[k]))
        sums = op != "p2p" and law_of(op).result == "sum"
        return None if sums and not named else named


def _first_nodes(plan: Plan, equal: Collection[AxisPart], per_node: int) -> frozenset[int]:
    """Return the first of nodes that are equal to each other."""
    ranks: Sequence[int] = range(0, plan.mesh.world, per_node)
    for _, stride, size in equal:
        ranks = [rank for rank in ranks if rank // stride % size == 0]
    return frozenset(rank // per_node for rank in ranks)


def first_ops(plan: Plan) -> list[Op]:
    """Return the op of the first part of each instruction."""
    ops: list[Op] = []
    for table in (role.table for role in plan.roles):
        of_template = {k: table.templates[k].parts[0].op for k in set(table.used)}
        ops += map(of_template.__getitem__, table.used)
    return ops


def _uses(plan: Plan) -> list[tuple[Channel, str]]:
    used = {
        (op.channel, message_op(op))
        for op in {id(op): op for op in first_ops(plan)}.values()
        if isinstance(op, COMM)
    }
    place = {c.id: k for k, c in enumerate(plan.channels)}
    return [
        (plan.channel(c), op) for c, op in sorted(used, key=lambda use: (place[use[0]], use[1]))
    ]


def demand(
    id: int,
    route: Route,
    nbytes: int,
    seconds: float,
    ends: Mapping[int, End],
    wires: Wiring,
    shared: Mapping[Resource, int],
) -> Flow:
    """Return the load of a message of `nbytes` per rank that takes `seconds` alone.

    `ends` are by role. `shared` numbers the resources that count (`shared_resources`).
    """
    wire = route.wire * nbytes
    needed = PORT_SMS if route.port else NIC_SMS
    fewest = min((end.named for end in ends.values() if end.named), default=needed)
    seconds += min(seconds, wire * route.slowest) * max(0.0, needed / fewest - 1)
    if not seconds or not wire or not route.slowest:
        return Flow(id, seconds, {}, 0.0)
    rate = min(wire / seconds, 1 / route.slowest)
    shares = {
        shared[r]: n * rate / wires.capacity(r) for r, n in route.passes.items() if r in shared
    }
    usual = PORT_SM_SHARE if route.port else NIC_SM_SHARE
    takes = {}
    for role, end in ends.items():
        f_sm = usual if end.named is None else end.named / end.sms if end.named else 0.0
        takes[role] = f_sm, route.touched * rate / end.memory
    return Flow(id, seconds, shares, rate * route.slowest, takes)


def named_sms(plan: Plan, cluster: Cluster) -> dict[tuple[str, str], int]:
    """Return (role, stream) -> the SMs that the stream names, which hold for all communication on it.

    Raises ClusterError for as many as the devices have, or more.
    """
    sms_by_stream: dict[tuple[str, str], int] = {}
    for channel in plan.channels:
        for role, stream, n in zip(channel.roles, channel.streams, channel.sms):
            if n is None:
                continue
            sms_by_stream[role, stream] = n
            sms = min(cluster.of(rank).sms for rank in plan.role(role).ranks)
            if n and n >= sms:
                name = cluster.name
                has = (
                    f"has {sms} per device, and compute needs some"
                    if sms
                    else "does not say how many a device has"
                )
                raise ClusterError(
                    f"stream {stream} of role {role} takes {n} SMs; {name} {has}; name fewer, or none"
                )
    return sms_by_stream


def route(op: str, groups: Sequence[Sequence[int]], wires: Wiring) -> Route:
    """Return the route of an op's messages when all of these groups of ranks send them at the same time.

    Raises ClusterError without a member, and for groups of different sizes.
    """
    sizes = {len(members) for members in groups}
    if len(sizes) != 1 or sizes == {0}:
        raise ClusterError(
            f"{op} of groups of {sorted(sizes)} ranks; instances of one group have the same number, at least 1"
        )
    n = sizes.pop()
    if op == "p2p":
        if n != 2:
            raise ClusterError(f"p2p of {n} ranks; it has a source and a destination")
        return _through(Route(1.0, 1), [passes(wires, members, True) for members in groups], wires)
    law = law_of(op)
    match law.route:
        case "ring":
            return _through(
                Route(law.wire(n), 2), [passes(wires, members, False) for members in groups], wires
            )
        case "pairs":
            return _through(
                Route(law.wire(n), 2), [_to_all(members, wires) for members in groups], wires
            )
        case "next":
            return _through(
                Route(law.wire(n), 2), [_to_next(members, wires) for members in groups], wires
            )
        case "host":
            return _through(
                Route(law.wire(n), 1), [_to_host(op, ranks, wires) for ranks in groups], wires
            )
        case _:
            assert_never(law.route)


def _through(empty: Route, groups: Sequence[Mapping[Resource, float]], wires: Wiring) -> Route:
    for passed in groups:
        empty.add(passed, wires)
    return empty


def _to_all(members: Sequence[int], wires: Wiring) -> dict[Resource, float]:
    """Return how often a rank's wire bytes pass through each resource in an all-to-all with equal parts."""
    times_by_resource: dict[Resource, float] = {}
    for pair in permutations(members, 2):
        for resource, times in passes(wires, pair, p2p=True).items():
            times_by_resource[resource] = times_by_resource.get(resource, 0.0) + times / (
                len(members) - 1
            )
    return times_by_resource


def _to_next(members: Sequence[int], wires: Wiring) -> dict[Resource, float]:
    """Return how often a rank's wire bytes pass through each resource when each sends them to the one behind it."""
    times_by_resource: dict[Resource, float] = {}
    for k in range(len(members) if len(members) > 1 else 0):
        for resource, times in passes(wires, (members[k - 1], members[k]), p2p=True).items():
            times_by_resource[resource] = times_by_resource.get(resource, 0.0) + times
    return times_by_resource


def _to_host(op: str, members: Sequence[int], wires: Wiring) -> dict[Resource, float]:
    """Return how often the bytes of a rank's copy between device and host pass through each resource."""
    (rank,) = members
    direction = "out" if op == TO_HOST else "in"
    return {
        (f"host link {direction}", rank, -1): 1.0,
        ("host memory", wires.cluster.node_of(rank), -1): 1.0,
    }


def passes(wires: Wiring, members: Sequence[int], p2p: bool) -> dict[Resource, float]:
    """Return how often the wire bytes of one instance pass through each resource.

    A ring with one rank on each node uses no port; one of one rank moves nothing. A ring stays on its rails, and may go
    between any two of its nodes.
    """
    cluster = wires.cluster
    if p2p:
        source, destination = members
        here, there = cluster.node_of(source), cluster.node_of(destination)
        if here == there:
            return {("port out", source, -1): 1.0, ("port in", destination, -1): 1.0}
        changes_rail = cluster.network.rails > 1 and cluster.rail_of(source) != cluster.rail_of(
            destination
        )
        kinds = ["nic", *(["spine"] if changes_rail else [])]
        p2p_times = {(f"{kind} out", wires.nic_of(source), -1): 1.0 for kind in kinds}
        p2p_times |= {(f"{kind} in", wires.nic_of(destination), -1): 1.0 for kind in kinds}
        if (here, there) in wires.factors:
            p2p_times[f"slow {kinds[-1]} out", wires.nic_of(source), there] = 1.0
            p2p_times[f"slow {kinds[-1]} in", wires.nic_of(destination), here] = 1.0
        return p2p_times
    per_node = cluster.per_node
    count = Counter(rank // per_node for rank in members)
    ring_times: dict[Resource, float] = {}
    for rank in members if len(members) > 1 else ():
        node = rank // per_node
        if wires.nodes is not None and node not in wires.nodes:
            continue
        if count[node] > 1:
            ring_times["port out", rank, -1] = ring_times["port in", rank, -1] = 1.0
        if len(count) > 1:
            slow = (
                [far for far in count if far != node and (node, far) in wires.factors]
                if wires.factors
                else ()
            )
            for direction in ("out", "in"):
                for way in (("nic", -1), *(("slow nic", far) for far in slow)):
                    resource = f"{way[0]} {direction}", wires.nic_of(rank), way[1]
                    ring_times[resource] = ring_times.get(resource, 0.0) + 1 / count[node]
    return ring_times


def shared_resources(routes: Mapping[Used, Route], wires: Wiring) -> dict[Resource, int]:
    """Return numbers for the resources that can be short of capacity; resources with equal traffic share one."""
    carried: dict[Resource, list[tuple[Used, float]]] = {}
    for id, route in routes.items():
        for resource, times in route.passes.items():
            carried.setdefault(resource, []).append((id, times))
    numbers: dict[Resource, int] = {}
    seen: set[tuple[float, tuple[tuple[Used, float], ...]]] = set()
    for resource, users in carried.items():
        capacity = wires.capacity(resource)
        (id, times), *others = users
        enough = not others and times / capacity <= routes[id].slowest * (1 + 1e-9)
        if not enough and (key := (capacity, tuple(users))) not in seen:
            seen.add(key)
            numbers[resource] = len(numbers)
    return numbers
