"""Find which ranks meet over a channel: its instances, each a set of ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import COMPUTE, Channel, Plan, RolePlan, inside_channel
from piper_simulator.cluster.cluster import Cluster

AxisPart = tuple[str, int, int]
"""An axis, how many ranks a step along a part of it is, and the number of places on that part."""


def meeting_inside(plan: Plan, axis: str, role: RolePlan) -> Channel:
    """Return the channel on which the devices along an axis meet inside of the steps of a role.

    It is also the channel of a role whose ranks are part of another's, and of a plan that has no channels yet.
    """
    return Channel(
        inside_channel(axis, role.role),
        "group",
        (role.role,),
        (COMPUTE,),
        plan.mesh.along(axis),
        "tensor",
    )


def axes_inside(plan: Plan) -> tuple[str, ...]:
    """Return the axes along which devices meet inside of steps.

    Devices that share the work of chunks do, and devices that share the experts of a dropless mixture. Devices that
    share experts with a capacity meet between steps.
    """
    inside = {
        one.axis
        for chunk in plan.chunks
        if chunk.experts
        for sig in chunk.steps.values()
        for one in sig.collectives
    }
    met = {axis for axes in inside for axis in axes.split("+")}
    return (*plan.shared, *[axis for axis in plan.experts if axis in met])


def in_step(plan: Plan) -> Sequence[int]:
    """Return for each rank the number of its unit: the ranks that meet inside of every step.

    So they do the same at the same time.
    """
    world, met = plan.mesh.world, axes_inside(plan)
    if not met:
        return range(world)
    units: dict[tuple[int, ...], int] = {}
    others = [axis for axis in plan.mesh.axes if axis not in met]
    places = [plan.mesh.coords(rank) for rank in range(world)]
    return [
        units.setdefault(tuple([place[axis] for axis in others]), len(units)) for place in places
    ]


def parts_of_equal_nodes(plan: Plan, cluster: Cluster) -> tuple[AxisPart, ...]:
    """Return parts of axes such that a step along one takes each rank to the same place of another node.

    There it does the same. So nodes whose ranks differ only along these are equal, with their links and the ranks that
    they meet. There are none in a cluster whose nodes, ranks or links differ, and none along which roles differ. Of an
    axis that fills nodes and goes on to others, the part is that from node to node.
    """
    parts = []
    for axis, (stride, size) in _free_strides(plan, cluster).items():
        step = max(stride, cluster.per_node)
        if step % cluster.per_node == step % stride == stride * size % step == 0:
            parts.append((axis, step, stride * size // step))
    return tuple(parts)


def axes_of_equal_ranks(plan: Plan, cluster: Cluster) -> frozenset[str]:
    """Return axes along which all ranks do the same, on links that are alike.

    A step along one takes each node to another, or its ranks to other places of the same node. Ranks that meet are then
    as far apart as before, so that they are on different rails, or on one, as before.
    """
    filling = {axis for axis, _, _ in parts_of_equal_nodes(plan, cluster)}
    return frozenset(
        axis
        for axis, (stride, size) in _free_strides(plan, cluster).items()
        if axis in filling or cluster.per_node % (stride * size) == 0
    )


def _free_strides(plan: Plan, cluster: Cluster) -> dict[str, tuple[int, int]]:
    """Return the strides of axes along which roles do not differ; none where nodes, ranks or links of a cluster do."""
    mesh = plan.mesh
    placed = {axis for role in plan.roles for axis in role.placed}
    whole = all(
        len(role.ranks) * mesh.degree(role.placed) == mesh.world for role in plan.roles
    )  # else the plan is a part of another
    if len(cluster.nodes) > 1 or cluster.slow_ranks or cluster.network.slow_links or not whole:
        return {}
    return {axis: place for axis, place in _strides(mesh).items() if axis not in placed}


def _strides(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Return by axis how far neighbours along it are apart, as ranks, and its size."""
    strides, stride = {}, 1
    for axis, size in mesh.sizes:
        strides[axis] = stride, size
        stride *= size
    return strides


def instances(
    plan: Plan, channel: Channel, equal: Collection[AxisPart] = ()
) -> list[tuple[int, ...]]:
    """Return the ranks of each instance of a channel, ascending; of a transfer (source, destination).

    The result agrees with `Plan.peers` for every rank, in time linear in the ranks. Of instances that differ only along
    the parts `equal` of axes, it has the first.
    """
    mesh = plan.mesh
    if not plan.roles:  # of a plan of chunks alone: the ranks that meet rank 0
        return [mesh.ranks({axis: 0 for axis in mesh.axes if axis not in channel.over})]
    first, strides = plan.role(channel.roles[0]), _strides(mesh)
    kept = [(stride, size) for axis, stride, size in equal if axis not in channel.over]

    def ranks_of(role: str) -> Sequence[int]:
        ranks = plan.role(role).ranks
        for stride, size in kept:
            ranks = tuple([r for r in ranks if r // stride % size == 0])
        return ranks

    if channel.kind == "p2p":
        there = plan.role(channel.roles[1]).placed
        moved = [(*strides[axis], place) for axis, place in there.items() if axis in strides]
        return [
            (
                rank,
                rank + sum([(at - rank // stride % size) * stride for stride, size, at in moved]),
            )
            for rank in ranks_of(channel.roles[0])
        ]
    free = [
        place
        for axis, place in strides.items()
        if axis not in channel.over and axis not in first.placed
    ]
    members_by_coords: dict[int, list[int]] = {}
    for role in channel.roles:
        for rank in ranks_of(role):
            coords = sum([rank // stride % size * stride for stride, size in free])
            members_by_coords.setdefault(coords, []).append(rank)
    return [tuple(sorted(members)) for members in members_by_coords.values()]
