"""Find the policies of recomputation that a strategy does not write, as if `recompute` were written last for them.

Regions that a model puts under torch.utils.checkpoint itself are under "inputs". Compiled layers whose backward is one
graph are under "products/1": operations between the products are made again inside of kernels that run anyway, as the
partitioner of torch.compile does. A third less of activations waits, for 1 % of a step or less (decision 39). Chunks
that a `recompute` selects have its policy; keep="all" is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from piper_compiler.directives.base import Directive
from piper_compiler.directives.prepare import CaptureRequest, written_request
from piper_compiler.directives.recompute import Recompute, changed_buffers, may_repeat
from piper_compiler.directives.split_backward import SplitBackward
from piper_compiler.ports import BACKWARD
from piper_ir.graph.graph import Graph, Node
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import Where
from piper_ir.program.ops import CHECKPOINT, EVERY, KEEP_ALL, Compute, KernelSource, variant_name
from piper_ir.program.program import Chunk, Program

ASKED_FOR = "inputs"
"""The policy of regions that the model puts under torch.utils.checkpoint: it keeps the arguments of their function."""

COMPILED = f"products{EVERY}1"
"""The policy of compiled chunks: the result of each product is kept, and other tensors are made again."""


def asked_by_model(graph: Graph, directives: Iterable[Directive]) -> tuple[Recompute, ...]:
    """Return the directive for the model's own checkpointed regions that no `recompute` of the strategy selects."""
    regions = [c for c in graph.program.chunks if CHECKPOINT in c.coords]
    return _under(graph, directives, regions, ASKED_FOR, "torch.utils.checkpoint in the model")


def kept_by_kernels(
    graph: Graph, directives: Iterable[Directive], kernels: KernelSource
) -> tuple[Recompute, ...]:
    """Return the directive for compiled layers that no `recompute` of the strategy selects; for all without layers.

    Other chunks have nothing to gain: the backward of a loss follows its forward at once. The directive stands behind
    all others. It leaves out chunks that are under a policy already, that run torch's own operations (`eager`), that
    keep tensors on the host (`offload`), or whose backward is not compiled as one graph.
    """
    if kernels == "eager":
        return ()
    ops = [n.op for n in graph.sequence if isinstance(n.op, Compute) and n.op.step in BACKWARD]
    apart = {*graph.eager, *graph.offloading, *(op.chunk for op in ops)}
    layers = [c for c in graph.program.chunks if "layer" in c.coords] or graph.program.chunks
    joined = [c for c in layers if c.id not in apart and not _stays_apart(c)]
    return _under(graph, directives, joined, COMPILED, f"the default of kernels={kernels!r}")


def _stays_apart(chunk: Chunk) -> bool:
    """Return whether the backward of a chunk is no single graph, however it is compiled."""
    return chunk.opaque or any(step.experts is not None for step in chunk.steps.values())


def capture_request(
    mesh: Mesh,
    directives: Iterable[Directive],
    program: Program,
    kernels: KernelSource = "eager",
) -> CaptureRequest:
    """Return the request of a strategy to the capture whose program with the usual layers is `program`.

    For compiled chunks it has their policy, unless a directive for all chunks leaves none to it.
    """
    written = tuple(directives)
    request = written_request(mesh, written, program)
    taken = any(
        isinstance(item, Recompute | SplitBackward)
        and all(name == "phase" for name, _ in item.selection.terms)
        for item in written
    )
    return request if kernels == "eager" or taken else request.under(COMPILED)


def _under(
    graph: Graph,
    directives: Iterable[Directive],
    chunks: Sequence[Chunk],
    policy: str,
    site: str,
) -> tuple[Recompute, ...]:
    """Return the directive that puts chunks under a policy, where that is legal and no `recompute` selects them."""
    program = graph.program
    if not any(program.has_variant(c.id, policy) for c in chunks):
        return ()
    decided = {
        n.id for d in directives if isinstance(d, Recompute) for n in graph.pick(d.selection)
    }
    changed = changed_buffers(program)

    def may_be(chunk: Chunk) -> bool:
        forwards = graph.compute(chunk.id, "F")
        return (
            program.has_variant(chunk.id, policy)
            and may_repeat(program.chunk(variant_name(chunk.id, policy)), changed)
            and all(n.id not in decided and _keeps_all(n) for n in forwards)
        )

    possible = tuple(c.id for c in chunks if may_be(c))
    return (Recompute(Where(chunk=possible), policy, site=site),) if possible else ()


def _keeps_all(node: Node) -> bool:
    return isinstance(node.op, Compute) and node.op.keep == KEEP_ALL
