"""Check all rules on a plan: an abstract run under every blocking condition of the real engines, and a training step's.

The rules, each with its name and promise, are `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable

from piper_ir.fold.memory import host_peak, peak
from piper_ir.fold.memory_steps import PartUses
from piper_ir.ground.errors import PlanError
from piper_ir.plan.plan import Plan
from piper_ir.plan.plan_bytes import update_on_host_bytes
from piper_ir.program.ops import Update
from piper_ir.tools import no_garbage_collection
from piper_ir.verify.chunks import check_chunks
from piper_ir.verify.columns import HappensBefore
from piper_ir.verify.dataflow import check_dataflow
from piper_ir.verify.experts import check_experts
from piper_ir.verify.form import check_instructions, check_tables
from piper_ir.verify.host import check_host
from piper_ir.verify.recomputation import check_recomputation
from piper_ir.verify.reductions import check_reductions
from piper_ir.verify.rules import RULES, Findings, Violation
from piper_ir.verify.run import Events, meetings, run
from piper_ir.verify.sharding import check_sharded_use, check_shards
from piper_ir.verify.sharing import check_sharing
from piper_ir.verify.training import check_holders, check_layout, check_steps
from piper_ir.verify.values import check_values

__all__ = ["RULES", "Violation", "check", "check_joined", "verify"]


def verify(plan: Plan) -> None:
    """Raise PlanError when the plan breaks a rule.

    The message shows the first violation with role, ranks, instruction and stream. Time is linear in the plan's size.
    """
    violations = check(plan)
    if violations:
        more = len(violations) - 1
        rest = (
            f"\n({more} more violation{'s' if more > 1 else ''}; piper_ir.verify.check(plan) lists all)"
            if more
            else ""
        )
        raise PlanError(f"the plan is not valid. {violations[0]}{rest}")


def check(plan: Plan) -> list[Violation]:
    """Return every violation in a stable order; the list is empty for a good plan.

    Rules are checked in groups; a group is checked only if those before it hold, because it builds on them.
    """
    findings = Findings(plan)
    groups: tuple[Callable[[Findings], None], ...] = (
        check_tables,
        _check_form,
        _check_use,
        _check_memory,
    )
    with no_garbage_collection():
        for group in groups:
            group(findings)
            if findings.violations:
                break
    return findings.violations


def check_joined(plan: Plan) -> list[Violation]:
    """Return the violations of rules on chunks alone: inputs, gradients, sharding, collectives (R07, R34 to R37).

    They cost little, and the author of a strategy cannot know them. Names must exist, as in a plan just compiled.
    """
    findings = Findings(plan)
    _check_joined(findings)
    return findings.violations


def _check_joined(findings: Findings) -> None:
    check_chunks(findings)
    check_sharing(findings)
    check_experts(findings)


def _check_form(findings: Findings) -> None:
    """Check R03 to R10 and R34 to R37 of a plan whose tables hold."""
    _check_joined(findings)
    check_instructions(findings)


def _check_use(findings: Findings) -> None:
    """Check R11 to R27 and R29 to R33."""
    orders = {role.role: HappensBefore(role) for role in findings.plan.roles}
    check_values(findings, orders)
    check_host(findings)
    met = meetings(findings)
    if findings.violations:
        return
    events = Events(findings.columns, met)
    order = run(findings, events)
    check_steps(findings)
    check_recomputation(findings)
    check_layout(findings)
    check_shards(findings)
    if not findings.violations:
        check_holders(findings)
    if not findings.violations:
        check_reductions(findings, orders)
    if not findings.violations:
        check_sharded_use(findings, orders)
    orders.clear()  # they are large
    if not findings.violations:
        check_dataflow(findings, events, order)


def _check_memory(findings: Findings) -> None:
    """Check R28."""
    plan, uses = findings.plan, PartUses(findings.plan)
    for role in plan.roles:
        usage = peak(plan, role, uses)
        stated = (role.peak_bytes, role.peak_at, dict(role.peak_by_category))
        scanned = (usage.total, usage.instr, dict(usage.bytes))
        if stated != scanned:
            names = ("bytes", "instruction", "by category")
            wrong = [
                f"{n} {s!r}, and the scan gives {f!r}"
                for n, s, f in zip(names, stated, scanned, strict=True)
                if s != f
            ]
            findings.add("R28-peak", f"the plan states a peak of {'; '.join(wrong)}", role)
        if role.host_peak_bytes != (most := host_peak(role)):
            stated_there = f"the plan states {role.host_peak_bytes} bytes on the host"
            findings.add("R28-peak", f"{stated_there}, and the scan gives {most}", role)
        for op in (part.op for t in role.table.templates for part in t.parts):
            if not isinstance(op, Update):
                continue
            beside = update_on_host_bytes(map(plan.bucket, op.buckets), plan.mesh)
            if op.host_workspace != beside:
                text = f"an update states {op.host_workspace} bytes of copies on the host; {beside} are expected"
                findings.add("R28-peak", text, role)
