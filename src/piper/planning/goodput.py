"""Estimate the share of time that a training keeps, between checkpoints and failures.

A training that is checkpointed every T seconds loses C of them to each checkpoint, and at each failure the work since
the last one (T / 2 on average) and the R seconds until it runs again. With a failure every M seconds, T = sqrt(2 C M)
loses least (J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Failures:
    """Say how often a training fails, and how fast it is saved and started again.

    Attributes:
        mtbf_s: seconds between failures of the whole cluster, on average.
        bytes_per_s: bytes of states that each device writes per second.
        restart_s: seconds from a failure until the training runs again.
    """

    mtbf_s: float
    bytes_per_s: float = 1e9
    restart_s: float = 300.0


@dataclass(frozen=True)
class Goodput:
    """Hold the share of time that is kept, and the seconds between checkpoints that lose least."""

    share: float
    every_s: float


def saved_bytes(held: Mapping[str, int]) -> int:
    """Return the bytes that a device writes of its memory by category: parameters and optimizer states.

    In mixed precision the masters are saved, and not their copies in the narrow dtype.
    """
    return (held.get("master") or held.get("param", 0)) + held.get("optim", 0)


def goodput(failures: Failures, state_bytes: int) -> Goodput:
    """Return the goodput of a training whose fullest device saves so many bytes; no share is below 0."""
    stopped = state_bytes / failures.bytes_per_s
    every = max(sqrt(2 * stopped * failures.mtbf_s), stopped)
    lost = stopped / every + (every / 2 + failures.restart_s) / failures.mtbf_s
    return Goodput(max(0.0, 1.0 - lost), every)
