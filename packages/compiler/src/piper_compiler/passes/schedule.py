"""One global linear order of all nodes, from which every role's program is projected.

List scheduling under canonical durations: each role computes one node at a time and, where orders leave a choice, takes by
default what 1F1B takes: go on with the stage and microbatch at hand, else backward before forward, else the lowest microbatch;
a forward of a stage starts only while fewer than `limit` of its microbatches are in flight, where limit is 1 + the number of
stages after it on the longest way to the loss (p - r on device r of a chain). Forwards that an `order` mentions are not limited.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from piper_compiler.durations import chunk_seconds
from piper_compiler.passes.dependencies import Dependencies, cycle_error
from piper_compiler.ports import signatures
from piper_ir.costs import Costs
from piper_ir.graph import Graph, Node
from piper_ir.ops import COMM, AllReduce, Compute, ComputeStep, Recv, Send
from piper_ir.program import Chunk, Step
from piper_ir.sizes import ITEM_BYTES, bind

LINK = 1e11
"""Nominal bytes/s between devices."""

Group = tuple[int, int, int]
"""Rank of the phase (backward 0, forward 1, update 2), microbatch, number of the stage: nodes that run without a break when
they can."""


@dataclass
class _Role:
    ready: dict[Group, list[tuple[int, int]]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    gated: dict[int, list[Group]] = field(default_factory=dict)
    current: Group | None = None
    busy: bool = False


class Scheduler:
    """`run` returns the node numbers in global order. CompileError when the graph has a cycle."""

    def __init__(self, graph: Graph, deps: Dependencies, bound: dict[str, Chunk], rows: int, costs: Costs | None) -> None:
        self.graph, self.deps = graph, deps
        self.roles = {r: _Role() for r in graph.roles}
        self.seconds = _node_seconds(graph, deps.nodes, bound, rows, costs)
        self.group = _groups(deps.nodes)
        ordered = {i for edge, applied in graph.order_edges.items() if applied < len(graph.log) for i in edge}
        self.limited = {self.group[i] for i, n in enumerate(deps.nodes) if _forward(n)}
        self.limited -= {self.group[i] for i, n in enumerate(deps.nodes) if _forward(n) and n.id in ordered}
        self.limit = _limits(graph, deps, self.group)
        self.open: dict[tuple[str, int], int] = {}
        self.backward_left: dict[tuple[str, Group], int] = {}
        for i, n in enumerate(deps.nodes):
            if isinstance(n.op, Compute) and not _forward(n):
                key = (n.role, self.group[i])
                self.backward_left[key] = self.backward_left.get(key, 0) + 1
        self.admitted: set[tuple[str, Group]] = set()
        self.events: list[tuple[float, int, int]] = []
        self.sequence: list[int] = []
        self.arrived: dict[tuple[str, str], list[int]] = {}
        self.counter = 0

    def run(self) -> list[int]:
        waiting = [len(b) for b in self.deps.before]
        now, done = 0.0, 0
        dirty = set(self.roles)
        for i, n in enumerate(waiting):
            if n == 0:
                self._ready(i, now)
        while True:
            self._start(dirty, now)
            if not self.events:
                if done == len(waiting) or not self._force(dirty):
                    break
                continue
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                i = heapq.heappop(self.events)[2]
                done += 1
                self._finish(i, dirty)
                for j in self.deps.after[i]:
                    waiting[j] -= 1
                    if waiting[j] == 0:
                        self._ready(j, now)
                        dirty.add(self.deps.nodes[j].role)
        if done < len(waiting):
            raise cycle_error(self.graph, self.deps, {i for i, n in enumerate(waiting) if n})
        return self.sequence

    def _complete_at(self, time: float, i: int) -> None:
        self.counter += 1
        heapq.heappush(self.events, (time, self.counter, i))

    def _ready(self, i: int, now: float) -> None:
        node = self.deps.nodes[i]
        match node.op:
            case Send() | Recv():
                self.sequence.append(i)
                self._complete_at(now + (self.seconds[i] if isinstance(node.op, Recv) else 0.0), i)
            case AllReduce(channel=channel, bucket=bucket):
                members = self.arrived.setdefault((channel, bucket), [])
                members.append(i)
                if len(members) == len(self.graph.channels[channel].roles):
                    for j in sorted(members):
                        self.sequence.append(j)
                        self._complete_at(now + self.seconds[j], j)
            case _:
                role, group = self.roles[node.role], self.group[i]
                if group not in role.ready:
                    role.ready[group] = []
                    heapq.heappush(role.groups, group)
                heapq.heappush(role.ready[group], (self._along(node), i))

    def _along(self, node: Node) -> int:
        """Along the program for forward, against it for backward; sums run before what reads them by their edges."""
        position = self.graph.chunk_index.get(str(node.coords.get("chunk", "")), 0)
        return position if _forward(node) else -position

    def _start(self, dirty: set[str], now: float) -> None:
        for name in sorted(dirty):
            role = self.roles[name]
            while not role.busy and (group := self._choose(name, role)) is not None:
                heap = role.ready[group]
                i = heapq.heappop(heap)[1]
                if not heap:
                    del role.ready[group]
                role.current = group
                self.sequence.append(i)
                role.busy = True
                self._complete_at(now + self.seconds[i], i)
        dirty.clear()

    def _choose(self, name: str, role: _Role) -> Group | None:
        if role.current in role.ready:
            return role.current
        while role.groups:
            group = role.groups[0]
            if group in role.ready:
                if self._admit(name, group):
                    return group
                heapq.heappush(role.gated.setdefault(group[2], []), group)
            heapq.heappop(role.groups)
        return None

    def _admit(self, role: str, group: Group, force: bool = False) -> bool:
        """Whether the group may start; a forward that may is counted as in flight until its backward is done."""
        if group[0] != 1 or (role, group) in self.admitted:
            return True
        key = (role, group[2])
        if not force and group in self.limited and self.open.get(key, 0) >= self.limit.get(group[2], 1):
            return False
        self.admitted.add((role, group))
        if (role, (0, group[1], group[2])) in self.backward_left:
            self.open[key] = self.open.get(key, 0) + 1
        return True

    def _force(self, dirty: set[str]) -> bool:
        """Nothing runs and something is held back by its limit: an order elsewhere needs more in flight, so let the first one
        go."""
        held = [(gated[0][1], name, gated[0]) for name, role in self.roles.items() for gated in role.gated.values() if gated]
        if not held:
            return False
        _, name, group = min(held)
        self._admit(name, group, force=True)
        self._ungate(self.roles[name], group[2])
        dirty.add(name)
        return True

    def _ungate(self, role: _Role, stage: int) -> None:
        """Let the first group that a stage's limit holds back try again."""
        if role.gated.get(stage):
            heapq.heappush(role.groups, heapq.heappop(role.gated[stage]))

    def _finish(self, i: int, dirty: set[str]) -> None:
        node = self.deps.nodes[i]
        if isinstance(node.op, COMM):
            return
        self.roles[node.role].busy = False
        dirty.add(node.role)
        key = (node.role, self.group[i])
        if isinstance(node.op, Compute) and key in self.backward_left:
            self.backward_left[key] -= 1
            if not self.backward_left[key]:
                self.open[(node.role, key[1][2])] -= 1
                self._ungate(self.roles[node.role], key[1][2])


