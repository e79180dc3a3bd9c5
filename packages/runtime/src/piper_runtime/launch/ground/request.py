"""Make the requests of an attempt to train: one per role, with the code, states and callables that its ranks need."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from piper_ir.plan.plan import Plan, RolePlan
from piper_runtime.checkpoint.host_snapshots import SnapshotOptions
from piper_runtime.checkpoint.restoring import restore_of
from piper_runtime.checkpoint.saved_run import SavedRun
from piper_runtime.checkpoint.snapshot_files import HostSnapshot
from piper_runtime.launch.ground.protocol import EvaluationRequest, Request
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.rank.job.job import InitialState, Job
from piper_runtime.rank.optimizers.optimizer_kinds import with_declarations
from piper_runtime.rank.sending.shipping import pack
from piper_runtime.rank.values.code import ExportedCode, ShippedCode, custom_operators, used_code
from piper_runtime.rank.values.store import held_params, lone_tensors
from piper_runtime.weights import part_of


@dataclass(frozen=True)
class Attempt:
    """Hold one attempt to run the steps of a plan.

    Attributes:
        plan: the plan.
        code: the code of its chunks.
        job: the job that is trained.
        initial: the state with which the first attempt began.
        options: the options of the run, with the steps of this attempt.
        saved: the state that this attempt goes on from; None: it begins with `initial`.
        snapshots: the folder and frequency of host snapshots; None: none are made.
    """

    plan: Plan
    code: ExportedCode
    job: Job
    initial: InitialState
    options: RunOptions
    saved: SavedRun | HostSnapshot | None = None
    snapshots: SnapshotOptions | None = None


def make_requests(attempt: Attempt) -> dict[int, Request]:
    """Return the request of each rank; raise JobError when the job's callables cannot leave this process.

    The ranks of a role share one object, so that a launcher can send it once to each machine.
    """
    plan, job, initial, saved = attempt.plan, attempt.job, attempt.initial, attempt.saved
    evaluation = attempt.options.evaluation
    plan_blob = pickle.dumps(plan)
    measured = None if evaluation is None else evaluation.batch
    functions = job.batch, with_declarations(job.make_optimizers), job.scheduler, measured
    callables = pickle.dumps(pack(functions, (job.model, job.loss), custom_operators(attempt.code)))
    beside = None if evaluation is None else pickle.dumps(evaluation.plan)
    options = attempt.options.for_ranks()
    requests: dict[int, Request] = {}
    for role in plan.roles:
        rank = role.ranks[0]
        params = part_of(initial.params, held_params(plan, rank))
        buffers = part_of(initial.buffers, lone_tensors(plan, rank, "buffer"))
        restored = None if saved is None else restore_of(saved, {*params, *buffers})
        asked = None
        if evaluation is not None and beside is not None:
            own = _shipped(evaluation.plan, evaluation.plan.role(role.role), evaluation.code)
            asked = EvaluationRequest(beside, own, evaluation.every, evaluation.batches)
        request = Request(
            plan_blob,
            callables,
            _shipped(plan, role, attempt.code),
            params,
            buffers,
            job.seed,
            options,
            attempt.options.reports_steps,
            attempt.snapshots,
            restored,
            evaluation=asked,
            draws=job.draws,
            loss_scale=job.precision.scaling,
        )
        requests |= dict.fromkeys(role.ranks, request)
    return requests


def _shipped(plan: Plan, role: RolePlan, code: ExportedCode) -> dict[str, dict[str, ShippedCode]]:
    """Return the code that a role executes, in the form that travels to workers."""
    shipped: dict[str, dict[str, ShippedCode]] = {}
    for code_id, step in (
        *used_code(plan, role),
        *((b.counter, "F") for b in plan.batch if b.counter),
    ):
        source = code[code_id][step]
        shipped.setdefault(code_id, {})[step] = ShippedCode(source.source, dict(source.constants))
    return shipped
