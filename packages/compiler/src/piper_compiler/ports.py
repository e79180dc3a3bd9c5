"""Say which values a compute node reads and writes: the value ports of a chunk's step, in order.

A graph has nodes of phase F and B; B stands for the steps of `BACKWARD` until `split_backward` makes nodes of them.
Under a policy of recomputation the first of these steps comes after R, unless R is a node of its own. A plan has F, R,
I and W parts. A chunk with compiled kernels may have a step B that does the work of R, I and W in one graph; a node B
is that step unless R is a node of its own.
"""

from __future__ import annotations

from piper_ir.graph.graph import Graph
from piper_ir.plan.plan import Category, is_state
from piper_ir.program.ops import Compute, Step, variant_name
from piper_ir.program.program import Chunk, Program, Signature

BACKWARD: tuple[Step, ...] = ("I", "W")
"""The steps of a whole backward, B: I, then W."""

AGAIN = "!r"
"""The end of the name of a value that R makes again for the next chunk of its group; F's name stands before it."""

_OWN = ("saved", "iw")
"""The ports that never leave their chunk and microbatch, whose steps run on one device; no values of a graph."""


def steps_of(chunk: Chunk, step: Step, apart: bool = False) -> tuple[Step, ...]:
    """Return the steps of a chunk that run for a step of a graph, in order, without empty ones.

    The chunk is the variant that runs. `apart` says that R is a node of its own (see `Compute`).
    """
    if step == "B" and "B" in chunk.steps and not (apart and "R" in chunk.steps):
        return _present(chunk, ("B",))
    present = _present(chunk, BACKWARD if step == "B" else (step,))
    if (
        "R" in chunk.steps
        and not apart
        and step in ("B", *BACKWARD)
        and present[:1] == _present(chunk, BACKWARD)[:1]
    ):
        return (*_present(chunk, ("R",)), *present) if present else ()
    return present


def steps_run(graph: Graph) -> dict[str, set[Step]]:
    """Return the steps that the nodes of a graph run in compiled groups, by the names of the chunks' variants.

    Chunks whose operations torch runs one by one (`Graph.eager`) are left out. A backward whose R is a node of its own
    runs I and W; any other one of phase B runs B.
    """
    runs: dict[str, set[Step]] = {}
    eager = set(graph.eager)
    for node in graph.sequence:
        op = node.op
        if isinstance(op, Compute) and op.chunk not in eager:
            apart = op.step == "B" and op.apart
            runs.setdefault(op.variant, set()).update(BACKWARD if apart else (op.step,))
    for steps in runs.values():
        if not steps.isdisjoint(BACKWARD):
            steps.add("R")
    return runs


def _present(chunk: Chunk, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    return tuple([name for name in steps if name in chunk.steps and not chunk.steps[name].empty])


def signatures(chunk: Chunk, step: Step, apart: bool = False) -> tuple[Signature, ...]:
    """Return the signatures of `steps_of`."""
    return tuple([chunk.steps[name] for name in steps_of(chunk, step, apart)])


def value_reads(chunk: Chunk, step: Step, apart: bool = False) -> tuple[str, ...]:
    """Return the ports whose values are data edges into the step.

    Parameters, buffers and saved tensors of F (see `kept`) are not among them. A value that I hands to W is, if it is a
    gradient of an input and W is a step of its own.
    """
    sigs = signatures(chunk, step, apart)
    written = {p for s in sigs for p in s.writes}
    ports = [
        p
        for s in sigs
        for p in s.reads
        if not p.startswith(_OWN) and p not in written and not is_state(chunk, p)
    ]
    return tuple(dict.fromkeys(ports))


def value_writes(chunk: Chunk, step: Step, apart: bool = False) -> tuple[str, ...]:
    """Return the ports whose values the step gives to other nodes: all that do not stay in its chunk."""
    return tuple(
        p for s in signatures(chunk, step, apart) for p in s.writes if not p.startswith(_OWN)
    )


def kept(chunk: Chunk) -> tuple[str, ...]:
    """Return the ports that F writes for the backward of its own chunk and microbatch.

    That backward runs where F ran, so no directive can send these values elsewhere. A graph leaves them out, but most
    values of a plan are of this kind.
    """
    return tuple(p for s in signatures(chunk, "F") for p in s.writes if p.startswith("saved"))


def kept_inside(program: Program, chunk: Chunk, told_by: str) -> tuple[str, ...]:
    """Return the `kept` ports of a chunk, or of its variant, that a policy of recomputation would make again.

    All of them if the policy is "".
    """
    ports = kept(chunk)
    if not told_by or not ports:
        return ports
    others = kept(program.chunk(variant_name(chunk.id, told_by)))
    inside = {*kept(program.chunk(chunk.id))}.difference(others)
    return tuple([port for port in ports if port in inside])


def port_value(chunk: Chunk, port: str) -> str:
    """Return the id of the value behind a port that a step reads, without microbatch and role."""
    return chunk.inputs[int(port[2:])].ref if port.startswith("in") else f"{chunk.id}:{port}"


def port_category(port: str) -> Category:
    """Return the category of memory of a port's bytes."""
    return "gradient" if port.startswith(("gin", "tan")) else "activation"


def trains(chunk: Chunk, step: Step = "B") -> tuple[str, ...]:
    """Return the parameters to whose gradient a step of the chunk adds, in input order."""
    sigs = signatures(chunk, step)
    return tuple(dict.fromkeys(chunk.inputs[i].ref for s in sigs for i in s.accumulates))
