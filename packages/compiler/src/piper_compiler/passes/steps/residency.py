"""Add the nodes for sharded buckets once the compute of every role is in order: gathers, buffers, scatters, folds.

Everything here is local to a role, since the ranks that share its buckets run the same program. So nodes are added
behind scheduling, each next to the compute that it belongs to:

    copy      this rank's parameters of a bucket from the host, if they are there; a gather reads it if they are a shard
    gather    all parameters of a bucket, `prefetch` uses ahead of their first use in a window; F and I use them
    fresh     a buffer for all gradients of a bucket, right before the first who adds to it in a window
    cast      the buffer in the dtype of reductions, if it is summed in another one
    scatter   the buffer's sum over ranks, each shard to the rank that keeps it, right after the last who adds
    fold      adds that shard to the rank's own, once the scatter should have ended, so that nothing waits for it
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from piper_compiler.durations import LINK
from piper_compiler.passes.steps.adder import Adder, Scheduled
from piper_compiler.passes.steps.dependencies import Dependencies, policies_of
from piper_compiler.passes.steps.windows import CacheWindow, windows
from piper_compiler.ports import signatures
from piper_ir.graph.graph import Coord, Graph, Node, Replication
from piper_ir.ground.errors import CompileError
from piper_ir.ground.sizes import ITEM_BYTES
from piper_ir.plan.plan import Bucket, Category
from piper_ir.program.collectives import FROM_HOST
from piper_ir.program.ops import Cast, Collective, Compute, Fold, Fresh, Op
from piper_ir.program.program import Chunk, Signature

MakeNodes = Callable[[Bucket, int, str], list[Node]]
"""The type of a function that makes a window's nodes from its bucket, and the number and name of its first user."""


def residency(
    graph: Graph,
    deps: Dependencies,
    sequence: list[int],
    starts: Sequence[float],
    seconds: Sequence[float],
) -> Scheduled:
    """Return the scheduled graph with the nodes for its sharded buckets.

    `starts` and `seconds` are the canonical start and duration of each number that computes.
    """
    shared = [b for b in graph.buckets.values() if b.shard.grads or b.lent]
    if not shared:
        return Scheduled(graph, deps, sequence, {})
    if deps.spans:
        raise CompileError(
            "pairs of given duration run as one, and gradients or parameters are sharded: use zero=0 or 1"
        )
    adder = Adder(graph, deps)
    places: dict[str, list[int]] = {role: [] for role in graph.roles}
    for i in sequence:
        if not deps.comm[i]:
            places[deps.node(i).role].append(i)
    uses = _Uses(graph)
    for role, order in places.items():
        held_here = [b for b in shared if role in b.roles]
        if held_here:
            _Role(adder, uses, role, order, held_here).add(starts, seconds)
    return adder.done(sequence)


class _Uses:
    """Find the sharded buckets whose gathered parameters a step of a chunk reads, or whose gradients it adds to."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._home = {p: b for b in graph.buckets.values() for p in b.params}
        self._known: dict[tuple[str, str, bool], tuple[tuple[str, ...], tuple[str, ...]]] = {}

    def of(self, op: Op) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the buckets that an op reads, and the buckets that it adds to."""
        if not isinstance(op, Compute):
            return (), ()
        key = op.variant, op.step, op.apart
        if key not in self._known:
            chunk = self._graph.program.chunk(op.variant)
            sigs = signatures(chunk, op.step, op.apart)
            read = [b.id for sig in sigs for b in self._read(chunk, sig) if b.lent]
            added = [self._home[chunk.inputs[k].ref].id for sig in sigs for k in sig.accumulates]
            self._known[key] = (
                tuple(dict.fromkeys(read)),
                tuple(dict.fromkeys(b for b in added if self._shared(b))),
            )
        return self._known[key]

    def _shared(self, bucket: str) -> bool:
        return bool(self._graph.buckets[bucket].shard.grads)

    def _read(self, chunk: Chunk, sig: Signature) -> Iterable[Bucket]:
        inputs = [chunk.inputs[int(p[2:])] for p in sig.reads if p.startswith("in")]
        return [self._home[i.ref] for i in inputs if i.kind == "param" and i.ref in self._home]


