"""Order all nodes in one global linear order, so that every role's program is a projection of it.

This is list scheduling under canonical durations: each role computes one node at a time. If orders leave a choice, it
chooses as 1F1B does: go on with the stage and microbatch at hand, else backward before forward, else the lowest
microbatch. A forward of a stage starts only while fewer than `limit` of its microbatches are in flight: limit is 1 +
the number of stages after it on the longest way to the loss (p - r on device r of a chain). Forwards that an `order`
mentions are not limited. If the backward is split, the input gradient counts as backward, and a weight gradient runs
when there is nothing else to do; until it is done its microbatch counts as in flight.

A *span* (`Dependencies.spans`) is several nodes that run as one. It starts when all of them can, and takes given
seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from piper_compiler.durations import LINK, BoundChunks, collective_bytes, collective_seconds
from piper_compiler.passes.order.hiding import messages_to
from piper_compiler.passes.steps.dependencies import Dependencies, cycle_error, meeting
from piper_compiler.ports import signatures, steps_of
from piper_ir.graph.graph import At, Coord, Graph, Node
from piper_ir.ground.sizes import bind
from piper_ir.program.ops import COMM, Cast, Collective, Compute, Recv

BACKWARD, FORWARD, WEIGHT, UPDATE = 0, 1, 2, 3
"""The priorities of the phases: a lower one goes first if there is a choice."""
Group = int
"""A phase, microbatch and stage as one number; a role runs the nodes of a group without a break when they can.

