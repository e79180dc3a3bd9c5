"""The edges of a complete graph: by value, by state (gradient buckets, parameters) and by order directives."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from piper_compiler.ports import trains
from piper_ir.errors import CompileError
from piper_ir.graph import Graph, Node
from piper_ir.ops import COMM, AllReduce, Compute, Recv, Send, SquaredNorm, Update


@dataclass(frozen=True)
class Dependencies:
    """Nodes by number, in creation order; `before[i]` must be done before node i starts, `after` is the inverse. `comm[i]`:
    whether node i is communication. `made`: value -> the node that writes it. `accumulators`: (bucket, role) -> the nodes that
    add into its gradient there."""

    nodes: tuple[Node, ...]
    number: dict[str, int]
    comm: list[bool]
    made: dict[str, int]
    before: list[list[int]]
    after: list[list[int]]
    accumulators: dict[tuple[str, str], list[int]]


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
            if op.step == "B":  # a backward that reads nothing of its forward (a plain sum) still follows it
                edges.append(number[f"{op.chunk}.F@{node.mb}"])
        elif isinstance(op, Recv):
            edges.append(number[f"send.{node.writes[0]}"])
        elif not isinstance(op, Send):
            edges += states.of(node)
        before.append(list(dict.fromkeys(edges)) if len(edges) > 1 else edges)
    for first, then in graph.order_edges:
        before[number[then]].append(number[first])
    after: list[list[int]] = [[] for _ in nodes]
    for i, edges in enumerate(before):
        for j in edges:
            after[j].append(i)
    return Dependencies(nodes, number, comm, made, before, after, accumulators)


class _StateEdges:
    """What the ops on gradient buckets and parameters must come after."""

    def __init__(self, nodes: tuple[Node, ...], comm: list[bool], accumulators: dict[tuple[str, str], list[int]]) -> None:
        self.accumulators = accumulators
        self.reductions: dict[tuple[str, str], int] = {}
        self.on_role: dict[str, list[int]] = {}
        for i, node in enumerate(nodes):
            op = node.op
            if isinstance(op, AllReduce):
                if op.bucket:
                    self.reductions[(op.bucket, node.role)] = i
            elif not comm[i] and not isinstance(op, Update):
                self.on_role.setdefault(node.role, []).append(i)

    def of(self, node: Node) -> list[int]:
        """A reduction comes after the last accumulation, the norm after the reductions, the Update after everything."""
        match node.op:
            case AllReduce(bucket=bucket) if bucket:
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
    adds = {c.id: tuple(dict.fromkeys(bucket_of[p] for p in trains(c))) for c in graph.program.chunks}
    out: dict[tuple[str, str], list[int]] = {}
    for i, node in enumerate(nodes):
        op = node.op
        if isinstance(op, Compute) and op.step != "F":
            for bucket in adds[op.chunk]:
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
        at = next(j for j in deps.before[at] if j in stuck)
    cycle = [*path[seen[at] :], at]
    lines = []
    for later, earlier in pairwise(cycle):
        a, b = deps.nodes[earlier], deps.nodes[later]
        applied = graph.order_edges.get((a.id, b.id))
        if applied is None:
            why = _reason(a, b)
        else:
            why = f"ordered by {graph.log[applied]}" if applied < len(graph.log) else "microbatches update a buffer in order"
        lines.append(f"  {b.id} on {b.role} waits for {a.id} on {a.role}: {why}")
    return CompileError(
        "the orders and the data together are cyclic, so nothing on this cycle can ever start:\n" + "\n".join(lines)
    )


def _reason(a: Node, b: Node) -> str:
    if isinstance(b.op, Recv):
        return "it receives what that sends"
    return "it needs its result" if set(a.writes) & set(b.reads) else "a backward follows its forward, a reduction its gradients"
