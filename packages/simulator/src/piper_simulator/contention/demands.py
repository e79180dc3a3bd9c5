"""Say what messages ask of links by their op alone: (op, bytes, members), without a plan.

The laws are those for the messages of a plan (`piper_simulator.contention.flows`). Wire bytes of a rank per byte of its
message, and what they pass through:

    p2p                          1              the port, or the NIC, of the source and of the destination
    all_reduce                   2 (n - 1) / n  a ring: the port of each member; at a node's border the NICs of its
                                                members
    all_gather, reduce_scatter   (n - 1) / n    the same ring, half of the way
    all_to_all                   (n - 1) / n    1 / (n - 1) of them to each other member, as if point-to-point

A rank of an all-to-all reads what it sends and writes what it receives. A rank of a reduction does as much, so both
touch 2 bytes of memory per wire byte. Sources are those of the durations (`piper_simulator.durations.communication`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from piper_ir.errors import ClusterError
from piper_simulator.cluster.network import MessageOp
from piper_simulator.contention.flows import End, Resource, Route, Wiring, demand, passes, shared_resources
from piper_simulator.contention.rates import Flow


@dataclass(frozen=True, slots=True)
class Message:
    """Describe one message without a plan.

    Attributes:
        channel: messages of one channel follow each other, those of different ones may run at the same time.
        op: what it does.
        nbytes: bytes on each rank (all_gather, reduce_scatter: of the whole tensor).
        seconds: its duration alone.
        instances: the ranks of each group that does this at the same time, all of one size.
        ends: role that takes part, by its place in `Prepared.roles` -> the SMs that its stream names (None: none, 0:
            copy engines); their device is that of the first member.
    """

    channel: str
    op: MessageOp
    nbytes: int
    seconds: float
    instances: tuple[tuple[int, ...], ...]
    ends: Mapping[int, int | None] = field(default_factory=dict)


def demands(messages: Sequence[Message], wires: Wiring) -> list[Flow]:
    """Return what each message asks for. ClusterError for a channel whose messages differ in op or members."""
    of: dict[str, Message] = {}
    for m in messages:
        first = of.setdefault(m.channel, m)
        if (first.op, first.instances) != (m.op, m.instances):
            raise ClusterError(
                f"channel {m.channel!r} has {first.op} of {first.instances} and {m.op} of {m.instances}; "
                "messages that differ in op or members need channels of their own"
            )
    routes = {name: route(m.op, m.instances, wires) for name, m in of.items()}
    shared = shared_resources(routes, wires)
    known: dict[tuple[str, int, float], Flow] = {}
    out = []
    for m in messages:
        key = m.channel, m.nbytes, m.seconds
        if key not in known:
            device = wires.cluster.of(m.instances[0][0])
            ends = {role: End(named, device.sms, device.memory_bandwidth) for role, named in m.ends.items()}
            known[key] = demand(len(known), routes[m.channel], m.nbytes, m.seconds, ends, wires, shared)
        out.append(known[key])
    return out


def route(op: MessageOp, instances: Sequence[Sequence[int]], wires: Wiring) -> Route:
    """Return what all instances of a group pass through.

    ClusterError without a member, and for groups of different sizes."""
    sizes = {len(members) for members in instances}
    if len(sizes) != 1 or sizes == {0}:
        raise ClusterError(f"{op} of groups of {sorted(sizes)} ranks; instances of one group have the same number, at least 1")
    n = sizes.pop()
    if op == "p2p" and n != 2:
        raise ClusterError(f"p2p of {n} ranks; it has a source and a destination")
    rounds = 2 if op == "all_reduce" else 1
    found = Route(1.0, 1) if op == "p2p" else Route(rounds * (n - 1) / n, 2)
    for members in instances:
        found.add(_to_all(members, wires) if op == "all_to_all" else passes(wires, members, op == "p2p"), wires)
    return found


def _to_all(members: Sequence[int], wires: Wiring) -> dict[Resource, float]:
    """Return how often the wire bytes of a rank pass through each resource in an all-to-all.

    Every member sends as much to each other one."""
    out: dict[Resource, float] = {}
    for pair in permutations(members, 2):
        for resource, times in passes(wires, pair, p2p=True).items():
            out[resource] = out.get(resource, 0.0) + times / (len(members) - 1)
    return out
