"""Check rules R06, R07 and R34 on the chunks of a plan: ports and inputs, and gradients to which their steps add."""

from __future__ import annotations

from collections import Counter
from re import compile as regex

from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import KEEP_ALL
from piper_ir.program.program import Chunk
from piper_ir.verify.rules import Findings

_PORT = regex(r"(in|out|saved|tan|gin|iw)(\d+)")


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


def check_ports(findings: Findings) -> None:
    """Check R06 inside of chunks: their inputs, and the ports and parameters of their signatures."""
    plan = findings.plan
    known = {("value", f"{c.id}:out{k}") for c in plan.chunks for k in range(len(c.outputs))}
    known |= {("param", p.name) for p in plan.params} | {("buffer", b.name) for b in plan.buffers}
    known |= {("batch", b.name) for b in plan.batch}
    ids = {c.id for c in plan.chunks}
    for name in [c.variant for c in plan.chunks if c.keep != KEEP_ALL]:
        findings.add(
            "R06-names",
            f"{name} stands among the chunks, which keep all; it belongs to the variants",
        )
    for name in [v.variant for v in plan.variants if v.keep == KEEP_ALL or v.id not in ids]:
        findings.add(
            "R06-names", f"the variant {name} is under no policy, or of no chunk of the plan"
        )
    sound: set[tuple[object, ...]] = set()  # by identity: equal layers share ports and signatures
    for chunk in (*plan.chunks, *plan.variants):
        where = f"chunk {chunk.variant}"
        for k, entry in enumerate(chunk.inputs):
            if (entry.kind, entry.ref) not in known:
                findings.add(
                    "R06-names",
                    f"input {k} of {where} is the {entry.kind} {entry.ref}, which the plan does not have",
                )
        shape = id(chunk.ports), len(chunk.outputs), tuple([i.kind for i in chunk.inputs])
        for step, sig in chunk.steps.items():
            if (id(sig), *shape) in sound:
                continue
            unknown = [p for p in (*sig.reads, *sig.writes) if not _is_port(chunk, p)]
            unknown += [f"accumulator {k}" for k in sig.accumulates if not _is_param(chunk, k)]
            if not unknown:
                sound.add((id(sig), *shape))
            else:
                findings.add(
                    "R06-names",
                    f"{step} of {where} uses {', '.join(unknown)}, which the chunk does not have",
                )


def _is_port(chunk: Chunk, port: str) -> bool:
    match = _PORT.fullmatch(port)
    if match is None:
        return False
    limits = {
        "in": len(chunk.inputs),
        "gin": len(chunk.inputs),
        "out": len(chunk.outputs),
        "tan": len(chunk.outputs),
    }
    kind, index = match[1], int(match[2])
    return (kind == "in" or port in chunk.ports) and (kind not in limits or index < limits[kind])


def _is_param(chunk: Chunk, index: int) -> bool:
    return 0 <= index < len(chunk.inputs) and chunk.inputs[index].kind == "param"
