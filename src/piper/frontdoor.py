"""compile and execute: the two calls that join capture, compiler and runtime."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper.metrics import OnStep, check_logs, recorded
from piper.results import hang_report, new_folder, save_run, unless_empty
from piper_compiler import Lowered, Options, Strategy, Training, compile_program
from piper_ir.costs import Costs
from piper_ir.errors import CompileError, JobError, OutputError, PiperWarning, PlanError
from piper_ir.graph import Graph
from piper_ir.keywords import check_keywords, checked_call
from piper_ir.plan import Plan
from piper_ir.program import Program
from piper_ir.tools import no_garbage_collection

if TYPE_CHECKING:
    from piper.content import Content
    from piper_compiler.capture import Advancing, Captured, CodeStore
    from piper_runtime import Job, Run
    from piper_runtime.rank import OptimizerSpec
    from piper_simulator import Cluster


MOST_CAPTURES = 16
"""Captured models that are kept; the oldest goes first."""
_CAPTURES: dict[CaptureKey, Captured] = {}
_BATCHES: dict[Content, str] = {}


@dataclass(frozen=True)
class CaptureKey:
    """What a capture depends on: the content of model and loss, what the batch looks like, and dtypes. Jobs with equal keys share
    one capture; the same callables with another content do not."""

    content: Content
    batch: str
    precision: str
    default_dtype: str


@dataclass(frozen=True)
class Compiled:
    """A strategy compiled for a job or a program. `job` and `code` are None for a program without code (synthetic or loaded), and
    so is `trainable`: names of the parameters that had requires_grad when the model was captured. `advancing`: buffers of the
    job's model that advance once per microbatch."""

    program: Program
    graph: Graph
    plan: Plan
    job: Job | None = None
    code: CodeStore | None = None
    trainable: frozenset[str] | None = None
    advancing: tuple[Advancing, ...] = ()


@checked_call(CompileError)
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
    from piper_runtime.rank import optimizer_spec

    if not isinstance(source, Job):
        raise CompileError(f"compile: the source is a {type(source).__name__}; a piper.Job or a Program is needed")
    if global_batch is not None:
        raise CompileError("compile: global_batch is given with a Program only; a Job has its own")
    captured = captured_job(source)
    spec = optimizer_spec(source, captured.program.params)
    lowered = _with_remarks(captured)(
        captured.program,
        strategy,
        global_batch=source.global_batch,
        training=Training(spec.group_of, spec.state_bytes, source.clip_norm, source.tokens_per_row, spec.update_bytes),
        costs=costs,
        options=options,
        at_rows=lambda rows: program_at(captured, rows),
    )
    check_separable(spec, lowered.plan)
    trainable = frozenset(p.name for p in captured.forward.params if p.requires_grad)
    made = Compiled(lowered.graph.program, lowered.graph, lowered.plan, source, captured.code, trainable, captured.advancing)
    if notice := advancing_notice(made):
        warnings.warn(notice, PiperWarning, stacklevel=2)
    return made


def check_separable(spec: OptimizerSpec, plan: Plan) -> None:
    """JobError when an optimizer may couple parameters that a plan puts on several roles."""
    if len(plan.roles) > 1 and not spec.separable:
        raise JobError(
            f"Job.optimizer returned {spec.kind}, which is not known to update each parameter by itself, while "
            f"this strategy puts parameters on {len(plan.roles)} roles; use an optimizer of torch.optim, "
            "or a strategy without place"
        )


def advancing_notice(compiled: Compiled) -> str:
    """Say which buffers advance more than once in a step of this plan; "" if none does."""
    if not compiled.advancing or compiled.plan.microbatches == 1:
        return ""
    shown = ", ".join(f"{a.name!r} ({a.line})" for a in compiled.advancing[:3])
    more = f" and {len(compiled.advancing) - 3} more" if len(compiled.advancing) > 3 else ""
    return (
        f"forward changes buffers from their own content or from the batch: {shown}{more}. They advance once per microbatch, "
        f"{compiled.plan.microbatches} times in a step, while the whole batch in one forward advances them once. If it matters, "
        "update them outside of forward, or use one microbatch; `piper verify` compares with both"
    )


