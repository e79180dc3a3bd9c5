"""Check rule R33: R recomputes the tensors that F does not keep for I and W, once, from the inputs of F.

R may read an output that R of another chunk has made again, also after an exchange; R27 says that it is the right one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from piper_ir.fold.part_memory import value_ports
from piper_ir.plan.instr_table import PartTemplate
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import KEEP_ALL, Collective, Compute
from piper_ir.program.program import Chunk
from piper_ir.verify.host import brought_back
from piper_ir.verify.rules import Findings, part_name

RULE = "R33-recompute"


def check_recomputation(findings: Findings) -> None:
    """Check R33: the tables of variants, and the parts that run them."""
    plan = findings.plan
    for variant in plan.variants:
        for problem in _table_problems(plan, variant):
            findings.add(RULE, f"chunk {variant.id} under the policy {variant.keep}: {problem}")
    if plan.variants and not findings.violations:
        _Recomputed(findings).check()


def _table_problems(plan: Plan, variant: Chunk) -> Iterator[str]:
    """Yield the problems of a chunk under a policy, compared with the chunk that keeps all."""
    chunk = plan.chunk(variant.id)
    if (chunk.inputs, chunk.outputs) != (variant.inputs, variant.outputs):
        yield "its inputs or outputs are not those of the chunk"
    reads = {step: sig.reads for step, sig in variant.steps.items()}
    written = {step: _saved(sig.writes) for step, sig in variant.steps.items()}
    forward, again = written.get("F", []), written.get("R", [])
    for port in sorted({*forward} & {*again}):
        yield f"both F and R write {port}; one of them does"
    for step in ("I", "W"):
        for port in _without(_saved(reads.get(step, ())), (*forward, *again)):
            yield f"{step} reads {port}, which neither F nor R writes"
    for port in _without(_saved(reads.get("B", ())), forward):
        yield f"B reads {port}, which F does not write"
    for port in _without(reads.get("R", ()), forward):
        if not port.startswith(("in", "out")):
            yield f"R reads {port}, which is neither an input nor kept by F"
    for port in sorted({*forward} - {port for ports in reads.values() for port in ports}):
        yield f"F keeps {port}, which no step reads"
    changed = {o.ref for c in plan.chunks for o in c.outputs if o.kind == "buffer"}
    for port in reads.get("R", ()):
        entry = variant.inputs[int(port[2:])] if port.startswith("in") else None
        if entry is not None and entry.kind == "buffer" and entry.ref in changed:
            yield f"R reads buffer {entry.ref}, which is changed while it waits"


def _saved(ports: Iterable[str]) -> list[str]:
    return [port for port in ports if port.startswith("saved")]


def _without(ports: Iterable[str], known: Collection[str]) -> list[str]:
    return [port for port in ports if port not in known]


class _Backward:
    """Hold how the parts of one template recompute: the policy, and the slots of its reads that are inputs."""

    def __init__(self, plan: Plan, part: PartTemplate) -> None:
        op = part.op
        assert isinstance(op, Compute)
        chunk = plan.chunk(op.variant)
        ports = value_ports(chunk, part)
        names = chunk.steps[op.step].reads
        slots = {k: n for n, k in enumerate(ports)}
        self.op = op
        self.inputs = {names[k]: n for k, n in slots.items() if names[k].startswith("in")}
        self.again = op.step == "R" or (op.step == "B" and op.keep != KEEP_ALL)


class _Recomputed:
    """Check the parts that run variants.

    `_again` are values that R makes again, and `_back` has the originals of values that come back from the host.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings, self._columns = findings, findings.columns
        self._steps = [
            _Backward(findings.plan, p) if isinstance(p.op, Compute) else None
            for p in self._columns.parts
        ]
        self._back = brought_back(findings.columns)
        self._again = self._made_again()

    def _made_again(self) -> set[int]:
        """Return the values that R writes, and the values that exchanges make of them."""
        columns = self._columns
        recomputing = columns.rows_of(lambda p: isinstance(p.op, Compute) and p.op.step == "R")
        again = {v for row in recomputing.tolist() for v in columns.writes.of(row)}
        exchanges = columns.rows_of(lambda p: isinstance(p.op, Collective) and bool(p.reads))
        exchanges = exchanges[columns.row_mb[exchanges] >= 0]
        found = [r for r in exchanges.tolist() if columns.reads.of(r)[0] in again]
        return again | {v for row in found for v in columns.writes.of(row)}

    def check(self) -> None:
        """Check that each part follows the policy of its forward, and that R reads the inputs of the forward."""
        columns = self._columns
        rows = columns.rows_of(lambda p: isinstance(p.op, Compute)).tolist()
        parts, mbs = columns.row_part.tolist(), columns.row_mb.tolist()
        forwards: dict[tuple[str, int], int] = {}
        for row in rows:
            step = self._steps[parts[row]]
            if step is not None and step.op.step == "F":
                forwards[step.op.chunk, mbs[row]] = row
        for row in rows:
            step = self._steps[parts[row]]
            assert step is not None
            forward = forwards.get((step.op.chunk, mbs[row]))
            if forward is not None:  # else R21 says so
                before = self._steps[parts[forward]]
                assert before is not None
                if before.op.keep != step.op.keep or step.again:
                    for message in self._problems(row, step, forward, before):
                        instr = int(columns.row_instr[row])
                        self._findings.add_at(RULE, f"{self._name(row)} {message}", instr)

    def _name(self, row: int) -> str:
        columns = self._columns
        number, index = columns.place(int(columns.row_instr[row]))
        parts = self._findings.plan.roles[number].program[index].parts
        return part_name(parts[int(columns.row_index[row])])

    def _problems(
        self, row: int, step: _Backward, forward: int, before: _Backward
    ) -> Iterator[str]:
        if before.op.keep != step.op.keep:
            yield (
                f"runs under the policy {step.op.keep}, its forward under {before.op.keep}; one is expected"
            )
            return
        reads, name = self._columns.reads.of(row), self._columns.table.name
        forward_reads = self._columns.reads.of(forward)
        for port, n in step.inputs.items():
            value = self._back.get(reads[n], reads[n])
            own = forward_reads[before.inputs[port]] if port in before.inputs else value
            if own != value and value not in self._again:
                yield f"reads {name(value)} as {port}; its forward read {name(own)}"
