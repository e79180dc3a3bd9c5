"""Plans of hand-made models, compiled by the real compiler, and their comparison with one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packages.runtime.tests.handmade import (
    CODE,
    Reference,
    chain_job,
    chain_program,
    masked_loss,
    mean_loss,
)
from piper_compiler import (
    Options,
    Strategy,
    Training,
    compile_program,
    offload,
    recipes,
    split,
)
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.select import where
from piper_ir.plan.plan import Plan
from piper_runtime import Job, Run, execute
from piper_runtime.rank.optimizers.optimizer_groups import optimizer_spec

TOLERANCE = 1e-12


def chain(
    layers: int = 3, *, pp: int = 2, dp: int = 1, microbatches: int = 4, schedule: str = "one_f_one_b", rows: int = 2,
    tied: bool = False, drop: bool = False, masked: bool = False, fuse: bool = True, zero: int = 0, rep: int = 1,
    sharing: Mapping[str, Any] | None = None, moves: bool = False, hosted: bool = False,
    **fields: Any,
) -> tuple[Plan, Job]:  # fmt: skip
    """A plan and its job. `fields` go to the job; with `rep` the states of `zero` are shared along dp alone; `sharing`
    are more arguments of data_parallel; `moves`: tensors wait on the host for their backward; `hosted`: the
    optimizer is there."""
    loss = masked_loss if masked else mean_loss
    job = chain_job(
        layers, rows * microbatches * dp * rep, tied=tied, drop=drop, **{"loss": loss, **fields}
    )
    program = chain_program(layers, tied=tied, drop=drop, masked=masked)
    cut = (
        getattr(recipes, schedule)(pp=pp, microbatches=microbatches)
        if pp > 1
        else (split(where(), microbatches=microbatches),)
    )
    over = ("dp", "rep") if rep > 1 else ("dp",)
    shard = {kind: ("dp",) for kind in ("optim", "grads", "params")[:zero]} if rep > 1 else None
    replicas = recipes.data_parallel(
        **dict(over=over, zero=0 if shard else zero, shard=shard) | dict(sharing or {})
    )
    waiting = (offload(where(), least_mb=0),) if moves else ()
    waiting += (offload(where(), tensors="optim"),) if hosted else ()
    directives = (*cut, *(replicas if dp * rep > 1 else ()), *waiting)
    spec = optimizer_spec(job, program.params)
    training = Training(spec.group_of, spec.state_bytes, job.clip_norm)
    strategy = Strategy(Mesh(pp=pp, dp=dp, rep=rep), directives)
    lowered = compile_program(
        program,
        strategy,
        global_batch=job.global_batch,
        training=training,
        options=Options(fuse=fuse),
    )
    return lowered.plan, job


def run(plan: Plan, job: Job, **options: Any) -> Run:
    """Execute it inline for three steps unless told otherwise, with the gradients of every step."""
    return execute(
        plan, CODE, job, **{"steps": 3, "launcher": "inline", "gradients": True, **options}
    )


def distance(found: Run, plan: Plan, job: Job) -> float:
    """Largest difference from one device: losses, gradients of every step on every rank, parameters after the last."""
    reference = Reference(job, plan.rows)
    steps = range(len(found.losses))
    out = [abs(found.losses[step] - reference.step(step)) for step in steps]
    for gradients in found.rank_gradients.values():
        out += [
            float((g - reference.gradients[step][n]).norm())
            for step in steps
            for n, g in gradients[step].items()
        ]
    wanted = {n: p.detach() for n, p in reference.model.named_parameters()}
    for states in found.rank_states.values():
        out += [float((t - wanted[n]).norm()) for n, t in states.items() if n in wanted]
    assert {n for g in found.rank_gradients.values() for n in g[0]} == reference.gradients[0].keys()
    return max(out)
