"""Run a plan for some optimizer steps, and return the results."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from piper_ir.ground.errors import JobError
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Update
from piper_runtime.checkpoint.settings import Checkpoints
from piper_runtime.data import check_data_replicas
from piper_runtime.launch.ground.progress import OnStep, evaluated
from piper_runtime.launch.ground.recovery import OnRestart, Recovery, RecoveryOptions, Replan
from piper_runtime.launch.ground.result import Run, check_numbers
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.launch.running.attempts import Attempts, check_spares, workers_of
from piper_runtime.launch.running.beginning import beginning_of, initial_of, under_torchrun
from piper_runtime.launch.running.launchers import Launcher, Workers, launcher_kind
from piper_runtime.launch.running.survivors import survivors
from piper_runtime.launch.torchrun.torchrun import is_active
from piper_runtime.rank.batches.feed import check_loader
from piper_runtime.rank.binding.evaluation import Evaluation
from piper_runtime.rank.binding.same_model import check_same_model
from piper_runtime.rank.job.job import Job
from piper_runtime.rank.values.code import ExportedCode


def execute(
    plan: Plan, code: ExportedCode, job: Job, *, steps: int, launcher: Launcher = "ray", cluster: str = "auto",
    timeout_s: float = 60.0, trace: bool = False, memory: bool = False, gradients: bool = False, pool: Workers | None = None,
    ranges: bool = False, on_step: OnStep | None = None, trainable: Collection[str] | None = None, first_step: int | None = None,
    checkpoint: Checkpoints | None = None, resume: str | Path | None = None, loader: str | int = "thread", restarts: int = 0,
    replan: Replan | None = None, on_restart: OnRestart | None = None, spares: int = 0, evaluation: Evaluation | None = None,
) -> Run:  # fmt: skip
    """Run `steps` optimizer steps of a plan with the code of its chunks.

    Args:
        launcher: "ray" (one actor per rank), "processes" (one process per rank, gloo over loopback; under torchrun this
            process is one rank, see `piper_runtime.launch.torchrun.torchrun`) or "inline" (all ranks in this process).
        cluster: for Ray: "auto", or the address of a cluster to join.
        timeout_s: the call ends that long after the last sign of progress of any rank; an instruction that takes longer
            counts as hung.
        trace: keep the last step's spans (about 1 us per instruction).
        memory: measure peak bytes in the second step, or in the only one (slows that step).
        gradients: keep the gradients of every step.
        pool: workers to use again; without one they are started and ended in this call.
        ranges: name instructions in profilers, see `piper_runtime.engine.ranges`.
        on_step: called here with every finished step, in order, while the run goes on; when it raises, that is a
            warning and the run goes on.
        trainable: names of the parameters that had requires_grad when the plan was made (None: not known).
        first_step: the number of the first step, which decides rows, random numbers and the schedule of learning rates;
            weights come from Job.init all the same. Default: 0, or the step of the checkpoint.
        checkpoint: the folder and frequency of checkpoints.
        resume: "latest", the newest complete checkpoint in the folder of `checkpoint`, or the path of one; the run goes
            on from there with `steps` more steps, under this or any other strategy.
        loader: who calls Job.batch, one step ahead at most: "thread" (a thread of the rank, once the function has
            turned out to take a share of the step), "processes" or a number (so many processes per rank, from the
            start), or "none" (the issuing thread, when a microbatch is loaded; as with "inline" always).
        restarts: how many times the run is started again after a rank died, raised or hung: from host snapshots of the
            ranks that are left, if `checkpoint` asks for them and they have all of the state, else from the newest
            complete checkpoint, else from where this call began.
        replan: gives a plan for fewer ranks, if ranks that died took their devices with them.
        on_restart: called when a run that failed is about to go on.
        spares: with "ray", the number of spare ranks with reserved room, which take the places of ranks that die.
        evaluation: how the model is evaluated beside training; None: not at all.

    Raises:
        JobError: the job does not fit the plan or the checkpoint.
        FormatError: the checkpoint is truncated or was changed.
        OutputError: the folder of checkpoints cannot be written.
        NonFiniteLossError: with step, rank and microbatch.
        HangError: with every rank's last instructions.
        ExecutionError: with rank, node, instruction and peer.
    """
    check_request(plan, job, steps, launcher, timeout_s, loader)
    recovering = RecoveryOptions(restarts, replan, on_restart)
    recovering.check(gradients)
    check_spares(spares, launcher, pool)
    check_evaluation(plan, evaluation, replan)
    if launcher_kind(launcher).joins and is_active():
        recovering, again, steps = under_torchrun(recovering, checkpoint, resume, first_step, steps)
        resume, first_step = (resume, first_step) if again is None else (again, None)
    begin = beginning_of(plan, job, checkpoint, resume, first_step)
    initial = initial_of(plan, job, begin.saved)
    check_same_model(plan, initial, trainable)
    options = RunOptions(
        steps, timeout_s, trace, memory, gradients, ranges, on_step is not None or restarts > 0, begin.step, begin.checkpoint,
        loader,
    )  # fmt: skip
    with (
        survivors(checkpoint, recovering.restarts) as kept,
        workers_of(launcher, plan.mesh.world, cluster, spares, pool) as workers,
    ):
        attempts = Attempts(job, initial, begin, options, workers, kept, evaluation)
        recovery = Recovery(
            recovering, begin.step, _completed(on_step, job), attempts.devices(plan, spares)
        )
        return attempts.run(plan, code, recovery)


def _completed(on_step: OnStep | None, job: Job) -> OnStep | None:
    """Return a function that hands steps on with all of a job's metrics in their evaluations."""
    if on_step is None or not job.metrics:
        return on_step
    return lambda record: on_step(replace(record, evaluation=evaluated(record, job.metrics)))


def check_request(
    plan: Plan, job: Job, steps: int, launcher: str, timeout_s: float, loader: str | int = "thread"
) -> None:
    """Raise JobError or ExecutionError when `execute` could not even start with these arguments."""
    check_loader(loader, launcher_kind(launcher).open is None)
    check_numbers(steps, timeout_s)
    if plan.global_batch != job.global_batch:
        raise JobError(
            f"the plan was made for a global batch of {plan.global_batch} rows, the job has "
            f"{job.global_batch}; "
            f"compile the strategy with this job"
        )
    check_clip(plan, job)
    check_data_replicas(job.batch, plan.replicas)


def check_evaluation(plan: Plan, evaluation: Evaluation | None, replan: Replan | None) -> None:
    """Raise JobError for an evaluation that is for other ranks, or would be."""
    if evaluation is None:
        return
    if replan is not None:
        raise JobError(
            'Job(eval_data=...) and on_loss="replan": the evaluation is compiled for the first '
            "mesh alone; leave one "
            "of them out"
        )
    if evaluation.plan.mesh != plan.mesh or evaluation.plan.global_batch != plan.global_batch:
        raise JobError(
            "the evaluation was compiled for another mesh or global batch than the plan; compile "
            "both together"
        )


def check_clip(plan: Plan, job: Job) -> None:
    """Raise JobError when a plan clips gradients to another norm than the job asks for."""
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
                f"the plan clips gradients to {update.clip}, the job's clip_norm is "
                f"{job.clip_norm}; "
                "compile the strategy with this job"
            )