Groups are taken in the order of phase first, then by microbatch, then by stage.
"""


@dataclass(slots=True)
class _Role:
    """Hold the state of one role while nodes are scheduled.

    Attributes:
        ready: the nodes that may start, by group, along the program.
        groups: the groups with such nodes, except the current one; some may be empty by now.
        gated: by stage, the groups that its limit holds back.
        admitted: the groups that have started, or may.
        open: microbatches in flight, by stage.
        left: backward nodes still to run, by microbatch and stage.
        current: the group at hand; -1 for none.
        busy: whether a node is running.
    """

    ready: dict[Group, list[tuple[int, int]]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    gated: dict[int, list[Group]] = field(default_factory=dict)
    admitted: set[Group] = field(default_factory=set)
    open: dict[int, int] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    current: Group = -1
    busy: bool = False


class Scheduler:
    """Order the nodes of a complete graph, as the module's docstring says.

    `given` maps the first node of each span to its seconds. `run` returns the nodes in one global linear order, or
    raises CompileError when the graph has a cycle.
    """

    def __init__(
        self,
        graph: Graph,
        deps: Dependencies,
        bound: BoundChunks,
        given: Mapping[int, float],
    ) -> None:
        assert all(signatures(c, "F") for c in bound.by_name.values()), "every chunk has a forward"
        nodes = deps.nodes
        self.graph, self.deps = graph, deps
        names = {name: r for r, name in enumerate(sorted(graph.roles))}
        self.roles = [
            _Role() for _ in names
        ]  # by name, the order of roles that can start at the same time
        self.role_of = deps.column([names[n.role] for n in nodes])
        self.seconds = deps.column(node_seconds(graph, nodes, bound))
        for i, taken in given.items():
            self.seconds[i] = taken
        kinds = _kinds(nodes)
        self.stages = 1 + max([stage for _, stage in kinds], default=0)
        self.each = self.stages * (max(deps.mb, default=0) + 2)  # groups of a phase
        heads = [rank * self.each + self.stages + stage for rank, stage in kinds]
        self.group: list[Group] = [
            heads[k] + self.stages * mb for k, mb in zip(deps.of, deps.mb, strict=True)
        ]
        self.along = deps.column(_along(graph, nodes, kinds))
        self.collective = deps.column(
            [n.op if isinstance(n.op, Collective) else None for n in nodes]
        )
        self.free = {self.group[i] for i in deps.ordered if kinds[deps.of[i]][0] == FORWARD}
        """The groups of forwards that an order mentions."""
        self.limit = _limits(deps, kinds)
        self.backward = deps.column(
            [
                isinstance(n.op, Compute) and k[0] != FORWARD
                for n, k in zip(nodes, kinds, strict=True)
            ]
        )
        for i, backward in enumerate(self.backward):
            if backward:
                left, key = self.roles[self.role_of[i]].left, self.group[i] % self.each
                left[key] = left.get(key, 0) + 1
        self.at_once = deps.column([isinstance(n.op, (*COMM, Cast)) for n in nodes])
        """The nodes that start as soon as they can: messages, and casts of gradients that they wait for."""
        self.spans = deps.spans
        self.events: list[tuple[float, int, int]] = []
        self.sequence: list[int] = []
        self.starts = [0.0] * len(self.role_of)
        """The canonical start of each node that computes, once it has started."""
        self.arrived: dict[tuple[Collective, int, int], list[int]] = {}
        self.turns: dict[
            tuple[Collective, int, int], int
        ] = {}  # of each role, how often it has come to such a meeting

    def run(self) -> list[int]:
        waiting: list[int] = np.bincount(self.deps.target, minlength=len(self.deps.comm)).tolist()
        events = self.events
        now, done = 0.0, 0
        dirty = set(range(len(self.roles)))
        over: list[int] = []
        for i, n in enumerate(waiting):
            if n == 0:
                self._communicate(i, now, over) if self.at_once[i] else self._ready(i)
        while True:
            if dirty:
                self._start(dirty, now)
            if events and not over:
                now = events[0][0]
            while events and events[0][0] == now:
                over.append(heappop(events)[2])
            if over:
                self._end(over, waiting, dirty, now)
                done += len(over)
                over.clear()
            elif done == len(waiting) or not self._force(dirty):
                break
        if done < len(waiting):
            raise cycle_error(self.graph, self.deps, set(range(len(waiting))) - {*self.sequence})
        return self.sequence

    def _end(self, over: list[int], waiting: list[int], dirty: set[int], now: float) -> None:
        """End the nodes that are over, and let those start that waited for nothing else.

        Args:
            over: the nodes, which grow by communication that takes no time.
            waiting: how many nodes each node waits for.
            dirty: collects the roles that may have something new to do.
        """
        after, at_once, backward, role_of = (
            self.deps.after,
            self.at_once,
            self.backward,
            self.role_of,
        )
        for i in over:
            if not at_once[i]:
                role = self.roles[role_of[i]]
                role.busy = False
                dirty.add(role_of[i])
                if backward[i]:
                    self._finish(role, self.group[i] % self.each)
            for j in after[i]:
                waiting[j] -= 1
                if waiting[j]:
                    continue
                if at_once[j]:
                    self._communicate(j, now, over)
                else:
                    self._ready(j)
                    dirty.add(role_of[j])

    def _ready(self, i: int) -> None:
        """Let a node that computes start when its role has nothing better to do."""
        if self.spans and self.spans.get(i, (i,))[0] != i:
            return  # the first node of a span stands for it
        role, group = self.roles[self.role_of[i]], self.group[i]
        waiting = role.ready.get(group)
        if waiting is None:
            role.ready[group] = [(self.along[i], i)]
            if group != role.current:
                heappush(role.groups, group)
        else:
            heappush(waiting, (self.along[i], i))

    def _communicate(self, i: int, now: float, over: list[int]) -> None:
        """Start a communication, which needs no processor; a collective starts once the last of its members can.

        `over` collects the communication that is done by now.
        """
        op, sequence = self.collective[i], self.sequence
        for j in (i,) if op is None else self._met(i, op):
            sequence.append(j)
            end = now + self.seconds[j]
            if end > now:
                heappush(self.events, (end, len(sequence), j))
            else:
                over.append(j)

    def _met(self, i: int, op: Collective) -> Sequence[int]:
        """Return the members of a collective when this one is the last of them, else none."""
        use = op, self.deps.mb[i], self.role_of[i]
        nth = self.turns[use] = self.turns.get(use, -1) + 1
        members = self.arrived.setdefault((op, self.deps.mb[i], nth), [])
        members.append(i)
        return sorted(members) if len(members) == len(self.graph.channels[op.channel].roles) else ()

    def _start(self, dirty: set[int], now: float) -> None:
        sequence, events, seconds, spans, starts = (
            self.sequence,
            self.events,
            self.seconds,
            self.spans,
            self.starts,
        )
        for r in sorted(dirty) if len(dirty) > 1 else dirty:
            role = self.roles[r]
            if role.busy:
                continue
            group = role.current
            if group not in role.ready and (group := self._choose(role)) < 0:
                continue
            heap = role.ready[group]
            i = heappop(heap)[1]
            if not heap:
                del role.ready[group]
            role.current = group
            role.busy = True
            end = now + seconds[i]
            for j in spans.get(i, (i,)):
                starts[j] = now
                sequence.append(j)
                heappush(events, (end, len(sequence), j))
        dirty.clear()

    def _choose(self, role: _Role) -> Group:
        """Return the first group that may start, -1 when there is none."""
        while role.groups:
            group = role.groups[0]
            if group in role.ready:
                if self._admit(role, group):
                    return group
                heappush(role.gated.setdefault(group % self.stages, []), group)
            heappop(role.groups)
        return -1

    def _admit(self, role: _Role, group: Group, force: bool = False) -> bool:
        """Return whether the group may start; an admitted forward counts as in flight until its backward is done."""
        if group // self.each != FORWARD or group in role.admitted:
            return True
        stage = group % self.stages
        in_flight = role.open.get(stage, 0)
        if not force and in_flight >= self.limit.get(stage, 1) and group not in self.free:
            return False
        role.admitted.add(group)
        if group % self.each in role.left:
            role.open[stage] = in_flight + 1
        return True

    def _force(self, dirty: set[int]) -> bool:
        """Admit the first group that is held back, when nothing runs; return whether there was one.

        An order elsewhere then needs more microbatches in flight than the limit allows.
        """
        waiting = [
            (g[0] // self.stages, r, g[0])
            for r, role in enumerate(self.roles)
            for g in role.gated.values()
            if g
        ]
        if not waiting:
            return False
        _, r, group = min(waiting)
        self._admit(self.roles[r], group, force=True)
        self._ungate(self.roles[r], group % self.stages)
        dirty.add(r)
        return True

    def _ungate(self, role: _Role, stage: int) -> None:
        """Make the first group that a stage's limit holds back ready again."""
        if role.gated.get(stage):
            heappush(role.groups, heappop(role.gated[stage]))

    def _finish(self, role: _Role, key: int) -> None:
        """Count a backward node of a stage and microbatch, after whose last one another forward may start."""
        left = role.left[key] = role.left[key] - 1
        if not left:
            role.open[key % self.stages] -= 1
            self._ungate(role, key % self.stages)


