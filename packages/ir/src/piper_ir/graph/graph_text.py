"""Write a graph as text for people: one line per node, channel, bucket and replicated chunk, in stable order."""

from __future__ import annotations

from collections.abc import Iterable

from piper_ir.graph.graph import Graph, Node
from piper_ir.plan.plan import COMPUTE
from piper_ir.plan.plan_bytes import bucket_bytes
from piper_ir.program.ops import op_name

_DERIVED = ("chunk", "phase", "op", "mb")
"""The coordinates that the id of a node shows already."""
_KINDS = {"Add": 0, "Compute": 1, "Send": 2, "Recv": 3}
_PHASES = {"F": 0, "R": 1, "B": 1, "I": 1, "W": 2}


def format_graph(graph: Graph, *, log: bool = True) -> str:
    """Return a graph as text.

    Nodes stand along the step (forward, backward, update; by microbatch; along the program, backward against it), each
    with its role and stream, its coordinates, `reads -> writes` and the nodes that an `order` puts before it. Channels,
    buckets and replicated chunks follow. With `log` the text begins with the directives that were applied and where
    they were written.
    """
    head = [
        f"graph on {graph.mesh}, {graph.microbatches or 'no'} microbatch{'es' * (graph.microbatches != 1)}"
    ]
    if log:
        head += [f"  {k}. {applied}" for k, applied in enumerate(graph.log, start=1)]
    rows = [_row(node, before) for node, before in _ordered(graph)]
    return (
        "\n".join(
            [*head, *_aligned(rows), *_channels(graph), *_replication(graph), *_buckets(graph)]
        )
        + "\n"
    )


def _ordered(graph: Graph) -> Iterable[tuple[Node, list[str]]]:
    before: dict[str, list[str]] = {}
    for pair in graph.order_edges:
        first, then = map(graph.name, pair)
        before.setdefault(then, []).append(first)
    for node in sorted(graph.nodes.values(), key=lambda n: _place(graph, n)):
        yield node, before.get(node.id, [])


def _place(graph: Graph, node: Node) -> tuple[int, int, int, int, str]:
    """Return a sort key that puts nodes of the whole step (reductions) after the microbatches of their phase."""
    phase = _PHASES.get(str(node.coords.get("phase")), 3)
    mb = node.mb if node.mb >= 0 or "chunk" in node.coords else graph.microbatches
    chunk = graph.chunk_index.get(str(node.coords.get("chunk", "")), 0)
    return phase, mb, chunk if phase == 0 else -chunk, _KINDS.get(op_name(node.op), 4), node.id


def _row(node: Node, before: list[str]) -> tuple[str, ...]:
    on = node.role + (f"/{node.stream}" if node.stream != COMPUTE else "")
    coords = " ".join(f"{k}={v}" for k, v in node.coords.items() if k not in _DERIVED)
    flow = " ".join(node.reads) + (f" -> {' '.join(node.writes)}" if node.writes else "")
    after = f"after {' '.join(before)}" if before else ""
    return node.id, on, coords, flow.strip(), after


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return rows as columns, without columns that are empty everywhere."""
    columns = [c for c in zip(*rows) if any(c)]
    widths = [max(map(len, c)) for c in columns]
    return ["  ".join(f"{x:<{w}}" for x, w in zip(row, widths)).rstrip() for row in zip(*columns)]


def _channels(graph: Graph) -> Iterable[str]:
    for channel in graph.channels.values():
        sms = ["" if n is None else f" on {n} SMs" for n in channel.sms] or [""] * len(
            channel.roles
        )
        ends = [
            f"{role}/{stream}{n}"
            for role, stream, n in zip(channel.roles, channel.streams, sms, strict=True)
        ]
        if channel.kind == "p2p":
            yield f"channel {channel.id}: {' -> '.join(ends)}"
        else:
            over = f" over {' '.join(channel.over)}" if channel.over else ""
            yield f"channel {channel.id}: among {' '.join(ends)}{over}"


def _replication(graph: Graph) -> Iterable[str]:
    for chunk, policy in graph.replication.items():
        over = " ".join(policy.over) or "nothing"
        yield (
            f"replicated {chunk}: over {over}, buckets of {policy.bucket_bytes} bytes"
            + f" on {policy.stream}" * bool(policy.stream)
        )


def _buckets(graph: Graph) -> Iterable[str]:
    for bucket in graph.buckets.values():
        size = bucket_bytes(bucket)
        reduced = f", reduced by {bucket.channel}" if bucket.channel else ""
        yield (
            f"{bucket.id}: {' '.join(bucket.params)}, {size} bytes on {' '.join(bucket.roles)}{reduced}"
        )
