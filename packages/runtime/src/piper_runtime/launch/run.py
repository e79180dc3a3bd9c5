"""Run a plan for some optimizer steps, and return the results."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from statistics import median

from piper_ir.errors import JobError
from piper_ir.ops import Update
from piper_ir.plan import Plan
from piper_runtime.checkpoint.settings import Checkpoints
from piper_runtime.data import check_data_replicas
from piper_runtime.engine.trace import executed_trace
from piper_runtime.launch.beginning import beginning_of, committing, initial_of
from piper_runtime.launch.inline_run import run_inline
from piper_runtime.launch.joined import joined_gradients, joined_states
from piper_runtime.launch.launchers import Launcher, Workers, check_launcher, open_pool
from piper_runtime.launch.progress import OnSave, OnStep, Progress
from piper_runtime.launch.protocol import Request
from piper_runtime.launch.report import MEASURED, Interrupted, RankReport, StepRecord
from piper_runtime.launch.request import make_requests
from piper_runtime.launch.result import WARMUP_STEPS, Run, check_numbers
from piper_runtime.launch.run_options import RunOptions
from piper_runtime.rank.code import ExportedCode
from piper_runtime.rank.feed import check_loader
from piper_runtime.rank.job import InitialState, Job
from piper_runtime.rank.same_model import check_same_model

TRACED = (
    "to see when a communication ends, a thread waits for it in the traced step of processes on CPUs, and wakes who needs it, "
    "some 30 us each, which other steps do not"
)


def execute(
    plan: Plan, code: ExportedCode, job: Job, *, steps: int, launcher: Launcher = "ray", cluster: str = "auto",
    timeout_s: float = 60.0, trace: bool = False, memory: bool = False, gradients: bool = False, pool: Workers | None = None,
    ranges: bool = False, on_step: OnStep | None = None, trainable: Collection[str] | None = None, first_step: int | None = None,
    checkpoint: Checkpoints | None = None, resume: str | Path | None = None, loader: str | int = "thread",
) -> Run:  # fmt: skip
    """Run `steps` optimizer steps of a plan with the code of its chunks.

    Args:
        launcher: "ray" (one actor per rank), "processes" (one process per rank, gloo over loopback; under torchrun this
            process is one rank, see `piper_runtime.launch.torchrun`) or "inline" (all ranks in this process).
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
            weights are those of Job.init all the same. Default: 0, or the step of the checkpoint.
        checkpoint: where and how often the state is saved.
        resume: "latest", the newest complete checkpoint in the folder of `checkpoint`, or the path of one; the run goes
            on from there with `steps` more steps, under this or any other strategy.
        loader: who calls Job.batch, one step ahead at most: "thread" (a thread of the rank, once the function has
            turned out to take a share of the step), "processes" or a number (so many processes per rank, from the
            start), or "none" (the issuing thread, when a microbatch is loaded; as with "inline" always).

    Raises:
        JobError: the job does not fit the plan or the checkpoint.
        FormatError: the checkpoint is truncated or was changed.
        OutputError: the folder of checkpoints cannot be written.
        NonFiniteLossError: with step, rank and microbatch.
        HangError: with every rank's last instructions.
        ExecutionError: with rank, node, instruction and peer.
    """
    check_request(plan, job, steps, launcher, timeout_s, loader)
    begin = beginning_of(plan, job, checkpoint, resume, first_step)
    initial = initial_of(plan, job, begin.saved)
    check_same_model(plan, initial, trainable)
    options = RunOptions(
        steps, timeout_s, trace, memory, gradients, ranges, on_step is not None, begin.step, begin.checkpoint, loader
    )
    reports: Mapping[int, RankReport]
    with committing(begin.checkpoint, plan, job, initial) as on_save:
        try:
            if launcher == "inline":
                progress = Progress(plan, on_step, on_save, begin.step)
                reports = run_inline(plan, code, job, initial, options, progress, begin.saved)
            else:
                requests = make_requests(plan, code, job, initial, options, begin.saved)
                reports = _run_workers(plan, requests, options, launcher, cluster, pool, on_step, on_save)
        except Interrupted as e:
            e.run = _result(plan, e.reports, initial, memory)
            raise
    return _result(plan, reports, initial, memory)


def _run_workers(
    plan: Plan, requests: Mapping[int, Request], options: RunOptions, launcher: Launcher, cluster: str, pool: Workers | None,
    on_step: OnStep | None, on_save: OnSave | None,
) -> Mapping[int, RankReport]:  # fmt: skip
    """Return the results of every rank; raise Interrupted when ranks could end an interrupted run together."""
    if pool is not None:
        return pool.run(plan, requests, options.timeout_s, on_step, on_save)
    with open_pool(launcher, plan.mesh.world, cluster=cluster) as own:
        return own.run(plan, requests, options.timeout_s, on_step, on_save)


def check_request(plan: Plan, job: Job, steps: int, launcher: str, timeout_s: float, loader: str | int = "thread") -> None:
    """Raise JobError or ExecutionError when `execute` could not even start with these arguments."""
    check_launcher(launcher)
    check_loader(loader, launcher)
    check_numbers(steps, timeout_s)
    if plan.global_batch != job.global_batch:
        raise JobError(
            f"the plan was made for a global batch of {plan.global_batch} rows, the job has {job.global_batch}; "
            f"compile the strategy with this job"
        )
    check_clip(plan, job)
    check_data_replicas(job.batch, plan.replicas)


def check_clip(plan: Plan, job: Job) -> None:
    """Raise JobError when a plan clips gradients to another norm than the job asks for."""
    updates = [p.op for role in plan.roles for i in role.program for p in i.parts if isinstance(p.op, Update)]
    for update in updates:
        if update.clip != job.clip_norm:
            raise JobError(
                f"the plan clips gradients to {update.clip}, the job's clip_norm is {job.clip_norm}; "
                "compile the strategy with this job"
            )


def _result(plan: Plan, reports: Mapping[int, RankReport], initial: InitialState, memory: bool) -> Run:
    records: list[StepRecord] = []
    first = min(r.first_step for r in reports.values())
    Progress(plan, records.append, first_step=first).finish(reports)
    losses, step_s = [r.loss for r in records], [r.step_s for r in records]
    notes = {"peak_bytes": MEASURED} if memory else {}
    if any(r.spans for r in reports.values()):
        notes["traced step"] = f"{step_s[-1]:.6g} s; {TRACED}"
    if error := max(r.clock_error_s for r in reports.values()):
        notes["clock_error_s"] = f"{error:.2e}: between nodes, half of the quickest round trip"
    spans = {r: rep.spans for r, rep in reports.items()}
    points = {r: rep.memory.points for r, rep in reports.items() if rep.memory is not None}
    waits = {r: rep.waits for r, rep in reports.items() if rep.spans}
    trace = executed_trace(plan, first + len(records) - 1, spans, points, losses, notes, waits)
    return Run(
        losses, step_s, median(step_s[WARMUP_STEPS:]) if step_s[WARMUP_STEPS:] else None,
        {r: rep.memory.peak for r, rep in sorted(reports.items()) if rep.memory is not None}, trace,
        joined_states(plan, reports), joined_gradients(plan, reports),
        {r: rep.memory for r, rep in reports.items() if rep.memory is not None}, initial, [r.batch_s for r in records], first,
    )  # fmt: skip
