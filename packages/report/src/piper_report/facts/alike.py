"""Find the ranks of a trace that do the same at the same times, so that one of them stands for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from piper_ir.ground.trace import Trace
from piper_ir.plan.plan import Plan

Groups = Mapping[int, tuple[int, ...]]
"""The ranks that are alike, by the first of them, which stands for all."""


def alike_ranks(traces: Sequence[Trace], plan: Plan | None) -> Groups:
    """Return all ranks of the traces in groups, by the first of each, ascending.

    Measured ranks are never alike. Simulated ones are when the trace says so, or when they have one role and equal
    spans.
    """
    if any(trace.kind == "executed" for trace in traces):
        return {
            rank: (rank,)
            for rank in sorted(
                {s.rank for t in traces for s in t.spans}
                | {r for t in traces for r in t.shown_as()}
            )
        }
    said = {ranks[0]: ranks for trace in traces for ranks in trace.alike}
    return dict(sorted((said or _equal(traces, plan)).items()))


def _equal(traces: Sequence[Trace], plan: Plan | None) -> Groups:
    role_of = (
        {rank: role.role for role in plan.roles for rank in role.ranks} if plan is not None else {}
    )
    does: dict[int, list[object]] = {}
    for number, trace in enumerate(traces):
        for s in trace.spans:
            does.setdefault(s.rank, []).append((number, s.stream, s.instr, s.start, s.end))
    ranks_by_work: dict[object, list[int]] = {}
    for rank in sorted(does):
        ranks_by_work.setdefault((role_of.get(rank, rank), tuple(does[rank])), []).append(rank)
    return {ranks[0]: tuple(ranks) for ranks in ranks_by_work.values()}
