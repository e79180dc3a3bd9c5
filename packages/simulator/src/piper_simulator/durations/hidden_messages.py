"""Leave out the share of the messages inside of steps that a software stack runs beside its kernels."""

from __future__ import annotations

from dataclasses import replace

from piper_simulator.cluster.device import Device
from piper_simulator.durations.cost_model import StepMessages


def beside_kernels(
    device: Device, messages: tuple[StepMessages, ...], kernels_s: float
) -> tuple[StepMessages, ...]:
    """Return the messages inside of a step without the share that the stack runs beside its kernels.

    These are messages of tensor parallelism, and the ring of context parallelism. No more can be hidden than there is
    computation in the step.
    """
    share = 0.0 if device.stack is None else device.stack.number.get("hidden", 0.0)
    total = sum(m.seconds for m in messages if _may_hide(m))
    if not share or not total:
        return messages
    left = 1.0 - min(share, kernels_s / total)
    return tuple(replace(m, seconds=m.seconds * left) if _may_hide(m) else m for m in messages)


def _may_hide(message: StepMessages) -> bool:
    """Return whether a stack may run a message inside of a step beside its kernels."""
    return "tp" in message.axis.split("+") or message.op == "shift"
