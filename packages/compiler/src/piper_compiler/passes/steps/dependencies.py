"""Find the edges of a complete graph: by value, by state (buckets, parameters) and by order directives.

Each node gets a number for each of its microbatches, because the passes that follow look at single microbatches. Edges
between nodes are found once for all microbatches, as columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TypeVar

import numpy as np

from piper_compiler.passes.program.recomputation import late_recomputation, ordered_late
from piper_compiler.passes.steps.arrays import Ints, int_array
from piper_compiler.ports import trains
from piper_ir.graph.graph import At, Graph, Node
from piper_ir.graph.graph_parts import Replication, common
from piper_ir.ground.errors import CompileError
from piper_ir.ground.node_ids import compute_id, send_id
from piper_ir.program.ops import (
    COMM,
    Cast,
    Collective,
    Compute,
    Fold,
    Recv,
    Send,
    SquaredNorm,
    Update,
)
from piper_ir.program.program import Program

Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Dependencies:
    """Number every node in every microbatch, and hold the edges between the numbers.

    Attributes:
        nodes: the nodes in the order of their creation.
        starts: the first number of each of `nodes`; its microbatches follow one after the other.
        of: by number, the index in `nodes`.
        mb: by number, the microbatch; -1 for the whole step.
        comm: by number, whether it is communication.
        source: by edge, the number that must be done before `target` starts.
        target: by edge, the number that waits. Edges stand by target; the edges of a receive begin with its send's.
        after: by number, the targets of the edges from it, ascending.
        ordered: the numbers that directives order.
        accumulators: (bucket, role) -> the numbers that add into the bucket's gradient there.
        spans: number -> all numbers of its span, in order. They start together, so they have edges from the same
            numbers.
        links: by node, the nodes whose values it reads; for a receive, its sends.
    """

    nodes: tuple[Node, ...]
    starts: list[int]
    of: list[int]
    mb: list[int]
    comm: list[bool]
    source: Ints
    target: Ints
    after: list[list[int]]
    ordered: set[int]
    accumulators: dict[tuple[str, str], Ints]
    spans: dict[int, tuple[int, ...]]
    links: list[list[int]]

    def node(self, i: int) -> Node:
        """Return the node behind a number, whatever its microbatch."""
        return self.nodes[self.of[i]]

    def name(self, i: int) -> str:
        """Return the name of number i."""
        return self.node(i).name(self.mb[i])

    def column(self, facts: Sequence[Fact]) -> list[Fact]:
        """Return a fact for each number, given one for each of `nodes`."""
        return [facts[k] for k in self.of]


def dependencies(graph: Graph) -> Dependencies:
    """Find all edges, in time linear in their number."""
    finder = _Edges(graph)
    nodes, starts = finder.nodes, finder.starts
    of: list[int] = np.repeat(
        np.arange(len(nodes)), int_array([len(node.each) for node in nodes])
    ).tolist()
    mb = list(chain.from_iterable([node.each for node in nodes]))
    kinds = [isinstance(n.op, COMM) for n in nodes]
    edges = ordered_late(graph, finder.late) if finder.late else graph.order_edges
    pairs = finder.pairs(edges)
    source, target = finder.columns(pairs)
    joined: dict[int, tuple[int, ...]] = {}
    if graph.overlaps:
        source, target, joined = _join(
            source, target, [tuple(map(finder.number, span)) for span in spans(graph)]
        )
    written = len(graph.log)
    asked = [pair for pair, applied in zip(pairs, edges.values(), strict=True) if applied < written]
    ordered = set(chain.from_iterable(asked))
    ordered |= {finder.number(at) for group in graph.overlaps for at in group.nodes}
    adds = {
        key: np.concatenate([finder.numbers(k) for k in mine])
        for key, mine in finder.accumulators.items()
    }
    after = targets(source, target, len(of))
    comm = [kinds[k] for k in of]
    return Dependencies(
        nodes, starts, of, mb, comm, source, target, after, ordered, adds, joined, finder.links
    )


def policies_of(graph: Graph) -> dict[str, Replication]:
    """Return the replication policy of each bucket."""
    home = {p: b.id for b in graph.buckets.values() for p in b.params}
    policies: dict[str, Replication] = {}
    for chunk in graph.program.chunks:
        for entry in chunk.inputs:
            if entry.kind == "param" and entry.ref in home and chunk.id in graph.replication:
                policies.setdefault(home[entry.ref], graph.replication[chunk.id])
    return policies


def targets(source: Ints, target: Ints, nodes: int) -> list[list[int]]:
    """Return for each of `nodes` nodes the targets of the edges from it, ascending."""
    order = np.sort(source * nodes + target)
    ends = np.cumsum(np.bincount(source, minlength=nodes)).tolist()
    flat = (order % nodes).tolist() if nodes else []
    return [flat[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def meeting(a: Node, b: Node) -> tuple[Ints, Ints]:
    """Return the microbatches that two nodes share, as indexes in a's and in b's; the whole step meets all."""
    if a.mbs is None or b.mbs is None:
        every = np.arange(max(len(a.each), len(b.each)))
        only = np.zeros_like(every)
        return only if a.mbs is None else every, only if b.mbs is None else every
    if a.mbs == b.mbs:
        every = np.arange(len(a.mbs))
        return every, every
    shared = int_array(common(a.mbs, b.mbs) or ())
    return np.searchsorted(int_array(a.mbs), shared), np.searchsorted(int_array(b.mbs), shared)


def _join(
    source: Ints, target: Ints, found: Iterable[tuple[int, ...]]
) -> tuple[Ints, Ints, dict[int, tuple[int, ...]]]:
    """Give the numbers of each span the predecessors of all of them, but not each other."""
    span_of: dict[int, tuple[int, ...]] = {}
    more: list[tuple[int, int]] = []
    for span in found:
        before = [j for i in span for j in source[target == i].tolist()]
        more += [(j, i) for i in span for j in dict.fromkeys(before) if j not in span]
        span_of.update(dict.fromkeys(span, span))
    kept = ~np.isin(target, int_array(span_of))
    source = np.concatenate((source[kept], int_array(j for j, _ in more)))
    target = np.concatenate((target[kept], int_array(i for _, i in more)))
    order = np.argsort(target, kind="stable")
    return source[order], target[order], span_of


_EARLIER = {"B": ("R", "F"), "R": ("F",), "I": ("R", "F"), "W": ("I", "R", "F")}
"""The steps of a chunk that each step follows: only the first of them that exists counts."""


class _Edges:
    """Find the edges between the nodes of a graph.

    `accumulators` maps (bucket, role) to the nodes that add into the bucket's gradient there.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.nodes = graph, graph.sequence
        self.starts = [0, *accumulate(len(n.each) for n in self.nodes)][:-1]
        self.family: dict[str, list[int]] = {}
        for k, node in enumerate(self.nodes):
            self.family.setdefault(node.id, []).append(k)
        self.bucket_of = {p: b.id for b in graph.buckets.values() for p in b.params}
        self.accumulators = _accumulators(graph, self.nodes, self.bucket_of)
        policies = policies_of(graph)
        self.alone = {id for id, policy in policies.items() if not policy.overlap}
        self.states = _StateEdges(self.nodes, self.accumulators, self.alone)
        self.late = late_recomputation(graph)
        self.links = [self._links(node) for node in self.nodes]

    def number(self, at: At) -> int:
        id, mb = at
        for k in self.family[id]:
            each = self.nodes[k].each
            if mb in each:
                return self.starts[k] + each.index(mb)
        raise KeyError(at)

    def pairs(self, edges: Collection[tuple[At, At]]) -> list[tuple[int, int]]:
        """Return order edges by number."""
        every = range(self.graph.microbatches)
        first = {
            id: self.starts[own[0]]
            for id, own in self.family.items()
            if self.nodes[own[0]].mbs == every
        }
        try:
            return [(first[a] + i, first[b] + j) for (a, i), (b, j) in edges]
        except KeyError:  # an id of several nodes, each for some microbatches
            return [(self.number(before), self.number(after)) for before, after in edges]

    def numbers(self, k: int) -> Ints:
        """Return the numbers of a node, one per microbatch."""
        return np.arange(self.starts[k], self.starts[k] + len(self.nodes[k].each))

    def columns(self, ordered: list[tuple[int, int]]) -> tuple[Ints, Ints]:
        """Return the sources and the targets of all edges, by target, given the order edges by number."""
        pairs = [
            (j, k)
            for k, node in enumerate(self.nodes)
            for j in dict.fromkeys([*self.links[k], *self._states(k, node)])
        ]
        alike: dict[
            int, list[int]
        ] = {}  # by how many microbatches: pairs of nodes that have the same, by place
        triples: list[tuple[Ints, Ints, Ints]] = []  # sources, targets, and the place of their pair
        for n, (j, k) in enumerate(pairs):
            a, b = self.nodes[j], self.nodes[k]
            if a.mbs == b.mbs:
                alike.setdefault(len(a.each), []).append(n)
                continue
            mine, theirs = meeting(a, b)
            triples.append((mine + self.starts[j], theirs + self.starts[k], np.full(len(mine), n)))
        starts, both = int_array(self.starts), int_array(chain.from_iterable(pairs)).reshape(-1, 2)
        for count, places in alike.items():
            source, target = (
                (starts[both[places]][:, :, None] + np.arange(count))
                .transpose(1, 0, 2)
                .reshape(2, -1)
            )
            triples.append((source, target, np.repeat(int_array(places), count)))
        flat = int_array(chain.from_iterable(ordered))
        triples.append((flat[::2], flat[1::2], np.full(len(ordered), len(pairs))))
        source, target, place = (np.concatenate(column) for column in zip(*triples, strict=True))
        order = np.argsort(target * (len(pairs) + 1) + place, kind="stable")
        return source[order], target[order]

    def _links(self, node: Node) -> list[int]:
        if isinstance(node.op, Recv):
            return self._with(node, send_id(node.writes[0]))
        links = [
            k
            for v in node.reads
            for id in self.graph.writers.get(v, ())
            for k in self._with(node, id)
            if v in self.nodes[k].writes
        ]
        if node.mbs is None:  # it reads values of its own role
            links = [
                k for k in links if self.nodes[k].mbs is None or self.nodes[k].role == node.role
            ]
        return links

    def _with(self, node: Node, id: str) -> list[int]:
        """Return the nodes of an id that share a microbatch with a node."""
        return [
            k
            for k in self.family.get(id, ())
            if (shared := common(self.nodes[k].mbs, node.mbs)) is None or shared
        ]

    def _late(self, node: Node) -> list[int]:
        """Return the predecessors of a backward that its late R waits for, too."""
        backward = self.late.get(node.id, ())
        links = [
            j for id in backward for k in self._with(node, id) for j in self._links(self.nodes[k])
        ]
        return [
            j for j in links if self.nodes[j].coords.get("phase") != "R"
        ]  # not the R of its own group

    def _states(self, k: int, node: Node) -> list[int]:
        op = node.op
        if isinstance(op, Compute):
            if op.step == "F":
                return self._gathers(node, op)
            # The step before it, even if it reads no value of that step.
            earlier = (self._with(node, compute_id(op.chunk, step)) for step in _EARLIER[op.step])
            own = next(filter(None, earlier), [])
            return [*own, *self._late(node)] if op.step == "R" else own
        return [] if isinstance(op, Send | Recv) else self.states.of(k, node)

    def _gathers(self, node: Node, op: Compute) -> list[int]:
        """Return the gathers at the start of a step that a chunk waits for; its backward follows its forward.

        They are those of its parameters, and all that run beside no compute.
        """
        gathers = self.states.gathers
        if not gathers:
            return []
        names = [i.ref for i in self.graph.program.chunk(op.chunk).inputs if i.kind == "param"]
        buckets = dict.fromkeys([self.bucket_of[name] for name in names if name in self.bucket_of])
        buckets |= dict.fromkeys(b for b, role in gathers if b in self.alone and role == node.role)
        return [gathers[b, node.role] for b in buckets if (b, node.role) in gathers]


