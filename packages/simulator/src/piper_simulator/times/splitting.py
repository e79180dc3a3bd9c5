"""Split roles into ranks that behave alike, for timing.

A slow rank or link, or another kind of device, delays only the ranks that wait for it. Ranks are alike when they run
the same role on the same kind of device, equally slow, and when their instances of each channel are alike: as many
members in the same places, over the same links, of classes that are alike in turn. That is the coarsest such partition,
found by refinement: ranks and instances of channels (and, if links are shared, the links) get colours by their own
properties, and new ones by the colours of their neighbours, until no class falls apart any more. Members of a class do
the same at the same time: by induction over the instructions, and max-min fair shares are unique, so that equal
messages get equal ones. Hence a simulation of the classes is the one of all ranks, at the cost of the classes.

Ranks that share the work of chunks meet inside of every step. So they are a unit
(`piper_simulator.durations.instances`), which is as slow as the slowest of them, and never fall apart.

The split plan is a plan of the same ranks, in which each class is a role, and the instances of a channel that meet in
the same classes are a channel. It is for timing only: memory, buckets and execution belong to the plan itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from piper_ir.plan.plan import Channel, Plan, RolePlan
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.contention.flows import Resource, Wiring, passes, wiring
from piper_simulator.durations.communication import rank_group
from piper_simulator.durations.instances import (
    axes_inside,
    axes_of_equal_ranks,
    in_step,
    instances,
)


@dataclass(frozen=True)
class SplitPlan:
    """Hold a plan with a role for each class of ranks.

    Attributes:
        plan: the split plan; the plan itself if no role is split.
        of: for each of its roles the index of the role in the original plan.
        role_of: for each rank the index of its role in `plan`; -1 for a rank that was left out.
    """

    plan: Plan
    of: tuple[int, ...]
    role_of: tuple[int, ...]


def split(plan: Plan, cluster: Cluster | None, *, shared: bool) -> SplitPlan:
    """Split the roles of a plan by the differences of their ranks on a cluster.

    With `shared`, messages share links (contention), so that the other users of a link matter, too. A class is named
    after its first rank, "pp0/3"; so is the channel of an instance, after its first member.
    """
    if cluster is None or plan.mesh.world == len(plan.roles) or plan.mesh.world > cluster.devices:
        return _whole(plan)
    if _same_everywhere(plan, cluster):
        return _whole(plan)
    meetings = _meetings(plan)
    ranks = _refined(plan, cluster, meetings, shared)
    return _by_colours(plan, meetings, ranks) if len(set(ranks)) > len(plan.roles) else _whole(plan)


def _same_everywhere(plan: Plan, cluster: Cluster) -> bool:
    """Return whether the ranks of each role are alike, since they differ only along axes of equal ranks.

    Ranks that meet inside of every step are one unit. Else the ranks may be alike all the same.
    """
    placed = {axis for role in plan.roles for axis in role.placed}
    within = {*placed, *axes_inside(plan)}
    return axes_of_equal_ranks(plan, cluster).issuperset(
        [axis for axis in plan.mesh.axes if axis not in within]
    )


def each_rank(plan: Plan, left_out: frozenset[int] = frozenset()) -> SplitPlan:
    """Make every rank, with the ranks that share its chunks, a role of its own, except the ranks that are left out.

    The other members of a channel meet without the latter; a transfer needs both its ends.
    """
    return _by_colours(
        plan,
        _meetings(plan),
        [-1 if r in left_out else unit for r, unit in enumerate(in_step(plan))],
    )


def _whole(plan: Plan) -> SplitPlan:
    role_of = [-1] * plan.mesh.world
    for r, role in enumerate(plan.roles):
        for rank in role.ranks:
            role_of[rank] = r
    return SplitPlan(plan, tuple(range(len(plan.roles))), tuple(role_of))


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Name an instance of a channel."""

    channel: int
    members: tuple[int, ...]


def _meetings(plan: Plan) -> list[_Meeting]:
    return [
        _Meeting(c, members)
        for c, channel in enumerate(plan.channels)
        for members in instances(plan, channel)
    ]


def _refined(plan: Plan, cluster: Cluster, meetings: Sequence[_Meeting], shared: bool) -> list[int]:
    units = in_step(plan)
    graph = _Graph(plan, cluster, meetings, units)
    if shared:
        graph.add_links(wiring(cluster))
    colours = refined(graph.first, graph.neighbours, graph.seen)
    return [colours[unit] for unit in units]


