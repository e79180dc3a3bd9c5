"""compile: a program and a strategy to a graph and a plan, as a straight line of named passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from piper_compiler.build import build
from piper_compiler.directives import Directive, describe
from piper_compiler.passes.complete import Training, complete
from piper_compiler.passes.lower import Options, lower
from piper_compiler.strategy import Strategy
from piper_ir.collector import no_garbage_collection
from piper_ir.costs import Costs
from piper_ir.errors import CompileError, DirectiveError
from piper_ir.graph import Applied, Graph
from piper_ir.plan import Plan
from piper_ir.program import Program

__all__ = ["Lowered", "Options", "Training", "apply_directives", "compile_program", "rows_per_microbatch"]


@dataclass(frozen=True)
class Lowered:
    """The complete graph and the plan made of it."""

    graph: Graph
    plan: Plan


def compile_program(
    program: Program,
    strategy: Strategy,
    *,
    global_batch: int | None = None,
    training: Training | None = None,
    costs: Costs | None = None,
    options: Options | None = None,
    at_rows: Callable[[int], Program] | None = None,
) -> Lowered:
    """Build the graph, apply the directives in order, complete and lower it. `global_batch`: rows of one step over all replicas
    (default: one row per microbatch and replica). `at_rows`: the program for a number of rows, for programs that are not
    affine down to one row. A DirectiveError or CompileError names what does not hold and where it was written."""
    training = training or Training()
    with no_garbage_collection():
        graph = complete(apply_directives(build(program, strategy.mesh, costs), strategy.directives), training)
        rows = rows_per_microbatch(graph, global_batch)
        if at_rows is not None and (exact := at_rows(rows)) is not program:
            graph = complete(apply_directives(build(exact, strategy.mesh, costs), strategy.directives), training)
        return Lowered(graph, lower(graph, rows, training, options or Options(), costs))


def apply_directives(graph: Graph, directives: tuple[Directive, ...]) -> Graph:
    """Check and apply each directive in the order written. The given graph stays as it is."""
    given = graph
    for item in directives:
        item.check(graph)
        ours = graph is not given and getattr(item, "takes_over", False)
        result = item.apply(graph.hand_over() if ours else graph)
        if not isinstance(result, Graph):
            raise DirectiveError(f"{describe(item)}: apply returned {type(result).__name__}; a Graph is needed")
        applied = Applied(describe(item), getattr(item, "site", ""))
        graph = _logged(result, applied, len(graph.log))
    return graph


def _logged(graph: Graph, applied: Applied, index: int) -> Graph:
    """The graph with exactly one entry for the directive in its log, whether or not `apply` recorded one."""
    return replace(graph, log=(*graph.log[:index], applied))


def rows_per_microbatch(graph: Graph, global_batch: int | None) -> int:
    """Rows of one microbatch on one rank. CompileError when the global batch does not divide."""
    parts = graph.microbatches
    replicas = graph.replicas
    if global_batch is None:
        return 1
    rows, rest = divmod(global_batch, parts * replicas)
    if rest or rows < 1:
        good = max(1, round(global_batch / (parts * replicas))) * parts * replicas
        raise CompileError(
            f"a global batch of {global_batch} rows does not divide into {parts} microbatches x {replicas} data-parallel "
            f"replicas; use a multiple of {parts * replicas}, e.g. {good}"
        )
    return rows