class _StateEdges:
    """Find the predecessors of the ops on gradient buckets and parameters, node by node."""

    def __init__(
        self,
        nodes: tuple[Node, ...],
        accumulators: dict[tuple[str, str], list[int]],
        alone: Collection[str],
    ) -> None:
        self.complete: dict[tuple[str, str], list[int]] = dict(accumulators)
        """The nodes after which the gradient of a bucket is complete on a role, as far as it is known yet."""
        self.before: dict[int, list[int]] = {}
        """The nodes that must be done before a node that works on the gradients of a bucket."""
        self.gathers: dict[tuple[str, str], int] = {}
        self.on_role: dict[str, list[int]] = {}
        computes: dict[str, list[int]] = {}
        for i, node in enumerate(nodes if alone else ()):
            if isinstance(node.op, Compute):
                computes.setdefault(node.role, []).append(i)
        # each reduction of a bucket follows the one that was made before it
        for i, node in enumerate(nodes):
            match node.op:
                case Collective(bucket=bucket) if bucket and node.op.law.state == "param":
                    self.gathers[bucket, node.role] = i
                case Collective(bucket=bucket) | Cast(bucket=bucket) | Fold(bucket=bucket) if (
                    bucket
                ):
                    self.before[i] = self.complete.get((bucket, node.role), [])
                    if bucket in alone and isinstance(node.op, Collective | Cast):
                        self.before[i] = [*self.before[i], *computes.get(node.role, ())]
                    self.complete[bucket, node.role] = [i]
            if not isinstance(node.op, (*COMM, Update)):
                self.on_role.setdefault(node.role, []).append(i)

    def of(self, number: int, node: Node) -> list[int]:
        """Return the nodes that a node must come after.

        A reduction comes after the last accumulation, the norm after the reductions, the Update after everything.
        """
        match node.op:
            case SquaredNorm(buckets=buckets):
                return [i for b in buckets for i in self.complete.get((b, node.role), ())]
            case Update(buckets=buckets):
                reduced = [
                    i
                    for b in buckets
                    for i in self.complete.get((b, node.role), ())
                    if i in self.before
                ]
                return reduced + self.on_role.get(node.role, [])
            case _:
                return self.before.get(number, [])