class _Graph:
    """Hold a graph in which units of ranks, instances of channels, and links are neighbours if they touch."""

    def __init__(
        self, plan: Plan, cluster: Cluster, meetings: Sequence[_Meeting], units: Sequence[int]
    ) -> None:
        role_of = _whole(plan).role_of
        inside: list[list[int]] = [[] for _ in range(max(units, default=-1) + 1)]
        for rank, unit in enumerate(units):
            inside[unit].append(rank)
        self._world, self._meetings = len(inside), meetings
        self._p2p = [plan.channels[m.channel].kind == "p2p" for m in meetings]
        self._ends = [list(dict.fromkeys([units[rank] for rank in m.members])) for m in meetings]
        self.first: list[Hashable] = [
            (role_of[ranks[0]], *_pace(cluster, ranks)) for ranks in inside
        ]
        self.first += [(m.channel, rank_group(cluster, m.members)) for m in meetings]
        self.neighbours: list[list[int]] = [[] for _ in inside]
        self.neighbours += map(list, self._ends)
        self._times: list[list[float]] = [
            [] for _ in self.first
        ]  # per link of an instance, or per user of a link
        for node, ends in enumerate(self._ends, self._world):
            for unit in ends:
                self.neighbours[unit].append(node)

    def add_links(self, wires: Wiring) -> None:
        number: dict[Resource, int] = {}
        for node, (m, p2p) in enumerate(zip(self._meetings, self._p2p, strict=True), self._world):
            for resource, times in passes(wires, m.members, p2p).items():
                link = number.get(resource)
                if link is None:
                    link = number[resource] = len(self.first)
                    self.first.append(
                        (resource[0], wires.capacity(resource), wires.kind_of(resource))
                    )
                    self.neighbours.append([])
                    self._times.append([])
                self.neighbours[node].append(link)
                self.neighbours[link].append(node)
                self._times[node].append(times)
                self._times[link].append(times)

    def seen(self, node: int, colours: Sequence[int]) -> Hashable:
        """Return the colours that a node sees at its neighbours.

        A transfer has two ends. Other instances wait for the last of their members: the number of members of a class
        does not matter to them, but it does to the links that they share, which see it.
        """
        around = [colours[n] for n in self.neighbours[node]]
        if node < self._world:
            return tuple(sorted(around))
        k = node - self._world
        if k >= len(self._meetings):
            return tuple(sorted(zip(around, self._times[node], strict=True)))
        n = len(self._ends[k])
        ends: Hashable = tuple(around[:n]) if self._p2p[k] else frozenset(around[:n])
        return ends, tuple(sorted(zip(around[n:], self._times[node], strict=True)))


def _pace(cluster: Cluster, ranks: Sequence[int]) -> tuple[Hashable, float]:
    """Return the kinds of devices of a unit, and how many times as long its slowest rank takes."""
    if len(ranks) == 1:
        return cluster.kind_of(ranks[0]), cluster.slow_ranks.get(ranks[0], 1.0)
    return tuple(sorted({cluster.kind_of(r) for r in ranks})), max(
        [cluster.slow_ranks.get(r, 1.0) for r in ranks]
    )


def refined(
    first: Iterable[Hashable],
    neighbours: Sequence[Sequence[int]],
    seen: Callable[[int, Sequence[int]], Hashable],
) -> list[int]:
    """Return the colour of each node in the coarsest partition of a graph whose classes see the same.

    This is colour refinement; nodes that cannot be told apart have the same colour. `first` is a key of each node by
    itself, `neighbours` the nodes that it looks at, which look at it, and `seen(node, colours)` a key of their colours.
    That must differ if a neighbour's colour is one that it did not see before, and must not depend on the order of
    neighbours of equal colour.

    A round looks at the neighbours of nodes with a new colour. When a class is split, the nodes that saw nothing new,
    else the most numerous, keep the colour: their neighbours need not be looked at again.
    """
    known: dict[Hashable, int] = {}
    colours = [known.setdefault(thing, len(known)) for thing in first]
    size = [0] * len(known)
    for colour in colours:
        size[colour] += 1
    looking: Iterable[int] = range(len(colours))
    while looking:
        changed: list[tuple[int, list[int]]] = []
        for colour, nodes in _nodes_by_colour(looking, colours, size).items():
            views: dict[Hashable, list[int]] = {}
            for node in nodes:
                views.setdefault(seen(node, colours), []).append(node)
            groups = list(views.values())
            if len(nodes) == size[colour]:
                groups.remove(max(groups, key=len))
            changed.extend((colour, group) for group in groups)
        for colour, group in changed:
            size[colour] -= len(group)
            size.append(len(group))
            for node in group:
                colours[node] = len(size) - 1
        looking = dict.fromkeys(
            n for _, group in changed for node in group for n in neighbours[node]
        )
    return colours


