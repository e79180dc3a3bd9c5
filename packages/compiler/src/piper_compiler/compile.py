"""Compile a program and a strategy to a graph and a plan: this file is the list of passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from piper_compiler.build import build_graph
from piper_compiler.directives import (
    Directive,
    asked_by_model,
    describe,
    kept_by_kernels,
    partition,
)
from piper_compiler.directives.base import Settling
from piper_compiler.directives.decided import decided
from piper_compiler.directives.prepare import CaptureRequest, Preparation
from piper_compiler.directives.replicate import Replicate, check_rows
from piper_compiler.directives.shard import Shard
from piper_compiler.durations import BoundChunks, InstructionSeconds
from piper_compiler.passes.order.overlap import first_to_finish, interleavings, seconds_of_spans
from piper_compiler.passes.order.schedule import Scheduler, overlap_seconds
from piper_compiler.passes.program.assemble import bound_chunks, plan_of
from piper_compiler.passes.program.complete import complete
from piper_compiler.passes.program.cuda_graph import check_cuda_graph
from piper_compiler.passes.program.forwards import forwards_alone, forwards_run
from piper_compiler.passes.program.moves import check_rows_named
from piper_compiler.passes.program.wiring import check_chunks, check_wiring
from piper_compiler.passes.steps.columns import columns
from piper_compiler.passes.steps.dependencies import dependencies
from piper_compiler.passes.steps.draft import draft
from piper_compiler.passes.steps.fuse import tasks
from piper_compiler.passes.steps.offloading import offloading
from piper_compiler.passes.steps.parts import PartMaker
from piper_compiler.passes.steps.positions import positions
from piper_compiler.passes.steps.release import releases
from piper_compiler.passes.steps.residency import residency
from piper_compiler.passes.steps.templates import Drafted
from piper_compiler.ports import steps_run
from piper_compiler.request import CompileRequest, Options, ProgramAt, Training
from piper_compiler.strategy import Strategy
from piper_ir.fold.memory import with_peaks
from piper_ir.fold.timing import Prepared
from piper_ir.graph.graph import Applied, Graph
from piper_ir.ground.errors import CompileError, DirectiveError
from piper_ir.ground.mesh import Mesh, whole_axis
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import Costs
from piper_ir.program.ops import KernelSource
from piper_ir.program.program import Program
from piper_ir.tools import no_garbage_collection

__all__ = [
    "CompileRequest",
    "Lowered",
    "Options",
    "Training",
    "apply_directives",
    "compile_program",
    "compiled",
    "completed",
    "depends_on_costs",
    "lowered",
    "rows_told",
    "with_fixed_stages",
]


@dataclass(frozen=True)
class Lowered:
    """Hold the complete graph and the plan made of it."""

    graph: Graph
    plan: Plan
    _prepare: Callable[[], Prepared] = field(repr=False, compare=False)

    @cached_property
    def prepared(self) -> Prepared:
        """Return the same as `piper_ir.fold.timing.prepare` for the plan, faster: compiling has found most of it."""
        return self._prepare()


def compile_program(
    program: Program,
    strategy: Strategy,
    *,
    global_batch: int | None = None,
    training: Training | None = None,
    costs: Costs | None = None,
    options: Options | None = None,
    at_rows: ProgramAt | None = None,
    evaluates: bool = False,
) -> Lowered:
    """Build the graph, apply the directives in order, complete and lower it.

    See `CompileRequest` for the arguments. Raises DirectiveError or CompileError, which names the condition that does
    not hold and the place of the directive.
    """
    request = CompileRequest(
        program,
        strategy,
        strategy.global_batch if global_batch is None else global_batch,
        training or Training(),
        costs,
        options or Options(),
        at_rows,
        evaluates,
    )
    return compiled(request)


def compiled(request: CompileRequest) -> Lowered:
    """Run the passes, from a program and a strategy to a plan."""
    with no_garbage_collection():
        return lowered(*completed(request), request)


def completed(request: CompileRequest) -> tuple[Graph, int]:
    """Run the passes up to a complete graph; return it, and the rows of a microbatch on a rank."""
    request.strategy.check_step(request.global_batch)
    with no_garbage_collection():
        program, told = request.program, 0
        if request.at_rows is not None and request.options.kernels == "eager":
            told = rows_told(request.strategy, request.global_batch)
            program = request.at_rows(told, {}) if told else program
        graph = directed(request, program)
        parts = graph.microbatches or 1
        rows = rows_per_microbatch(parts, graph.replicas, request.global_batch)
        if request.training.undivided and parts * graph.replicas > 1 and not request.evaluates:
            raise CompileError(
                f"{parts} microbatches x {graph.replicas} replicas: {request.training.undivided}"
            )
        if request.at_rows is not None and rows != told:
            alone = request.evaluates
            runs = forwards_run(graph) if alone else steps_run(graph)
            exact = request.at_rows(rows, runs)
            if exact is not program:
                graph = directed(request, exact)
        graph = complete(graph, request.training)
        check_wiring(graph)
        return forwards_alone(graph) if request.evaluates else graph, rows


def directed(request: CompileRequest, program: Program) -> Graph:
    """Return the graph of a program with the directives applied, whose nodes stand for all microbatches."""
    graph = build_graph(program, split_mesh(request.strategy.mesh, program), request.costs)
    kernels = "eager" if request.evaluates else request.options.kernels
    return apply_directives(graph, request.strategy.directives, kernels)


def split_mesh(mesh: Mesh, program: Program) -> Mesh:
    """Return the mesh with the axes split along which a program's chunks are shared by parts of the devices."""
    degrees: dict[str, list[int]] = {}
    for axis, degree in program.axes:
        degrees.setdefault(whole_axis(axis), []).append(degree)
    for axis, each in degrees.items():
        mesh = mesh.split(axis, each)
    return mesh


