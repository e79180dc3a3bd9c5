"""Find which ranks meet over a channel: its instances, each a set of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from piper_ir.plan.plan import COMPUTE, Channel, Plan, RolePlan, inside_channel


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


def instances(plan: Plan, channel: Channel) -> list[tuple[int, ...]]:
    """Return the ranks of each instance of a channel, ascending; of a transfer (source, destination).

    The result agrees with `Plan.peers` for every rank, in time linear in the ranks.
    """
    mesh = plan.mesh
    if not plan.roles:  # of a plan of chunks alone: the ranks that meet rank 0
        return [mesh.ranks({axis: 0 for axis in mesh.axes if axis not in channel.over})]
    first = plan.role(channel.roles[0])
    if channel.kind == "p2p":
        there = plan.role(channel.roles[1]).placed
        return [(rank, mesh.rank({**mesh.coords(rank), **there})) for rank in first.ranks]
    free = [axis for axis in mesh.axes if axis not in channel.over and axis not in first.placed]
    members_by_coords: dict[tuple[int, ...], list[int]] = {}
    for role in channel.roles:
        for rank in plan.role(role).ranks:
            coords = mesh.coords(rank)
            members_by_coords.setdefault(tuple([coords[axis] for axis in free]), []).append(rank)
    return [tuple(sorted(members)) for members in members_by_coords.values()]
