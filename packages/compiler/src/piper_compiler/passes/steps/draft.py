"""Draft the instructions of a plan in program order, with their nodes and waits, before names and frees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from piper_compiler.passes.steps.arrays import Flags, Ints, index_in_run, int_array, run_starts
from piper_compiler.passes.steps.columns import Columns
from piper_compiler.passes.steps.dependencies import Dependencies
from piper_compiler.passes.steps.fuse import Tasks
from piper_compiler.passes.steps.positions import Positions
from piper_compiler.passes.steps.walk_order import Walks
from piper_ir.fold.timing import IssueOrder, Prepared, grouped, with_waits
from piper_ir.graph.graph import Graph
from piper_ir.plan.plan import COMPUTE
from piper_ir.program.ops import COMM, op_name


@dataclass(frozen=True)
class WaitEdges:
    """Hold an entry per wait: `waiter` waits for instruction `target` and all before it on its stream."""

    waiter: Ints
    target: Ints

    def __add__(self, more: WaitEdges) -> WaitEdges:
        return WaitEdges(
            np.concatenate((self.waiter, more.waiter)), np.concatenate((self.target, more.target))
        )


@dataclass(frozen=True)
class IssueStreams:
    """Find the waits of instructions, with no more of a draft than that needs: finished plans hold this.

    Attributes:
        stream_of: by instruction, the index of its stream.
        alphabet: by stream, the position of its name in alphabetical order.
    """

    stream_of: Ints
    alphabet: Ints

    def needed(self, waits: WaitEdges) -> WaitEdges:
        """Return the instructions that each instruction must wait for, by instruction and ordered by stream name.

        On each other stream it is the last of its waits, unless an earlier instruction of the waiter's own stream has
        waited for that already.
        """
        stream, waiter, target = self.stream_of, waits.waiter, waits.target
        pair = stream[waiter] * len(self.alphabet) + stream[target]
        order = np.lexsort((-target, waiter, pair))
        waiter, target, pair = waiter[order], target[order], pair[order]
        reached = np.maximum.accumulate(
            pair * len(stream) + target
        )  # a later pair has reached nothing yet
        fresh = np.ones(len(pair), np.bool_)
        fresh[1:] = reached[1:] > reached[:-1]
        waiter, target = waiter[fresh], target[fresh]
        order = np.lexsort((self.alphabet[stream[target]], waiter))
        return WaitEdges(waiter[order], target[order])

    def waits_of(self, needed: WaitEdges) -> tuple[tuple[int, ...], ...]:
        """Return for each instruction the instructions that it waits for."""
        waits: list[tuple[int, ...]] = [()] * len(self.stream_of)
        for i, one in zip(needed.waiter.tolist(), zip(needed.target.tolist()), strict=True):
            waits[i] = waits[i] + one if waits[i] else one
        return tuple(waits)


@dataclass(frozen=True)
class Draft:
    """Hold instructions that are numbered role by role in program order, as in `Prepared`.

    Attributes:
        offsets: the instructions of role r are `offsets[r] : offsets[r + 1]`.
        tasks: the nodes that each instruction runs.
        computed: by instruction, how many computing instructions of its role stand before it.
        place: by instruction, the place of its first node in the schedule's order of nodes.
        orders: the instructions that each role issues, stream by stream.
        bare: streams and rendezvous of the instructions, without waits.
        waits: the waits that edges ask for, some of them redundant.
    """

    roles: tuple[str, ...]
    offsets: tuple[int, ...]
    tasks: list[list[int]]
    compute: Ints
    computed: Ints
    place: Ints
    orders: list[IssueOrder]
    bare: Prepared
    waits: WaitEdges

    @cached_property
    def stream_of(self) -> Ints:
        """Return for each instruction the index of its stream in `bare.streams`."""
        return int_array(self.bare.stream_of)

    @cached_property
    def walks(self) -> Walks:
        """Return the streams and groups of `bare` as columns."""
        return Walks(self.bare)

    def prepared(
        self, needed: WaitEdges, waits: tuple[tuple[int, ...], ...], *keys: Ints | Flags
    ) -> Prepared:
        """Return the DAG of the draft with these waits; raise PlanError if they form a cycle.

        If the instructions in the order of the keys are in topological order, that is the order of the DAG.

        Args:
            needed: the waits.
            waits: the same by instruction, as `waits_of` returns them.
            keys: a column each, with an entry per instruction.
        """
        order = self.walks.by(needed.waiter, needed.target, keys)
        if order is None:
            return with_waits(self.bare, waits, self.orders)
        return replace(self.bare, waits=waits, order=self.walks.steps(waits, order))

    @cached_property
    def scheduled(self) -> tuple[Ints, Ints]:
        """Return sort keys that put the instructions nearly into their scheduled order.

        A transfer is scheduled when it can be sent. In a plan it also waits for its buffer, and for the transfers
        before it on its streams, and compute may wait for it.
        """
        key, event_of = 2 * self.place, self.walks.event_of
        waiter, target = event_of[self.waits.waiter], event_of[self.waits.target]
        carried = self.channelled[self.waits.waiter]
        streams = [
            (nodes, self.channelled[nodes[0]]) for nodes in map(int_array, self.bare.streams)
        ]
        # A transfer that is later may make others later, on its other stream.
        for channelled in (True, True, False):
            mine = carried if channelled else ~carried
            np.maximum.at(key, waiter[mine], key[target[mine]] + 1)
            for nodes in (event_of[nodes] for nodes, of in streams if of == channelled):
                key[nodes] = np.maximum.accumulate(key[nodes])
        return key, self.place

    @cached_property
    def channelled(self) -> Flags:
        """Return for each instruction whether it communicates."""
        flags = np.ones(len(self.stream_of), np.bool_)
        flags[self.compute] = False
        return flags

    @cached_property
    def issue(self) -> IssueStreams:
        """Return the streams by themselves, for the waits."""
        return IssueStreams(self.stream_of, self._alphabet)

    @cached_property
    def _alphabet(self) -> Ints:
        """Return the position of each stream in the alphabetical order of names."""
        names = [name for order in self.orders for name in dict.fromkeys(order.streams)]
        ranks = {name: k for k, name in enumerate(sorted(set(names)))}
        return int_array([ranks[name] for name in names])


def draft(graph: Graph, deps: Dependencies, c: Columns, tasks: Tasks, where: Positions) -> Draft:
    """Put the instructions of every role in program order."""
    totals = tasks.counts + where.counts
    compute, comm = _places(totals, tasks, where)
    at = np.empty(len(c.of), np.int64)  # of each node, its instruction
    at[where.nodes] = comm
    at[tasks.nodes] = np.repeat(compute, np.diff(tasks.first, append=len(tasks.nodes)))
    computed = np.empty(len(compute) + len(comm), np.int64)
    computed[compute], computed[comm] = index_in_run(tasks.counts), where.before

    place = np.empty(len(computed), np.int64)
    place[compute], place[comm] = c.place[tasks.nodes[tasks.first]], c.place[where.nodes]

    ran: list[list[int]] = [[]] * len(computed)
    nodes = tasks.nodes.tolist()
    for i, (a, b) in zip(
        compute.tolist(), pairwise([*tasks.first.tolist(), len(nodes)]), strict=True
    ):
        ran[i] = nodes[a:b]
    for i, node in zip(comm.tolist(), where.nodes.tolist(), strict=True):
        ran[i] = [node]
    offsets = (0, *np.cumsum(totals).tolist())
    orders = _orders(graph, deps, offsets, ran, comm)
    bare = grouped(orders, graph.channels.values())
    received = comm[
        c.each(isinstance(n.op, COMM) and bool(n.writes) for n in deps.nodes)[where.nodes] > 0
    ]
    received = received[computed[received] > 0]
    latest = compute[np.searchsorted(compute, received) - 1]  # its buffer is made right after that
    waits = _edges(c, at, int_array(bare.stream_of)) + WaitEdges(received, latest)
    return Draft(tuple(graph.roles), offsets, ran, compute, computed, place, orders, bare, waits)


def _places(totals: Ints, tasks: Tasks, where: Positions) -> tuple[Ints, Ints]:
    """Return the numbers of the computing and of the communicating instructions, given each role's total."""
    assert np.all(where.before < np.repeat(tasks.counts, where.counts)), (
        "communication after the Update"
    )
    far = 1 + len(tasks.first)  # more than any place of communication
    among = np.repeat(np.arange(len(totals)) * far, where.counts) + where.before
    earlier = (
        np.searchsorted(among, tasks.role * far + index_in_run(tasks.counts), side="right")
        - run_starts(where.counts)[tasks.role]
    )
    compute = run_starts(totals)[tasks.role] + index_in_run(tasks.counts) + earlier
    return compute, np.repeat(run_starts(totals), where.counts) + index_in_run(
        where.counts
    ) + where.before