def _forward(node: Node) -> bool:
    return node.coords.get("phase") == "F"


def _stage(node: Node) -> str:
    """The name of a node's stage: everything on one device when there are no stages."""
    return str(node.coords.get("stage", node.role))


def _groups(nodes: tuple[Node, ...]) -> list[Group]:
    """The group of each node. Stages are numbered along the program."""
    numbers: dict[str, int] = {}
    ranks = {"F": 1, "U": 2}
    return [(ranks.get(str(n.coords.get("phase")), 0), n.mb, numbers.setdefault(_stage(n), len(numbers))) for n in nodes]


def _node_seconds(graph: Graph, nodes: tuple[Node, ...], bound: dict[str, Chunk], rows: int, costs: Costs | None) -> list[float]:
    cache: dict[Compute, float] = {}
    out = []
    for node in nodes:
        match node.op:
            case Compute():
                if node.op not in cache:
                    cache[node.op] = _compute_seconds(bound[node.op.chunk], node.op.step, costs)
                out.append(cache[node.op])
            case Recv():
                out.append(graph.program.hop + bind(graph.values[node.writes[0]].spec.nbytes, rows) / LINK)
            case AllReduce(bucket=bucket) if bucket and graph.program.source != "synthetic":
                out.append(graph.buckets[bucket].numel * ITEM_BYTES[graph.buckets[bucket].dtype] / LINK)
            case _:
                out.append(0.0)
    return out


def _compute_seconds(chunk: Chunk, step: ComputeStep, costs: Costs | None) -> float:
    steps: tuple[Step, ...] = ("I", "W") if step == "B" else (step,)
    return sum([chunk_seconds(chunk, s, costs) for s in steps if s in chunk.steps and not chunk.steps[s].empty])


def _limits(graph: Graph, deps: Dependencies, group: list[Group]) -> dict[int, int]:
    """Stage -> microbatches in flight: 1 + the most changes of device on a way from it to the end of forward."""
    changes: dict[str, int] = {}  # forward node -> the most changes on a way from it
    out: dict[int, int] = {}
    for i in reversed(range(len(deps.nodes))):  # against the program: a node's readers come before it
        node = deps.nodes[i]
        if not (isinstance(node.op, Compute) and _forward(node)):
            continue
        far, stage = changes.get(node.id, 0), group[i][2]
        out[stage] = max(out.get(stage, 1), 1 + far)
        for v in node.reads:
            writer = graph.nodes.get(graph.writer.get(v, ""))
            if writer is not None:
                moved = isinstance(writer.op, Recv)
                source = graph.writer[graph.nodes[f"send.{v}"].reads[0]] if moved else writer.id
                changes[source] = max(changes.get(source, 0), far + moved)
    return out


def schedule(graph: Graph, deps: Dependencies, bound: dict[str, Chunk], rows: int, costs: Costs | None = None) -> list[int]:
    """The nodes of a complete graph in one global linear order. See the module's docstring."""
    assert all(signatures(c, "F") for c in bound.values()), "every chunk has a forward"
    return Scheduler(graph, deps, bound, rows, costs).run()
