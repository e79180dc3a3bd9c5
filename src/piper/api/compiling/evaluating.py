"""Compile the evaluation beside a training: forwards in eval mode, where the training has its parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from piper.api.captures.capturing import program_at, rewritten, traced_job
from piper.api.compiling.random_draws import check_draws
from piper_compiler import (
    FORGETS,
    Lowered,
    Options,
    Strategy,
    capture_request,
    compile_program,
)
from piper_ir.ground.errors import CaptureError, CompileError, DirectiveError, JobError
from piper_ir.ground.expert_tokens import counts_tokens
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import KernelSource
from piper_ir.tools import count_text

if TYPE_CHECKING:
    from piper_capture import Captured, CodeStore
    from piper_compiler import Training
    from piper_runtime import Job


def compiled_evaluation(
    job: Job, strategy: Strategy, plan: Plan, training: Training, kernels: KernelSource
) -> tuple[Lowered, CodeStore]:
    """Return the plan of an evaluation for the ranks of a training plan, and its code.

    The strategy has fixed stages. Raises JobError, or the error of capture or compiler, in the name of the evaluation.
    """
    try:
        captured = replace(_captured(job, strategy), kernels=kernels)
        lowered = compile_program(
            captured.program,
            strategy,
            global_batch=job.global_batch,
            training=training,
            options=Options(device=plan.device, kernels=kernels),
            at_rows=partial(program_at, captured),
            evaluates=True,
        )
    except (CaptureError, CompileError, DirectiveError) as error:
        raise type(error)(f"Job(eval_data=...), the model in eval mode: {error}") from error
    check_alike(plan, lowered.plan)
    return lowered, captured.code


def evaluation_notice(job: Job | None) -> str:
    """Return a line about a job's evaluation; "" if it has none."""
    if job is None or job.eval_data is None:
        return ""
    batches = job.evaluated.eval_batches
    many = f"{count_text(batches or 0, 'global batch', 'global batches')} of {count_text(job.global_batch, 'row')}"
    return (
        f"every {job.eval_every} steps an evaluation of {many}, as in training: forwards in eval mode by this "
        f"strategy, on the ranks that train. Predictions of a step are without it"
    )


def replicas_notice(job: Job, plan: Plan) -> str:
    """Return a warning about evaluations with buffers of each replica's own rows; "" if there are none."""
    from piper_runtime.checkpoint import varying_buffers

    if job.eval_data is None or plan.replicas == 1 or not (own := sorted(varying_buffers(plan))):
        return ""
    return (
        f"the {plan.replicas} replicas evaluate their rows with buffers of their own, such as {own[0]!r}, and checkpoints "
        f"have the first replica's: eval_loss and metrics differ a little from those of the saved model, and change when "
        f"a run is resumed. For exact ones, evaluate the state_dict on one device"
    )


def _captured(job: Job, strategy: Strategy) -> Captured:
    """Return the capture of the model in eval mode, in the form that the strategy asks for."""
    traced = traced_job(job, evaluating=True)
    request = capture_request(strategy.mesh, strategy.directives, traced.outline)
    captured = rewritten(traced, replace(request, policies=(FORGETS, *request.policies)))
    check_draws(job, captured.program)
    changed = [
        o.ref
        for c in captured.program.chunks
        for o in c.outputs
        if o.kind == "buffer" and not counts_tokens(o.ref)
    ]
    if changed:
        raise JobError(
            f"Job(eval_data=...): in eval mode forward still changes the buffer {changed[0]!r}, so that an "
            f"evaluation would change the training; update it in training mode alone: `if self.training:`"
        )
    return captured


def check_alike(training: Plan, evaluation: Plan) -> None:
    """Raise JobError if an evaluation would need other states than the ranks of the training have."""
    if evaluation.buckets != training.buckets:
        ours, theirs = (
            {name for b in plan.buckets for name in b.params} for plan in (training, evaluation)
        )
        other = ", ".join(sorted(ours ^ theirs)[:3]) or "none, but in other groups"
        raise JobError(
            f"Job(eval_data=...): in eval mode the loss depends on other parameters than in training mode, or "
            f"their layout is another ({other}); let both modes use the same, or evaluate with a job of its own"
        )
    for role, other_role in zip(training.roles, evaluation.roles, strict=True):
        state_ids = {s.id for s in role.states}
        missing = [s.id for s in other_role.states if s.id not in state_ids]
        if missing or other_role.ranks != role.ranks:
            raise JobError(
                f"Job(eval_data=...): the evaluation needs {', '.join(missing) or 'other ranks'} on {role.role}, "
                f"where training has none; let both modes use the same parameters and buffers"
            )