class _Role:
    """Add the nodes of one role, whose compute runs in this order."""

    def __init__(
        self, adder: Adder, uses: _Uses, role: str, order: list[int], buckets: list[Bucket]
    ) -> None:
        self.adder, self.uses, self.role, self.order, self.buckets = (
            adder,
            uses,
            role,
            order,
            buckets,
        )
        self.ops = [adder.deps.node(i).op for i in order]
        alone = Replication((), 0, "", -1)
        self.policy = {b: alone for b in adder.graph.buckets} | policies_of(adder.graph)
        self.starts: list[float] | None = None
        self.ending = _ending(self.ops)
        self.nodes: dict[tuple[str, str, int], list[Node]] = {}  # by kind, bucket and first user
        self.kinds = {
            b.id: [FROM_HOST] * b.away + ["gather"] * bool(b.shard.params) for b in buckets
        }

    def add(self, starts: Sequence[float], seconds: Sequence[float]) -> None:
        """Add everything that the role's buckets need."""
        gathered = {b.id: b.numel * ITEM_BYTES[b.compute_dtype] for b in self.buckets}
        reduced = {b.id: b.numel * ITEM_BYTES[b.accumulate_dtype] for b in self.buckets}
        sent = {b.id: b.numel * ITEM_BYTES[b.reduce_dtype] for b in self.buckets}
        touched = [self.uses.of(op) for op in self.ops]
        at = [k for k, (read, _) in enumerate(touched) if read]
        users = [self.order[k] for k in at]
        for window in windows([touched[k][0] for k in at], gathered, self._room("resident_bytes")):
            self._gather(window, at, [users[use] for use in window.uses])
        at = [k for k, (_, added) in enumerate(touched) if added]
        scattered = windows([touched[k][1] for k in at], reduced, self._room("reduced_bytes"))
        last = {w.bucket: w for w in scattered}
        free = 0.0
        by_end = sorted(scattered, key=lambda w: w.uses[-1])
        begins = sorted(at[w.uses[0]] for w in scattered)
        for n, window in enumerate(by_end):
            k = at[window.uses[-1]]
            ends = starts[self.order[k]] + seconds[self.order[k]]
            free = max(ends, free) + sent[window.bucket] / LINK
            place = self._place(k, free, starts)
            if n + 1 < len(
                by_end
            ):  # one scatter is under way while another buffer is filled, and no more
                following = bisect_right(begins, at[by_end[n + 1].uses[-1]])
                place = min([place, *begins[following : following + 1]])
            self._scatter(window, at, place, final=last[window.bucket] is window)

    def _room(self, name: str) -> int | None:
        """Return the most that the policies of the role's buckets allow to keep."""
        rooms = [getattr(self.policy[b.id], name) for b in self.buckets if b.id in self.policy]
        return None if None in rooms else max(rooms, default=0)

    def _mb(self, users: list[int]) -> int:
        """Return the microbatch that all of these numbers are in, -1 if they are in several."""
        mb = self.adder.deps.mb
        own = mb[users[0]]
        return own if len(users) == 1 or {mb[user] for user in users} == {own} else -1

    def _made(self, make: MakeNodes, bucket: str, first: int, mb: int) -> list[Node]:
        """Return the nodes of a window that begins with a number, made once for all windows that lie in a microbatch.

        Windows of one microbatch are told apart by their first user, which the ids name; others by its microbatch too.
        """
        deps = self.adder.deps
        if mb < 0:
            return make(self.adder.graph.buckets[bucket], first, deps.name(first))
        key = make.__name__, bucket, deps.of[first]  # a method would hold this object in a cycle
        nodes = self.nodes.get(key)
        if nodes is None:
            known = self.adder.graph.buckets[bucket]
            nodes = self.nodes[key] = make(known, first, deps.node(first).id)
        return nodes

    def _id(self, what: str, bucket: Bucket, user: str) -> str:
        return f"{what}.{bucket.id}#{self.role}.{user}"

    def _coords(self, op: str, bucket: Bucket, user: int) -> dict[str, Coord]:
        phase = self.adder.deps.node(user).coords["phase"]
        return {"phase": phase, "op": op, "bucket": bucket.id}

    def _gather(self, window: CacheWindow, at: list[int], users: list[int]) -> None:
        """Add the copy of parameters from the host, if they are there, and their gather, if ranks share them."""
        adder = self.adder
        mb = self._mb(users)
        nodes = self._made(self._gathering, window.bucket, users[0], mb)
        numbers = [adder.add(node, mb) for node in nodes]
        policy = self.policy[window.bucket]
        ahead = max(window.earliest, window.uses[0] - policy.prefetch * policy.overlap)
        behind = at[ahead] - 1
        if behind < 0:
            adder.front.extend(numbers)
        else:
            before = self.order[behind]
            adder.after.setdefault(before, []).extend(numbers)
            adder.edges += [(before, number) for number in numbers]
        numbers.append(users[0])
        adder.edges += pairwise(numbers)
        self._hold("gathered", window, users, nodes[-1].writes[0])

    def _gathering(self, bucket: Bucket, first: int, user: str) -> list[Node]:
        """Return the nodes that bring a bucket's parameters, whose first user has this number and name."""
        nodes: list[Node] = []
        reads: tuple[str, ...] = ()
        for kind in self.kinds[bucket.id]:
            make = self._copy_node if kind == FROM_HOST else self._gather_node
            nodes.append(make(self._id(kind, bucket, user), bucket, first, reads))
            reads = nodes[-1].writes
        return nodes

    def _copy_node(self, id: str, bucket: Bucket, first: int, reads: tuple[str, ...]) -> Node:
        """Return the copy of a rank's parameters of a bucket from the memory of the host."""
        numel = bucket.numel // self.adder.graph.mesh.degree(bucket.shard.params)
        value = self.adder.value(f"{id}:copy", numel, bucket, "gathered")
        op = Collective(FROM_HOST, self.adder.host_channel(FROM_HOST, self.role), bucket.id)
        coords = self._coords(FROM_HOST, bucket, first)
        return Node(id, op, coords, reads, (value,), self.role, FROM_HOST)

    def _gather_node(self, id: str, bucket: Bucket, first: int, reads: tuple[str, ...]) -> Node:
        channel = bucket.gather[bucket.roles.index(self.role)]
        value = self.adder.value(f"{id}:whole", bucket.numel, bucket, "gathered")
        op = Collective("all_gather", channel, bucket.id)
        coords = self._coords("allgather", bucket, first)
        stream = self.adder.graph.channels[channel].streams[0]
        return Node(id, op, coords, reads, (value,), self.role, stream)

    def _hold(self, category: Category, window: CacheWindow, users: list[int], value: str) -> None:
        held, entry = self.adder.held, (category, window.bucket, value)
        for user in users:
            held.setdefault(user, []).append(entry)

    def _scatter(self, window: CacheWindow, at: list[int], place: int, *, final: bool) -> None:
        adder, users = self.adder, [self.order[at[use]] for use in window.uses]
        mb = -1 if final else self._mb(users)
        fresh, *sent, fold = self._made(self._scattering, window.bucket, users[0], mb)
        adder.before.setdefault(users[0], []).append(adder.add(fresh, mb))
        self._hold("reduced", window, users, fresh.writes[0])
        scatter = users[-1]
        for node in sent:
            before, scatter = scatter, adder.add(node, mb)
            adder.after.setdefault(users[-1], []).append(scatter)
            adder.edges.append((before, scatter))
        after = at[window.uses[-1]] + 1
        if not self.policy[window.bucket].overlap and after < len(self.order):
            adder.edges.append((scatter, self.order[after]))
            place = after
        part = sent[-1].writes[0]
        if final:
            self._final_fold(window.bucket, scatter, part, place)
            return
        number = adder.add(fold, mb)
        adder.before.setdefault(self.order[place], []).append(number)
        adder.edges.append((scatter, number))

    def _scattering(self, bucket: Bucket, first: int, user: str) -> list[Node]:
        """Return the buffer of a bucket's gradients, its cast, if any, its sum over ranks, and the fold of the sum.

        The first user has this number and name.
        """
        graph, role, r = self.adder.graph, self.role, bucket.roles.index(self.role)
        value, dtype = self.adder.value, bucket.accumulate_dtype
        id = self._id("fresh", bucket, user)
        buffer = value(f"{id}:whole", bucket.numel, bucket, "reduced", dtype)
        coords = self._coords("fresh", bucket, first)
        nodes = [Node(id, Fresh(bucket.id), coords, (), (buffer,), role)]
        for _ in range(bucket.casts):
            id = self._id("cast", bucket, user)
            cast = value(f"{id}:whole", bucket.numel, bucket, "reduced")
            coords = self._coords("cast", bucket, first)
            nodes.append(Node(id, Cast(bucket.id), coords, (buffer,), (cast,), role))
            buffer = cast
        id, channel = self._id("scatter", bucket, user), bucket.scatter[r]
        numel = bucket.numel // graph.mesh.degree(bucket.shard.grads)
        part = value(f"{id}:part", numel, bucket, "reduced")
        op, stream = Collective("reduce_scatter", channel), graph.channels[channel].streams[0]
        coords = self._coords("reducescatter", bucket, first)
        nodes.append(Node(id, op, coords, (buffer,), (part,), role, stream))
        coords = self._coords("fold", bucket, first)
        id = self._id("fold", bucket, user)
        return [*nodes, Node(id, Fold(bucket.id), coords, (part,), (), role)]

    def _final_fold(self, bucket: str, scatter: int, part: str, place: int) -> None:
        """Let the last fold of a bucket, which is there already behind all compute, run right before a place."""
        adder = self.adder
        k = adder.folds[bucket, self.role]
        adder.replaced[k] = replace(adder.deps.nodes[k], reads=(part,))
        fold = adder.deps.starts[k]
        adder.edges.append((scatter, fold))
        if isinstance(self.ops[place], Compute):
            adder.moved.add(fold)
            adder.before.setdefault(self.order[place], []).append(fold)

    def _place(self, last: int, ends: float, starts: Sequence[float]) -> int:
        """Return the first compute after `last` that starts when a scatter should have ended, or else a final fold."""
        if self.starts is None:
            self.starts = [
                starts[i] for i in self.order
            ]  # ascending, since compute runs one after the other
        ready = bisect_left(self.starts, ends, last + 1)
        return min(ready, self.ending[last + 1], len(self.order) - 1)


def _ending(ops: Sequence[Op]) -> list[int]:
    """Return for each index, and the one behind the last, the next op from there on that does not compute a chunk."""
    endings = [len(ops)]
    for k in reversed(range(len(ops))):
        endings.append(endings[-1] if isinstance(ops[k], Compute) else k)
    return endings[::-1]
