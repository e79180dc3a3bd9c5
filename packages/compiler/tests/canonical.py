"""A finished plan under the durations that the compiler assumes."""

from __future__ import annotations

from piper_compiler.durations import InstructionSeconds
from piper_ir.fold.timing import prepare, sweep
from piper_ir.plan.plan import Instr, Plan
from piper_ir.plan.plan_bytes import PlanBytes
from piper_ir.program.costs import Costs
from piper_ir.program.ops import Collective, Recv, Send


def canonical_durations(plan: Plan, costs: Costs | None = None) -> list[float]:
    """Seconds per instruction in the order of `piper_ir.fold.timing.prepare`."""
    seconds = InstructionSeconds(plan.chunks, costs)
    return [_seconds(plan, instr, seconds) for _, _, instr in plan.instructions()]


def makespan(plan: Plan, costs: Costs | None = None) -> float:
    return sweep(prepare(plan), canonical_durations(plan, costs), latency=plan.hop).makespan


def _seconds(plan: Plan, instr: Instr, seconds: InstructionSeconds) -> float:
    if instr.seconds is not None:
        return instr.seconds
    if instr.seconds is not None:
        return instr.seconds
    part = instr.parts[0]
    match part.op:
        case Send() | Recv():
            return seconds.transfer(plan.values[(*part.reads, *part.writes)[0]].nbytes)
        case Collective():
            return seconds.collective(PlanBytes(plan).message_bytes(part.op, part))
        case _:
            return seconds.compute([p.op for p in instr.parts])
