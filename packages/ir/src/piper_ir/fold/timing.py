"""Compute the time of a plan under fixed durations, from in-order streams, waits and rendezvous, without contention.

`prepare` turns a plan into a flat DAG once; `sweep` runs it in one fixed topological order, as often as wanted. Roles
stand for all their ranks (data-parallel replicas behave alike). These are the rules, which the simulator's event engine
implements independently:

1. A node starts when its predecessor on its stream has ended, each of its waits is done, and its host has issued it.
2. A Send and its Recv, and all members of one collective, start together: when the last of them can.
3. The k-th Send of a channel meets the k-th Recv; the k-th collective on one role meets the k-th on every role of the
   channel.
4. A point-to-point transfer occupies both streams for its duration. Its waiters see it done `latency` later, which
   occupies nothing: the next transfer may start at once. A wait for n instructions holds until all n are done.
5. A host issues its role's instructions in program order, and is never blocked (`piper_ir.fold.issue`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest

from piper_ir.fold.issue import Issue
from piper_ir.ground.errors import PlanError
from piper_ir.plan.plan import Channel, Plan, RolePlan
from piper_ir.program.ops import op_name

Waits = tuple[tuple[str, int], ...]
"""The waits of an instruction as pairs (stream, n): the first n instructions of that stream must be done."""
Member = tuple[int, int, tuple[int, ...]]
"""A node, the slot of its predecessor on its stream, and the nodes that it waits for."""
SweepStep = tuple[int, int, tuple[int, ...], tuple[tuple[Member, ...], bool] | None]
"""A node in the order of the sweep, with its predecessor and waits as in `Member`, and its group or None.

