"""Check that the steps of a plan can be captured as CUDA graphs, for `Options(cuda_graph=True)`.

A graph launches the same kernels at the same addresses in every step, so no step may wait on the host for a number, or
let the host choose memory. The update is not in the graph: learning rates, clipping, a scaled loss that skips steps and
optimizers of any kind work as without one.

1. Every chunk is captured: autograd runs no module as it is, which may read anything on the host in each step.
2. No step reads on the host how many tokens chose an expert, as dropless experts and grouped products do.
3. Everything stays on the device: no tensor waits in the memory of the host, and no optimizer or parameter is there.
4. Random numbers are drawn by row. Under `Job(draws="microbatches")` the host seeds torch's generator before each draw.
"""

from __future__ import annotations

from collections.abc import Iterator

from piper_ir.ground.errors import CompileError
from piper_ir.plan.plan import Plan
from piper_ir.program.program import Chunk

WAY_OUT = "leave cuda_graph out"


def check_cuda_graph(plan: Plan, *, by_row: bool) -> None:
    """Raise CompileError with the first condition that a plan does not meet; `by_row` is about random numbers."""
    problem = next(_problems(plan, by_row), None)
    if problem is not None:
        condition, text, chunks = problem
        raise CompileError(
            f"Options(cuda_graph=True): condition {condition}: {text}, or {WAY_OUT}", chunks
        )


def _problems(plan: Plan, by_row: bool) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield the number of each condition that does not hold, the change that helps, and its chunks."""
    chunks = (*plan.chunks, *plan.variants)
    if opaque := [c for c in chunks if c.opaque]:
        yield (
            1,
            f"autograd runs chunk {opaque[0].id} as it is in every step; make its module one that is captured",
            (opaque[0].id,),
        )
    for chunk in chunks:
        if op := _counted(chunk):
            yield (
                2,
                f"{op} of chunk {chunk.id} reads on the host how many tokens chose each expert; give the experts a "
                f"capacity",
                (chunk.id,),
            )
    hosted = [b for b in plan.buckets if b.host or b.away]
    if hosted or any(role.table.values.on_host for role in plan.roles):
        what = (
            f"bucket {hosted[0].id} is updated in"
            if hosted
            else "tensors wait for their backward in"
        )
        yield 3, f"{what} the memory of the host; leave offload out", ()
    if not by_row and (random := [c for c in chunks if c.random]):
        yield (
            4,
            f"the host seeds torch's generator before chunk {random[0].id} draws; leave "
            f'draws="microbatches" out of the job',
            (random[0].id,),
        )


def _counted(chunk: Chunk) -> str:
    """Return the operation of a chunk whose kernel waits on the host for counts of tokens; "" if there is none."""
    for name, step in chunk.steps.items():
        if step.experts is not None:
            return f"step {name}"
        for kernel in step.cost.kernels:
            if "grouped" in kernel.op:
                return kernel.op
    return ""
