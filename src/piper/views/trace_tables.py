"""Show traces of the profiler as tables, alone and beside a prediction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from piper_ir.plan.phases import PHASES, instr_label
from piper_ir.plan.plan import Plan
from piper_ir.tools import count_text, size_text, time_text
from piper_report import Table
from piper_simulator import Simulation
from piper_traces import Breakdown, Matched, MatchedMessages, Straggling

MOST = 16
"""The most rows of a table; a note counts the others."""
TRUSTED = 0.5
"""The share of a plan's messages below which a trace is taken to be of another job."""


def breakdown_tables(ranks: Sequence[Breakdown]) -> Iterator[Table]:
    """Yield where the time of each rank's step went, and its messages by group."""
    slowest = sorted(ranks, key=lambda b: (-b.step_s, b.rank))[:MOST]
    rows = tuple(
        (
            f"rank {b.rank}" if b.rank >= 0 else "rank not said",
            time_text(b.step_s),
            _share(b.compute_s, b),
            _share(b.exposed_s, b),
            _share(b.copy_s, b),
            _share(b.idle_s, b),
            _share(b.gaps.seconds, b) if b.gaps.known else "-",
        )
        for b in sorted(slowest, key=lambda b: b.rank)
    )
    steps = {b.steps for b in ranks}
    notes = [] if steps == {1} else ["means over the marked steps after the first"]
    if not any(b.gaps.known for b in ranks):
        notes.append(
            "compute is that of operators; a report counts instructions, with Python's time"
        )
    if len(ranks) > MOST:
        notes.append(f"{len(ranks) - MOST} faster ranks are not shown")
    columns = "", "step", "compute", "exposed messages", "copies", "idle", "of it for the host"
    yield Table("where the time of a step went", columns, rows, tuple(notes))
    worst = max(ranks, key=lambda b: b.exposed_s)
    if worst.traffic:
        yield Table(
            f"messages of {f'rank {worst.rank}' if worst.rank >= 0 else 'a rank'}, which waits longest for them",
            ("group", "op", "per step", "bytes", "time", "exposed"),
            tuple(
                (
                    t.group,
                    t.op,
                    str(t.count),
                    size_text(t.nbytes) if t.nbytes else "-",
                    time_text(t.seconds),
                    time_text(t.exposed_s),
                )
                for t in worst.traffic[:MOST]
            ),
            (),
        )
    kinds = sorted({kind for b in ranks for kind in b.by_kind})
    yield Table(
        "kernels by kind, mean of the ranks",
        ("", "time per step"),
        tuple(
            (k, time_text(sum(b.by_kind.get(k, 0.0) for b in ranks) / len(ranks))) for k in kinds
        ),
        (),
    )


def straggler_table(found: Sequence[Straggling]) -> Table:
    """Return how far apart ranks arrive at their collectives."""
    rows = tuple(
        (
            s.group,
            s.op,
            str(s.count),
            time_text(s.spread_s),
            f"rank {s.last} ({s.share:.0%})" if s.share else "-",
        )
        for s in found[:MOST]
    )
    return Table(
        "arrivals at collectives",
        ("group", "op", "count", "mean spread", "most often last"),
        rows,
        (),
    )


def _share(seconds: float, of: Breakdown) -> str:
    return f"{time_text(seconds)} ({seconds / of.step_s:.0%})" if of.step_s else time_text(seconds)


def instruction_seconds(
    plan: Plan, matched: Matched, predicted: Simulation
) -> dict[str, tuple[int, float, float]]:
    """Return kind of instruction -> its number on the traced ranks, measured and predicted seconds of all."""
    foreseen = {(s.rank, s.instr): s.end - s.start for s in predicted.trace.spans}
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for s in matched.trace.spans:
        phase = instr_label(plan.role_of(s.rank).program[s.instr]).phase
        row = totals[PHASES[phase]]
        row[0] += 1
        row[1] += s.end - s.start
        row[2] += foreseen[s.rank, s.instr]
    return {kind: (int(n), measured, foresaw) for kind, (n, measured, foresaw) in totals.items()}


def instruction_table(plan: Plan, matched: Matched, predicted: Simulation) -> Table:
    """Return the measured time of a plan's instructions beside the predicted, by kind."""
    rows = [_beside("step", 1, matched.step_s, predicted.step_s)] if matched.step_s else []
    seconds = instruction_seconds(plan, matched, predicted)
    rows += [_beside(kind, *numbers) for kind, numbers in seconds.items()]
    notes = ["messages last as long as their ranges, with the waiting for their peers"]
    notes += differences(matched)
    return Table(
        "instructions of the plan, all traced ranks together",
        ("", "count", "measured", "predicted", "predicted / measured"),
        tuple(rows),
        tuple(notes),
    )


def differences(matched: Matched) -> list[str]:
    """Return in words which instructions have no range in a trace, and which ranges no instruction has."""
    both = (
        (matched.missing, "without a range in the trace"),
        (matched.unplanned, "of the trace that the plan lacks"),
    )
    return [
        f"{count_text(len(names), 'instruction')} {said}: {', '.join(names[:3])}"
        f"{', ...' if len(names) > 3 else ''}"
        for names, said in both
        if names
    ]


def _beside(name: str, n: int, measured: float, predicted: float) -> tuple[str, ...]:
    ratio = f"{predicted / measured:.2f}" if measured else "-"
    return name, str(n), time_text(measured), time_text(predicted), ratio


def message_tables(found: MatchedMessages) -> Iterator[Table]:
    """Yield the messages of plan and trace, and the compute between them."""
    rows = tuple(
        (
            f"{r.op} over {r.axes}" if r.axes else r.op,
            size_text(r.nbytes),
            str(r.planned),
            str(r.traced),
            time_text(r.measured_s),
            time_text(r.predicted_s),
        )
        for r in sorted(found.rows, key=lambda r: -r.predicted_s)[:MOST]
    )
    notes = [f"{found.matched:.0%} of the plan's messages are in the trace"]
    if found.matched < TRUSTED:
        notes.append("warning: that is so few that the trace may be of another job or strategy")
    if found.unplanned:
        (op, nbytes, size), n = max(found.unplanned.items(), key=lambda u: u[1] * u[0][1])
        notes.append(
            f"{sum(found.unplanned.values())} messages of the trace are not in the plan, most of their bytes in "
            f"{n} x {op} of {size_text(nbytes)} in groups of {size}"
        )
    columns = "", "size", "in the plan", "in the trace", "measured", "predicted"
    yield Table("messages of the plan, per step", columns, rows, tuple(notes))
    if found.windows:
        yield Table(
            "compute between matched messages",
            ("instructions", "times", "measured", "predicted", "predicted / measured"),
            tuple(_beside(w.kinds, w.count, w.measured_s, w.predicted_s) for w in found.windows),
            (),
        )
