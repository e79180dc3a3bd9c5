"""Costs: durations that somebody measured, looked up or decided, each with its source.

A simulation takes a duration from here before it computes one; `partition(at="cost")` weighs layers by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from piper_ir.errors import FormatError
from piper_ir.program import Step
from piper_ir.trace import Source


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds, never negative, and where they come from."""

    seconds: float
    source: Source = "measured"

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < float("inf"):
            raise FormatError(f"a duration is {self.seconds!r} seconds; a finite number that is not negative is needed")


@dataclass(frozen=True, slots=True)
class CommDuration:
    """One communication: `op` is "p2p" or "all_reduce", `bytes` of the message on one rank, `group` the number of ranks (2 for
    p2p)."""

    op: str
    bytes: int
    group: int
    duration: Duration


@dataclass(frozen=True)
class Costs:
    """`compute`: chunk id -> step -> duration. `comm`: exact sizes, no interpolation. `rows` is the row count of a
    microbatch at which the compute durations hold; None when they hold at any (synthetic programs). JSON: `piper_ir.codec`."""

    compute: Mapping[str, Mapping[str, Duration]] = field(default_factory=dict)
    comm: tuple[CommDuration, ...] = ()
    rows: int | None = None
    _comm: dict[tuple[str, int, int], Duration] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for chunk, steps in self.compute.items():
            for step in steps:
                if step not in ("F", "I", "W"):
                    raise FormatError(f"Costs: chunk {chunk!r} has a duration for step {step!r}; the steps are F, I and W")
        object.__setattr__(self, "_comm", {(c.op, c.bytes, c.group): c.duration for c in self.comm})

    def of_compute(self, chunk: str, step: Step) -> Duration | None:
        """The duration of one step of a chunk; None when it is not known."""
        return self.compute.get(chunk, {}).get(step)

    def of_comm(self, op: str, nbytes: int, group: int) -> Duration | None:
        """The duration of a communication of exactly this size; None when it is not known."""
        return self._comm.get((op, nbytes, group))
