"""Outlines: plans for their times and peaks of memory alone, which is what a search asks for.

The instructions of an outline, their streams and order are those of the plan, and so are the peaks. But they are those of
microbatch 0, shared by all microbatches, and say nothing of what is freed: names take most of the time of lowering. Waits are in
`prepared` alone. An outline can be timed, and not be verified, run or shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from piper_compiler.durations import InstructionSeconds
from piper_compiler.passes.complete import Training
from piper_compiler.passes.dependencies import dependencies
from piper_compiler.passes.kinds import Kinds
from piper_compiler.passes.lower import Options, bound_chunks, drafted, plan_of, role_plan, run_of, states
from piper_compiler.passes.outline_memory import Memory
from piper_compiler.passes.parts import PartMaker
from piper_compiler.passes.release import releases
from piper_compiler.passes.repeat import in_microbatch, repeated
from piper_compiler.uniform import Uniform
from piper_ir.costs import Costs
from piper_ir.graph import Graph
from piper_ir.plan import Plan, Values
from piper_ir.program import Program
from piper_ir.timing import Prepared


def alike(program: Program) -> bool:
    """Whether the nodes that complete the graph of a program are the same for any number of microbatches: there is no sum of
    loss weights and no buffer that microbatches update in order."""
    return program.loss_kind == "mean" and not any(o.kind == "buffer" for c in program.chunks for o in c.outputs)


@dataclass(frozen=True)
class Outline:
    """`plan`: for its times and peaks alone; `prepared`: what `prepare` makes of it."""

    plan: Plan
    prepared: Prepared


def outline(uniform: Uniform, graph: Graph, rows: int, training: Training, options: Options, costs: Costs | None) -> Outline:
    """The outline of the plan of a uniform graph. `graph`: the complete graph of its microbatch 0."""
    one = dependencies(graph)
    chunks = bound_chunks(graph, rows)
    count = uniform.microbatches
    seconds = InstructionSeconds(chunks.values(), costs)
    maker = PartMaker(graph, chunks, rows, count * graph.replicas, seconds)
    deps = repeated(uniform, one)
    draft = drafted(graph, deps, chunks, rows, options, seconds, {})
    kinds = Kinds(graph, one, maker, count, draft, deps)
    freed = releases(draft, kinds.uses, run_of(graph, draft, [kind.seconds for kind in kinds.used])[1])
    plan = plan_of(graph, chunks, rows, count, training, options)
    held = states(graph, training)
    memory = Memory(plan, kinds, draft, freed)
    roles = []
    for r, (role, (begin, end)) in enumerate(zip(draft.roles, pairwise(draft.offsets), strict=True)):
        program = [kind.instr for kind in kinds.used[begin:end]]
        peak = memory.peak(r, held[role])
        mb = int(kinds.mb[begin + peak.at])
        if mb > 0:  # messages name it
            parts = [replace(p, node=in_microbatch(p.node, mb)) for p in program[peak.at].parts]
            program[peak.at] = replace(program[peak.at], parts=tuple(parts))
        made = role_plan(graph, role, tuple(program), held[role], memory.allocs_first(r))
        roles.append(replace(made, peak_bytes=peak.nbytes, peak_at=peak.at, peak_by_category=peak.by_category))
    prepared = draft.prepared(draft.waits + freed.waits)
    return Outline(replace(plan, roles=tuple(roles), values=Values(maker.kinds)), prepared)