def _nodes_by_colour(
    nodes: Iterable[int], colours: Sequence[int], size: Sequence[int]
) -> dict[int, list[int]]:
    """Return nodes by colour, without nodes that are alone in their class."""
    nodes_by_colour: dict[int, list[int]] = {}
    for node in nodes:
        if size[colours[node]] > 1:
            nodes_by_colour.setdefault(colours[node], []).append(node)
    return nodes_by_colour


def _by_colours(plan: Plan, meetings: Sequence[_Meeting], ranks: Sequence[int]) -> SplitPlan:
    """Return the plan with a role per colour of ranks, without ranks of colour -1."""
    own: dict[int, list[int]] = {}
    for rank, colour in enumerate(ranks):
        own.setdefault(colour, []).append(rank)
    own.pop(-1, None)
    whole = _whole(plan).role_of
    order = sorted(own, key=lambda colour: (whole[own[colour][0]], own[colour][0]))
    parts = Counter(whole[own[colour][0]] for colour in order)
    names = {}
    for colour in order:
        first = own[colour][0]
        name = plan.roles[whole[first]].role
        names[colour] = name if parts[whole[first]] == 1 else f"{name}/{first}"
    role_at = {colour: plan.roles[whole[mine[0]]].role for colour, mine in own.items()}
    channels, used = _channels(plan, meetings, ranks, names, role_at)
    roles = [
        _part(plan.roles[whole[own[c][0]]], names[c], tuple(own[c]), used.get(c, {})) for c in order
    ]
    role_of = [-1] * plan.mesh.world
    for k, colour in enumerate(order):
        for rank in own[colour]:
            role_of[rank] = k
    of = tuple(whole[own[colour][0]] for colour in order)
    return SplitPlan(
        replace(plan, roles=tuple(roles), channels=tuple(channels)), of, tuple(role_of)
    )


def _channels(
    plan: Plan,
    meetings: Sequence[_Meeting],
    ranks: Sequence[int],
    names: dict[int, str],
    role_at: dict[int, str],
) -> tuple[list[Channel], dict[int, dict[str, str]]]:
    """Return the channels between classes, and for each class its names of the plan's channels.

    `role_at` has the role of each class.
    """
    first_by_meeting: dict[tuple[int, tuple[int, ...]], int] = {}
    for m in meetings:
        there = [r for r in m.members if ranks[r] >= 0]
        if there:
            colours = dict.fromkeys(ranks[r] for r in there)
            p2p = plan.channels[m.channel].kind == "p2p"
            first_by_meeting.setdefault(
                (m.channel, tuple(colours) if p2p else tuple(sorted(colours))), there[0]
            )
    number = Counter(c for c, _ in first_by_meeting)
    new_channels, used = [], dict[int, dict[str, str]]()
    for (c, classes), first in first_by_meeting.items():
        channel = plan.channels[c]
        id = channel.id if number[c] == 1 else f"{channel.id}/{first}"
        at = [channel.roles.index(role_at[colour]) for colour in classes]
        sms = tuple([channel.sms[k] for k in at]) if channel.sms else ()
        streams = tuple([channel.streams[k] for k in at])
        new_channels.append(
            replace(
                channel, id=id, roles=tuple([names[k] for k in classes]), streams=streams, sms=sms
            )
        )
        for colour in classes:
            used.setdefault(colour, {})[channel.id] = id
    return new_channels, used


def _part(role: RolePlan, name: str, ranks: tuple[int, ...], channels: dict[str, str]) -> RolePlan:
    """Return a role of some of the ranks, with new names of channels."""
    renamed = any(old != new for old, new in channels.items())
    program = role.table.on_channels(channels) if renamed else role.program
    return replace(role, role=name, ranks=ranks, program=program)
