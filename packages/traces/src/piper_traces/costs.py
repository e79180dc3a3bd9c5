"""Make costs of a trace: `piper simulate --costs` then predicts from measured durations."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TypeAlias

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
from piper_simulator import Cluster, CostModel
from piper_traces.matching import Matched

_Key: TypeAlias = tuple[str, str, int]
"The code, step and rows of a chunk's step; no code, the op and bytes of another part."
ROUNDS = 1000
CLOSE = 1e-5
"The relative change of a part in a round below which the shares are found."


def measured_costs(
    plan: Plan, matched: Matched, model: CostModel, cluster: Cluster, origin: Origin
) -> Costs:
    """Return the durations of steps, other ops and messages, each the mean of its measurements.

    With means the same strategy takes the measured time again, a rare long instruction included; medians leave it out.
    Of the ranks of a role the one that computes longest counts, since the others wait for it where their gradients are
    reduced. An instruction of several parts is shared out among them (`_fitted`). The messages inside of a step are
    taken off as the model predicts them, since costs of steps are without these. A message lasts from the last arrival
    of a rank to its end.

    Raises FormatError if no instruction was measured.
    """
    if not matched.trace.spans:
        raise FormatError("no instruction of the plan was measured, so that no costs follow")
    traffic = PlanBytes(plan)
    measured: dict[tuple[_Key, ...], list[float]] = defaultdict(list)
    predicted: dict[_Key, list[float]] = defaultdict(list)
    chunk_of: dict[_Key, str] = {}
    slowest = _slowest(plan, matched)
    for role, instr, span in _spans(plan, matched):
        if instr.comm or span.rank not in slowest:
            continue
        keys: list[_Key] = []
        inside = 0.0
        key: _Key
        for part in instr.parts:
            work = model.work(role, replace(instr, parts=(part,), waits=(), seconds=None))
            if isinstance(part.op, Compute):
                key = plan.chunk(part.op.variant).cost_code(part.op.step), part.op.step, plan.rows
                chunk_of.setdefault(key, part.op.chunk)
            else:
                key = "", cost_op(part.op), traffic.memory_bytes(role, part)
            keys.append(key)
            predicted[key].append(work.seconds - work.inside_s)
            inside += work.inside_s
        measured[tuple(sorted(keys))].append(max(0.0, span.end - span.start - inside))
    found = sorted(_fitted(measured, {k: fmean(s) for k, s in predicted.items()}).items())
    return Costs(
        comm=tuple(_messages(plan, matched, traffic, cluster)),
        steps=tuple(
            StepDuration(code, step, n, Duration(s), chunk_of[code, step, n])  # type: ignore[arg-type]  # a step
            for (code, step, n), s in found
            if code
        ),
        parts=tuple(PartDuration(op, n, Duration(s)) for (code, op, n), s in found if not code),
        host=_host(plan, matched) if cluster.synchronous else None,
        origin=origin,
    )


def _slowest(plan: Plan, matched: Matched) -> set[int]:
    """Return for each role the rank that computes longest."""
    computes: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for role, instr, span in _spans(plan, matched):
        if not instr.comm:
            computes[role.role][span.rank] += span.end - span.start
    return {max(of, key=of.__getitem__) for of in computes.values()}


def _fitted(
    measured: Mapping[tuple[_Key, ...], Sequence[float]], seconds: Mapping[_Key, float]
) -> dict[_Key, float]:
    """Return the seconds of each part such that the parts of an instruction add up to its measured mean if they can.

    It starts from predicted seconds, shares every measurement out among its parts in proportion to them, takes the mean
    of a part's shares as its seconds, and repeats: the iteration of Richardson and Lucy, which finds the non-negative
    solution of most likelihood. Where instructions differ in one part, such as the last stage's by the loss, they tell
    its seconds; parts that only occur together keep their predicted ratios.
    """
    now = {key: max(each, 1e-9) for key, each in seconds.items()}
    for _ in range(ROUNDS):
        shares: dict[_Key, float] = defaultdict(float)
        count: dict[_Key, int] = defaultdict(int)
        for keys, lasted in measured.items():
            factor = sum(lasted) / (sum([now[key] for key in keys]) or 1.0)
            for key in keys:
                shares[key] += factor * now[key]
                count[key] += len(lasted)
        before, now = now, {key: shares[key] / count[key] for key in now}
        if all(abs(now[key] - before[key]) <= CLOSE * before[key] for key in now):
            break
    return now


def _host(plan: Plan, matched: Matched) -> HostCosts | None:
    """Return the mean seconds from one instruction of compute to the next; None if each waits for a message.

    Where the host is the device that is the time to issue one. Messages issued between the two take the time by which
    it is longer.
    """
    spans = {(span.rank, span.instr): span for span in matched.trace.spans}
    issue: list[float] = []
    talk: list[tuple[float, int]] = []
    for rank in sorted({rank for rank, _ in spans}):
        ends: dict[str, list[float]] = defaultdict(list)
        before, messages = math.inf, 0
        for k, instr in enumerate(plan.role_of(rank).program):
            span = spans.get((rank, k))
            end = math.inf if span is None else span.end
            if instr.comm:
                messages += 1
            else:
                ready = all(ends[stream][n - 1] <= before for stream, n in instr.waits if n)
                if span is not None and before < math.inf and ready:
                    gap = max(0.0, span.start - before)
                    if messages:
                        talk.append((gap, messages))
                    else:
                        issue.append(gap)
                before, messages = end, 0
            ends[instr.stream].append(end)
    if not issue and not talk:
        return None
    each = fmean(issue) if issue else 0.0
    return HostCosts(each, fmean([max(0.0, gap - each) / n for gap, n in talk]) if talk else 0.0)


def _spans(plan: Plan, matched: Matched) -> Iterator[tuple[RolePlan, Instr, Span]]:
    for span in matched.trace.spans:
        role = plan.role_of(span.rank)
        yield role, role.program[span.instr], span


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
