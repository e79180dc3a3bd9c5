"""The simple device model: how long each instruction of a plan takes, and where that number comes from.

Compute: per kernel the larger of FLOPs at the reached peak and bytes at the reached bandwidth, summed; never less than the
launches (t_layer = max(sum t_gpu, n_kernels t_launch), cost-model.md 1). Point-to-point: latency + bytes / bandwidth.
All-reduce over n ranks: 2 (n - 1) hops + 2 (n - 1) / n bytes / bandwidth (a ring). Everything else is one kernel that moves
bytes of memory.

Where the host is the device (a CPU), what a message costs the processor is taken from the computation that is issued next, unless
that waits for the message anyway: one core per rank does both, however many threads share it."""

from __future__ import annotations

from dataclasses import dataclass

from piper_ir.costs import Costs, Duration
from piper_ir.errors import ClusterError
from piper_ir.ops import COMM, Comm, Compute, Load
from piper_ir.plan import Channel, Instr, Part, Plan, RolePlan
from piper_ir.program import Cost, Kernel
from piper_ir.sizes import bind
from piper_ir.trace import Source
from piper_ir.traffic import Traffic
from piper_simulator.clusters import Cluster
from piper_simulator.provenance import Provenance

_TRUST: tuple[Source, ...] = ("formula", "interpolated", "table", "measured", "given")
"""Least to most: an instruction of several parts is labelled by the least trusted of its durations."""

_AT_PEAK = frozenset({"matmul", "attention"})


@dataclass(frozen=True, slots=True)
class Work:
    """What an instruction takes, moves (communication: bytes of the message on one rank) and computes."""

    seconds: float
    source: Source
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True)
class _Link:
    """The slowest instance of a channel: ranks in it, seconds of all its hops, bytes/s."""

    ranks: int
    latency: float
    bandwidth: float


def given_only(plan: Plan) -> bool:
    """Whether all compute of a plan has given durations (a synthetic program): then everything else takes no time."""
    costs = [sig.cost for chunk in plan.chunks for sig in chunk.steps.values()]
    return bool(costs) and all(c.seconds is not None for c in costs)


