"""Join neighbouring compute of one role, microbatch and phase into one instruction.

Compute nodes are joined unless something lies between them: communication that must start after the first (its value is
sent, or it was the last to add into a bucket that is reduced) or must end before the second (it is the first to read a
received or reduced value). Parts keep their order, so results are bit-equal. A span is always one instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_compiler.passes.steps.arrays import NEVER, Flags, Ints, run_starts
from piper_compiler.passes.steps.columns import Columns
from piper_compiler.passes.steps.dependencies import Dependencies
from piper_ir.graph.graph import Graph
from piper_ir.program.ops import SquaredNorm, Update


@dataclass(frozen=True)
class Tasks:
    """Hold the compute instructions, role by role in program order.

    Attributes:
        nodes: all nodes that compute, in order; task t runs `nodes[first[t] : first[t + 1]]` in turn.
        first: the index in `nodes` of each task's first node.
        role: the role of each task.
        counts: how many tasks each role has.
        number: by node, its task counted within the role; -1 for communication.
    """

    nodes: Ints
    first: Ints
    role: Ints
    counts: Ints
    number: Ints


def tasks(graph: Graph, deps: Dependencies, c: Columns, fuse: bool) -> Tasks:
    """Return the compute instructions of a scheduled graph; one node each unless `fuse`."""
    computed = np.flatnonzero(~c.comm)
    nodes = computed[np.lexsort((c.place[computed], c.role[computed]))]
    opens = np.ones(len(nodes), np.bool_)  # whether a node is the first of its instruction
    last, here = nodes[:-1], nodes[1:]
    phases = {
        phase: k for k, phase in enumerate(dict.fromkeys(n.coords.get("phase") for n in deps.nodes))
    }
    phase = c.each(phases[n.coords.get("phase")] for n in deps.nodes)
    alone = c.each(isinstance(n.op, SquaredNorm | Update) for n in deps.nodes)
    if fuse:
        alike = (
            (c.role[last] == c.role[here])
            & (c.mb[last] == c.mb[here])
            & (phase[last] == phase[here])
        )
        between = (
            _first_readers(c)[here]
            | (_senders(deps, c) | _last_before_reductions(graph, deps, c))[last]
        )
        opens[1:] = ~alike | between | (alone[here] > 0)
    if deps.spans:
        span = np.full(len(c.of), -1)
        for i, members in deps.spans.items():
            span[i] = members[0]
        joined = (span[here] >= 0) & (span[last] == span[here])
        opens[1:] = (opens[1:] | (span[last] >= 0) | (span[here] >= 0)) & ~joined
    first = np.flatnonzero(opens)
    role = c.role[nodes[first]]
    counts = np.bincount(role, minlength=len(graph.roles))
    number = np.full(len(c.of), -1)
    number[nodes] = np.cumsum(opens) - 1 - run_starts(counts)[c.role[nodes]]
    return Tasks(nodes, first, role, counts, number)


def _first_readers(c: Columns) -> Flags:
    """Return the nodes that are the first of their role to wait for some communication."""
    edges = c.comm[c.source] & ~c.comm[c.target]
    source, target = c.source[edges], c.target[edges]
    earliest = np.full(len(c.of), NEVER)
    np.minimum.at(earliest, source, c.place[target])
    is_first = np.zeros(len(c.of), np.bool_)
    is_first[target[c.place[target] == earliest[source]]] = True
    return is_first


def _senders(deps: Dependencies, c: Columns) -> Flags:
    """Return the nodes whose value a communication carries."""
    carries = c.each(bool(n.reads) for n in deps.nodes) > 0
    is_sender = np.zeros(len(c.of), np.bool_)
    is_sender[c.source[c.comm[c.target] & carries[c.target]]] = True
    return is_sender


def _last_before_reductions(graph: Graph, deps: Dependencies, c: Columns) -> Flags:
    """Return the nodes that are the last of their role to add into a bucket that is then reduced."""
    is_last = np.zeros(len(c.of), np.bool_)
    for (bucket, _), nodes in deps.accumulators.items():
        if graph.buckets[bucket].channel or graph.buckets[bucket].shard.optim:
            is_last[nodes[int(np.argmax(c.place[nodes]))]] = True
    return is_last
