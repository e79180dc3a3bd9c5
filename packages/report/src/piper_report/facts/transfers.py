"""Find the spans of a trace that are the ends of one transfer: a Send and its Recv, or all members of a collective."""

from __future__ import annotations

from collections.abc import Iterable

from piper_ir.ground.trace import Span, Trace
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import COMM


def transfers(plan: Plan, trace: Trace) -> list[tuple[Span, ...]]:
    """Return the spans of each transfer, by rank.

    The k-th use of a channel by one rank meets the k-th by every other (rule 3 of `piper_ir.fold.timing`); a transfer
    of which a rank's span is missing has fewer spans. Ranks that are alike count as one.
    """
    uses: dict[tuple[str, tuple[int, ...], int], list[Span]] = {}
    role_of = {rank: role for role in plan.roles for rank in role.ranks}
    same = trace.shown_as()
    for rank, spans in _by_rank(trace.spans).items():
        role, counts = role_of[rank], dict[str, int]()
        members: dict[str, tuple[int, ...]] = {}
        known = {s.instr: s for s in spans}
        for index, instr in enumerate(role.program):
            op = instr.parts[0].op
            if not isinstance(op, COMM):
                continue
            k = counts[op.channel] = counts.get(op.channel, -1) + 1
            if index in known:
                if op.channel not in members:
                    peers = plan.peers(plan.channel(op.channel), rank)
                    members[op.channel] = (
                        tuple(sorted({same.get(p, p) for p in peers})) if same else peers
                    )
                uses.setdefault((op.channel, members[op.channel], k), []).append(known[index])
    return [tuple(spans) for spans in uses.values()]


def _by_rank(spans: Iterable[Span]) -> dict[int, list[Span]]:
    spans_by_rank: dict[int, list[Span]] = {}
    for s in spans:
        spans_by_rank.setdefault(s.rank, []).append(s)
    return dict(sorted(spans_by_rank.items()))
