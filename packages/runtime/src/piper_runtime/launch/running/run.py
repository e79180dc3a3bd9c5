"""Run a plan for some optimizer steps, and return the results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from piper_ir.ground.errors import ExecutionError, JobError
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Update
from piper_runtime.data import check_data_replicas
from piper_runtime.launch.ground.progress import OnStep, evaluated
from piper_runtime.launch.ground.recovery import Recovery
from piper_runtime.launch.ground.result import Run
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.launch.running.attempts import Attempts
from piper_runtime.launch.running.beginning import beginning_of, initial_of, under_torchrun
from piper_runtime.launch.running.launchers import launcher_kind, workers_of
from piper_runtime.launch.running.survivors import survivors
from piper_runtime.launch.torchrun.torchrun import is_active
from piper_runtime.rank.binding.same_model import check_same_model
from piper_runtime.rank.job.job import Job
from piper_runtime.rank.values.code import ExportedCode


def execute(plan: Plan, code: ExportedCode, job: Job, **options: Any) -> Run:
    """Run a plan with the code of its chunks; the keywords are the fields of `RunOptions`. Raises as `run_plan`."""
    return run_plan(plan, code, job, RunOptions(**options))


def run_plan(plan: Plan, code: ExportedCode, job: Job, options: RunOptions) -> Run:
    """Run the optimizer steps that `options` ask for, with a plan and the code of its chunks.

    Raises:
        JobError: the job does not fit the plan or the checkpoint, or no run can have these options.
        FormatError: the checkpoint is truncated or was changed.
        OutputError: the folder of checkpoints cannot be written.
        NonFiniteLossError: with step, rank and microbatch.
        HangError: with every rank's last instructions.
        ExecutionError: with rank, node, instruction and peer.
    """
    check_request(plan, job, options)
    check_evaluation(plan, options)
    if launcher_kind(options.launcher).joins and is_active():
        options = under_torchrun(options)
    begin = beginning_of(plan, job, replace(options, on_step=_completed(options.on_step, job)))
    initial = initial_of(plan, job, begin.saved)
    check_same_model(plan, initial, options.trainable)
    with (
        survivors(options.snapshot_every) as kept,
        workers_of(options, plan.mesh.world) as workers,
    ):
        attempts = Attempts(job, initial, begin, workers, kept)
        recovery = Recovery(begin.options, options.devices(plan.mesh.world))
        return attempts.run(plan, code, recovery)


def _completed(on_step: OnStep | None, job: Job) -> OnStep | None:
    """Return a function that hands steps on with all of a job's metrics in their evaluations."""
    if on_step is None or not job.metrics:
        return on_step
    return lambda record: on_step(replace(record, evaluation=evaluated(record, job.metrics)))


def check_request(plan: Plan, job: Job, options: RunOptions) -> None:
    """Raise JobError or ExecutionError when a run could not even start with these options."""
    options.check(launcher_kind(options.launcher))
    if plan.global_batch != job.global_batch:
        raise JobError(
            f"the plan was made for a global batch of {plan.global_batch} rows, the job has {job.global_batch}; "
            f"compile the strategy with this job"
        )
    if plan.cuda_graph and launcher_kind(options.launcher).open is None:
        raise ExecutionError(
            "Options(cuda_graph=True): the inline launcher issues the instructions of all ranks in turns; use "
            'launcher="processes" on CUDA devices, or leave cuda_graph out'
        )
    check_float8(job)
    check_clip(plan, job)
    check_data_replicas(job.batch, plan.replicas)


def check_evaluation(plan: Plan, options: RunOptions) -> None:
    """Raise JobError for an evaluation that is for other ranks, or would be."""
    evaluation = options.evaluation
    if evaluation is None:
        return
    if options.replan is not None:
        raise JobError(
            'Job(eval_data=...) and on_loss="replan": the evaluation is compiled for the first '
            "mesh alone; leave one of them out"
        )
    if evaluation.plan.mesh != plan.mesh or evaluation.plan.global_batch != plan.global_batch:
        raise JobError(
            "the evaluation was compiled for another mesh or global batch than the plan; compile both together"
        )


def check_float8(job: Job) -> None:
    """Raise JobError for a recipe of float8 that is predicted only."""
    asked = job.precision.quantised
    if asked is not None and asked.cannot_run:
        raise JobError(asked.cannot_run)


def check_clip(plan: Plan, job: Job) -> None:
    """Raise JobError when a plan clips gradients otherwise than the job asks for, or scales its loss otherwise."""
    updates = [
        p.op
        for role in plan.roles
        for i in role.program
        for p in i.parts
        if isinstance(p.op, Update)
    ]
    for update in updates:
        if update.clip != job.clip_norm:
            raise JobError(
                f"the plan clips gradients to {update.clip}, the job's clip_norm is {job.clip_norm}; compile the "
                f"strategy with this job"
            )
        if update.scaled != (job.precision.scaling is not None):
            raise JobError(
                f"the plan {'scales' if update.scaled else 'does not scale'} the loss, and the job's precision says "
                f"otherwise; compile the strategy with this job"
            )
