"""Check rule R33: R recomputes the tensors that F does not keep for I and W, once, from the inputs of F.

R may read an output that R of another chunk has made again, also after an exchange; R27 says that it is the right one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from piper_ir.fold.part_memory import value_ports
from piper_ir.plan.plan import Part, Plan, RolePlan
from piper_ir.program.ops import KEEP_ALL, Collective, Compute
from piper_ir.program.program import Chunk
from piper_ir.verify.host import brought_back
from piper_ir.verify.rules import Findings, part_name

RULE = "R33-recompute"

_Placed = tuple[RolePlan, int, Part]


def check_recomputation(findings: Findings) -> None:
    """Check R33: the tables of variants, and the parts that run them."""
    plan = findings.plan
    for variant in plan.variants:
        for problem in _table_problems(plan, variant):
            findings.add(RULE, f"chunk {variant.id} under the policy {variant.keep}: {problem}")
    if plan.variants and not findings.violations:
        forwards: dict[tuple[str, int], _Placed] = {}
        again: set[str] = set()
        for role, index, part in _computing(plan):
            op = part.op
            assert isinstance(op, Compute)
            if op.step == "F":
                forwards[op.chunk, part.mb] = role, index, part
            elif op.step == "R":
                again.update(part.writes)
        again |= {v for part in _exchanges(plan) if part.reads[0] in again for v in part.writes}
        back = brought_back(plan)
        for role, index, part in _computing(plan):
            _check_part(findings, (role, index, part), forwards, again, back)


def _table_problems(plan: Plan, variant: Chunk) -> Iterator[str]:
    """Yield the problems of a chunk under a policy, compared with the chunk that keeps all."""
    chunk = plan.chunk(variant.id)
    if (chunk.inputs, chunk.outputs) != (variant.inputs, variant.outputs):
        yield "its inputs or outputs are not those of the chunk"
    written = {
        step: [p for p in sig.writes if p.startswith("saved")]
        for step, sig in variant.steps.items()
    }
    forward, again = written.get("F", []), written.get("R", [])
    for port in sorted({*forward} & {*again}):
        yield f"both F and R write {port}; one of them does"
    saved = {*forward, *again}
    for step in ("I", "W"):
        for port in variant.steps[step].reads if step in variant.steps else ():
            if port.startswith("saved") and port not in saved:
                yield f"{step} reads {port}, which neither F nor R writes"
    for port in variant.steps["B"].reads if "B" in variant.steps else ():
        if port.startswith("saved") and port not in forward:
            yield f"B reads {port}, which F does not write"
    for port in variant.steps["R"].reads if "R" in variant.steps else ():
        if not port.startswith(("in", "out")) and port not in forward:
            yield f"R reads {port}, which is neither an input nor kept by F"
    read = {port for step in variant.steps.values() for port in step.reads}
    for port in sorted({*forward} - read):
        yield f"F keeps {port}, which no step reads"
    changed = {o.ref for c in plan.chunks for o in c.outputs if o.kind == "buffer"}
    for port in variant.steps["R"].reads if "R" in variant.steps else ():
        entry = variant.inputs[int(port[2:])] if port.startswith("in") else None
        if entry is not None and entry.kind == "buffer" and entry.ref in changed:
            yield f"R reads buffer {entry.ref}, which is changed while it waits"


def _computing(plan: Plan) -> Iterator[_Placed]:
    for role, index, instr in plan.instructions():
        for part in instr.parts:
            if isinstance(part.op, Compute):
                yield role, index, part


def _exchanges(plan: Plan) -> Iterator[Part]:
    for _, _, instr in plan.instructions():
        yield from (
            part
            for part in instr.parts
            if isinstance(part.op, Collective) and part.reads and part.mb >= 0
        )


def _check_part(
    findings: Findings,
    placed: _Placed,
    forwards: Mapping[tuple[str, int], _Placed],
    again: Collection[str],
    back: Mapping[str, str],
) -> None:
    """Check that a part follows the policy of its forward, and that R reads the inputs of the forward.

    `again` are values that R makes again, and `back` the originals of values that come back from the host.
    """
    role, index, part = placed
    op = part.op
    assert isinstance(op, Compute)
    placed_forward = forwards.get((op.chunk, part.mb))
    if placed_forward is None:
        return  # R21 says so
    _, _, forward = placed_forward
    assert isinstance(forward.op, Compute)
    if forward.op.keep != op.keep:
        message = (
            f"{part_name(part)} runs under the policy {op.keep}, its forward under "
            f"{forward.op.keep}; one is expected"
        )
        findings.add(RULE, message, role, index)
    elif op.step == "R" or (op.step == "B" and op.keep != KEEP_ALL):
        read, forward_reads = _inputs(findings.plan, part), _inputs(findings.plan, forward)
        for port, value in read.items():
            value = back.get(value, value)
            if forward_reads.get(port, value) != value and value not in again:
                message = f"{part_name(part)} reads {value} as {port}; its forward read {forward_reads[port]}"
                findings.add(RULE, message, role, index)


def _inputs(plan: Plan, part: Part) -> dict[str, str]:
    """Return the values that a part reads from other chunks and the batch, by port."""
    assert isinstance(part.op, Compute)
    chunk = plan.chunk(part.op.variant)
    reads = chunk.steps[part.op.step].reads
    return {reads[k]: v for k, v in value_ports(chunk, part).items() if reads[k].startswith("in")}
