"""Bound the needs of sharded buckets: bytes of whole buckets at one moment, and messages in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from piper_compiler import directives, steps_of, windows
from piper_ir.graph.graph import Graph, Node
from piper_ir.graph.graph_parts import Replication
from piper_ir.ground.select import Where
from piper_ir.ground.sizes import ITEM_BYTES
from piper_ir.program.ops import Collective, Compute

Turns = Sequence[Node]
"""The compute nodes of a role in the order in which they run in a step, once for each microbatch."""


@dataclass(frozen=True)
class BucketUse:
    """Name the sharded buckets that a node holds whole while it runs.

    Attributes:
        gathered: the buckets whose parameters it reads.
        reduced: the buckets to whose gradients it adds.
    """

    gathered: tuple[str, ...]
    reduced: tuple[str, ...]


@dataclass(frozen=True)
class KeptBuckets:
    """Say how long a role, whose order is known, keeps its buckets whole.

    Attributes:
        gathers: how often each bucket is gathered.
        scatters: how often the gradients of each are scattered.
        most: the most bytes of whole buckets while one instruction runs.
    """

    gathers: Counter[str]
    scatters: Counter[str]
    most: int


class WholeBuckets:
    """Bound the needs of the sharded buckets of a graph of one microbatch, in which everything is placed.

    `turns` are the orders of the roles whose every node an order decides.
    """

    def __init__(self, graph: Graph, turns: dict[str, Turns]) -> None:
        self._graph, self._turns = graph, turns
        self._home = {p: b.id for b in graph.buckets.values() for p in b.params}
        self._known: dict[tuple[str, str, bool], BucketUse] = {}
        self._kept_by_role: dict[str, KeptBuckets | None] = {}
        self._uses_in_turn: dict[str, list[BucketUse]] = {}
        self.gathered = {
            b.id: b.numel * ITEM_BYTES[b.compute_dtype] for b in graph.buckets.values() if b.lent
        }
        self.reduced = {
            b.id: b.numel * ITEM_BYTES[b.accumulate_dtype]
            for b in graph.buckets.values()
            if b.shard.grads
        }

    def use(self, node: Node) -> BucketUse:
        """Return the buckets that a compute node holds whole."""
        op = node.op
        assert isinstance(op, Compute), "other ops use no parameters"
        key = op.variant, op.step, op.apart
        if key not in self._known:
            chunk = self._graph.program.chunk(op.variant)
            sigs = [chunk.steps[name] for name in steps_of(chunk, op.step, op.apart)]
            read = [
                chunk.inputs[int(p[2:])] for sig in sigs for p in sig.reads if p.startswith("in")
            ]
            params = [self._home.get(i.ref, "") for i in read if i.kind == "param"]
            added = [self._home[chunk.inputs[k].ref] for sig in sigs for k in sig.accumulates]
            self._known[key] = BucketUse(
                tuple(dict.fromkeys(b for b in params if b in self.gathered)),
                tuple(dict.fromkeys(b for b in added if b in self.reduced)),
            )
        return self._known[key]

    def bytes_in(self, use: BucketUse) -> int:
        """Return the bytes of the buckets that a node holds whole."""
        return sum([self.gathered[b] for b in use.gathered]) + sum(
            [self.reduced[b] for b in use.reduced]
        )

    @cached_property
    def most(self) -> dict[str, int]:
        """Return for each role a lower bound of the most bytes of whole buckets at one moment.

        A node holds its own buckets. While it runs, the buckets of the next `prefetch` uses are there too, if they are
        known.
        """
        if not self.gathered and not self.reduced:
            return dict.fromkeys(self._graph.roles, 0)
        most_by_role = {
            role: max(map(self.bytes_in, uses), default=0) for role, uses in self._uses.items()
        }
        for role in self._turns:
            uses = [use for use in self._in_turn(role) if use.gathered]
            ahead = 1 + min([policy.prefetch for policy in self._policies(role)], default=0)
            for sight in dict.fromkeys(tuple(uses[k : k + ahead]) for k in range(len(uses))):
                together = BucketUse(
                    tuple(dict.fromkeys(b for use in sight for b in use.gathered)), sight[0].reduced
                )
                most_by_role[role] = max(most_by_role[role], self.bytes_in(together))
            if (kept := self._kept(role)) is not None:
                most_by_role[role] = max(most_by_role[role], kept.most)
        return most_by_role

    @cached_property
    def _uses(self) -> dict[str, set[BucketUse]]:
        """Return the buckets that the compute nodes of each role hold whole."""
        uses_by_role: dict[str, set[BucketUse]] = {role: set() for role in self._graph.roles}
        for node in compute_nodes(self._graph):
            uses_by_role[node.role].add(self.use(node))
        return uses_by_role

    def messages(self, role: str) -> Counter[tuple[str, Collective]]:
        """Return how many messages of a step buckets need at least on a role, each with its stream.

        A sharded bucket is gathered once if a rank keeps it for the step, and scattered once. If the order of a role is
        known, so are the windows between which less room lets go of a bucket.
        """
        counts: Counter[tuple[str, Collective]] = Counter()
        gathers, scatters = self._windows(role)
        for bucket in self._graph.buckets.values():
            if role not in bucket.roles:
                continue
            at = bucket.roles.index(role)
            if bucket.shard.optim:
                self._count(
                    counts,
                    role,
                    Collective("all_gather", bucket.gather[at], bucket.id),
                    gathers[bucket.id],
                )
                self._count(
                    counts,
                    role,
                    Collective("reduce_scatter", bucket.scatter[at], bucket.id),
                    scatters[bucket.id],
                )
            if bucket.channel:
                self._count(counts, role, Collective("all_reduce", bucket.channel, bucket.id), 1)
        return counts

    def _count(
        self, out: Counter[tuple[str, Collective]], role: str, op: Collective, times: int
    ) -> None:
        out[self._graph.channels[op.channel].stream_on(role), op] += times

    def _windows(self, role: str) -> tuple[Counter[str], Counter[str]]:
        """Return how often each bucket is gathered and scattered on a role at least: once if it is used."""
        kept = self._kept(role)
        if kept is None:
            gathers = Counter({b for use in self._uses[role] for b in use.gathered})
            scatters = Counter({b for use in self._uses[role] for b in use.reduced})
        else:
            gathers, scatters = kept.gathers, kept.scatters
        every = self._graph.buckets  # whole states are gathered or scattered once
        return gathers + Counter(every.keys() - self.gathered), scatters + Counter(
            every.keys() - self.reduced
        )

    def _kept(self, role: str) -> KeptBuckets | None:
        """Return how long a role keeps its buckets whole; None if its order is not known."""
        if role not in self._kept_by_role:
            self._kept_by_role[role] = self._windowed(role)
        return self._kept_by_role[role]

    def _windowed(self, role: str) -> KeptBuckets | None:
        policies = self._policies(role)
        if role not in self._turns or len(policies) != 1:
            return None
        (policy,) = policies
        uses = self._in_turn(role)
        change = [0] * (len(uses) + 1)
        counts = []
        for name, nbytes, room in (
            ("gathered", self.gathered, policy.resident_bytes),
            ("reduced", self.reduced, policy.reduced_bytes),
        ):
            touched: list[tuple[str, ...]] = [getattr(use, name) for use in uses]
            at = [k for k, buckets in enumerate(touched) if buckets]
            whole = windows([touched[k] for k in at], nbytes, room)
            for window in whole:
                change[at[window.uses[0]]] += nbytes[window.bucket]
                change[at[window.uses[-1]] + 1] -= nbytes[window.bucket]
            counts.append(Counter(window.bucket for window in whole))
        gathers, scatters = counts
        return KeptBuckets(gathers, scatters, max(accumulate(change)))

    def _in_turn(self, role: str) -> list[BucketUse]:
        """Return the buckets that each compute node of a role holds whole, in the order of the nodes."""
        if role not in self._uses_in_turn:
            turns = self._turns[role]
            # Nodes are told apart by identity: one has a turn in each microbatch, and hashing it takes long.
            nodes = {id(node): node for node in turns}
            use_of = {number: self.use(node) for number, node in nodes.items()}
            self._uses_in_turn[role] = [use_of[id(node)] for node in turns]
        return self._uses_in_turn[role]

    def _policies(self, role: str) -> set[Replication]:
        """Return how the chunks of a role are replicated."""
        chunks = self._graph.program.chunks
        here = [
            c.id
            for c in chunks
            if any(node.role == role for node in self._graph.compute(c.id, "F"))
        ]
        return {self._graph.replication[c] for c in here if c in self._graph.replication}


def compute_nodes(graph: Graph) -> Iterator[Node]:
    """Yield the nodes that run steps of chunks."""
    return (
        node
        for family in graph.families.values()
        for node in family
        if isinstance(node.op, Compute)
    )


def turns(
    graph: Graph, orders: Iterable[directives.Ordered], microbatches: int
) -> dict[str, Turns]:
    """Return the order of each role in which one order without overlaps names every compute node.

    The graph has one microbatch.
    """
    number = Counter(node.role for node in compute_nodes(graph))
    turns_by_role: dict[str, Turns] = {}
    for order in orders:
        for role, nodes in _named(graph, order, microbatches).items():
            if len(nodes) == number[role] * microbatches:
                turns_by_role[role] = nodes
    return turns_by_role


def _named(graph: Graph, order: directives.Ordered, microbatches: int) -> dict[str, list[Node]]:
    """Return the nodes that an order names, by role, in its order; nothing if it does not say them one by one."""
    nodes_by_role: dict[str, list[Node]] = {}
    if order.overlaps:
        return nodes_by_role
    for selection in order.selections:
        terms = dict(selection.terms)
        mb = terms.pop("mb", None)
        if type(mb) is not int or not 0 <= mb < microbatches:
            return {}
        for node in graph.find(Where.of(tuple(terms.items()))):
            nodes_by_role.setdefault(node.role, []).append(node)
    return nodes_by_role