class CostModel:
    """Durations of the instructions of one plan: given by the program, else looked up in `costs`, else computed for `cluster`.

    ClusterError: a duration must be computed and there is no cluster; the plan has more ranks than the cluster has devices; the
    costs were taken at another number of rows per microbatch. CostsError: the costs hold for none of the plan's chunks.

    `issue_s`: host seconds per instruction, beside the device; where the host is the device they are part of the instruction."""

    def __init__(self, plan: Plan, cluster: Cluster | None, costs: Costs | None) -> None:
        self.plan, self.cluster, self.costs = plan, cluster, costs or Costs()
        self.given = given_only(plan)
        if cluster is not None and plan.mesh.world > cluster.devices:
            raise ClusterError(f"the plan runs on {plan.mesh.world} ranks; {cluster.name} has {cluster.devices} devices")
        if self.costs.compute and self.costs.rows not in (None, plan.rows):
            raise ClusterError(
                f"the costs hold for {self.costs.rows} rows per microbatch; the plan has {plan.rows}: measure them at {plan.rows}"
            )
        self._provenance = Provenance(plan, cluster, self.costs)
        self._inline = cluster is not None and cluster.synchronous
        issue = 0.0 if cluster is None or self.given else cluster.host_issue_s
        if self.costs.host is not None and not self.given:
            issue = self.costs.host.issue_s
        self.issue_s, self._inline_s = (0.0, issue) if self._inline else (issue, 0.0)
        self._traffic = Traffic(plan)
        self._steps: dict[Compute, Work] = {}
        self._links: dict[str, _Link] = {}
        self._messages: dict[tuple[str, int], Work] = {}
        self._others: dict[tuple[str, int], Work] = {}
        self._busy_s: dict[tuple[str, int], float] = {}
        self._beside: dict[str, dict[int, float]] = {}
        self._calls: dict[str, set[int]] = {}

    def work(self, role: RolePlan, instr: Instr) -> Work:
        """Duration, source, bytes and FLOPs of one instruction of a role."""
        op = instr.parts[0].op
        if isinstance(op, COMM):
            return self._comm(op, instr.parts[0])
        parts = [self._part(role, part) for part in instr.parts]
        more = self._inline_s + self._taken(role, instr)
        if len(parts) == 1 and not more:
            return parts[0]
        seconds = more + sum([p.seconds for p in parts])
        return Work(seconds, min([p.source for p in parts], key=_TRUST.index), flops=sum([p.flops for p in parts]))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the durations asked for so far: constants that nobody measured, guesses, costs that do not
        fit."""
        return self._provenance.notes()

    def _taken(self, role: RolePlan, instr: Instr) -> float:
        """Seconds that messages take from an instruction of the compute stream."""
        if not self._inline or self.given or self.costs.host is None:
            return 0.0
        if role.role not in self._beside:
            self._beside[role.role] = self._taken_by_messages(role, self.costs.host.comm_s)
        return self._beside[role.role].get(id(instr), 0.0)

    def _taken_by_messages(self, role: RolePlan, each: float) -> dict[int, float]:
        """Instruction of the compute stream (by identity) -> processor seconds of the messages issued since the one before it."""
        taken: dict[int, float] = {}
        issued: list[tuple[str, int, float]] = []
        count: dict[str, int] = {}
        for instr in role.program:
            op = instr.parts[0].op
            if isinstance(op, COMM):
                count[instr.stream] = count.get(instr.stream, 0) + 1
                issued.append((instr.stream, count[instr.stream], self._busy(op, instr.parts[0])))
            elif issued:
                awaited = dict(instr.waits)
                taken[id(instr)] = sum(each + (0.0 if awaited.get(stream, 0) >= k else busy) for stream, k, busy in issued)
                issued.clear()
        return taken

    def _busy(self, op: Comm, part: Part) -> float:
        key = (op.channel, self._traffic.message(op, part))
        if key not in self._busy_s:
            self._busy_s[key] = self.costs.busy_s(*self._comm_key(self.plan.channel(op.channel), key[1]))
        return self._busy_s[key]

    def _part(self, role: RolePlan, part: Part) -> Work:
        if isinstance(part.op, Compute):
            if part.op not in self._steps:
                self._steps[part.op] = self._step(part.op)
            return self._steps[part.op]
        if self.given:
            return Work(0.0, "given")
        key = (type(part.op).__name__, self._traffic.touched(role, part))
        if key not in self._others:
            self._others[key] = self._other(*key, part.node)
        found = self._others[key]
        called = self._batch_s(role, part) if isinstance(part.op, Load) else 0.0
        return Work(found.seconds + called, found.source) if called else found

    def _other(self, op: str, touched: int, node: str) -> Work:
        known = self.costs.of_part(op, touched)
        if known is not None:
            return Work(known.seconds, known.source)
        cluster = self._need(node)
        self._provenance.computed()
        return Work(_launched(cluster, touched / (cluster.memory_bandwidth * cluster.memory_fraction), 1), "formula")

    def _batch_s(self, role: RolePlan, part: Part) -> float:
        """Seconds of the job's batch function, which the first load of a microbatch on a role calls."""
        known = self.costs.of_part("Batch", self.plan.rows)
        return known.seconds if known is not None and self._is_first(role, part) else 0.0

    def _is_first(self, role: RolePlan, part: Part) -> bool:
        if role.role not in self._calls:
            first: dict[int, int] = {}
            for p in (p for instr in role.program for p in instr.parts if isinstance(p.op, Load)):
                first.setdefault(p.mb, id(p))
            self._calls[role.role] = set(first.values())
        return id(part) in self._calls[role.role]

    def _step(self, op: Compute) -> Work:
        assert op.step != "B", "a plan holds I and W parts; B exists in graphs only"
        chunk = self.plan.chunk(op.chunk)
        cost = chunk.steps[op.step].cost
        known = self.costs.of_compute(op.chunk, op.step, chunk.code, self.plan.rows)
        if cost.seconds is not None:
            known = Duration(cost.seconds, "given")
        if known is not None:
            self._provenance.looked_up(chunk, op.step)
            return Work(known.seconds, known.source, flops=cost.flops)
        cluster = self._need(f"step {op.step} of chunk {op.chunk}")
        self._provenance.computed_step(chunk, op.step, [k.dtype for k in cost.kernels if _is_guess(cluster, k)])
        return Work(_kernels(cluster, cost), "formula", flops=cost.flops)

    def _need(self, what: str) -> Cluster:
        if self.cluster is None:
            raise ClusterError(f"{what} has no given duration; name a cluster to simulate on, e.g. simulate(plan, 'h100x8')")
        return self.cluster

    def _comm(self, op: Comm, part: Part) -> Work:
        key = (op.channel, self._traffic.message(op, part))
        if key not in self._messages:
            self._messages[key] = self._message(self.plan.channel(op.channel), key[1])
        return self._messages[key]

    def _comm_key(self, channel: Channel, nbytes: int) -> tuple[str, int, int, int]:
        """How `Costs` names a message."""
        members = self.plan.peers(channel, self.plan.role(channel.roles[0]).ranks[0])
        nodes = 1 if self.cluster is None else len({self.cluster.node_of(r) for r in members})
        return "p2p" if channel.kind == "p2p" else "all_reduce", nbytes, len(members), nodes

    def _message(self, channel: Channel, nbytes: int) -> Work:
        p2p = channel.kind == "p2p"
        key = self._comm_key(channel, nbytes)
        known = self.costs.of_comm(*key) if self.costs.comm else None
        if known is not None:
            self._provenance.sent(*key)
            return Work(known.seconds, known.source, bytes=nbytes)
        if self.given:
            return Work(0.0, "given", bytes=nbytes)
        link = self._link(channel, self._need(f"a message on channel {channel.id}"))
        self._provenance.sent_unknown(*key)
        share = 1.0 if p2p else 2 * (link.ranks - 1) / link.ranks
        return Work(link.latency + share * nbytes / link.bandwidth, "formula", bytes=nbytes)

    def _link(self, channel: Channel, cluster: Cluster) -> _Link:
        if channel.id not in self._links:
            left = set(self.plan.role(channel.roles[0]).ranks)
            links = []
            while left:
                members = self.plan.peers(channel, min(left))
                left -= set(members)
                links.append(_link(cluster, members, channel.kind == "p2p"))
            self._links[channel.id] = _Link(links[0].ranks, max(x.latency for x in links), min(x.bandwidth for x in links))
        return self._links[channel.id]