def _with_remarks(captured: Captured) -> Callable[..., Lowered]:
    """`compile_program`, whose errors add what capture knows of the chunks that they are about."""

    def compiled(*args: Any, **more: Any) -> Lowered:
        try:
            return compile_program(*args, **more)
        except CompileError as error:
            said = dict.fromkeys(captured.remarks[chunk] for chunk in error.chunks if chunk in captured.remarks)
            if not said:
                raise
            raise CompileError("\n".join([str(error), *said]), error.chunks) from error

    return compiled


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
    key = capture_key(job)
    if key not in _CAPTURES:
        if len(_CAPTURES) == MOST_CAPTURES:
            _CAPTURES.pop(next(iter(_CAPTURES)))
        _CAPTURES[key] = _capture(job)
    return _CAPTURES[key]


def capture_key(job: Job) -> CaptureKey:
    """Return what the capture of a job depends on. Of the batch that is what two rows of it look like; the function is asked once
    for each content that it has."""
    import torch

    from piper.content import content_of

    content = content_of(job.batch)
    if content not in _BATCHES:
        if len(_BATCHES) == MOST_CAPTURES:
            _BATCHES.pop(next(iter(_BATCHES)))
        _BATCHES[content] = _looks(job)
    return CaptureKey(content_of(job.model, job.loss), _BATCHES[content], job.precision.params, str(torch.get_default_dtype()))


