"""Hold durations that somebody measured, looked up or decided, each with its source.

A simulation takes a duration from here before it computes one, and `partition(at="cost")` weighs layers by it.
Between measured sizes, and up to a factor of 2 beyond them, durations are interpolated (`piper_ir.tools.interpolate`);
further away nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from piper_ir.ground.errors import FormatError
from piper_ir.ground.trace import Source
from piper_ir.program.program import Step
from piper_ir.tools import Points, log_log, within

K = TypeVar("K")
STEPS: tuple[Step, ...] = ("F", "R", "I", "W", "B")


SCALARS = ("Add", "Zeros")
"""The ops on scalars that a profile may not have measured: weights of losses."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Hold a duration in seconds, never negative, with its source.

    Attributes:
        spread: the median absolute deviation of the repeats, in seconds.
    """

    seconds: float
    source: Source = "measured"
    spread: float = 0.0

    def __post_init__(self) -> None:
        for seconds in (self.seconds, self.spread):
            if not 0 <= seconds < float("inf"):
                raise FormatError(
                    f"a duration is {seconds!r} seconds; a finite number that is not negative is needed"
                )


@dataclass(frozen=True, slots=True)
class StepDuration:
    """Hold the duration of one step of the chunks that share a code.

    Attributes:
        code: the code of the chunks (`Chunk.code`).
        rows: rows of the microbatch at which it was measured.
        chunk: the id of one of the chunks.
    """

    code: str
    step: Step
    rows: int
    duration: Duration
    chunk: str = ""


@dataclass(frozen=True, slots=True)
class CommDuration:
    """Hold the duration of one communication.

    Attributes:
        op: "p2p", or a kind of `piper_ir.program.collectives`.
        bytes: the bytes of the message; for a collective, the bytes of the whole tensor.
        group: the number of ranks that take part (2 for p2p).
        nodes: the number of nodes on which these ranks are.
        busy_s: processor seconds that it takes on each rank from computation beside it.
    """

    op: str
    bytes: int
    group: int
    duration: Duration
    nodes: int = 1
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PartDuration:
    """Hold the duration of an op of the compute stream that is no step of a chunk.

    Attributes:
        op: the op's class name ("Load", "Add", "Update", ...), or "Batch": the job's batch function for one microbatch.
        amount: bytes of memory that the op reads and writes (`piper_ir.plan.plan_bytes`); for "Batch" the number of
            rows.
    """

    op: str
    amount: int
    duration: Duration


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Hold the durations of the thread that issues instructions.

    Attributes:
        issue_s: seconds per instruction of the compute stream, without its parts.
        comm_s: seconds per communication instruction, without its message; they delay the next instructions.
        issue_spread_s: the spread of `issue_s`, as in a Duration.
        comm_spread_s: the spread of `comm_s`, as in a Duration.
    """

    issue_s: float
    comm_s: float
    issue_spread_s: float = 0.0
    comm_spread_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AllocatorCosts:
    """Hold the memory that a process takes beside the bytes of its tensors.

    Attributes:
        context_bytes: bytes of a process before its first tensor.
        factor: growth of the process at the peak, per byte of the tensors alive then.
    """

    context_bytes: int
    factor: float


