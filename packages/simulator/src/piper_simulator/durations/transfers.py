"""Count the bytes that software sends where devices, or nodes, would otherwise get the same rows more than once.

Where a tensor is replicated along an axis, each device of Megatron-LM of 2021 to 2023 and DeepSpeed sends a part of it
to the next stage, whose devices gather the parts within their node (arXiv 2104.04473, section 4.1: scatter/gather
optimization). To experts DeepEP sends a token once to each node that has experts of it, and once to each
device within a node, where an all-to-all sends it once to each expert (https://github.com/deepseek-ai/DeepEP).
"""

from __future__ import annotations

from math import prod

from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Channel, Plan
from piper_ir.program.program import Chunk
from piper_simulator.cluster.device import Device
from piper_simulator.durations.communication import RankGroup
from piper_simulator.durations.instances import meeting_inside

_BETWEEN_STAGES = ("activation", "gradient")


class Transfers:
    """Count the bytes that a stack sends for messages of a plan, see `Stack.transfers` and `Stack.dispatch`."""

    def __init__(self, plan: Plan, device: Device | None) -> None:
        self._plan = plan
        stack = None if device is None else device.stack
        self._axes: tuple[str, ...] = ()
        self._choices = 0
        if stack is not None and stack.transfers == "parts":
            self._axes = _replicated_along(plan)
        if stack is not None and stack.dispatch == "once":
            self._choices = max(map(_choices, plan.chunks), default=0)

    def bytes_of(self, channel: Channel, op: str, nbytes: int, group: RankGroup) -> int:
        """Return the bytes that a message of `nbytes` has on its links."""
        if op == "all_to_all" and self._choices > 1:
            places = group.nodes if group.nodes > 1 else group.ranks
            return round(nbytes * _distinct(places, self._choices))
        return -(-nbytes // self._plan.mesh.degree(self._cut(channel, op)))

    def gathers(self, channel: Channel, op: str) -> list[Channel]:
        """Return the channels on which the receivers gather the parts of a message."""
        receivers = [self._plan.role(channel.roles[1])] if self._cut(channel, op) else []
        return [meeting_inside(self._plan, axis, role) for role in receivers for axis in self._axes]

    def _cut(self, channel: Channel, op: str) -> tuple[str, ...]:
        return self._axes if op == "p2p" and channel.purpose in _BETWEEN_STAGES else ()


def _distinct(places: int, choices: int) -> float:
    """Return to how many places (nodes or devices) a token is sent per choice, if experts are chosen evenly."""
    return places * (1 - (1 - 1 / places) ** choices) / choices


def _choices(chunk: Chunk) -> int:
    """Return how many experts each token of a chunk chooses; 0 for one without dropless experts."""
    region, out = chunk.steps["F"].experts, chunk.ports.get("out0")
    if region is None or out is None:
        return 0
    return round(bind(region.rows, 0) / prod([bind(n, 0) for n in out.shape[:-1]]))


def _replicated_along(plan: Plan) -> tuple[str, ...]:
    """Return the axes along which tensors are replicated between steps.

    Most bytes of such an axis are all-reduces of partial sums. Where an axis cuts tensors along tokens, it has
    all-gathers and reduce-scatters instead.
    """
    sent: dict[tuple[str, bool], int] = {}
    collectives = [
        c for chunk in plan.chunks for sig in chunk.steps.values() for c in sig.collectives
    ]
    for c in collectives:
        key = c.axis, c.kind == "all_reduce"
        sent[key] = sent.get(key, 0) + bind(c.nbytes, 0)
    return tuple([a for a in plan.shared if sent.get((a, True), 0) > sent.get((a, False), 0)])
