"""compile: a program and a strategy to a graph and a plan, as a straight line of named passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from piper_compiler.build import build
from piper_compiler.directives import Directive, describe, split
from piper_compiler.directives.partition import Partition, resolved
from piper_compiler.passes.complete import Training, complete
from piper_compiler.passes.lower import Options, lower
from piper_compiler.passes.outline import Outline, alike, outline
from piper_compiler.strategy import Strategy
from piper_compiler.uniform import NotUniform, Uniform
from piper_ir.costs import Costs
from piper_ir.errors import CompileError, DirectiveError, PiperError
from piper_ir.graph import Applied, Graph
from piper_ir.plan import Plan
from piper_ir.program import Program
from piper_ir.tools import no_garbage_collection

__all__ = ["Lowered", "Options", "Outline", "Training", "apply_directives", "compile_program", "outline_program", "settled"]

FEW_COPIES = 1024
"""Microbatches of which the graph is made at once."""


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
    check_microbatches(strategy, global_batch)
    with no_garbage_collection():
        graph = complete(apply_directives(build(program, strategy.mesh, costs), strategy.directives), training)
        rows = rows_per_microbatch(graph.microbatches, graph.replicas, global_batch)
        if at_rows is not None and (exact := at_rows(rows)) is not program:
            graph = complete(apply_directives(build(exact, strategy.mesh, costs), strategy.directives), training)
        return Lowered(*lower(graph, rows, training, options or Options(), costs))


def settled(strategy: Strategy, graph: Graph) -> Strategy:
    """A strategy that makes the stages of `graph`, which it was compiled to, whatever costs are given: boundaries in place of
    partition(at="cost")."""
    made = [resolved(d, graph.program, graph.costs) if isinstance(d, Partition) else d for d in strategy.directives]
    return Strategy(strategy.mesh, made, params=strategy.params)


def outline_program(
    program: Program,
    strategy: Strategy,
    *,
    global_batch: int | None = None,
    training: Training | None = None,
    costs: Costs | None = None,
    options: Options | None = None,
    at_rows: Callable[[int], Program] | None = None,
) -> Outline | None:
    """The plan of `compile_program` in outline (see `piper_compiler.passes.outline`): the same times and peaks of memory, in a
    fraction of the time. None where it takes all of `compile_program`: when microbatches differ in more than their order, or
    when something is wrong, which that one says."""
    training = training or Training()

    def first_of(program: Program) -> tuple[Uniform, Graph] | None:
        uniform = _uniformly(build(program, strategy.mesh, costs), strategy.directives)
        return (uniform, complete(uniform.first(), training)) if isinstance(uniform, Uniform) else None

    try:
        with no_garbage_collection():
            if not alike(program) or (found := first_of(program)) is None:
                return None
            rows = rows_per_microbatch(found[0].microbatches, found[1].replicas, global_batch)
            if at_rows is not None and (exact := at_rows(rows)) is not program and (found := first_of(exact)) is None:
                return None
            return outline(*found, rows, training, options or Options(), costs)
    except PiperError:
        return None


def apply_directives(graph: Graph, directives: tuple[Directive, ...]) -> Graph:
    """Check and apply each directive in the order written. The given graph stays as it is."""
    try:
        found = _uniformly(graph, directives)
    except PiperError:  # its message is to be about the nodes of the whole graph
        return one_by_one(graph, directives)
    return found.expand() if isinstance(found, Uniform) else found


def one_by_one(graph: Graph, directives: Iterable[Directive], ours: bool = False) -> Graph:
    """Check and apply each directive on the whole graph. `ours`: nobody else holds it."""
    for item in directives:
        item.check(graph)
        result = item.apply(graph.hand_over() if ours and getattr(item, "takes_over", False) else graph)
        if not isinstance(result, Graph):
            raise DirectiveError(f"{describe(item)}: apply returned {type(result).__name__}; a Graph is needed")
        graph, ours = _logged(result, item, len(graph.log)), True
    return graph


def _uniformly(graph: Graph, directives: tuple[Directive, ...]) -> Graph | Uniform:
    """Apply directives by way of the graph of one microbatch; the rest, if there is one, on the whole graph."""
    at = next((k for k, item in enumerate(directives) if isinstance(item, split)), len(directives))
    given, graph = graph, one_by_one(graph, directives[:at])
    if at == len(directives) or graph.order_edges:
        return one_by_one(graph, directives[at:], graph is not given)
    halves = directives[at]
    assert isinstance(halves, split)
    halves.check(graph)
    uniform = Uniform(_logged(graph, halves, len(graph.log)), halves.microbatches)
    for k, item in enumerate(directives[at + 1 :], at + 1):
        try:
            uniform.apply(item)
        except NotUniform:
            return one_by_one(uniform.expand(), directives[k:], True)
        uniform.one = _logged(uniform.one, item, len(uniform.one.log))
    return uniform


def _logged(graph: Graph, item: Directive, index: int) -> Graph:
    """The graph with exactly one entry for the directive in its log, whether or not `apply` recorded one."""
    applied = Applied(describe(item), getattr(item, "site", ""))
    return replace(graph, log=(*graph.log[:index], applied))


def check_microbatches(strategy: Strategy, global_batch: int | None) -> None:
    """Raise CompileError for many more microbatches than rows, before there is a copy of the graph for each.

    Of a few too many `rows_per_microbatch` says more, for then it is known how many replicas there are."""
    for item in strategy.directives:
        if isinstance(item, split) and type(item.microbatches) is int and global_batch is not None:
            if item.microbatches > max(global_batch, FEW_COPIES):
                rows_per_microbatch(item.microbatches, 1, global_batch)


def rows_per_microbatch(parts: int, replicas: int, global_batch: int | None) -> int:
    """Rows of one of `parts` microbatches on one rank. CompileError when the global batch does not divide."""
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