A group stands where its first member does, with all members and whether it is a point-to-point transfer.
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Hold a plan as a DAG.

    Attributes:
        offsets: node `offsets[r] + i` is instruction i of role r.
        streams: `streams[s]` are the nodes of one stream of one role, in order.
        stream_of: `stream_of[node]` is the index in `streams`.
        waits: `waits[node]` are the nodes that must be done before the node starts.
        groups: the nodes that start together (communication only).
        group_of: `group_of[node]` is the index in `groups`, -1 for none.
        p2p: `p2p[g]` says whether group g is a point-to-point transfer.
        order: the order in which `sweep` walks the nodes. Any topological order gives the same times, so DAGs that
            differ in it alone are equal.
    """

    roles: tuple[str, ...]
    offsets: tuple[int, ...]
    streams: tuple[tuple[int, ...], ...]
    stream_of: tuple[int, ...]
    waits: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    group_of: tuple[int, ...]
    p2p: tuple[bool, ...]
    order: Iterable[SweepStep] = field(compare=False)

    def __len__(self) -> int:
        return len(self.stream_of)


@dataclass(slots=True)
class Times:
    """Hold the times of a step in seconds, with one entry per node but for `host`.

    Attributes:
        start: when the node begins to occupy its stream.
        end: when the node leaves its stream.
        done: when waiters see that the node and all before it on its stream are done.
        ready: when its waits were done and it was issued.
        host: per role, when its host had issued everything.
    """

    start: list[float]
    end: list[float]
    done: list[float]
    ready: list[float]
    host: list[float]

    @property
    def makespan(self) -> float:
        """Return when the last node is done."""
        return max(self.done, default=0.0)


@dataclass(frozen=True, slots=True)
class IssueOrder:
    """Hold one role's program as columns with an entry per instruction.

    Attributes:
        channels: the channel that each instruction uses; "" for compute.
        label: a function from an instruction's index to its name in messages.
    """

    role: str
    streams: Sequence[str]
    channels: Sequence[str]
    label: Callable[[int], str]
    waits: Sequence[Waits] = ()


def prepare(plan: Plan) -> Prepared:
    """Return the DAG of a plan, in time linear in its size.

    Raises PlanError for an end of a channel without its other end, for a wait that names no instruction, and for a
    deadlock (with the cycle of waits).
    """
    orders = [_issue_order(role) for role in plan.roles]
    if any(role.table.astray for role in plan.roles):  # waits for no instruction are an error
        return prepare_orders(orders, plan.channels)
    bare = grouped(orders, plan.channels)
    waits: list[tuple[int, ...]] = []
    for role, first in zip(plan.roles, bare.offsets):
        waits += [tuple([first + j for j in own]) if own else () for own in role.table.waits]
    return with_waits(bare, tuple(waits), orders)


def _issue_order(role: RolePlan) -> IssueOrder:
    program, table = role.program, role.table
    waits: list[Waits] = []
    if table.astray:
        places = table.places
        waits = [tuple([places[j] for j in own]) for own in table.waits]
    return IssueOrder(
        role.role,
        table.streams,
        table.channels,
        lambda k: f"{program[k].name} ({op_name(program[k].parts[0].op)})",
        waits,
    )


def prepare_orders(orders: Sequence[IssueOrder], channels: Iterable[Channel]) -> Prepared:
    """Return the DAG of issue orders that need not be a plan yet; raise the errors of `prepare`."""
    bare = grouped(orders, channels)
    streams = iter(bare.streams)
    waits: list[tuple[int, ...]] = []
    for order in orders:
        waits += _waits(order, {name: next(streams) for name in dict.fromkeys(order.streams)})
    return with_waits(bare, tuple(waits), orders)


def grouped(orders: Sequence[IssueOrder], channels: Iterable[Channel]) -> Prepared:
    """Return the streams and groups of issue orders, without waits and without an order: `with_waits` adds both.

    Raises PlanError for an end of a channel without its other end.
    """
    offsets, stream_of = [0], list[int]()
    streams: list[tuple[int, ...]] = []
    for order in orders:
        own: dict[str, list[int]] = {name: [] for name in order.streams}
        index = {name: len(streams) + k for k, name in enumerate(own)}
        for node, name in enumerate(order.streams, offsets[-1]):
            own[name].append(node)
        stream_of.extend([index[name] for name in order.streams])
        streams.extend([tuple(nodes) for nodes in own.values()])
        offsets.append(offsets[-1] + len(order.streams))
    groups, p2p = _groups(orders, channels, offsets)
    group_of = [-1] * offsets[-1]
    for g, members in enumerate(groups):
        for m in members:
            group_of[m] = g
    roles = tuple([order.role for order in orders])
    return Prepared(
        roles,
        tuple(offsets),
        tuple(streams),
        tuple(stream_of),
        (),
        groups,
        tuple(group_of),
        p2p,
        (),
    )


def with_waits(
    prepared: Prepared, waits: tuple[tuple[int, ...], ...], orders: Sequence[IssueOrder]
) -> Prepared:
    """Return the DAG with these waits, an entry per node; raise PlanError for a deadlock.

    `orders`, from which the DAG was made, give nodes their names in messages.
    """
    return replace(
        prepared, waits=waits, order=_Walk(_order(orders, prepared, waits), prepared, waits)
    )


class _Walk:
    """Yield the steps of a sweep in an order of nodes, which names the first of each group; the engine needs none."""

    def __init__(
        self, order: Sequence[int], prepared: Prepared, waits: Sequence[tuple[int, ...]]
    ) -> None:
        self._order, self._prepared, self._waits = order, prepared, waits
        self._steps: list[SweepStep] | None = None

    def __iter__(self) -> Iterator[SweepStep]:
        if self._steps is None:
            self._steps = self._made()
        return iter(self._steps)

    def _made(self) -> list[SweepStep]:
        dag, waits = self._prepared, self._waits
        before = _before(dag)
        steps: list[SweepStep] = []
        for node in self._order:
            group = dag.group_of[node]
            if group < 0:
                steps.append((node, before[node], waits[node], None))
            else:
                whole = tuple([(m, before[m], waits[m]) for m in dag.groups[group]])
                steps.append((*whole[0], (whole, dag.p2p[group])))
        return steps


def _before(prepared: Prepared) -> list[int]:
    """Return by node the slot of its predecessor on its stream."""
    n = len(prepared)
    before = [0] * n
    for s, nodes in enumerate(prepared.streams):
        for a, b in pairwise((n + s, *nodes)):
            before[b] = a
    return before


def _waits(order: IssueOrder, own: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the nodes that each instruction of a role waits for; `own` has the role's nodes by stream."""
    try:
        return [
            tuple([own[stream][n - 1] for stream, n in waits if n > 0]) if waits else ()
            for waits in order.waits
        ]
    except (KeyError, IndexError):
        i, stream, n = next(
            (i, s, n)
            for i, waits in enumerate(order.waits)
            for s, n in waits
            if n > len(own.get(s, ()))
        )
        where = f"role {order.role}, instruction {i} {order.label(i)}"
        raise PlanError(
            f"{where}: waits for {n} of stream {stream!r}, which has {len(own.get(stream, ()))}"
        ) from None


