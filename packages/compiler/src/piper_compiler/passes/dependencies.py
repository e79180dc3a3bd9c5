"""The edges of a complete graph: by value, by state (gradient buckets, parameters) and by order directives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TypeVar

import numpy as np

from piper_compiler.passes.arrays import Ints, ints
from piper_compiler.passes.overlap import spans
from piper_compiler.ports import trains
from piper_ir.errors import CompileError
from piper_ir.graph import Graph, Node
from piper_ir.ops import COMM, Collective, Compute, Recv, Send, SquaredNorm, Update

Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Dependencies:
    """Nodes by number, in creation order. `nodes[of[i]]` says what node i is, but for its microbatch `mb[i]` (-1: of the
    whole step): in a graph of all microbatches that is the node itself, in one that stands for all
    (`piper_compiler.passes.repeat`) its like of microbatch 0. An edge says that node `source[e]` must be done before node
    `target[e]` starts; edges stand by target, of a receive that of its send first. `after[i]`: the targets of the edges from
    node i, ascending. `comm[i]`: whether node i is communication. `ordered`: the nodes that directives order. `accumulators`:
    (bucket, role) -> the nodes that add into its gradient there. `spans`: node -> all nodes of its span, in order, which
    start together: they have edges from the same nodes."""

    nodes: tuple[Node, ...]
    of: Sequence[int]
    mb: list[int]
    comm: list[bool]
    source: Ints
    target: Ints
    after: list[list[int]]
    ordered: set[int]
    accumulators: dict[tuple[str, str], list[int]]
    spans: dict[int, tuple[int, ...]]

    def node(self, i: int) -> Node:
        """What node i is."""
        return self.nodes[self.of[i]]

    def column(self, facts: Sequence[Fact]) -> list[Fact]:
        """A fact of each of `nodes`, by number."""
        return [facts[k] for k in self.of]


def dependencies(graph: Graph) -> Dependencies:
    """All edges, in time linear in their number."""
    nodes = tuple(graph.nodes.values())
    number = {n.id: i for i, n in enumerate(nodes)}
    comm = [isinstance(n.op, COMM) for n in nodes]
    accumulators = _accumulators(graph, nodes)
    states = _StateEdges(nodes, comm, accumulators)
    made = {v: i for i, n in enumerate(nodes) for v in n.writes}
    before: list[list[int]] = []
    for node in nodes:
        edges = [made[v] for v in node.reads if v in made]
        op = node.op
        if isinstance(op, Compute):
            if op.step != "F":  # a backward that reads nothing of its forward (a plain sum) still follows it
                own = number.get(f"{op.chunk}.I@{node.mb}") if op.step == "W" else None
                edges.append(number[f"{op.chunk}.F@{node.mb}"] if own is None else own)
        elif isinstance(op, Recv):
            edges.append(number[f"send.{node.writes[0]}"])
        elif not isinstance(op, Send):
            edges += states.of(node)
        before.append(list(dict.fromkeys(edges)) if len(edges) > 1 else edges)
    for first, then in graph.order_edges:
        before[number[then]].append(number[first])
    joined = _join(before, [tuple([number[id] for id in span]) for span in spans(graph)])
    ordered = {number[i] for edge, applied in graph.order_edges.items() if applied < len(graph.log) for i in edge}
    ordered |= {number[id] for group in graph.overlaps for id in group.nodes}
    source, target = ints(chain.from_iterable(before)), np.repeat(np.arange(len(nodes)), ints(map(len, before)))
    after = targets(source, target, len(nodes))
    return Dependencies(
        nodes, range(len(nodes)), [n.mb for n in nodes], comm, source, target, after, ordered, accumulators, joined
    )


def targets(source: Ints, target: Ints, nodes: int) -> list[list[int]]:
    """Of each of so many nodes, the targets of the edges from it, ascending."""
    order = np.sort(source * nodes + target)
    ends = np.cumsum(np.bincount(source, minlength=nodes)).tolist()
    flat = (order % nodes).tolist() if nodes else []
    return [flat[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _join(before: list[list[int]], found: Iterable[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Let the nodes of each span wait for what any of them waits for, and not for each other."""
    out = {}
    for span in found:
        outside = list(dict.fromkeys(j for i in span for j in before[i] if j not in span))
        for i in span:
            before[i] = outside
            out[i] = span
    return out


