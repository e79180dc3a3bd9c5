"""compile and execute: the two calls that join capture, compiler and runtime."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper.results import new_folder, save_run
from piper_compiler import Options, Strategy, Training, compile_program
from piper_ir.costs import Costs
from piper_ir.errors import CompileError, JobError
from piper_ir.graph import Graph
from piper_ir.plan import Plan
from piper_ir.program import Program

if TYPE_CHECKING:
    from piper_compiler.capture import Captured, CodeStore
    from piper_runtime import Job, Run


MOST_CAPTURES = 16
"""Captured models that are kept; the oldest goes first."""
_CAPTURES: dict[tuple[int, int, int, str], tuple[Job, Captured]] = {}  # the job keeps its callables, and so their ids, alive


@dataclass(frozen=True)
class Compiled:
    """A strategy compiled for a job or a program. `job` and `code` are None for a program without code (synthetic or loaded)."""

    program: Program
    graph: Graph
    plan: Plan
    job: Job | None = None
    code: CodeStore | None = None


def compile(
    source: Job | Program,
    strategy: Strategy,
    *,
    costs: Costs | None = None,
    global_batch: int | None = None,
    options: Options | None = None,
) -> Compiled:
    """Compile a strategy for a job (which is captured on first use, once per model, batch shape, loss and precision) or for a
    Program.

    `costs` weigh layers and decide ties; `global_batch` is given only with a Program (rows over all replicas; default one per
    microbatch and replica). Raises CaptureError, DirectiveError, CompileError or JobError, each naming what to change."""
    if not isinstance(strategy, Strategy):
        raise CompileError(
            f"compile: the strategy is a {type(strategy).__name__}; a piper.Strategy is needed (call a function of a trial first)"
        )
    if isinstance(source, Program):
        lowered = compile_program(source, strategy, global_batch=global_batch, costs=costs, options=options)
        return Compiled(source, lowered.graph, lowered.plan)
    from piper_runtime import Job
    from piper_runtime.optimizer import optimizer_spec

    if not isinstance(source, Job):
        raise CompileError(f"compile: the source is a {type(source).__name__}; a piper.Job or a Program is needed")
    if global_batch is not None:
        raise CompileError("compile: global_batch is given with a Program only; a Job has its own")
    captured = captured_job(source)
    spec = optimizer_spec(source, captured.program.params)
    lowered = compile_program(
        captured.program,
        strategy,
        global_batch=source.global_batch,
        training=Training(spec.group_of, spec.state_bytes, source.clip_norm, source.tokens_per_row),
        costs=costs,
        options=options,
        at_rows=lambda rows: program_at(captured, rows),
    )
    if len(lowered.plan.roles) > 1 and not spec.separable:
        raise JobError(
            f"Job.optimizer returned {spec.kind}, which is not known to update each parameter by itself, while "
            f"this strategy puts parameters on {len(lowered.plan.roles)} roles; use an optimizer of torch.optim, "
            "or a strategy without place"
        )
    return Compiled(lowered.graph.program, lowered.graph, lowered.plan, source, captured.code)


def program_at(captured: Captured, rows: int) -> Program:
    """The program for microbatches of `rows` rows: the affine one, once it is known that the captured path holds there; at one
    row, where sizes are not affine, one of its own. CaptureError where the model takes another path."""
    from piper_compiler.capture.codestore import check_rows

    if rows == 1:
        return captured.bind(1)
    check_rows(captured.forward, rows)
    return captured.program


def captured_job(job: Job) -> Captured:
    """The capture of a job's model; jobs that differ only in what capture does not see share one."""
    key = (id(job.model), id(job.batch), id(job.loss), job.precision.params)  # callables need not be hashable
    if key not in _CAPTURES:
        if len(_CAPTURES) == MOST_CAPTURES:
            _CAPTURES.pop(next(iter(_CAPTURES)))
        _CAPTURES[key] = job, _capture(job)
    return _CAPTURES[key][1]


def _capture(job: Job) -> Captured:
    from piper_compiler.capture import capture
    from piper_runtime.job import call_batch

    return capture(job.model, partial(call_batch, job.batch, 0), job.loss, dtype=job.precision.dtype, most=job.global_batch)


def check_same_job(compiled: Compiled, job: Job) -> None:
    """JobError when a job differs from the compiled one in what the plan was made from; it would be ignored silently."""
    for name in ("model", "loss", "clip_norm", "precision", "tokens_per_row"):
        ours, theirs = getattr(compiled.job, name), getattr(job, name)
        if ours is not theirs and ours != theirs:
            raise JobError(
                f"execute: the job's {name} is {theirs!r}, but the strategy was compiled for {ours!r}; compile it with this job"
            )


def execute(
    compiled: Compiled,
    job: Job | None = None,
    *,
    steps: int,
    launcher: str = "ray",
    cluster: str = "auto",
    timeout_s: float = 60,
    trace: bool = False,
    memory: bool = True,
    out: str | Path | None = None,
    **more: Any,
) -> Run:
    """Run a compiled strategy for `steps` optimizer steps. `job` replaces the compiled one (same model, loss and optimizer
    groups: other data, seed or learning rate). launcher: "processes" (torch.distributed, one process per rank) or "inline"
    (all ranks in this one). timeout_s: seconds without progress of any rank after which the run ends. trace: record the last
    step's spans. memory: measure peak bytes in the second step (or the only one), which slows it. out: losses, times and trace
    go to a new folder below this one. More keywords go to `piper_runtime.execute`. Raises JobError, ExecutionError (rank,
    instruction, peer), NonFiniteLossError."""
    from piper_ir.verify import verify
    from piper_runtime import execute as run
    from piper_runtime.run import check_request

    chosen = job or compiled.job
    if chosen is None or compiled.code is None:
        raise JobError("execute: this was compiled from a Program, which has no code and no data; compile a piper.Job to run it")
    if cluster != "auto":
        raise JobError(f'execute(cluster={cluster!r}): only "auto" (this machine) is there until the ray launcher comes')
    check_same_job(compiled, chosen)
    check_request(compiled.plan, chosen, steps, launcher, timeout_s)
    verify(compiled.plan)  # a directive of the user's may have made a plan that would hang
    folder = new_folder(Path(out), "run") if out is not None else None
    codes = [c.code for c in compiled.plan.chunks]
    code = compiled.code.export(codes, compiled.plan.rows)
    result = run(
        compiled.plan, code, chosen, steps=steps, launcher=launcher, timeout_s=timeout_s, trace=trace, memory=memory, **more
    )
    if folder is not None:
        save_run(folder, result, compiled.plan.tokens_per_step)
    return result