def sweep(
    prepared: Prepared,
    durations: Sequence[float],
    *,
    latency: float = 0.0,
    issue: Issue | None = None,
    after: Times | None = None,
) -> Times:
    """Return the times of one step.

    Args:
        prepared: the DAG of the plan.
        durations: seconds by node; a group takes the duration of its first member.
        latency: seconds until the waiters of a point-to-point transfer see its end.
        issue: when hosts issue; None: at once.
        after: the times of the step before, which this one follows without a barrier: each stream and each host goes on
            where it was, but for streams that begin with a gather of states (see `after_updates`).
    """
    ready, host = _issued(prepared, issue, after)
    if after is not None:
        for first, updated in after_updates(prepared).items():
            ready[first] = max(ready[first], after.done[updated])
    start = [0.0] * len(prepared)
    end, done = _carried(prepared, after)
    for node, before, waits, group in prepared.order:
        if group is None:
            moment = ready[node]
            for w in waits:
                if done[w] > moment:
                    moment = done[w]
            ready[node] = moment
            if end[before] > moment:
                moment = end[before]
            start[node] = moment
            moment += durations[node]
            end[node] = moment
            done[node] = moment if moment > done[before] else done[before]
            continue
        members, p2p = group
        moment = 0.0
        for m, before, waits in members:
            free_at = ready[m]
            for w in waits:
                if done[w] > free_at:
                    free_at = done[w]
            ready[m] = free_at
            if free_at > moment:
                moment = free_at
            if end[before] > moment:
                moment = end[before]
        stop = moment + durations[node]
        seen = stop + latency if p2p else stop
        for m, before, _ in members:
            start[m], end[m] = moment, stop
            done[m] = seen if seen > done[before] else done[before]
    n = len(prepared)
    return Times(start, end[:n], done[:n], ready, host)


def _carried(prepared: Prepared, after: Times | None) -> tuple[list[float], list[float]]:
    """Return `end` and `done` to be filled; their last slots are the state of each stream before its first node."""
    last = [nodes[-1] for nodes in prepared.streams]
    end, done = [0.0] * len(prepared), [0.0] * len(prepared)
    if after is None:
        return end + [0.0] * len(last), done + [0.0] * len(last)
    return end + [after.end[x] for x in last], done + [after.done[x] for x in last]


def after_updates(prepared: Prepared) -> dict[int, int]:
    """Return the first nodes of streams that wait for the step before: each with the last node that its role computes.

    A collective that waits for nothing in its step works on states, which the step before updates last.
    """
    computed = {}
    for nodes in prepared.streams:
        if prepared.group_of[nodes[0]] < 0:
            computed[_role_of(prepared, nodes[0])] = nodes[-1]
    last_by_first = {}
    for first, *_ in prepared.streams:
        group, role = prepared.group_of[first], _role_of(prepared, first)
        if (
            group >= 0
            and not prepared.p2p[group]
            and not prepared.waits[first]
            and role in computed
        ):
            last_by_first[first] = computed[role]
    return last_by_first


def _role_of(prepared: Prepared, node: int) -> int:
    """Return the index of a node's role."""
    return bisect_right(prepared.offsets, node) - 1


def _issued(
    prepared: Prepared, issue: Issue | None, after: Times | None
) -> tuple[list[float], list[float]]:
    """Return when each node is issued, and when each host is through."""
    clocks = list(after.host) if after is not None else [0.0] * len(prepared.roles)
    if issue is None:
        return [0.0] * len(prepared), clocks
    if after is None:
        return list(issue.at), list(issue.step_s)
    issued_at: list[float] = []
    for clock, (first, end) in zip(clocks, pairwise(prepared.offsets)):
        issued_at += [clock + at for at in issue.at[first:end]]
    return issued_at, [clock + step_s for clock, step_s in zip(clocks, issue.step_s, strict=True)]


