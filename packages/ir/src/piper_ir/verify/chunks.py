"""Check rules R07 and R34 on the chunks of a plan: their inputs, and the gradients to which their steps add."""

from __future__ import annotations

from collections import Counter

from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Plan
from piper_ir.program.program import Chunk
from piper_ir.verify.rules import Findings


def check_chunks(findings: Findings) -> None:
    """Check that chunks take their inputs as they are, and add once to each gradient that is wanted."""
    plan = findings.plan
    specs = _given(plan)
    for chunk in (*plan.chunks, *plan.variants):
        where = f"chunk {chunk.variant}"
        for k, entry in enumerate(chunk.inputs):
            spec = specs[entry.kind, entry.ref]
            if entry.spec != spec:
                text = f"input {k} of {where} is the {entry.kind} {entry.ref} as a {entry.spec}; it is a {spec}"
                findings.add("R07-signature", text)
        for text in _accumulation_problems(chunk):
            findings.add("R34-accumulation", f"{where} {text}")


def _given(plan: Plan) -> dict[tuple[str, str], TensorSpec]:
    """Return the shape and dtype of everything that a chunk may take, by kind and name."""
    specs: dict[tuple[str, str], TensorSpec] = {("param", p.name): p.spec for p in plan.params}
    specs |= {("buffer", b.name): b.spec for b in plan.buffers}
    specs |= {("batch", b.name): b.spec.bind(plan.rows) for b in plan.batch}
    return specs | {
        ("value", f"{c.id}:out{k}"): o.spec for c in plan.chunks for k, o in enumerate(c.outputs)
    }


def _accumulation_problems(chunk: Chunk) -> list[str]:
    added = Counter(k for step, sig in chunk.steps.items() if step != "B" for k in sig.accumulates)
    problems = []
    for k, entry in enumerate(chunk.inputs):
        wanted = int(entry.kind == "param" and entry.needs_grad)
        if added[k] != wanted:
            problems.append(
                f"adds {added[k]} times to the gradient of {entry.ref} in a microbatch; {wanted} is expected"
            )
    return problems