def _looks(job: Job) -> str:
    """Return the structure, shapes and dtypes of the rows that a capture asks for, the number of rows left out."""
    import torch
    from torch.utils import _pytree as pytree

    from piper_compiler.capture.model import ASKED_ROWS
    from piper_runtime.rank import call_batch

    rows = range(min(ASKED_ROWS, job.global_batch))
    leaves, structure = pytree.tree_flatten(call_batch(job.batch, 0, rows))
    looks = [
        f"{leaf.dtype} {tuple(leaf.shape[1:])} {leaf.shape[:1] == (len(rows),)}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    ]
    return f"{structure} {looks}"


def _capture(job: Job) -> Captured:
    from piper_compiler.capture import capture
    from piper_runtime.rank import call_batch

    batch = partial(call_batch, job.batch, 0)
    with no_garbage_collection():
        return capture(job.model, batch, job.loss, dtype=job.precision.dtype, most=job.global_batch)


def check_same_job(compiled: Compiled, job: Job) -> None:
    """JobError when a job differs from the compiled one in what the plan was made from; it would be ignored silently."""
    for name in ("model", "loss", "clip_norm", "precision", "tokens_per_row"):
        ours, theirs = getattr(compiled.job, name), getattr(job, name)
        if ours is not theirs and ours != theirs:
            raise JobError(
                f"execute: the job's {name} is {theirs!r}, but the strategy was compiled for {ours!r}; compile it with this job"
            )
    if job is not compiled.job:
        from piper_runtime.rank import optimizer_spec

        check_separable(optimizer_spec(job, compiled.program.params), compiled.plan)


def check_same_program(compiled: Compiled) -> None:
    """PlanError when a plan is not of the program beside it: its rules may hold, and it would compute something else."""
    plan, program = compiled.plan, compiled.program
    bound = tuple(replace(b, spec=b.spec.bind(plan.rows)) for b in program.batch)
    coords = {c.id: c.coords for c in program.chunks}  # directives add coordinates, and change nothing else of a chunk
    chunks = tuple(replace(c, coords={k: v for k, v in c.coords.items() if k in coords.get(c.id, ())}) for c in plan.chunks)
    tables: dict[str, tuple[Any, Any]] = {
        "program_key": (plan.program_key, program.key),
        "loss_kind": (plan.loss_kind, program.loss_kind),
        "params": (plan.params, program.params),
        "buffers": (plan.buffers, program.buffers),
        "batch": (plan.batch, bound),
        "chunks": (chunks, program.bound(plan.rows)),
    }
    for name, (ours, theirs) in tables.items():
        if ours != theirs:
            raise PlanError(f"execute: the plan's {name} {_difference(ours, theirs)}; compile the strategy with this job")


def _difference(ours: Any, theirs: Any) -> str:
    """Say where two tables of a plan and of its program differ."""
    if not isinstance(ours, tuple):
        return f"is {ours!r}, that of its program is {theirs!r}"
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            fields = [f.name for f in dataclass_fields(one) if getattr(one, f.name) != getattr(other, f.name)]
            name = getattr(one, "id", "") or one.name
            return f"differ from those of its program: {', '.join(fields)} of {name}"
    return f"are {len(ours)}, its program has {len(theirs)}"


@checked_call(JobError)
def execute(
    compiled: Compiled,
    job: Job | None = None,
    *,
    steps: int,
    launcher: str = "ray",
    cluster: str | Cluster | None = "auto",
    timeout_s: float = 60,
    trace: bool = False,
    memory: bool = True,
    out: str | Path | None = None,
    folder: Path | None = None,
    log: Iterable[str] = (),
    on_step: OnStep | None = None,
    **more: Any,
) -> Run:
    """Run a compiled strategy for `steps` optimizer steps. `job` replaces the compiled one (same model, loss and optimizer
    groups: other data, seed or learning rate). launcher: "ray" (one actor per rank), "processes" (torch.distributed, one process
    per rank; under torchrun this process is one of them), "inline" (all ranks in this one), or "emulated": no job, memory or
    losses, but sleeps instead of compute, of the time that `cluster` would take (`piper.emulation.emulate`). cluster: for "ray",
    "auto" (a cluster that is there, else this machine) or the address HOST:PORT of one to join. timeout_s: seconds without
    progress of any rank after which the run ends. trace: record the last step's spans. memory: measure peak bytes in the second
    step (or the only one), which slows it. out: losses, times, metrics and trace go to a new folder below this one (with
    `folder`: into that one); on a hang every rank's last instructions, as hang.txt. log: where steps go beside metrics.jsonl
    while the run goes on ("tensorboard", "wandb"). on_step: called with every finished step, a
    `piper_runtime.launch.report.StepRecord`. More keywords go to `piper_runtime.execute`. Raises JobError, ExecutionError (rank,
    node, instruction, peer), HangError, NonFiniteLossError, MissingPackageError."""
    from piper_ir.verify import verify
    from piper_runtime import execute as run
    from piper_runtime.launch import check_request, is_first

    if launcher == "emulated":
        from piper.emulation import emulate

        check_keywords("execute", more, [*_EXECUTE, *inspect.signature(emulate).parameters], JobError)
        if log or on_step is not None:
            raise JobError('execute(launcher="emulated"): nothing is trained, so there are no steps for log and on_step')
        return emulate(compiled, steps=steps, cluster=cluster, timeout_s=timeout_s, trace=trace, out=out, **more)
    check_keywords("execute", more, [*_EXECUTE, *inspect.signature(run).parameters], JobError)
    chosen = job or compiled.job
    if chosen is None or compiled.code is None:
        raise JobError("execute: this was compiled from a Program, which has no code and no data; compile a piper.Job to run it")
    if cluster != "auto" and launcher != "ray":
        raise JobError(
            f'execute(cluster={cluster!r}): launcher "{launcher}" runs on this machine; launcher="ray" takes an address, '
            'launcher="emulated" any cluster to imitate'
        )
    check_logs(log)
    check_same_job(compiled, chosen)
    check_same_program(compiled)
    check_request(compiled.plan, chosen, steps, launcher, timeout_s)
    verify(compiled.plan)  # a directive of the user's may have made a plan that would hang
    if not is_first():  # under torchrun one of the ranks writes for all
        folder, out, log = None, None, ()
    folder = new_folder(Path(out), "run") if out is not None else folder
    codes = [c.code for c in compiled.plan.chunks]
    code = compiled.code.export(codes, compiled.plan.rows)
    options = dict(steps=steps, launcher=launcher, cluster=cluster, timeout_s=timeout_s, trace=trace, memory=memory)
    options |= {"trainable": compiled.trainable}
    with unless_empty(folder), hang_report(folder), recorded(folder, log, compiled.plan, on_step) as heard:
        result = run(compiled.plan, code, chosen, on_step=heard, **options, **more)
    if folder is not None:
        try:
            save_run(folder, result, compiled.plan.tokens_per_step)
        except OutputError as e:  # what was trained is worth more than its report
            warnings.warn(f"{e}. The run is complete, but its report is not", PiperWarning, stacklevel=2)
    return result


_EXECUTE = [name for name in inspect.signature(execute).parameters if name != "more"]
