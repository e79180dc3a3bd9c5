"""Add up messages inside of steps, and leave out the share that a software stack runs beside its kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from piper_simulator.cluster.device import Device
from piper_simulator.durations.cost_model import StepMessages


def summed(messages: Iterable[tuple[StepMessages, float]]) -> tuple[StepMessages, ...]:
    """Return one entry per axis and kind of message, of messages with how often each is sent.

    A message that is sent in some cases only counts as one at least: its bytes and seconds are there.
    """
    sums: dict[tuple[str, str], tuple[float, float, float, float]] = {}
    for m, times in messages:
        count, nbytes, seconds, hidden = sums.get((m.axis, m.op), (0.0, 0.0, 0.0, 0.0))
        sums[m.axis, m.op] = (
            count + times * m.count,
            nbytes + times * m.bytes,
            seconds + times * m.seconds,
            hidden + times * m.hidden_s,
        )
    return tuple(
        StepMessages(*key, max(1, round(n)), round(nbytes), seconds, hidden)
        for key, (n, nbytes, seconds, hidden) in sums.items()
    )


def beside_kernels(
    device: Device, messages: tuple[StepMessages, ...], kernels_s: float
) -> tuple[StepMessages, ...]:
    """Return the messages inside of a step without the share that the stack runs beside its kernels.

    These are messages of tensor parallelism, and the ring of context parallelism. No more can be hidden than there is
    computation in the step.
    """
    share = 0.0 if device.stack is None else device.stack.number.get("hidden", 0.0)
    total = sum(m.exposed_s for m in messages if _may_hide(m))
    if not share or not total:
        return messages
    left = 1.0 - min(share, kernels_s / total)
    return tuple(
        replace(m, seconds=m.hidden_s + m.exposed_s * left) if _may_hide(m) else m for m in messages
    )


def _may_hide(message: StepMessages) -> bool:
    """Return whether a stack may run a message inside of a step beside its kernels."""
    return "tp" in message.axis.split("+") or message.op == "shift"
