"""Costs: durations that somebody measured, looked up or decided, each with its source, and where they come from.

A simulation takes a duration from here before it computes one, and `partition(at="cost")` weighs layers by it. Between
measured sizes, and up to a factor of 2 beyond them, durations are interpolated (`piper_ir.tools.interpolate`); further away
nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from piper_ir.errors import FormatError
from piper_ir.program import Step
from piper_ir.tools import Points, log_log, within
from piper_ir.trace import Source

K = TypeVar("K")
STEPS: tuple[Step, ...] = ("F", "I", "W")


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds, never negative, and where they come from. `spread`: the median absolute deviation of the repeats, in seconds."""

    seconds: float
    source: Source = "measured"
    spread: float = 0.0

    def __post_init__(self) -> None:
        for seconds in (self.seconds, self.spread):
            if not 0 <= seconds < float("inf"):
                raise FormatError(f"a duration is {seconds!r} seconds; a finite number that is not negative is needed")


@dataclass(frozen=True, slots=True)
class StepDuration:
    """One step of the chunks that share a code (`Chunk.code`), at `rows` rows per microbatch. `chunk`: the id of one of them."""

    code: str
    step: Step
    rows: int
    duration: Duration
    chunk: str = ""


@dataclass(frozen=True, slots=True)
class CommDuration:
    """The duration of one communication.

    op: "p2p" or a kind of `piper_ir.collectives`.
    bytes: of the message; of a collective, of its whole tensor.
    group, nodes: the number of ranks that take part (2 for p2p), and on how many nodes.
    busy_s: processor seconds that it takes on each rank, from computation that runs beside it.
    """

    op: str
    bytes: int
    group: int
    duration: Duration
    nodes: int = 1
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PartDuration:
    """Another op of the compute stream by its class name ("Load", "Add", "Update", ...) and the bytes of memory that it reads and
    writes (`piper_ir.plan_bytes`). "Batch" is the job's batch function for one microbatch; its `amount` counts rows."""

    op: str
    amount: int
    duration: Duration


@dataclass(frozen=True, slots=True)
class HostCosts:
    """`issue_s`: seconds of the issuing thread per instruction of the compute stream, beside its parts. `comm_s`: of a
    communication instruction, beside its message; it delays what is issued next. Spreads: as of a Duration."""

    issue_s: float
    comm_s: float
    issue_spread_s: float = 0.0
    comm_spread_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AllocatorCosts:
    """`context_bytes` of a process before its first tensor; `factor`: what it grew by at the peak over the bytes of tensors then
    alive."""

    context_bytes: int
    factor: float


@dataclass(frozen=True, slots=True)
class Origin:
    """Where and how costs were measured. `device`: `piper_ir.tools.machine_name`, or the accelerator's name; `cluster`: the
    name of the cluster for which they stand; `ranks` ran at once, each with `threads` threads; `program`: key of the program;
    `date` in ISO 8601; `repeats` of each duration, of which it is the median."""

    device: str
    cluster: str
    backend: str
    launcher: str
    ranks: int
    threads: int
    python: str
    torch: str
    program: str
    date: str
    repeats: int