def _kinds(nodes: tuple[Node, ...]) -> list[tuple[int, int]]:
    """Return (phase priority, stage number) of each node.

    Stages are numbered along the program; without stages, each device is one stage.
    """
    numbers: dict[str, int] = {}
    known: dict[Coord, int] = {}
    ranks = {"F": FORWARD, "W": WEIGHT, "U": UPDATE}
    kinds = []
    for node in nodes:
        coords = node.coords
        stage = coords.get("stage", node.role)
        number = known.get(stage)
        if number is None:
            number = known[stage] = numbers.setdefault(str(stage), len(numbers))
        kinds.append((ranks.get(str(coords.get("phase")), BACKWARD), number))
    return kinds


def _along(graph: Graph, nodes: tuple[Node, ...], kinds: list[tuple[int, int]]) -> list[int]:
    """Return each node's position: along the program for forward, against it for backward; sums precede readers."""
    index = graph.chunk_index
    places = [index.get(str(node.coords.get("chunk", "")), 0) for node in nodes]
    return [
        place if rank == FORWARD else -place for place, (rank, _) in zip(places, kinds, strict=True)
    ]


def node_seconds(graph: Graph, nodes: tuple[Node, ...], bound: BoundChunks) -> list[float]:
    """Return the canonical seconds of nodes."""
    steps: dict[int, float] = {}  # by the id of an op, which microbatches share
    sizes: dict[int, float] = {}  # by the id of a spec
    durations: list[float] = []
    for node in nodes:
        op = node.op
        seconds: float | None
        if isinstance(op, Compute):
            seconds = steps.get(id(op))
            if seconds is None:
                seconds = steps[id(op)] = sum(
                    [
                        bound.seconds.step(op.variant, s)
                        for s in steps_of(bound.by_name[op.variant], op.step, op.apart)
                    ]
                )
        elif isinstance(op, Recv):
            spec = graph.values[node.writes[0]].spec
            seconds = sizes.get(id(spec))
            if seconds is None:
                seconds = sizes[id(spec)] = graph.program.hop + bind(spec.nbytes, bound.rows) / LINK
        elif isinstance(op, Collective) and graph.program.source != "synthetic":
            seconds = collective_seconds(collective_bytes(graph, node, op, bound.rows))
        else:
            seconds = 0.0
        durations.append(seconds)
    return durations


def overlap_seconds(graph: Graph, bound: BoundChunks) -> dict[At, float]:
    """Return the canonical seconds of the nodes of overlaps, and of the collectives whose results they read."""
    members = [at for group in graph.overlaps for at in group.nodes]
    places = list(
        dict.fromkeys([*members, *(sent for at in members for sent, _ in messages_to(graph, at))])
    )
    nodes = tuple([node for at in places if (node := graph.at(at)) is not None])
    return dict(zip(places, node_seconds(graph, nodes, bound), strict=True))


def _limits(deps: Dependencies, kinds: list[tuple[int, int]]) -> dict[int, int]:
    """Return for each stage how many microbatches may be in flight.

    It is 1 + the most changes of device on a way from the stage to the end of forward.
    """
    forward = [
        rank == FORWARD and isinstance(n.op, Compute)
        for n, (rank, _) in zip(deps.nodes, kinds, strict=True)
    ]
    changes = [
        np.zeros(len(n.each), np.int64) for n in deps.nodes
    ]  # by microbatch, the most on a way from a node
    limits: dict[int, int] = {}
    for k in reversed(range(len(forward))):  # a node's readers come before it
        if not forward[k]:
            continue
        stage = kinds[k][1]
        limits[stage] = max(limits.get(stage, 1), 1 + int(changes[k].max()))
        for j in deps.links[k]:
            theirs, mine = meeting(deps.nodes[j], deps.nodes[k])
            if not isinstance(deps.nodes[j].op, Recv):
                changes[j][theirs] = np.maximum(changes[j][theirs], changes[k][mine])
                continue
            far = np.full(len(deps.nodes[j].each), -1)
            far[theirs] = changes[k][mine] + 1
            for i in [i for send in deps.links[j] for i in deps.links[send]]:  # the senders
                theirs, mine = meeting(deps.nodes[i], deps.nodes[j])
                changes[i][theirs] = np.maximum(changes[i][theirs], far[mine])
    return limits