def _accumulators(
    graph: Graph, nodes: tuple[Node, ...], bucket_of: Mapping[str, str]
) -> dict[tuple[str, str], list[int]]:
    accumulators: dict[tuple[str, str], list[int]] = {}
    for i, node in enumerate(nodes):
        op = node.op
        if isinstance(op, Compute) and op.step != "F":
            for bucket in dict.fromkeys(
                [bucket_of[p] for p in trains(graph.program.chunk(op.chunk), op.step)]
            ):
                accumulators.setdefault((bucket, node.role), []).append(i)
    return accumulators


MOST_WAITS = 3
"""The number of waits of a cycle that are shown."""


def cycle_error(graph: Graph, deps: Dependencies, stuck: set[int]) -> CompileError:
    """Return the error for nodes that can never start: one cycle among them, with the directive of each order edge."""
    after = deps.target[np.isin(deps.source, int_array(stuck))]
    waiting: list[int] = np.unique(after).tolist()
    at = waiting[0]
    path: list[int] = []
    seen: dict[int, int] = {}
    while at not in seen:
        seen[at] = len(path)
        path.append(at)
        sources: list[int] = deps.source[deps.target == at].tolist()
        before = next((j for j in sources if j in stuck), None)
        # a collective that waits for nothing waits for another of its members
        op = deps.node(at).op
        at = next(j for j in waiting if deps.node(j).op == op) if before is None else before
    cycle = [*path[seen[at] :], at]
    waits: list[str] = []
    directives: dict[int, int] = {}
    for k, (later, earlier) in enumerate(pairwise(cycle)):
        a, b = deps.node(earlier), deps.node(later)
        applied = graph.order_edges.get(((a.id, deps.mb[earlier]), (b.id, deps.mb[later])))
        if applied is None and later in deps.spans:
            why = _reason_of_span(graph, deps, later)
        elif applied is None:
            why = _reason(a, b)
        else:
            directives.setdefault(applied, k)
            why = (
                f"ordered by {graph.log[applied]}"
                if applied < len(graph.log)
                else "microbatches update a buffer in order"
            )
        waits.append(
            f"  {deps.name(later)} on {b.role} waits for {deps.name(earlier)} on {a.role}: {why}"
        )
    shown = list(dict.fromkeys((*directives.values(), *range(len(waits)))))[
        :MOST_WAITS
    ]  # one for each directive, then others
    left = [f"  (and {len(waits) - MOST_WAITS} more waits)"] if len(waits) > MOST_WAITS else []
    chunks = dict.fromkeys(n.op.chunk for n in map(deps.node, cycle) if isinstance(n.op, Compute))
    said = "the orders and the data together are cyclic, so nothing on this cycle can ever start:"
    return CompileError("\n".join([said, *(waits[k] for k in sorted(shown)), *left]), tuple(chunks))