@dataclass(frozen=True)
class Costs:
    """`compute`: chunk id -> step -> duration, at microbatches of `rows` rows; None when they hold at any (synthetic programs).
    It comes before `steps`, which holds measurements by code and rows. `comm`, `parts`, `host`, `allocator`: see their classes.
    `origin`: None for costs that nobody measured. JSON: `piper_ir.codec`."""

    compute: Mapping[str, Mapping[str, Duration]] = field(default_factory=dict)
    comm: tuple[CommDuration, ...] = ()
    rows: int | None = None
    steps: tuple[StepDuration, ...] = ()
    parts: tuple[PartDuration, ...] = ()
    host: HostCosts | None = None
    allocator: AllocatorCosts | None = None
    origin: Origin | None = None
    _steps: dict[tuple[str, str], _DurationsBySize] = field(init=False, repr=False, compare=False)
    _comm: dict[tuple[str, int, int], _DurationsBySize] = field(init=False, repr=False, compare=False)
    _busy: dict[tuple[str, int, int], _DurationsBySize] = field(init=False, repr=False, compare=False)
    _parts: dict[str, _DurationsBySize] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for chunk, found in self.compute.items():
            for step in found:
                if step not in STEPS:
                    raise FormatError(f"Costs: chunk {chunk!r} has a duration for step {step!r}; the steps are F, I and W")
        steps = (((s.code, s.step), s.rows, s.duration) for s in self.steps)
        comm = (((c.op, c.group, c.nodes), c.bytes, c.duration) for c in self.comm)
        busy = (((c.op, c.group, c.nodes), c.bytes, Duration(c.busy_s)) for c in self.comm)
        parts = ((p.op, p.amount, p.duration) for p in self.parts)
        for name, tables in (
            ("_steps", _tables(steps)), ("_comm", _tables(comm)), ("_busy", _tables(busy)), ("_parts", _tables(parts))
        ):  # fmt: skip
            object.__setattr__(self, name, tables)

    def of_compute(self, chunk: str, step: Step, code: str = "", rows: int | None = None) -> Duration | None:
        """The duration of one step of a chunk; None when it is not known. `code`, `rows`: of the chunk and its microbatches;
        without rows, at the most that were measured."""
        if (given := self.compute.get(chunk, {}).get(step)) is not None:
            return given
        table = self._steps.get((code, step))
        if table is None:
            return None
        return table.at(table.points[-1][0] if rows is None else rows)

    def of_comm(self, op: str, nbytes: int, group: int, nodes: int = 1) -> Duration | None:
        """The duration of a communication; None when it is not known. Below the smallest size measured (of at least two): that of
        the smallest."""
        table = self._comm.get((op, group, nodes))
        return None if table is None else table.at_least(nbytes)

    def busy_s(self, op: str, nbytes: int, group: int, nodes: int = 1) -> float:
        """Processor seconds that a communication takes from computation beside it on one rank; 0 when they are not known."""
        found = table.at_least(nbytes) if (table := self._busy.get((op, group, nodes))) is not None else None
        return found.seconds if found is not None else 0.0

    def of_part(self, op: str, amount: int) -> Duration | None:
        """The duration of another op of the compute stream; None when it is not known. Below the smallest amount measured (of at
        least two): that of the smallest."""
        table = self._parts.get(op)
        return None if table is None else table.at_least(amount)

    def rows_of(self, code: str, step: Step) -> tuple[int, ...]:
        """The numbers of rows at which a step of a code was measured, ascending."""
        table = self._steps.get((code, step))
        return () if table is None else tuple(x for x, _ in table.points)

    def bytes_of(self, op: str, group: int, nodes: int = 1) -> tuple[int, ...]:
        """The sizes at which a communication was measured, ascending."""
        table = self._comm.get((op, group, nodes))
        return () if table is None else tuple(x for x, _ in table.points)


@dataclass(frozen=True, slots=True)
class _DurationsBySize:
    """What was measured of one thing, by size, ascending."""

    points: Points
    exact: Mapping[int, Duration]

    def at(self, x: int) -> Duration | None:
        """Measured, or interpolated; None further than a factor of 2 outside of what was measured."""
        if (found := self.exact.get(x)) is not None:
            return found
        seconds = log_log(self.points, x)
        return None if seconds is None else Duration(seconds, "interpolated", self._spread(seconds))

    def at_least(self, x: int) -> Duration | None:
        """As `at`; below all points the first, for a smaller message takes no longer, and its latency is all of it."""
        if len(self.points) > 1 and x < self.points[0][0] and not within(self.points, x):
            return Duration(self.points[0][1], "interpolated", self.exact[self.points[0][0]].spread)
        return self.at(x)

    def _spread(self, seconds: float) -> float:
        """As large a part of the duration as at the point where it was largest."""
        return seconds * max((d.spread / d.seconds for d in self.exact.values() if d.seconds), default=0.0)


def _tables(entries: Iterable[tuple[K, int, Duration]]) -> dict[K, _DurationsBySize]:
    found: dict[K, dict[int, Duration]] = {}
    for key, x, duration in entries:
        if x in found.setdefault(key, {}):
            raise FormatError(f"Costs: two durations of {key} at {x}; one is needed")
        found[key][x] = duration
    return {k: _DurationsBySize(tuple((x, d[x].seconds) for x in sorted(d)), d) for k, d in found.items()}
