"""Count the gathers of sharded parameters in a step, beside those of torch's pipeline runtime for the same order.

`python benchmarks/gathers.py` writes docs/gathers.md. Ours are those of plans of a chain of layers whose forwards and
input gradients read their parameters (`replicate(zero=3)`, a bucket per layer). torch's are the UNSHARD actions that
its runtime adds to the same order of stages (`_add_unshard_reshard`), which it takes a stage at a time. A gather of one
of the layers of a stage is that part of a stage. Both hold as many bytes at most; no gather is issued ahead.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":  # run as a file, sys.path begins with this folder and not with the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from torch.distributed.pipelining.schedules import _Action, _add_unshard_reshard, _ComputationType

from packages.compiler.tests.order_validator import Did
from packages.compiler.tests.recipe_orders import orders_of_directives
from piper_compiler import Directive, Strategy, compile_program, replicate, synthetic
from piper_compiler.recipes import RECIPES
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.plan.plan import COMPUTE, Plan, RolePlan
from piper_ir.program.ops import Collective, Compute
from piper_ir.program.program import Cost, Kernel, Program

LAYER_BYTES = 1024
COST = Cost((Kernel("matmul", (64, 64, 64), "float32", 2 * 64**3, 3 * 4 * 64**2),))
"""Work and no seconds: pairs of given seconds would overlap as a whole, and not layer by layer."""
SCHEDULES: dict[str, tuple[str, dict[str, int]]] = {
    "GPipe": ("gpipe", {}),
    "1F1B": ("one_f_one_b", {}),
    "ZB-H1": ("zb_h1", {}),
    "ZB-H2": ("zb_h2", {}),
    "looped BFS, v=2": ("looped_bfs", {"chunks": 2}),
    "interleaved, v=2": ("interleaved", {"chunks": 2}),
    "interleaved, v=4": ("interleaved", {"chunks": 4}),
    "interleaved zero bubble, v=2": ("interleaved_zb", {"chunks": 2}),
    "ZBV": ("zbv", {}),
    "V-Half": ("v_half", {}),
    "V-Min": ("v_min", {}),
    "DualPipe": ("dualpipe", {}),
    "DualPipeV": ("dualpipe_v", {}),
}
"""Title -> recipe, and its keywords."""
PAGE = Path(__file__).resolve().parent.parent / "docs" / "gathers.md"


@dataclass(frozen=True)
class Order:
    """Hold the order of stages that a recipe gives each device.

    Attributes:
        rows: what each device computes, in order; an overlapped pair is one entry of two actions.
        stages: how many there are; a device holds `held` of them.
    """

    directives: tuple[Directive, ...]
    rows: Sequence[Sequence[tuple[Did, ...]]]
    stages: int
    held: int


def order_of(title: str, pp: int, microbatches: int) -> Order:
    """Return the order of a schedule."""
    name, more = SCHEDULES[title]
    directives = RECIPES[name].make(pp=pp, microbatches=microbatches, **more)
    rows = orders_of_directives(directives)
    stages = 1 + max(a.stage for row in rows for slot in row for a in slot)
    return Order(
        directives, rows, stages, max(len({a.stage for slot in row for a in slot}) for row in rows)
    )


def chain(layers: int) -> Program:
    """Return a chain of layers with one parameter each, which F and I read and W does not."""
    program = synthetic(stages=layers, F=1, I=1, W=1, params=LAYER_BYTES)
    chunks = []
    for k, chunk in enumerate(program.chunks):
        assert (chunk.inputs[1].kind, chunk.inputs[1].ref) == ("param", f"stage{k}.weight")
        steps = {step: replace(sig, cost=COST) for step, sig in chunk.steps.items()}
        read = {
            step: replace(steps[step], reads=(*steps[step].reads, "in1")) for step in ("F", "I")
        }
        chunks.append(replace(chunk, coords={"layer": k}, steps=steps | read))
    return replace(program, chunks=tuple(chunks))


def plan_of(order: Order, layers: int, resident: int | None, prefetch: int = 0) -> Plan:
    """Return the plan of an order with some layers per stage, which keeps `resident` layers beside the one in use.

    None keeps all of them for the step.
    """
    mb = "step" if resident is None else resident * LAYER_BYTES / 2**20
    sharing = replicate(
        where(),
        zero=3,
        bucket_mb=LAYER_BYTES / 2**20,
        resident_mb=mb,
        reduced_mb="step",
        prefetch=prefetch,
    )
    strategy = Strategy(Mesh(pp=len(order.rows), dp=2), (*order.directives, sharing))
    microbatches = 1 + max(a.mb for row in order.rows for slot in row for a in slot)
    return compile_program(
        chain(order.stages * layers), strategy, global_batch=2 * microbatches
    ).plan


def gathered(plan: Plan, role: RolePlan) -> int:
    """Return the buckets that a role gathers in a step, each as often as it is gathered."""
    parts = (part for instr in role.program for part in instr.parts)
    return sum(isinstance(p.op, Collective) and p.op.kind == "all_gather" for p in parts)


def most_held(plan: Plan, role: RolePlan) -> int:
    """Return the most bytes of gathered parameters that a role holds at once."""
    kinds, held, most = plan.kinds, 0, 0

    def size(values: Iterable[str]) -> int:
        return sum(plan.values[v].nbytes for v in values if kinds[v][1] == "gathered")

    held = most = size(role.allocs_first)
    for instr in role.program:
        if instr.stream == COMPUTE:
            held -= size(instr.frees_before)
            held -= sum(size(p.frees) for p in instr.parts)
            held += size(instr.allocs_after)
            most = max(most, held)
    return most


def steps_that_hold(plan: Plan) -> Counter[str]:
    """Return how many parts of each step hold gathered parameters."""
    kinds, out = plan.kinds, Counter[str]()
    for part in (p for _, _, instr in plan.instructions() for p in instr.parts):
        if isinstance(part.op, Compute) and any(kinds[v][1] == "gathered" for v in part.held):
            out[part.op.step] += 1
    return out


KINDS = {
    "F": _ComputationType.FORWARD,
    "B": _ComputationType.FULL_BACKWARD,
    "I": _ComputationType.BACKWARD_INPUT,
    "W": _ComputationType.BACKWARD_WEIGHT,
}


def torchs(row: Sequence[tuple[Did, ...]], held: int) -> int:
    """Return the stages that torch's runtime gathers on a device that holds so many at once.

    The two of an overlapped pair come one after the other: torch would hold both, however many are asked for.
    """
    actions: list[_Action | None] = [
        _Action(a.stage, KINDS[a.phase], a.mb) for slot in row for a in slot
    ]
    return sum(
        a.computation_type == _ComputationType.UNSHARD for a in _add_unshard_reshard(actions, held)
    )


@dataclass(frozen=True)
class Counted:
    """Hold the gathers of the device with most of them, in stages, where so many stages are held at once."""

    title: str
    held: int
    torch: int
    ours: float


def counted(title: str, pp: int, microbatches: int, layers: int, held: int) -> Counted:
    """Count one schedule at a number of stages held."""
    order = order_of(title, pp, microbatches)
    plan = plan_of(order, layers, held * layers - 1)
    assert max(most_held(plan, role) for role in plan.roles) <= held * layers * LAYER_BYTES
    ours = max(gathered(plan, role) for role in plan.roles) / layers
    return Counted(title, held, max(torchs(row, held) for row in order.rows), ours)


def table(pp: int = 4, microbatches: int = 16, layers: int = 8) -> list[Counted]:
    """Return all schedules, at every number of stages up to those of a device, and at most 3."""
    rows = []
    for title in SCHEDULES:
        most = order_of(title, pp, microbatches).held
        rows += [
            counted(title, pp, microbatches, layers, held) for held in range(1, min(most, 3) + 1)
        ]
    return rows


HEAD = """# Gathers of a step, beside torch's

Parameters of which each rank keeps a part (`replicate(zero=3)`) are gathered before they are used. Here are the gathers
of a step on the device that has most of them, in stages: four devices, 16 microbatches, 8 layers per stage. A bucket is
a layer, so a gather of ours is an eighth of a stage. torch's pipeline runtime gathers whole stages
(`_add_unshard_reshard` with as many active stages as are held here; 3 by default), and counts the weight gradient as a
use; ours does not need parameters there. Both hold the same number of bytes at most. Rows with equal numbers are left
out: GPipe, 1F1B, ZB-H1, ZB-H2 and looped BFS, and two chunks per device with 2 stages held.

`python benchmarks/gathers.py` writes this page.

| schedule | stages held | torch | ours | ours / torch |
|---|---|---|---|---|
"""


def page(rows: Sequence[Counted]) -> str:
    """Return docs/gathers.md."""
    lines = [
        f"| {r.title} | {r.held} | {r.torch} | {r.ours:g} | {r.ours / r.torch:.2f} |\n"
        for r in rows
        if r.ours != r.torch
    ]
    return HEAD + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(table()), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))
