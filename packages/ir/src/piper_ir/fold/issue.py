"""Compute when hosts issue the instructions of a step, and when the kernels of an instruction may start.

A host goes through its role's program and is never blocked. For each instruction it takes some time of its own, and
then launches its kernels one by one, which the device runs meanwhile: an instruction whose kernels take longer than
their launches starts with the first of them. One whose launches take longer ends with the last of them, and starts so
much earlier as its kernels take.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from piper_ir.fold.timing import Issue, Prepared


def issue_times(
    prepared: Prepared,
    each: float,
    launches: Sequence[float] = (),
    durations: Sequence[float] = (),
) -> Issue | None:
    """Return the times of hosts; None if they take none.

    Args:
        prepared: the nodes of the plan.
        each: seconds per instruction, before its kernels are launched.
        launches: by node, seconds of the launches; empty for none.
        durations: by node, seconds that its kernels take.
    """
    if not each and not any(launches):
        return None
    at: list[float] = []
    step_s: list[float] = []
    for first, end in pairwise(prepared.offsets):
        now = 0.0
        if launches:
            for launch, duration in zip(launches[first:end], durations[first:end], strict=True):
                now += each + launch
                at.append(now - min(launch, duration))
        else:
            for _ in range(first, end):
                now += each
                at.append(now)
        step_s.append(now)
    return Issue(at, step_s)