def _groups(
    orders: Sequence[IssueOrder], channels: Iterable[Channel], offsets: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[bool, ...]]:
    """Return the nodes that start together, source first, and whether each such group is a transfer."""
    uses: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for r, order in enumerate(orders):
        for node, used in enumerate(order.channels, offsets[r]):
            if used:
                uses[used][order.role].append(node)
    groups: list[tuple[int, ...]] = []
    p2p: list[bool] = []
    known = set()
    for channel in channels:
        known.add(channel.id)
        ends = [uses[channel.id][role] for role in channel.roles] if channel.id in uses else []
        for k, members in enumerate(zip_longest(*ends)):
            if None in members:
                counts = ", ".join(
                    f"{len(e)} on {role}" for e, role in zip(ends, channel.roles, strict=True)
                )
                raise PlanError(
                    f"channel {channel.id}: use {k + 1} has no counterpart; the channel is used {counts} times"
                )
            groups.append(members)
            p2p.append(channel.kind == "p2p")
    for name in uses:
        if name not in known:
            raise PlanError(
                f"channel {name!r} is used by {', '.join(sorted(uses[name]))} and not declared in the plan"
            )
    return tuple(groups), tuple(p2p)


def _order(
    orders: Sequence[IssueOrder], prepared: Prepared, waits: Sequence[tuple[int, ...]]
) -> list[int]:
    """Return a fixed topological order, in which each stream in turn goes as far as it can.

    Of a group it has the first member. Raises PlanError with the cycle when there is no order.
    """
    streams, stream_of, groups, group_of = (
        prepared.streams,
        prepared.stream_of,
        prepared.groups,
        prepared.group_of,
    )
    n = len(stream_of)
    ended = [0] * len(streams)  # per stream: how many of its nodes are done
    waiting: dict[int, list[int]] = {}  # by node: the streams that wait for it
    arrived = [0] * len(groups)
    done = bytearray(n)
    order: list[int] = []
    ready = list(
        reversed(range(len(streams)))
    )  # each stream is here, or waits for a node, or for its group
    while ready:
        stream = ready.pop()
        nodes, position = streams[stream], ended[stream]
        while position < len(nodes):
            node = nodes[position]
            node_waits = waits[node]
            for w in node_waits:
                if not done[w]:
                    waiting.setdefault(w, []).append(stream)
                    break
            else:
                group = group_of[node]
                if group < 0:
                    order.append(node)
                    done[node] = 1
                    if node in waiting:
                        ready += waiting[node]
                    position += 1
                    continue
                arrived[group] += 1
                members = groups[group]
                if arrived[group] == len(members):
                    ended[stream] = position
                    for m in members:
                        member_stream = stream_of[m]
                        ended[member_stream] += 1
                        done[m] = 1
                        ready += waiting.get(m, ())
                        if member_stream != stream:
                            ready.append(member_stream)
                    order.append(members[0])
                    position += 1
                    continue
            break
        ended[stream] = position
    if not all(done):
        raise PlanError(_cycle(orders, prepared, waits, {i for i, ran in enumerate(done) if ran}))
    return order


def _cycle(
    orders: Sequence[IssueOrder],
    prepared: Prepared,
    waits: Sequence[tuple[int, ...]],
    ran: set[int],
) -> str:
    """Return the message of a deadlock: each line waits for the next, and the last for the first."""
    offsets, groups, group_of, n = prepared.offsets, prepared.groups, prepared.group_of, len(waits)
    before = _before(prepared)
    path: list[tuple[int, str]] = []
    seen: dict[int, int] = {}
    node = min(set(range(n)) - ran)
    while node not in seen:
        seen[node] = len(path)
        blockers = [(w, "waits for") for w in waits[node]] + [
            (before[node], "comes on its stream after")
        ]
        blocker = next((b for b in blockers if b[0] < n and b[0] not in ran), None)
        if blocker is None:  # held up by a partner that cannot come
            partners = groups[group_of[node]]
            stuck = (
                m for m in partners if any(b < n and b not in ran for b in (*waits[m], before[m]))
            )
            blocker = next(stuck), "meets"
        path.append((node, blocker[1]))
        node = blocker[0]
    lines = [f"  {_where(orders, offsets, x)} {why}" for x, why in path[seen[node] :]]
    return "\n".join(
        [
            "deadlock: these instructions wait for each other",
            *lines,
            f"  {_where(orders, offsets, node)}",
        ]
    )


def _where(orders: Sequence[IssueOrder], offsets: Sequence[int], node: int) -> str:
    r = next(r for r in range(len(orders)) if node < offsets[r + 1])
    order, index = orders[r], node - offsets[r]
    return f"role {order.role}, stream {order.streams[index]!r}, instruction {index} {order.label(index)}"