@dataclass(frozen=True, slots=True)
class Origin:
    """Say where and how costs were measured.

    Attributes:
        device: the machine (`piper_ir.tools.machine_name`), or the accelerator's name.
        cluster: the name of the cluster for which they stand.
        launcher: the launcher that started the processes.
        ranks: how many ranks ran at once.
        program: the key of the program.
        date: the date in ISO 8601.
        repeats: how often each duration was measured; it is the median.
    """

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
    """Hold the known durations of a job; `piper_ir.ground.codec` reads and writes them as JSON.

    Attributes:
        compute: chunk id -> step -> duration; it comes before `steps`.
        rows: the rows of a microbatch at which `compute` holds; None when it holds at any (synthetic programs).
        steps: measured durations of steps, by code and rows.
        parts: durations of the other ops of the compute stream.
        host: durations of issuing, or None.
        allocator: memory beside tensors, or None.
        origin: where and how they were measured; None for costs that nobody measured.
    """

    compute: Mapping[str, Mapping[str, Duration]] = field(default_factory=dict)
    comm: tuple[CommDuration, ...] = ()
    rows: int | None = None
    steps: tuple[StepDuration, ...] = ()
    parts: tuple[PartDuration, ...] = ()
    host: HostCosts | None = None
    allocator: AllocatorCosts | None = None
    origin: Origin | None = None
    _steps: dict[tuple[str, str], _DurationsBySize] = field(init=False, repr=False, compare=False)
    _comm: dict[tuple[str, int, int], _DurationsBySize] = field(
        init=False, repr=False, compare=False
    )
    _busy: dict[tuple[str, int, int], _DurationsBySize] = field(
        init=False, repr=False, compare=False
    )
    _parts: dict[str, _DurationsBySize] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for chunk, by_step in self.compute.items():
            for step in by_step:
                if step not in STEPS:
                    raise FormatError(
                        f"Costs: chunk {chunk!r} has a duration for step {step!r}; the steps are F, R, I, W and B"
                    )
        self._check_sizes()
        steps = (((s.code, s.step), s.rows, s.duration) for s in self.steps)
        comm = (((c.op, c.group, c.nodes), c.bytes, c.duration) for c in self.comm)
        busy = (((c.op, c.group, c.nodes), c.bytes, Duration(c.busy_s)) for c in self.comm)
        parts = ((p.op, p.amount, p.duration) for p in self.parts)
        for name, tables in (
            ("_steps", _tables(steps)), ("_comm", _tables(comm)), ("_busy", _tables(busy)), ("_parts", _tables(parts))
        ):  # fmt: skip
            object.__setattr__(self, name, tables)

    def _check_sizes(self) -> None:
        """Raise FormatError for a size at which nothing can have been measured."""
        sizes = [(f"{s.step} of {s.code}", "rows", s.rows, 1) for s in self.steps]
        sizes += [(c.op, "bytes", c.bytes, 0) for c in self.comm] + [
            (p.op, "amount", p.amount, 0) for p in self.parts
        ]
        for what, name, size, least in sizes:
            if size < least:
                raise FormatError(
                    f"Costs: the duration of {what} has {name} {size}; a number from {least} is expected"
                )

    def of_compute(
        self, chunk: str, step: Step, code: str = "", rows: int | None = None
    ) -> Duration | None:
        """Return the duration of one step of a chunk; None when it is not known.

        `code` is the chunk's code, `rows` the rows of its microbatches; without rows, the largest measured number
        counts.
        """
        if (duration := self.compute.get(chunk, {}).get(step)) is not None:
            return duration
        table = self._steps.get((code, step))
        if table is None:
            return None
        return table.at(table.points[-1][0] if rows is None else rows)

    def of_comm(self, op: str, nbytes: int, group: int, nodes: int = 1) -> Duration | None:
        """Return the duration of a communication; None when it is not known.

        A size below the smallest of at least two measured ones has the duration of the smallest.
        """
        table = self._comm.get((op, group, nodes))
        return None if table is None else table.at_least(nbytes)

    def busy_s(self, op: str, nbytes: int, group: int, nodes: int = 1) -> float:
        """Return the processor seconds that a communication takes from computation on each rank; 0 if not known."""
        busy = (
            table.at_least(nbytes)
            if (table := self._busy.get((op, group, nodes))) is not None
            else None
        )
        return busy.seconds if busy is not None else 0.0

    def of_part(self, op: str, amount: int) -> Duration | None:
        """Return the duration of another op of the compute stream; None when it is not known.

        An amount below the smallest of at least two measured ones has the duration of the smallest. A scalar that is
        added up or zero takes as long as the one that a Seed writes, unless it was measured.
        """
        table = self._parts.get(op)
        if table is None and op in SCALARS and (seed := self._parts.get("Seed")) is not None:
            return seed.at_least(seed.points[0][0])
        return None if table is None else table.at_least(amount)

    def rows_of(self, code: str, step: Step) -> tuple[int, ...]:
        """Return the numbers of rows at which a step of a code was measured, ascending."""
        table = self._steps.get((code, step))
        return () if table is None else tuple(x for x, _ in table.points)

    def bytes_of(self, op: str, group: int, nodes: int = 1) -> tuple[int, ...]:
        """Return the sizes at which a communication was measured, ascending."""
        table = self._comm.get((op, group, nodes))
        return () if table is None else tuple(x for x, _ in table.points)


@dataclass(frozen=True, slots=True)
class _DurationsBySize:
    """Hold the measured durations of one thing, by size, ascending."""

    points: Points
    exact: Mapping[int, Duration]

    def at(self, x: int) -> Duration | None:
        """Return the measured or interpolated duration; None beyond a factor of 2 outside of the measured sizes."""
        if (measured := self.exact.get(x)) is not None:
            return measured
        seconds = log_log(self.points, x)
        return None if seconds is None else Duration(seconds, "interpolated", self._spread(seconds))

    def at_least(self, x: int) -> Duration | None:
        """Return the same as `at`, but the smallest measured duration for smaller sizes, where latency remains."""
        if len(self.points) > 1 and x < self.points[0][0] and not within(self.points, x):
            return Duration(self.points[0][1], "interpolated", self.exact[self.points[0][0]].spread)
        return self.at(x)

    def _spread(self, seconds: float) -> float:
        """Return a spread with the largest share of the duration that any point has."""
        return seconds * max(
            (d.spread / d.seconds for d in self.exact.values() if d.seconds), default=0.0
        )


def _tables(entries: Iterable[tuple[K, int, Duration]]) -> dict[K, _DurationsBySize]:
    by_size: dict[K, dict[int, Duration]] = {}
    for key, x, duration in entries:
        if x in by_size.setdefault(key, {}):
            raise FormatError(f"Costs: two durations of {key} at {x}; one is needed")
        by_size[key][x] = duration
    return {
        k: _DurationsBySize(tuple((x, d[x].seconds) for x in sorted(d)), d)
        for k, d in by_size.items()
    }
