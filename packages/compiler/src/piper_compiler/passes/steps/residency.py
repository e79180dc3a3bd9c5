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
from collections.abc import Iterable, Sequence
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
        self.ids: dict[tuple[str, str, int], str] = {}  # of nodes that are in one microbatch
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
        for window in windows([touched[k][0] for k in at], gathered, self._room("resident_bytes")):
            self._gather(window, at)
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

    def _bucket(self, window: CacheWindow) -> tuple[Bucket, int]:
        bucket = self.adder.graph.buckets[window.bucket]
        return bucket, bucket.roles.index(self.role)

    def _named(
        self, what: str, window: CacheWindow, at: list[int], *, whole: bool = False
    ) -> tuple[str, int]:
        """Return the id of a window's node, and the microbatch if all of its uses are in one and not `whole`, else -1.

        Windows of one microbatch are told apart by their first user, which the id names; others by its microbatch too.
        """
        deps, order = self.adder.deps, self.order
        number = order[at[window.uses[0]]]
        mb = deps.mb[number]
        uses = window.uses
        if whole or (len(uses) > 1 and any([deps.mb[order[at[use]]] != mb for use in uses])):
            return f"{what}.{window.bucket}#{self.role}.{deps.name(number)}", -1
        key = what, window.bucket, deps.of[number]
        id = self.ids.get(key)
        if id is None:
            id = self.ids[key] = f"{what}.{window.bucket}#{self.role}.{deps.node(number).id}"
        return id, mb

    def _coords(self, op: str, bucket: str, user: int) -> dict[str, Coord]:
        return {"phase": self.adder.deps.node(user).coords["phase"], "op": op, "bucket": bucket}

    def _gather(self, window: CacheWindow, at: list[int]) -> None:
        """Add the copy of parameters from the host, if they are there, and their gather, if ranks share them."""
        adder, first = self.adder, self.order[at[window.uses[0]]]
        bucket = adder.graph.buckets[window.bucket]
        numbers, made = list[int](), tuple[str, ...]()
        for kind in self.kinds[window.bucket]:
            id, mb = self._named(kind, window, at)
            known = adder.new.get(id)
            make = self._copy_node if kind == FROM_HOST else self._gather_node
            node = make(id, bucket, first, made) if known is None else known.node
            numbers.append(adder.add(node, mb))
            made = node.writes
        policy = self.policy[window.bucket]
        ahead = max(window.earliest, window.uses[0] - policy.prefetch * policy.overlap)
        behind = at[ahead] - 1
        if behind < 0:
            adder.front.extend(numbers)
        else:
            before = self.order[behind]
            adder.after.setdefault(before, []).extend(numbers)
            for number in numbers:
                adder.edges.append((before, number))
        numbers.append(first)
        adder.edges += pairwise(numbers)
        self._hold("gathered", window, at, made[0])

    def _copy_node(self, id: str, bucket: Bucket, first: int, reads: tuple[str, ...]) -> Node:
        """Return the copy of a rank's parameters of a bucket from the memory of the host."""
        numel = bucket.numel // self.adder.graph.mesh.degree(bucket.shard.params)
        value = self.adder.value(f"{id}:copy", numel, bucket, "gathered")
        op = Collective(FROM_HOST, self.adder.host_channel(FROM_HOST, self.role), bucket.id)
        coords = self._coords(FROM_HOST, bucket.id, first)
        return Node(id, op, coords, reads, (value,), self.role, FROM_HOST)

    def _gather_node(self, id: str, bucket: Bucket, first: int, reads: tuple[str, ...]) -> Node:
        channel = bucket.gather[bucket.roles.index(self.role)]
        value = self.adder.value(f"{id}:whole", bucket.numel, bucket, "gathered")
        op = Collective("all_gather", channel, bucket.id)
        coords = self._coords("allgather", bucket.id, first)
        stream = self.adder.graph.channels[channel].streams[0]
        return Node(id, op, coords, reads, (value,), self.role, stream)

    def _hold(self, category: Category, window: CacheWindow, at: list[int], value: str) -> None:
        held, order, entry = self.adder.held, self.order, (category, window.bucket, value)
        for use in window.uses:
            held.setdefault(order[at[use]], []).append(entry)

    def _scatter(self, window: CacheWindow, at: list[int], place: int, *, final: bool) -> None:
        adder, first, last = self.adder, self.order[at[window.uses[0]]], at[window.uses[-1]]
        id, mb = self._named("fresh", window, at, whole=final)
        known = adder.new.get(id)
        fresh = self._fresh_node(id, window, first) if known is None else known.node
        (buffer,) = fresh.writes
        adder.before.setdefault(first, []).append(adder.add(fresh, mb))
        self._hold("reduced", window, at, buffer)
        before = self.order[last]
        for kind, make in [("cast", self._cast_node)] * self._bucket(window)[0].casts + [
            ("scatter", self._scatter_node)
        ]:
            id, mb = self._named(kind, window, at, whole=final)
            known = adder.new.get(id)
            node = make(id, window, first, buffer) if known is None else known.node
            scatter = adder.add(node, mb)
            adder.after.setdefault(self.order[last], []).append(scatter)
            adder.edges.append((before, scatter))
            before, buffer = scatter, node.writes[0]
        if not self.policy[window.bucket].overlap and last + 1 < len(self.order):
            adder.edges.append((scatter, self.order[last + 1]))
            place = last + 1
        self._fold(window, at, scatter, buffer, place, final=final)

    def _fresh_node(self, id: str, window: CacheWindow, first: int) -> Node:
        bucket, _ = self._bucket(window)
        dtype = bucket.accumulate_dtype
        buffer = self.adder.value(f"{id}:whole", bucket.numel, bucket, "reduced", dtype)
        return Node(
            id, Fresh(bucket.id), self._coords("fresh", bucket.id, first), (), (buffer,), self.role
        )

    def _cast_node(self, id: str, window: CacheWindow, first: int, buffer: str) -> Node:
        bucket, _ = self._bucket(window)
        cast = self.adder.value(f"{id}:whole", bucket.numel, bucket, "reduced")
        coords = self._coords("cast", bucket.id, first)
        return Node(id, Cast(bucket.id), coords, (buffer,), (cast,), self.role)

    def _scatter_node(self, id: str, window: CacheWindow, first: int, buffer: str) -> Node:
        bucket, r = self._bucket(window)
        graph = self.adder.graph
        part = self.adder.value(
            f"{id}:part", bucket.numel // graph.mesh.degree(bucket.shard.grads), bucket, "reduced"
        )
        stream = graph.channels[bucket.scatter[r]].streams[0]
        op = Collective("reduce_scatter", bucket.scatter[r])
        return Node(
            id,
            op,
            self._coords("reducescatter", bucket.id, first),
            (buffer,),
            (part,),
            self.role,
            stream,
        )

    def _fold(
        self,
        window: CacheWindow,
        at: list[int],
        scatter: int,
        part: str,
        place: int,
        *,
        final: bool,
    ) -> None:
        """Add the fold of a window right before a place; a bucket's last one is there already, behind all compute."""
        adder, bucket = self.adder, window.bucket
        if final:
            k = adder.folds[bucket, self.role]
            adder.replaced[k] = replace(adder.deps.nodes[k], reads=(part,))
            fold = adder.deps.starts[k]
            adder.edges.append((scatter, fold))
            if isinstance(self.ops[place], Compute):
                adder.moved.add(fold)
                adder.before.setdefault(self.order[place], []).append(fold)
            return
        id, mb = self._named("fold", window, at)
        known = adder.new.get(id)
        if known is None:
            coords = self._coords("fold", bucket, self.order[at[window.uses[0]]])
            fold = adder.add(Node(id, Fold(bucket), coords, (part,), (), self.role), mb)
        else:
            fold = adder.add(known.node, mb)
        adder.before.setdefault(self.order[place], []).append(fold)
        adder.edges.append((scatter, fold))

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
