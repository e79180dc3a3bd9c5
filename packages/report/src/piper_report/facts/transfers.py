"""Find the spans of a trace that are the ends of one transfer: a Send and its Recv, or all members of a collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from piper_ir.ground.trace import Span, Trace
from piper_ir.plan.plan import Plan
from piper_ir.plan.plan_groups import Channel
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


def begun(plan: Plan, trace: Trace) -> dict[Span, float]:
    """Return when each span's transfer had all its ends, in seconds; before that, a measured rank waits."""
    return {s: max(x.start for x in group) for group in transfers(plan, trace) for s in group}


def communication_axes(plan: Plan) -> Mapping[tuple[str, int], str]:
    """Return the mesh axes over which each communication goes, by role and index: "pp", or "dp, cp" for several."""
    over = {channel.id: ", ".join(_axes(plan, channel)) for channel in plan.channels}
    return {
        (role.role, index): over[op.channel]
        for role, index, instr in plan.instructions()
        if isinstance(op := instr.parts[0].op, COMM)
    }


def _axes(plan: Plan, channel: Channel) -> list[str]:
    """Return the axes in which the ranks of a channel differ, within one role or because its roles are placed apart."""
    placed = [plan.role(role).placed for role in channel.roles]
    return [
        axis
        for axis in reversed(plan.mesh.axes)
        if axis in channel.over or len({place.get(axis) for place in placed}) > 1
    ]


def _by_rank(spans: Iterable[Span]) -> dict[int, list[Span]]:
    spans_by_rank: dict[int, list[Span]] = {}
    for s in spans:
        spans_by_rank.setdefault(s.rank, []).append(s)
    return dict(sorted(spans_by_rank.items()))
