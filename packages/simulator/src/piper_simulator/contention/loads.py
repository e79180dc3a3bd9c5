"""Compute the load of all messages of a plan: communication instructions, and messages inside of steps.

An instruction with messages inside of its steps is a sequence of pieces: compute, and messages that share links with
others as any message does. While one of them runs, the rank does not compute. Of messages beside kernels of the step,
the kernels beside them are in their piece, at the rate of compute that the messages leave: it ends with the later of
the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from piper_ir.fold.timing import Prepared
from piper_ir.plan.plan import Plan
from piper_simulator.contention.flows import PlanLoads, Wiring, first_ops, slows_anything
from piper_simulator.contention.rates import Flow, compute_rate
from piper_simulator.durations.cost_model import StepMessages, Work
from piper_simulator.durations.instances import meeting_inside

TimedPiece = tuple[float, Flow | None]
"""A part of an instruction: seconds of compute, or a message with its seconds."""
ROUNDS = 4
"""The most rounds of compute and messages that an instruction is run as.

A plan does not say where in a step its messages stand; they are spread evenly.
"""


@dataclass(frozen=True)
class SharedFlows:
    """Hold the loads of a plan's messages.

    Attributes:
        messages: the load of each group of the prepared plan.
        inside: node -> the pieces of an instruction with messages inside of its steps.
    """

    messages: Sequence[Flow]
    inside: Mapping[int, Sequence[TimedPiece]] = field(default_factory=dict)

    @property
    def slow_anything(self) -> bool:
        """Return whether any message can slow anything down."""
        inside = (flow for pieces in self.inside.values() for _, flow in pieces if flow is not None)
        return slows_anything(self.messages) or any(f.seconds and f.shares for f in inside)


def all_loads(plan: Plan, prepared: Prepared, work: Sequence[Work], wires: Wiring) -> SharedFlows:
    """Return the loads of all messages, given the work per node; raise the errors of `message_flows`."""
    inside = [(role, node) for role, node in _nodes(prepared) if work[node].inside]
    within = {(role, m.axis, m.op) for role, node in inside for m in work[node].inside}
    channels = {
        (role, axis): meeting_inside(plan, axis, plan.role(role))
        for role, axis, _ in sorted(within)
    }
    loads = PlanLoads(
        plan,
        prepared.roles,
        wires,
        [(channels[role, axis], op) for role, axis, op in sorted(within)],
    )
    ops = first_ops(plan)
    messages = [loads.of_group(ops[members[0]], work[members[0]]) for members in prepared.groups]
    known: dict[tuple[str, float, tuple[StepMessages, ...]], Sequence[TimedPiece]] = {}
    pieces = {}
    for role, node in inside:
        key = role, work[node].seconds, work[node].inside
        if key not in known:
            flows = [
                loads.flow(channels[role, m.axis], m.op, Work(m.seconds, "formula", m.bytes))
                for m in work[node].inside
            ]
            known[key] = _pieces(work[node], flows)
        pieces[node] = known[key]
    return SharedFlows(messages, pieces)


def _nodes(prepared: Prepared) -> Iterator[tuple[str, int]]:
    for r, role in enumerate(prepared.roles):
        for node in range(prepared.offsets[r], prepared.offsets[r + 1]):
            yield role, node


def _pieces(work: Work, flows: Sequence[Flow]) -> Sequence[TimedPiece]:
    """Return an instruction as rounds of compute and of the messages inside, whose loads are given."""
    rounds = min(ROUNDS, max([m.count for m in work.inside]))
    hidden = sum([m.hidden_s for m in work.inside])
    once: list[TimedPiece] = [(max(0.0, work.seconds - work.inside_s - hidden) / rounds, None)]
    for message, flow in zip(work.inside, flows, strict=True):
        seconds = flow.seconds
        if message.hidden_s:
            rate = min([compute_rate(*takes) for takes in flow.takes.values()], default=1.0)
            seconds = max(seconds, message.hidden_s + (1 - rate) * seconds)
        part = replace(flow, seconds=seconds / rounds)
        once.append((part.seconds, part))
    return rounds * [piece for piece in once if piece[0]]
