"""Estimate the share of time that a training keeps, between checkpoints and failures.

With failures at random, one every M seconds on average, T seconds of work and a checkpoint of C seconds after it take
M exp(R / M) (exp((T + C) / M) - 1) seconds, where R passes from a failure until the training runs again. The interval
that keeps most is T = sqrt(2 C M) (1 + sqrt(C / (2 M)) / 3 + C / (18 M)) - C, which is Young's sqrt(2 C M) to first
order, or M where a checkpoint takes longer than 2 M (J. W. Young, CACM 17(9), 1974; J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, expm1, sqrt

LARGEST = 700.0
"""The largest exponent of a float64."""
LEAST = 1e-6
"""The least share of time with which a training is taken to go on."""


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
    stopped, mean = state_bytes / failures.bytes_per_s, failures.mtbf_s
    share = stopped / (2 * mean)
    every = mean
    if share < 1:
        every = sqrt(2 * stopped * mean) * (1 + sqrt(share) / 3 + share / 9) - stopped
    every = max(every, 1.0)
    restart, work = failures.restart_s / mean, (every + stopped) / mean
    if restart + work > LARGEST:
        return Goodput(0.0, every)
    kept = every / (mean * exp(restart) * expm1(work))
    return Goodput(kept if kept > LEAST else 0.0, every)
