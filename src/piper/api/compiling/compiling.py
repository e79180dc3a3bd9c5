"""Compile a strategy and a job, or a program, to a plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from piper.api.captures.capturing import is_held, program_at, rewritten, traced_job
from piper.api.compiling.auxiliary_gradients import check_unscaled, undivided
from piper.api.compiling.batch_statistics import MICROBATCH, averages_of, check_shared_norms
from piper.api.compiling.batch_statistics import check_rows as check_norm_rows
from piper.api.compiling.before_capture import check_before_capture
from piper.api.compiling.evaluating import compiled_evaluation, replicas_notice
from piper.api.compiling.random_draws import check_draws
from piper_compiler import (
    CaptureRequest,
    Options,
    Strategy,
    Training,
    capture_request,
    compile_program,
    describe,
    rows_told,
    shard,
    with_fixed_stages,
)
from piper_ir.graph.graph import Graph
from piper_ir.ground.errors import CompileError, DirectiveError, JobError, PiperWarning
from piper_ir.ground.keywords import checked_call
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import Costs
from piper_ir.program.ops import KernelSource
from piper_ir.program.program import Program
from piper_ir.tools import Brief, no_garbage_collection

if TYPE_CHECKING:
    from piper_capture import Advancing, Captured, CodeStore, Layers
    from piper_ops import BatchNorm
    from piper_runtime import Job
    from piper_runtime.rank import OptimizerSpec


MOST_REMARKS = 2
"""The most remarks of a capture on chunks that an error of the compiler shows."""


@dataclass(frozen=True, repr=False)
class Compiled(Brief):
    """Hold a strategy compiled for a job or a program.

    A program without code (synthetic or loaded) has no `job`, `code` and `trainable`.

    Attributes:
        graph: The training graph that the directives made of the program.
        plan: The instructions of every rank.
        job: The job that was captured.
        code: The functions of the program's chunks.
        trainable: Names of the parameters that had requires_grad when the model was captured.
        advancing: Buffers of the job's model that advance once per microbatch.
        layers: Which modules of the job's model are the layers.
        norms: Batch norms of the job's model that take the statistics of each microbatch.
        strategy: The strategy that was compiled.
        kernels: "eager", or "inductor" for compiled groups of operations.
    """

    program: Program
    graph: Graph
    plan: Plan
    job: Job | None = None
    code: CodeStore | None = None
    trainable: frozenset[str] | None = None
    advancing: tuple[Advancing, ...] = ()
    strategy: Strategy | None = None
    layers: Layers | None = None
    notes: tuple[str, ...] = ()
    norms: tuple[BatchNorm, ...] = ()
    kernels: KernelSource = "eager"

    @cached_property
    def evaluation(self) -> Compiled | None:
        """Return the evaluation of the job, compiled for the same ranks; None if the job has none.

        Raises JobError, or the error of capture or compiler, if this strategy cannot evaluate the model.
        """
        if self.job is None or self.job.eval_data is None or self.strategy is None:
            return None
        job = self.job.evaluated
        training = trained_job("compile", self.job, None).training
        strategy = with_fixed_stages(self.strategy, self.graph)
        lowered, code = compiled_evaluation(job, strategy, self.plan, training, self.kernels)
        return Compiled(
            lowered.graph.program,
            lowered.graph,
            lowered.plan,
            job.unevaluated,
            code,
            strategy=strategy,
            kernels=self.kernels,
        )

    def __getstate__(self) -> dict[str, object]:
        """Return the pickled state: all but the captured graphs, with the code that a run of the plan needs."""
        state = dict(vars(self))
        if self.code is not None:
            from piper_capture import StoredCode

            self.code.export(self.plan.codes, self.plan.rows)
            state["code"] = StoredCode(*self.code.made)
        if self.layers is not None:
            state["layers"] = self.layers.without_graph()
        return state

    def facts(self) -> Iterator[tuple[str, object]]:
        """Yield the facts of the program and of its plan."""
        yield "program", self.program.source
        yield "chunks", len(self.program.chunks)
        yield "parameters", f"{sum(bind(p.spec.numel, 1) for p in self.program.params):,}"
        yield from self.plan.facts()


@checked_call(CompileError)
def compile(
    source: Job | Program,
    strategy: Strategy,
    *,
    costs: Costs | None = None,
    global_batch: int | None = None,
    options: Options | None = None,
) -> Compiled:
    """Compile a strategy for a job or for a Program.

    A job is captured on first use, once per model, batch shape, loss and precision. One whose content cannot be
    compared with that of earlier jobs is captured every time.

    Args:
        source: The job or the Program.
        strategy: The directives.
        costs: Measured durations, which weigh layers and decide ties.
        global_batch: Rows over all replicas, given with a Program only. The default is that of the strategy, or else
            one row per microbatch and replica.
        options: How the compiler works.

    Raises CaptureError, DirectiveError, CompileError or JobError; each names the part to change.
    """
    if not isinstance(strategy, Strategy):
        raise CompileError(
            f"compile: the strategy is a {type(strategy).__name__}; a piper.Strategy is needed (call a function of "
            f"a trial first)"
        )
    if options is not None and not isinstance(options, Options):
        raise CompileError(
            f"compile: the options are a {type(options).__name__}; piper.Options is needed"
        )
    strategy.check_step(getattr(source, "global_batch", global_batch))
    kernels = options.kernels if options is not None else "eager"
    if isinstance(source, Program):
        if kernels != "eager":
            raise CompileError(
                f"compile: kernels={kernels!r} needs a piper.Job; a Program has no operations to compile"
            )
        lowered = compile_program(
            source, strategy, global_batch=global_batch, costs=costs, options=options
        )
        return Compiled(source, lowered.graph, lowered.plan, strategy=strategy)
    trained = trained_job("compile", source, global_batch, strategy, kernels)
    norms = trained.captured.forward.norms
    check_shared_norms(norms, trained.request.shardings)
    asked = replace(trained.request, layers=())

    def captured_at(rows: int) -> Captured:
        """Return the capture at some rows: at one alone, which takes fewer traces, or at any."""
        with _shards_in_errors(strategy):
            form = rewritten(trained.captured, asked, 1 if rows == 1 else None)
        return replace(form, kernels=kernels)

    captured = captured_at(rows_told(strategy, source.global_batch))
    if trained.training.scaled:
        check_unscaled(captured)
    training = replace(trained.training, undivided=undivided(captured))
    with _remarks_in_errors(captured), no_garbage_collection():
        lowered = compile_program(
            captured.program,
            strategy,
            global_batch=source.global_batch,
            training=training,
            costs=costs,
            options=options,
            at_rows=lambda rows, runs: program_at(captured_at(rows), rows, runs),
        )
        graph, plan = lowered.graph, lowered.plan
        del lowered  # and with it the draft, which is larger than the plan
    check_separable(trained.spec, plan)
    check_data(source, plan)
    check_norm_rows(norms, plan)
    trainable = frozenset(p.name for p in captured.forward.params if p.requires_grad)
    compiled = Compiled(
        graph.program,
        graph,
        plan,
        source,
        captured.code,
        trainable,
        captured.advancing,
        strategy,
        captured.layers,
        captured.forward.notes,
        norms,
        kernels,
    )
    for notice in (advancing_notice(compiled), replicas_notice(source, plan)):
        if notice:
            warnings.warn(notice, PiperWarning, stacklevel=2)
    return compiled


@dataclass(frozen=True)
class Trained:
    """Hold what a job says of its training, beside the capture of its model.

    Attributes:
        captured: the capture with the layers of the request, without the rest of it.
        spec: the optimizer.
        training: what a plan's memory and updates depend on.
        request: what the strategy asks of the capture.
    """

    captured: Captured
    spec: OptimizerSpec
    training: Training
    request: CaptureRequest


def trained_job(
    call: str,
    source: Job,
    global_batch: int | None,
    strategy: Strategy | None = None,
    kernels: KernelSource = "eager",
) -> Trained:
    """Capture a job with the layers that a strategy asks for, or with the usual ones, and read its optimizer.

    The request of a strategy is the one for these `kernels`.

    Warnings about the model are given each time, also if its capture is one of an earlier call or process.

    CompileError, in the name of the `call`, for a source that is no job or has a `global_batch` beside it.
    """
    from piper_runtime import Job
    from piper_runtime.rank import optimizer_spec

    if not isinstance(source, Job):
        raise CompileError(
            f"{call}: the source is a {type(source).__name__}; a piper.Job or a Program is needed"
        )
    if global_batch is not None:
        raise CompileError(f"{call}: global_batch is given with a Program only; a Job has its own")
    if strategy is not None and not is_held(source):
        check_before_capture(source, strategy)
    traced = traced_job(source)
    request = CaptureRequest()
    if strategy is not None:
        request = capture_request(strategy.mesh, strategy.directives, traced.outline, kernels)
    captured = rewritten(traced, CaptureRequest(request.layers))
    for text in dict.fromkeys(traced.forward.warned):
        warnings.warn(text, PiperWarning, stacklevel=2)
    check_draws(source, captured.program)
    spec = optimizer_spec(source, captured.program.params)
    dtypes = source.precision
    training = Training(
        spec.group_of,
        spec.state_bytes,
        source.clip_norm,
        source.tokens_per_row,
        spec.update_bytes,
        spec.whole,
        spec.whole_groups,
        spec.matrix_groups,
        dtypes.params,
        dtypes.reduce or dtypes.params,
        averages_of(source, captured),
        undivided(captured),
        dtypes.scaling is not None,
        dtypes.accumulate or "",
        source.draws == "rows",
        spec.newton_schulz,
    )
    return Trained(captured, spec, training, request)


def check_separable(spec: OptimizerSpec, plan: Plan) -> None:
    """Raise JobError when an optimizer may couple parameters that a plan puts on several roles."""
    from piper_runtime.rank import KEEPS_TO

    if len(plan.roles) > 1 and not spec.separable:
        raise JobError(
            f"Job.optimizer returned {spec.kind}, which is not known to update each parameter by itself, while "
            f"this strategy puts parameters on {len(plan.roles)} roles; declare it with "
            f"piper.per_parameter({spec.kind}), or piper.elementwise({spec.kind}) if it updates each element by "
            f"itself, where {KEEPS_TO}; or use an optimizer of torch.optim, or a strategy without place"
        )


def check_data(job: Job, plan: Plan) -> None:
    """Raise JobError when the replicas of a plan cannot share the data of its job."""
    from piper_runtime.data import check_data_replicas

    check_data_replicas(job.batch, plan.replicas)


def advancing_notice(compiled: Compiled) -> str:
    """Return a warning about buffers that advance more than once in a step of this plan; "" if none does."""
    chosen = compiled.job is not None and compiled.job.batch_norm == MICROBATCH
    if not compiled.advancing or compiled.plan.microbatches == 1 or chosen:
        return ""
    shown = ", ".join(f"{a.name!r} ({a.line})" for a in compiled.advancing[:3])
    more = f" and {len(compiled.advancing) - 3} more" if len(compiled.advancing) > 3 else ""
    return (
        f"forward changes buffers from their own content or from the batch: {shown}{more}. They advance once per "
        f"microbatch, {compiled.plan.microbatches} times in a step, while the whole batch in one forward advances "
        f"them once. If it matters, update them outside of forward, or use one microbatch; `piper verify` compares "
        f"with both. "
        'Job(batch_norm="microbatch") says that it is meant'
    )


@contextmanager
def _shards_in_errors(strategy: Strategy) -> Iterator[None]:
    """Begin the refusal of a capture to share chunks with the directives that ask for it, and their places."""
    try:
        yield
    except DirectiveError as error:
        asked = [f"{describe(d)} at {d.site}" for d in strategy.directives if isinstance(d, shard)]
        if not asked:
            raise
        raise DirectiveError(f"{'; '.join(asked)}: {error}", error.chunks) from error


@contextmanager
def _remarks_in_errors(captured: Captured) -> Iterator[None]:
    """Add to a compiler's error the capture's remarks on the chunks that it is about."""
    try:
        yield
    except (CompileError, DirectiveError) as error:
        said = list(
            dict.fromkeys(text for chunk, text in captured.remarks.items() if chunk in error.chunks)
        )
        if not said:
            raise
        more = (
            [f"{len(said) - MOST_REMARKS} more of these chunks have such a remark"]
            if len(said) > MOST_REMARKS
            else []
        )
        raise type(error)(
            "\n".join([str(error), *said[:MOST_REMARKS], *more]), error.chunks
        ) from error