def lowered(graph: Graph, rows: int, request: CompileRequest) -> Lowered:
    """Make the plan of a complete graph, at `rows` rows per microbatch and rank."""
    chunks = bound_chunks(graph, rows)
    bound = BoundChunks(chunks, rows, InstructionSeconds(chunks.values(), request.costs))
    orders = interleavings(graph, overlap_seconds(graph, bound))
    best = first_to_finish(orders, lambda order: drafted(order, bound, request.options))
    freed = releases(best.draft, best.uses, best.times, best.buffers(), best.returns())
    programs = best.programs(freed)
    plan = plan_of(best.graph, chunks, rows, programs, request)
    check_chunks(plan)
    if plan.cuda_graph:
        check_cuda_graph(plan, by_row=request.training.drawn_by_row)
    plan = with_peaks(plan)
    return Lowered(best.graph, plan, lambda: best.prepared(freed))


def drafted(graph: Graph, bound: BoundChunks, options: Options) -> Drafted:
    """Put every role's instructions in program order, and time them in a run that frees nothing."""
    deps = dependencies(graph)
    spans = seconds_of_spans(graph, bound.by_name, deps)
    scheduler = Scheduler(graph, deps, bound, spans)
    placed = residency(graph, deps, scheduler.run(), scheduler.starts, scheduler.seconds)
    placed = offloading(placed, bound)
    nodes = columns(placed.graph, placed.deps, placed.sequence)
    work = tasks(placed.graph, placed.deps, nodes, options.fuse)
    where = positions(placed.graph, placed.deps, nodes, work.number, options.recv_ahead)
    order = draft(placed.graph, placed.deps, nodes, work, where)
    maker = PartMaker(placed.graph, bound, graph.microbatches * graph.replicas)
    return Drafted(placed, maker, order, spans)


def check_strategy(strategy: Strategy) -> None:
    """Raise DirectiveError or CompileError for devices that cannot share chunks or experts, whatever the model is."""
    mesh, written = strategy.mesh, tuple(strategy.directives)
    shards = [item for item in written if isinstance(item, Shard)]
    for number, item in enumerate(written):
        if isinstance(item, Shard):
            seen = Preparation(mesh, Program(()), written, written[:number])
            item.prepare(CaptureRequest(), seen)
    check_rows(mesh, written)
    sharing = {axis for item in shards if item.shares_tokens for axis in item.axes}
    over = {axis for item in written if isinstance(item, Replicate) for axis in item.over}
    rows = [axis for item in shards if item.experts for axis in item.meeting(mesh)]
    check_rows_named([axis for axis in rows if axis not in sharing], over)


def apply_directives(
    graph: Graph, directives: Iterable[Directive], kernels: KernelSource = "eager"
) -> Graph:
    """Check and apply each directive in the order written, then the ones that the model and the kernels imply."""
    written = tuple(directives)
    check_rows(graph.mesh, written)
    for item in written:
        graph = _applied(graph, item)
    for item in asked_by_model(graph, written):
        graph = _applied(graph, item)
    for item in kept_by_kernels(graph, written, kernels):
        graph = _applied(graph, item)
    return graph


def _applied(graph: Graph, item: Directive) -> Graph:
    item.check(graph)
    result = item.apply(graph)
    if not isinstance(result, Graph):
        raise DirectiveError(
            f"{describe(item)}: apply returned {type(result).__name__}; a Graph is needed"
        )
    return _logged(result, item, len(graph.log))


def depends_on_costs(strategy: Strategy) -> bool:
    """Return whether other costs may make another plan of a strategy, so that `with_fixed_stages` changes it."""
    settling = [d for d in strategy.directives if isinstance(d, Settling)]
    return any(not isinstance(d, partition) or d.at == "cost" for d in settling)


def with_fixed_stages(strategy: Strategy, graph: Graph) -> Strategy:
    """Return a strategy that makes the stages of `graph`, whatever costs are given.

    The strategy was compiled to that graph. Each directive with a method `with_fixed_stages` replaces the choices that
    depend on costs: `partition(at="cost")` gets its boundaries.
    """
    settled = [
        d.with_fixed_stages(graph) if isinstance(d, Settling) else d for d in strategy.directives
    ]
    return strategy.with_directives(settled)


def _logged(graph: Graph, item: Directive, index: int) -> Graph:
    """Return the graph with exactly one log entry for the directive, whether or not `apply` recorded one."""
    applied = Applied(describe(item), getattr(item, "site", ""))
    return replace(graph, log=(*graph.log[:index], applied))


def rows_told(strategy: Strategy, global_batch: int | None) -> int:
    """Return the rows of a microbatch on a rank as the directives tell them; 0 if one does not, or none divide."""
    decisions = [decided(item) for item in strategy.directives]
    if not all(decisions):
        return 0
    parts = next((d.microbatches for d in decisions if d and d.microbatches is not None), 1)
    if type(parts) is not int or parts < 1:
        return 0
    rows, rest = divmod(global_batch or parts * strategy.replicas, parts * strategy.replicas)
    return 0 if rest else rows


def rows_per_microbatch(parts: int, replicas: int, global_batch: int | None) -> int:
    """Return the rows of one of `parts` microbatches on one rank; raise CompileError when the batch does not divide."""
    if global_batch is None:
        return 1
    rows, rest = divmod(global_batch, parts * replicas)
    if rest or rows < 1:
        good = max(1, round(global_batch / (parts * replicas))) * parts * replicas
        raise CompileError(
            f"a global batch of {global_batch} rows does not divide into {parts} microbatches x {replicas} "
            f"data-parallel replicas; use a multiple of {parts * replicas}, e.g. {good}"
        )
    return rows
