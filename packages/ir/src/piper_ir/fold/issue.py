"""Compute when hosts issue the instructions of a step, and when the kernels of an instruction may start.

A host goes through its role's program and is never blocked. For each instruction it takes some time of its own, and
then launches its kernels one by one, which the device runs meanwhile. An instruction whose kernels take longer than
their launches may start with the first launch. One whose launches take longer ends with the last launch at the
earliest, and starts before that by the time of its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Issue:
    """Hold the times of hosts in seconds, each since its host began with a step.

    Attributes:
        at: by node, when it may start as far as its host is concerned.
        step_s: by role, when its host has issued a step and begins with the next.
    """

    at: Sequence[float]
    step_s: Sequence[float]


def issue_times(
    offsets: Sequence[int],
    each: float,
    launches: Sequence[float] = (),
    durations: Sequence[float] = (),
) -> Issue | None:
    """Return when hosts issue; None if they take no time.

    Args:
        offsets: the first node of each role, and the number of nodes.
        each: host seconds per instruction, before its kernels are launched.
        launches: by node, host seconds in which its kernels are launched; empty for none.
        durations: by node, seconds that its kernels take.
    """
    launching = any(launches)
    if not each and not launching:
        return None
    took = [each + s for s in launches] if launching else [each] * offsets[-1]
    through: list[float] = []
    step_s: list[float] = []
    for first, end in pairwise(offsets):
        through += accumulate(took[first:end])
        step_s.append(through[-1] if end > first else 0.0)
    if launching:
        overlaps = map(min, launches, durations)
        through = [at - overlap for at, overlap in zip(through, overlaps, strict=True)]
    return Issue(through, step_s)
