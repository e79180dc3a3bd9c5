"""Run a compiled strategy on a launcher."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from piper.api.compiling.compiling import Compiled, check_separable
from piper.api.ground.results import (
    hang_report,
    made_folder,
    new_folder,
    restart_log,
    save_run,
    unless_empty,
)
from piper.api.running.metrics import check_logs, recorded
from piper.api.running.replanning import Fallbacks, Replanner, check_on_loss, exported
from piper_ir.ground.errors import JobError, OutputError, PiperWarning, PlanError
from piper_ir.ground.keywords import check_keywords, checked_call
from piper_runtime.launch import (
    FurtherOptions,
    Interrupted,
    RunOptions,
    check_request,
    is_first,
    run_plan,
)

if TYPE_CHECKING:
    from piper_ir.plan.plan import Plan
    from piper_ir.program.costs import Costs
    from piper_runtime import Checkpoints, Job, Run
    from piper_runtime.launch import Launcher, StepRecord
    from piper_runtime.rank import Evaluation
    from piper_simulator import Cluster, CostModelFactory


class MoreOptions(FurtherOptions, total=False):
    """Hold the further keywords of `execute`: options of a run, and the costs and the cost model of `emulate`."""

    costs: Costs | None
    model: CostModelFactory


@dataclass(frozen=True)
class Records:
    """Say where the records of a run go.

    Attributes:
        out: losses, times, metrics and trace go to a new folder below this one.
        folder: they go into this folder itself; `out` takes precedence.
        log: logs of steps beside metrics.jsonl.
    """

    out: str | Path | None = None
    folder: str | Path | None = None
    log: Iterable[str] = ()

    def made(self) -> Path | None:
        """Make the folder and return it; None if there is none."""
        if self.out is not None:
            return new_folder(Path(self.out), "run")
        return None if self.folder is None else made_folder(Path(self.folder))


def check_same_job(compiled: Compiled, job: Job) -> None:
    """Raise JobError when a job differs from the compiled one in facts of the plan, which would be ignored silently."""
    for name in (
        "model",
        "loss",
        "clip_norm",
        "precision",
        "tokens_per_row",
        "batch_norm",
        "loss_over",
        "metrics",
    ):
        ours, theirs = getattr(compiled.job, name), getattr(job, name)
        if ours is not theirs and ours != theirs:
            raise JobError(
                f"execute: the job's {name} is {theirs!r}, but the strategy was compiled for {ours!r}; compile it "
                f"with this job"
            )
    if job is not compiled.job:
        from piper_runtime.rank import optimizer_spec

        check_separable(optimizer_spec(job, compiled.program.params), compiled.plan)


def check_same_program(compiled: Compiled) -> None:
    """Raise PlanError when a plan is not of the program beside it: its rules may hold, with other results."""
    plan, program = compiled.plan, compiled.program
    bound = tuple(replace(b, spec=b.spec.bind(plan.rows)) for b in program.batch)
    coords = {
        c.id: c.coords for c in program.chunks
    }  # directives add coordinates, and change nothing else of a chunk
    chunks, variants = (
        tuple(
            replace(c, coords={k: v for k, v in c.coords.items() if k in coords.get(c.id, ())})
            for c in cs
        )
        for cs in (plan.chunks, plan.variants)
    )
    used = {v.variant for v in variants}
    tables: dict[str, tuple[Any, Any]] = {
        "program_key": (plan.program_key, program.key),
        "loss_kind": (plan.loss_kind, program.loss_kind),
        "params": (plan.params, program.params),
        "buffers": (plan.buffers, program.buffers),
        "batch": (plan.batch, bound),
        "chunks": (chunks, program.bound(plan.rows)),
        "variants": (
            variants,
            tuple(v for v in program.bound_variants(plan.rows) if v.variant in used),
        ),
    }
    for name, (ours, theirs) in tables.items():
        if ours != theirs:
            raise PlanError(
                f"execute: the plan's {name} {_difference(ours, theirs)}; compile the strategy with this job"
            )


def _difference(ours: Any, theirs: Any) -> str:
    """Return where two tables of a plan and of its program differ."""
    if not isinstance(ours, tuple):
        return f"is {ours!r}, that of its program is {theirs!r}"
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            fields = [
                f.name
                for f in dataclass_fields(one)
                if getattr(one, f.name) != getattr(other, f.name)
            ]
            name = getattr(one, "id", "") or one.name
            return f"differ from those of its program: {', '.join(fields)} of {name}"
    return f"are {len(ours)}, its program has {len(theirs)}"


@checked_call(JobError)
def execute(
    compiled: Compiled,
    job: Job | None = None,
    *,
    steps: int,
    launcher: Launcher = "ray",
    cluster: str | Cluster | None = "auto",
    timeout_s: float = 60,
    trace: bool = False,
    memory: bool = True,
    out: str | Path | None = None,
    folder: str | Path | None = None,
    log: Iterable[str] = (),
    on_step: Callable[[StepRecord], object] | None = None,
    checkpoint: Checkpoints | None = None,
    resume: str | Path | None = None,
    restarts: int = 0,
    on_loss: Literal["restart", "replan"] = "restart",
    strategy: Fallbacks | None = None,
    **more: Unpack[MoreOptions],
) -> Run:
    """Run a compiled strategy for `steps` optimizer steps.

    Args:
        compiled: The result of `compile`.
        job: Replaces the compiled job. It has the same model, loss and optimizer groups, but may have other data,
            another seed or learning rate.
        steps: Optimizer steps to run.
        launcher: "ray" (one actor per rank), "processes" (torch.distributed, one process per rank; under torchrun this
            process is one of them), "inline" (all ranks in this process), or "emulated" (no job, memory or losses:
            sleeps of the time that `cluster` would take, see `piper.api.running.emulation.emulate`).
        cluster: For "ray", "auto" (a cluster that is there, else this machine) or the address HOST:PORT of one to join.
        timeout_s: Seconds without progress of any rank after which the run ends.
        trace: Record the last step's spans.
        memory: Measure peak bytes in the second step, or in the only one. It slows that step.
        out: Losses, times, metrics and trace go to a new folder below this one. On a hang every rank's last
            instructions go there too, as hang.txt.
        folder: As `out`, but into this folder itself, which is made if it is not there.
        log: Logs of steps beside metrics.jsonl while the run goes on: "tensorboard", "wandb".
        on_step: Called with every finished step, a `StepRecord` of `piper_runtime`.
        checkpoint: Where and how often the state is saved.
        resume: "latest", the newest complete checkpoint in the folder of `checkpoint`, or the path of one. The run goes
            on from there with `steps` more steps; another strategy than that of then may run it.
        restarts: How many times the run is started again after a rank died, raised or hung: from the newest complete
            checkpoint, without one from where it began. The failures are in `Run.restarts`. A loss that is not finite,
            a mistake in the job, and an exception that comes again in the same step end the run.
        on_loss: "restart" takes a rank that died to be replaced: the same plan runs again. "replan" takes its device to
            be gone: the run goes on with fewer devices and the same global batch.
        strategy: For "replan", the strategies for fewer devices: a function of a trial, which is searched in
            simulation, or a list, of which the first one that fits is taken. By default the compiled strategy on the
            largest legal mesh, with its recipe if it has one.
        more: Other keywords: `piper_runtime.launch.FurtherOptions` lists them, and `RunOptions` beside it explains
            them; `costs`, `model` and `pool` of `emulate` with "emulated".

    Raises JobError, ExecutionError (rank, node, instruction, peer), HangError, NonFiniteLossError, MissingPackageError,
    and FormatError for a checkpoint that was changed.
    """
    if not isinstance(compiled, Compiled):
        raise JobError(
            f"execute: a {type(compiled).__name__} stands here; the result of piper.compile is needed"
        )
    if launcher == "emulated":
        from piper.api.running.emulation import emulate

        known = [*_EXECUTE, *inspect.signature(emulate).parameters]
        check_keywords("execute", more, known, JobError)
        trains = any(option is not None for option in (on_step, checkpoint, resume))
        if trains or log or restarts or on_loss != "restart":
            raise JobError(
                'execute(launcher="emulated"): nothing is trained, so there is nothing for log, '
                "on_step, checkpoint and resume, nor for restarts"
            )
        return emulate(
            compiled,
            steps=steps,
            cluster=cluster,
            timeout_s=timeout_s,
            trace=trace,
            out=out,
            **dict[str, Any](more),
        )
    known = [*_EXECUTE, *(f.name for f in dataclass_fields(RunOptions))]
    check_keywords("execute", more, known, JobError)
    options = RunOptions(
        steps=steps,
        launcher=launcher,
        cluster=cluster,  # type: ignore[arg-type]  # checked with the launcher
        timeout_s=timeout_s,
        trace=trace,
        memory=memory,
        on_step=on_step,
        checkpoint=checkpoint,
        resume=resume,
        restarts=restarts,
        **dict[str, Any](more),
    )
    trained_job = runnable_job(compiled, job)
    check_on_loss(on_loss, strategy, options)
    if on_loss == "replan" and options.replan is None:
        options = replace(options, replan=Replanner(compiled, trained_job, strategy))
    return execute_with(compiled, trained_job, options, Records(out, folder, log))


def runnable_job(compiled: Compiled, job: Job | None) -> Job:
    """Return the job to run; raise JobError when a compiled strategy has no code to run."""
    from piper_runtime import Job

    chosen = job or compiled.job
    if chosen is not None and not isinstance(chosen, Job):
        raise JobError(f"execute: a {type(chosen).__name__} stands in place of a piper.Job")
    if chosen is None or compiled.code is None:
        raise JobError(
            "execute: this was compiled from a Program, which has no code and no data; compile a "
            "piper.Job to run it"
        )
    return chosen


def execute_with(compiled: Compiled, job: Job, options: RunOptions, records: Records) -> Run:
    """Run a compiled strategy with a job and options, and keep its records. Raises as `execute`."""
    from piper_capture import check_autocast
    from piper_ir.verify import verify
    from piper_runtime.rank import of_loss

    check_autocast()
    check_logs(records.log)
    check_same_job(compiled, job)
    check_same_program(compiled)
    check_request(compiled.plan, job, options)
    evaluation = evaluation_for(compiled, job)
    verify(compiled.plan)  # a directive of the user's may have made a plan that would hang
    if not is_first():  # under torchrun one of the ranks writes for all
        records = Records()
    folder = records.made()
    with (
        unless_empty(folder),
        hang_report(folder),
        recorded(
            folder, records.log, compiled.plan, options.on_step, of_loss(job.metrics)
        ) as on_step,
    ):
        options = replace(
            options,
            on_step=on_step,
            on_restart=restart_log(folder, options.on_restart),
            trainable=compiled.trainable,
            evaluation=evaluation,
        )
        try:
            result = run_plan(compiled.plan, exported(compiled), job, options)
        except Interrupted as e:
            _save(folder, e.run, compiled.plan, asked=options.steps)
            raise
    _save(folder, result, compiled.plan)
    return result


def _save(folder: Path | None, run: Run, plan: Plan, asked: int | None = None) -> None:
    """Write a run's results, if there is a folder, or warn: a training is worth more than its report."""
    if folder is None:
        return
    try:
        save_run(folder, run, plan, asked)
    except OutputError as e:
        done = "complete" if asked is None else "interrupted"
        warnings.warn(f"{e}. The run is {done}, but its report is not", PiperWarning, stacklevel=3)


def evaluation_for(compiled: Compiled, job: Job) -> Evaluation | None:
    """Return how a run of a job evaluates its model; None if the job does not ask for it."""
    from piper_ir.verify import verify
    from piper_runtime.rank import Evaluation

    if job.eval_data is None:
        return None
    beside = (compiled if job is compiled.job else replace(compiled, job=job)).evaluation
    if beside is None or beside.job is None or job.eval_every is None:
        raise JobError(
            "execute: nothing says how the job was compiled, so that it cannot be evaluated; "
            "compile it with this job"
        )
    verify(beside.plan)
    return Evaluation(
        beside.plan,
        exported(beside),
        beside.job.batch,
        job.eval_every,
        job.evaluated.eval_batches or 1,
    )


_EXECUTE = [name for name in inspect.signature(execute).parameters if name != "more"]
