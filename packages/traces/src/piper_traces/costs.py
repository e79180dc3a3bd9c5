"""Make costs of a trace: `piper simulate --costs` then predicts from measured durations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from piper_ir.ground.errors import FormatError
from piper_ir.ground.trace import Span
from piper_ir.plan.plan import Instr, Part, Plan, RolePlan
from piper_ir.plan.plan_bytes import PlanBytes
from piper_ir.program.costs import (
    CommDuration,
    Costs,
    Duration,
    HostCosts,
    Origin,
    PartDuration,
    StepDuration,
)
from piper_ir.program.ops import COMM, Comm, Compute, cost_op, message_op
from piper_ir.program.program import Step
from piper_simulator import Cluster, CostModel
from piper_traces.matching import Matched


def measured_costs(
    plan: Plan, matched: Matched, model: CostModel, cluster: Cluster, origin: Origin
) -> Costs:
    """Return the durations of steps, other ops and messages, each the mean of its measurements.

    With means the same strategy takes the measured time again, a rare long instruction included; medians leave it out.
    An instruction of several parts is shared out among them as the cost model weighs them. The messages inside of a
    step are taken off as the model predicts them, since costs of steps are without these. A message lasts from the last
    arrival of a rank to its end.

    Raises FormatError if no instruction was measured.
    """
    if not matched.trace.spans:
        raise FormatError("no instruction of the plan was measured, so that no costs follow")
    steps: dict[tuple[str, Step], list[float]] = defaultdict(list)
    chunk_of: dict[tuple[str, Step], str] = {}
    others: dict[tuple[str, int], list[float]] = defaultdict(list)
    traffic = PlanBytes(plan)
    for role, instr, span in _spans(plan, matched):
        if isinstance(instr.parts[0].op, COMM):
            continue
        for part, seconds in _shared_out(role, instr, span.end - span.start, model):
            if isinstance(part.op, Compute):
                step = part.op.step
                key = plan.chunk(part.op.variant).cost_code(step), step
                steps[key].append(seconds)
                chunk_of.setdefault(key, part.op.chunk)
            else:
                amount = traffic.memory_bytes(role, part)
                others[cost_op(part.op), amount].append(seconds)
    rows = plan.rows
    return Costs(
        comm=tuple(_messages(plan, matched, traffic, cluster)),
        steps=tuple(
            StepDuration(code, step, rows, Duration(fmean(s)), chunk_of[code, step])
            for (code, step), s in sorted(steps.items())
        ),
        parts=tuple(
            PartDuration(op, amount, Duration(fmean(s)))
            for (op, amount), s in sorted(others.items())
        ),
        host=_host(plan, matched) if cluster.synchronous else None,
        origin=origin,
    )


def _host(plan: Plan, matched: Matched) -> HostCosts | None:
    """Return the median seconds from one instruction of compute to the next; None if each waits for a message.

    Where the host is the device that is the time to issue one. A message takes nothing beyond its own span.
    """
    gaps = []
    for (role, _, before), (_, instr, span) in pairwise(_spans(plan, matched)):
        beside = (before.rank, before.instr + 1) == (span.rank, span.instr)
        computes = all(
            not isinstance(i.parts[0].op, COMM) for i in (role.program[before.instr], instr)
        )
        if beside and computes and not instr.waits:
            gaps.append(max(0.0, span.start - before.end))
    return HostCosts(median(gaps), 0.0) if gaps else None


def _spans(plan: Plan, matched: Matched) -> Iterator[tuple[RolePlan, Instr, Span]]:
    for span in matched.trace.spans:
        role = plan.role_of(span.rank)
        yield role, role.program[span.instr], span


def _shared_out(
    role: RolePlan, instr: Instr, seconds: float, model: CostModel
) -> Iterator[tuple[Part, float]]:
    """Yield each part of an instruction with its own seconds, without the messages inside of it."""
    works = [
        model.work(role, replace(instr, parts=(part,), waits=(), seconds=None))
        for part in instr.parts
    ]
    own = [w.seconds - w.inside_s for w in works]
    left = max(0.0, seconds - sum([w.inside_s for w in works]))
    for part, weight in zip(instr.parts, own, strict=True):
        yield part, left * weight / sum(own) if sum(own) else left / len(own)


def _messages(
    plan: Plan, matched: Matched, traffic: PlanBytes, cluster: Cluster
) -> Iterator[CommDuration]:
    """Yield the durations of messages by op, bytes, ranks and nodes."""
    count: dict[tuple[int, str], int] = defaultdict(int)
    meetings: dict[tuple[str, tuple[int, ...], int], list[Span]] = defaultdict(list)
    kinds: dict[tuple[str, tuple[int, ...], int], tuple[str, int]] = {}
    for _, instr, span in _spans(plan, matched):
        part = instr.parts[0]
        if not isinstance(part.op, COMM):
            continue
        members = plan.peers(plan.channel(part.op.channel), span.rank)
        n = count[span.rank, part.op.channel]
        count[span.rank, part.op.channel] += 1
        meetings[part.op.channel, members, n].append(span)
        kinds[part.op.channel, members, n] = _kind(part.op, part, traffic)
    seconds: dict[tuple[str, int, int, int], list[float]] = defaultdict(list)
    for key, spans in meetings.items():
        op, nbytes = kinds[key]
        members = key[1]
        nodes = len({cluster.node_of(r) for r in members})
        lasted = max(s.end for s in spans) - max(s.start for s in spans)
        seconds[op, nbytes, len(members), nodes].append(max(0.0, lasted))
    for (op, nbytes, group, nodes), lasts in sorted(seconds.items()):
        yield CommDuration(op, nbytes, group, Duration(fmean(lasts)), nodes)


def _kind(op: Comm, part: Part, traffic: PlanBytes) -> tuple[str, int]:
    return message_op(op), traffic.message_bytes(op, part)