def _link(cluster: Cluster, members: tuple[int, ...], p2p: bool) -> _Link:
    """A ring crosses to another node once per node, and back for the second half of an all-reduce; all its ranks of one node
    share the crossing, each with a NIC of its own (bus bandwidth = min(NVLink, NICs x rate), SimAI, cost-model.md 3)."""
    count: dict[int, int] = {}
    for rank in members:
        count[cluster.node_of(rank)] = count.get(cluster.node_of(rank), 0) + 1
    crosses = len(count) > 1
    if p2p:
        latency = cluster.inter_latency if crosses else cluster.intra_latency
        return _Link(2, latency, cluster.inter_bandwidth if crosses else cluster.intra_bandwidth)
    hops, between = 2 * (len(members) - 1), 2 * (len(count) - 1)
    latency = (hops - between) * cluster.intra_latency + between * cluster.inter_latency
    nics = min(count.values()) * cluster.inter_bandwidth
    if not crosses:
        return _Link(len(members), latency, cluster.intra_bandwidth)
    alone = max(count.values()) == 1  # no link within a node is used
    return _Link(len(members), latency, nics if alone else min(nics, cluster.intra_bandwidth))


def _kernels(cluster: Cluster, cost: Cost) -> float:
    return _launched(cluster, sum(k.count * _kernel(cluster, k) for k in cost.kernels), sum(k.count for k in cost.kernels))


def _kernel(cluster: Cluster, kernel: Kernel) -> float:
    return max(_computing(cluster, kernel), _moving(cluster, kernel))


def _computing(cluster: Cluster, kernel: Kernel) -> float:
    fraction = cluster.matmul_fraction if kernel.kind in _AT_PEAK else 1.0
    return bind(kernel.flops, 0) / (cluster.peak(kernel.dtype) * fraction)


def _moving(cluster: Cluster, kernel: Kernel) -> float:
    return bind(kernel.bytes, 0) / (cluster.memory_bandwidth * cluster.memory_fraction)


def _is_guess(cluster: Cluster, kernel: Kernel) -> bool:
    """The rate of a dtype that the cluster does not know; of kernels that move bytes only where that rate decides, since
    integers are added on every device."""
    if kernel.dtype in cluster.peak_flops:
        return False
    return kernel.kind in _AT_PEAK or _computing(cluster, kernel) > _moving(cluster, kernel)


def _launched(cluster: Cluster, busy: float, kernels: int) -> float:
    """Launches hide behind the device's work, or the other way round; they add up where the host is the device."""
    launches = kernels * cluster.launch_s
    return busy + launches if cluster.synchronous else max(busy, launches)