class _StateEdges:
    """What the ops on gradient buckets and parameters must come after."""

    def __init__(self, nodes: tuple[Node, ...], comm: list[bool], accumulators: dict[tuple[str, str], list[int]]) -> None:
        self.accumulators = accumulators
        self.reductions: dict[tuple[str, str], int] = {}
        self.on_role: dict[str, list[int]] = {}
        for i, node in enumerate(nodes):
            op = node.op
            if isinstance(op, Collective):
                if op.bucket:
                    self.reductions[(op.bucket, node.role)] = i
            elif not comm[i] and not isinstance(op, Update):
                self.on_role.setdefault(node.role, []).append(i)

    def of(self, node: Node) -> list[int]:
        """A reduction comes after the last accumulation, the norm after the reductions, the Update after everything."""
        match node.op:
            case Collective(bucket=bucket) if bucket:
                return self.accumulators.get((bucket, node.role), [])
            case SquaredNorm(buckets=buckets):
                return [i for b in buckets for i in self._complete(b, node.role)]
            case Update(buckets=buckets):
                reduced = [self.reductions[(b, node.role)] for b in buckets if (b, node.role) in self.reductions]
                return reduced + self.on_role.get(node.role, [])
            case _:
                return []

    def _complete(self, bucket: str, role: str) -> list[int]:
        """The nodes after which a bucket's gradient is complete."""
        reduction = self.reductions.get((bucket, role))
        return self.accumulators.get((bucket, role), []) if reduction is None else [reduction]


def _accumulators(graph: Graph, nodes: tuple[Node, ...]) -> dict[tuple[str, str], list[int]]:
    bucket_of = {p: b.id for b in graph.buckets.values() for p in b.params}
    adds: dict[Compute, tuple[str, ...]] = {}
    out: dict[tuple[str, str], list[int]] = {}
    for i, node in enumerate(nodes):
        op = node.op
        if isinstance(op, Compute) and op.step != "F":
            if op not in adds:
                adds[op] = tuple(dict.fromkeys(bucket_of[p] for p in trains(graph.program.chunk(op.chunk), op.step)))
            for bucket in adds[op]:
                out.setdefault((bucket, node.role), []).append(i)
    return out


def cycle_error(graph: Graph, deps: Dependencies, stuck: set[int]) -> CompileError:
    """The error for nodes that can never start: one cycle among them, with the directive behind each order edge."""
    at = min(stuck)
    path: list[int] = []
    seen: dict[int, int] = {}
    while at not in seen:
        seen[at] = len(path)
        path.append(at)
        at = next(j for j in deps.source[deps.target == at].tolist() if j in stuck)
    cycle = [*path[seen[at] :], at]
    lines = []
    for later, earlier in pairwise(cycle):
        a, b = deps.node(earlier), deps.node(later)
        applied = graph.order_edges.get((a.id, b.id))
        if applied is None and later in deps.spans:
            why = _reason_of_span(graph, deps, a, later)
        elif applied is None:
            why = _reason(a, b)
        else:
            why = f"ordered by {graph.log[applied]}" if applied < len(graph.log) else "microbatches update a buffer in order"
        lines.append(f"  {b.id} on {b.role} waits for {a.id} on {a.role}: {why}")
    chunks = dict.fromkeys(n.op.chunk for n in map(deps.node, cycle) if isinstance(n.op, Compute))
    return CompileError(
        "the orders and the data together are cyclic, so nothing on this cycle can ever start:\n" + "\n".join(lines),
        tuple(chunks),
    )


def _reason_of_span(graph: Graph, deps: Dependencies, a: Node, later: int) -> str:
    """A node of a span waits for what any of its nodes waits for."""
    names = [deps.nodes[i].id for i in deps.spans[later]]
    group = next(g for g in graph.overlaps if deps.nodes[later].id in g.nodes)
    return f"{' and '.join(names)} run as one, which needs it; overlapped by {graph.log[group.applied]}"


def _reason(a: Node, b: Node) -> str:
    if isinstance(b.op, Recv):
        return "it receives what that sends"
    return "it needs its result" if set(a.writes) & set(b.reads) else "a backward follows its forward, a reduction its gradients"