def _orders(
    graph: Graph, deps: Dependencies, offsets: tuple[int, ...], ran: list[list[int]], comm: Ints
) -> list[IssueOrder]:
    """Return each role's issue order, given the nodes of each instruction and which of them communicate."""
    streams, channels = [COMPUTE] * len(ran), [""] * len(ran)
    uses = [(n.stream, n.op.channel) if isinstance(n.op, COMM) else ("", "") for n in deps.nodes]
    for i in comm.tolist():
        streams[i], channels[i] = uses[deps.of[ran[i][0]]]

    def label(first: int, k: int) -> str:
        i = ran[first + k][0]
        return f"{deps.name(i)} ({op_name(deps.node(i).op)})"

    return [
        IssueOrder(role, streams[a:b], channels[a:b], partial(label, a))
        for role, (a, b) in zip(graph.roles, pairwise(offsets), strict=True)
    ]


def _edges(c: Columns, at: Ints, stream: Ints) -> WaitEdges:
    """Return the waits of the edges within a role and between streams; a receive meets its send without a wait."""
    source, target = at[c.source], at[c.target]
    needed: Flags = (
        (c.role[c.source] == c.role[c.target])
        & (stream[source] != stream[target])
        & (source < target)
    )
    return WaitEdges(target[needed], source[needed])
