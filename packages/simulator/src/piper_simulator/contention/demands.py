"""Compute the load of messages on links from (op, bytes, members), without a plan.

The laws for the messages of a plan hold (`piper_simulator.contention.flows`). Wire bytes of a rank per byte of its
message, and the ports and NICs that they pass through:

    p2p                          1              the port, or the NIC, of the source and of the destination
    all_reduce                   2 (n - 1) / n  a ring: the port of each member; at a node's border the NICs of its
                                                members
    all_gather, reduce_scatter   (n - 1) / n    the same ring, half of the way
    all_to_all                   (n - 1) / n    1 / (n - 1) of them to each other member, as if point-to-point
    shift                        1              all of it to the next member, as if point-to-point

A rank of an all-to-all or a reduction reads the bytes that it sends and writes the ones that it receives: 2 bytes of
memory per wire byte. The sources are in `piper_simulator.durations.communication`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from piper_ir.ground.errors import ClusterError
from piper_simulator.contention.flows import End, Wiring, demand, route, shared_resources
from piper_simulator.contention.rates import Flow


@dataclass(frozen=True, slots=True)
class Message:
    """Describe one message without a plan.

    Attributes:
        channel: messages of one channel follow each other, messages of different channels may run at the same time.
        nbytes: bytes on each rank (all_gather, reduce_scatter: of the whole tensor).
        seconds: its duration alone.
        instances: the ranks of each group that sends such a message at the same time, all of one size.
        ends: role that takes part, by its index in `Prepared.roles` -> the SMs that its stream names (None: none, 0:
            copy engines); their device is the first member's.
    """

    channel: str
    op: str
    nbytes: int
    seconds: float
    instances: tuple[tuple[int, ...], ...]
    ends: Mapping[int, int | None] = field(default_factory=dict)


def demands(messages: Sequence[Message], wires: Wiring) -> list[Flow]:
    """Return the load of each message; raise ClusterError for a channel whose messages differ in op or members."""
    of: dict[str, Message] = {}
    for m in messages:
        first = of.setdefault(m.channel, m)
        if (first.op, first.instances) != (m.op, m.instances):
            raise ClusterError(
                f"channel {m.channel!r} has {first.op} of {first.instances} and {m.op} of {m.instances}; messages "
                f"that differ in op or members need channels of their own"
            )
    routes = {name: route(m.op, m.instances, wires) for name, m in of.items()}
    shared = shared_resources(routes, wires)
    known: dict[tuple[str, int, float], Flow] = {}
    flows = []
    for m in messages:
        key = m.channel, m.nbytes, m.seconds
        if key not in known:
            device = wires.cluster.of(m.instances[0][0])
            ends = {
                role: End(named, device.sms, device.memory_bandwidth)
                for role, named in m.ends.items()
            }
            known[key] = demand(
                len(known), routes[m.channel], m.nbytes, m.seconds, ends, wires, shared
            )
        flows.append(known[key])
    return flows