def _reason_of_span(graph: Graph, deps: Dependencies, later: int) -> str:
    """Return why a span waits: it waits for the predecessors of all its nodes."""
    names = [deps.name(i) for i in deps.spans[later]]
    group = next(g for g in graph.overlaps if (deps.node(later).id, deps.mb[later]) in g.nodes)
    return f"{' and '.join(names)} run as one, which needs it; overlapped by {graph.log[group.applied]}"


def _reason(a: Node, b: Node) -> str:
    if isinstance(b.op, Recv):
        return "it receives what that sends"
    if a.op == b.op and isinstance(b.op, Collective):
        return "the two are one message"
    return (
        "it needs its result"
        if set(a.writes) & set(b.reads)
        else "a backward follows its forward, a reduction its gradients"
    )


def spans(graph: Graph) -> list[tuple[At, ...]]:
    """Return the groups that run as one instruction, forward first."""
    if not given(graph.program):
        return []
    return [
        tuple(sorted(group.nodes, key=lambda at: _position(graph, at))) for group in graph.overlaps
    ]


def _position(graph: Graph, at: At) -> tuple[int, int, int, str]:
    node = graph.at(at)
    assert node is not None, "an overlap is among nodes of the graph"
    rank, place, id = graph.along(node)
    return rank, at[1], place, id


def given(program: Program) -> bool:
    """Return whether chunks have durations of their own; then the members of an overlap run as one instruction."""
    return all(chunk.steps["F"].cost.seconds is not None for chunk in program.chunks)
