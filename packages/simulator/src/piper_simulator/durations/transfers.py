"""Find the tensors that software sends from stage to stage in parts, since devices of an axis all have the same.

Megatron-LM of 2021 to 2023 and DeepSpeed send a part from each device, and gather the parts within the node of the
receivers (arXiv 2104.04473, section 4.1: scatter/gather optimization).
"""

from __future__ import annotations

from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Channel, Plan
from piper_simulator.cluster.device import Device

_BETWEEN_STAGES = ("activation", "gradient")


def cut_along(plan: Plan, device: Device | None) -> tuple[str, ...]:
    """Return the axes whose devices each send a part of the tensor that all have (`Stack.transfers`)."""
    stack = None if device is None else device.stack
    return () if stack is None or stack.transfers == "whole" else _whole_along(plan)


def between_stages(channel: Channel, op: str) -> bool:
    """Return whether a message carries a tensor from stage to stage."""
    return op == "p2p" and channel.purpose in _BETWEEN_STAGES


def _whole_along(plan: Plan) -> tuple[str, ...]:
    """Return the axes whose devices all have the same tensors between their steps.

    These steps mostly add up partial sums. Where devices cut tensors along tokens, they gather and scatter instead.
    """
    sent: dict[tuple[str, bool], int] = {}
    collectives = [
        c for chunk in plan.chunks for sig in chunk.steps.values() for c in sig.collectives
    ]
    for c in collectives:
        key = c.axis, c.kind == "all_reduce"
        sent[key] = sent.get(key, 0) + bind(c.nbytes, 0)
    return tuple([a for a in plan.shared if sent.get((a, True), 0) > sent.get((a, False), 0)])
