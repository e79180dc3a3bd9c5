"""Deliberate mistakes of a runtime, each of which the judge must notice.

A fault stands in place of `Rank.binder`, which turns a plan into closures, in the ranks that are bound in this process:

    with faults.inject("forget_zero"):
        execute(plan, code, job, steps=3, launcher="inline")
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from piper_ir.plan.plan import COMPUTE, Instr, Part
from piper_ir.program.ops import (
    COMM,
    Add,
    Cast,
    Collective,
    Compute,
    Fold,
    Fresh,
    Recv,
    Seed,
    Send,
    Update,
)
from piper_ir.program.program import Step
from piper_runtime.rank.binding.parts import Operand, Thunk
from piper_runtime.rank.binding.rank import Rank
from piper_runtime.rank.binding.rank_state import RankState
from tests.faults.batch_faults import BATCHES, DRAWS
from tests.faults.fault import BindOperand, BindPart, Fault

VECTOR = 16
"""Elements of a vector register in bfloat16."""


@contextmanager
def inject(name: str) -> Iterator[Fault]:
    """Apply a fault of FAULTS to every rank that is bound inside the block, in this process."""
    correct = Rank.binder
    Rank.binder = FAULTS[name].binder(correct)
    try:
        yield FAULTS[name]
    finally:
        Rank.binder = correct


def _bucket_reduce(part: Part) -> bool:
    return isinstance(part.op, Collective) and bool(part.op.bucket)


def _skip_allreduce(part: Part, rank: RankState, bind: BindOperand) -> Operand:
    operand = bind(part, rank)
    return (lambda: operand().clone()) if _bucket_reduce(part) else operand


def _double_allreduce(part: Part, rank: RankState, bind: BindOperand) -> Operand:
    operand = bind(part, rank)
    assert isinstance(part.op, COMM)
    members = len(rank.plan.peers(rank.plan.channel(part.op.channel), rank.rank))
    # A second sum over equal copies multiplies by their number.
    return (lambda: operand().mul_(members)) if _bucket_reduce(part) else operand


def _skip_scalar_reduce(part: Part, rank: RankState, bind: BindOperand) -> Operand:
    operand = bind(part, rank)
    if not isinstance(part.op, Collective) or part.op.bucket:
        return operand
    source, target, values = part.reads[0], part.writes[0], rank.store.values

    def local() -> torch.Tensor:
        values[target].copy_(values[source])
        return values[source].clone()

    return local


def _first_sent(part: Part, rank: RankState, bind: BindOperand) -> Operand:
    operand = bind(part, rank)
    if not isinstance(part.op, Send) or part.mb < 1:
        return operand
    first: dict[str, torch.Tensor] = rank.__dict__.setdefault("first_sent", {})
    channel = part.op.channel

    def stale() -> torch.Tensor:
        now = operand()
        before = first.setdefault(channel, now.clone())
        return before if before.shape == now.shape and before.dtype == now.dtype else now

    return stale


def _forget_zero(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    run = bind(part, rank)
    if not isinstance(part.op, Update):
        return run
    flats = [rank.store.flat_grads[b] for b in part.op.buckets]

    def update() -> None:
        kept = [f.clone() for f in flats]
        run()
        for flat, grad in zip(flats, kept):
            flat.copy_(grad)

    return update


def _no_weight(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    if isinstance(part.op, Update) and part.op.weighted:
        part = replace(part, op=replace(part.op, weighted=False), reads=part.reads[1:])
    return bind(part, rank)


def _no_unscaling(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    if isinstance(part.op, Update) and part.op.scaled:
        part = replace(part, op=replace(part.op, scaled=False), reads=part.reads[:-1])
    return bind(part, rank)


def _next_scale(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    run, running = bind(part, rank), rank.loss_scale
    if not isinstance(part.op, Update) or running is None:
        return run

    def update() -> None:
        running.value *= 2
        run()
        running.value /= 2

    return update


def _no_clip(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    if isinstance(part.op, Update) and part.op.clip is not None:
        part = replace(part, op=replace(part.op, clip=None), reads=part.reads[:-1])
    return bind(part, rank)


def _unit_seed(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    if isinstance(part.op, Seed):
        part = replace(part, op=replace(part.op, value=1.0))
    return bind(part, rank)


def _stale_replica(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    run = bind(part, rank)
    if not isinstance(part.op, Update) or rank.plan.replica_of(rank.rank) == 0:
        return run
    return _undone(
        run,
        [
            flat
            for b in part.op.buckets
            for flat in (rank.store.flat_params[b], rank.store.own_masters[b])
        ],
    )


def _stale_copies(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    run = bind(part, rank)
    if not isinstance(part.op, Update):
        return run
    return _undone(
        run, [t for b, t in rank.store.own_params.items() if t is not rank.store.own_masters[b]]
    )


def _stale_master(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    """The optimizer updates the copies, and the masters stay."""
    run = bind(part, rank)
    if not isinstance(part.op, Update):
        return run
    return _undone(
        run, [t for b, t in rank.store.own_masters.items() if t is not rank.store.own_params[b]]
    )


def _no_master(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    """The optimizer updates parameters that have no more digits than bfloat16."""
    run, masters = (
        bind(part, rank),
        [t for b, t in rank.store.own_masters.items() if t is not rank.store.own_params[b]],
    )
    return _rounded(run, masters) if isinstance(part.op, Update) else run


def _narrow_sums(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    """Gradients are summed in bfloat16."""
    run = bind(part, rank)
    return _rounded(run, list(_accumulators(part, rank).values())) if _mixed(rank) else run


def _narrow_reduction(part: Part, rank: RankState, bind: BindOperand) -> Operand:
    operand = bind(part, rank)
    if not (_bucket_reduce(part) and _mixed(rank)):
        return operand

    def narrow() -> torch.Tensor:
        tensor = operand()
        return tensor.copy_(tensor.bfloat16())

    return narrow


def _mixed(rank: RankState) -> bool:
    return any(bucket.mastered for bucket in rank.store.buckets)


def _rounded(run: Thunk, tensors: list[torch.Tensor]) -> Thunk:
    """A part behind which these tensors are rounded to bfloat16."""
    if not tensors:
        return run

    def rounded() -> None:
        run()
        for tensor in tensors:
            tensor.copy_(tensor.bfloat16())

    return rounded


def _dead_kernel(part: Part, rank: RankState, bind: BindPart, *, flat: bool) -> Thunk:
    """An update of an optimizer that runs on whole buckets (`flat`), or of another, moves no whole vector of a
    bucket."""
    run = bind(part, rank)
    if not isinstance(part.op, Update) or rank.optimizer.flat != flat:
        return run
    flats = [rank.store.own_masters[b] for b in part.op.buckets]

    def update() -> None:
        whole = [f[: f.numel() // VECTOR * VECTOR] for f in flats]
        kept = [w.clone() for w in whole]
        run()
        for now, old in zip(whole, kept):
            now.copy_(old)

    return update


def _accumulators(part: Part, rank: RankState) -> dict[str, torch.Tensor]:
    """The gradients, by parameter, into which a backward part adds."""
    if not isinstance(part.op, Compute) or part.op.step not in ("I", "W"):
        return {}
    chunk = rank.plan.chunk(part.op.chunk)
    step: Step = "I" if part.op.step == "I" else "W"
    names = [chunk.inputs[i].ref for i in chunk.steps[step].accumulates]
    return {n: rank.store.grads[n] for n in names}


def _undone(run: Thunk, tensors: list[torch.Tensor]) -> Thunk:
    """A part whose additions to these tensors are taken back."""
    if not tensors:
        return run

    def lose() -> None:
        kept = [t.clone() for t in tensors]
        run()
        for tensor, old in zip(tensors, kept):
            tensor.copy_(old)

    return lose


def _lose_last_gradient(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    """The effect of a reduction that starts before the last microbatch's gradient is there."""
    last = part.mb == rank.plan.microbatches - 1
    return _undone(bind(part, rank), list(_accumulators(part, rank).values()) if last else [])


def _lose_tied_gradient(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    shared = {n for b in rank.store.buckets if rank.role.role != b.roles[0] for n in b.params}
    return _undone(
        bind(part, rank), [t for n, t in _accumulators(part, rank).items() if n in shared]
    )


def _short_add(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    return bind(
        replace(part, reads=part.reads[:-1])
        if isinstance(part.op, Add) and len(part.reads) > 1
        else part,
        rank,
    )


def _free_early(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    run = bind(part, rank)
    if not isinstance(part.op, Compute) or part.op.step != "F" or not part.writes:
        return run
    values, victim = rank.store.values, part.writes[-1]

    def early() -> None:
        run()
        values.pop(victim, None)

    return early


def _free_twice(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    run = bind(part, rank)
    if not isinstance(part.op, Compute) or not part.frees:
        return run
    values, victim = rank.store.values, part.frees[0]

    def twice() -> None:
        run()
        del values[victim]

    return twice


def _no_receive_wait(instr: Instr, rank: RankState) -> Instr:
    """Compute starts without waiting for what it receives."""
    receives = {i.stream for i in rank.role.program if isinstance(i.parts[0].op, Recv)}
    if instr.stream != COMPUTE:
        return instr
    return replace(instr, waits=tuple(w for w in instr.waits if w[0] not in receives))


def _update_first(instr: Instr, rank: RankState) -> Instr:
    """Update does not wait for the reductions, and they start only behind it."""
    program = rank.role.program
    reduces = {i.stream for i in program if _bucket_reduce(i.parts[0])}
    if instr.stream == COMPUTE:
        return replace(instr, waits=tuple(w for w in instr.waits if w[0] not in reduces))
    if instr.stream not in reduces:
        return instr
    computes = sum(i.stream == COMPUTE for i in program)
    return replace(instr, waits=(*instr.waits, (COMPUTE, computes)))


def _no_fold(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    run = bind(part, rank)
    if not isinstance(part.op, Fold):
        return run
    values, dead = rank.store.values, part.frees
    return lambda: [values.pop(v) for v in dead]


def _kept_after_cast(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    run = bind(part, rank)
    if not isinstance(part.op, Cast) or part.reads:
        return run
    kept = rank.store.flat_grads[part.op.bucket]

    def cast() -> None:
        before = kept.clone()
        run()
        kept.copy_(before)

    return cast


def _dirty_buffer(part: Part, rank: RankState, bind: BindPart) -> Thunk:
    run = bind(part, rank)
    if not isinstance(part.op, Fresh):
        return run
    values, made = rank.store.values, part.writes[0]
    return lambda: (run(), values[made].fill_(0.125))


def _stale_gather(part: Part, rank: RankState, bind: BindOperand) -> Operand:
    """Give what was given in the first step."""
    operand = bind(part, rank)
    if not (isinstance(part.op, Collective) and part.op.kind == "all_gather"):
        return operand
    first: list[torch.Tensor] = []

    def stale() -> torch.Tensor:
        if not first:
            first.append(operand().clone())
        return first[0]

    return stale


FAULTS: dict[str, Fault] = {
    "skip_fold": Fault(
        "the sum of shared gradients is not added to what a rank keeps", part=_no_fold
    ),
    "dirty_buffer": Fault(
        "a buffer for shared gradients does not start from zero", part=_dirty_buffer
    ),
    "stale_gather": Fault("gathers bring the parameters of the first step", operand=_stale_gather),
    "skip_allreduce": Fault("gradients are not reduced", operand=_skip_allreduce),
    "double_allreduce": Fault("gradients are reduced twice", operand=_double_allreduce),
    "skip_scalar_reduce": Fault(
        "loss weights and gradient norms stay local", operand=_skip_scalar_reduce
    ),
    "update_before_reduce": Fault("the optimizer steps before the reduction", instr=_update_first),
    "read_before_wait": Fault("compute does not wait for receives", instr=_no_receive_wait),
    "stale_send": Fault("every microbatch sends what the first one sent", operand=_first_sent),
    "forget_zero": Fault("gradients are not zeroed after an update", part=_forget_zero),
    "omit_weight": Fault("gradients are not divided by the sum of weights", part=_no_weight),
    "omit_unscaling": Fault("gradients keep the scale of the loss", part=_no_unscaling),
    "next_scale": Fault("gradients are divided by the scale of the next step", part=_next_scale),
    "omit_clip": Fault("gradients are not clipped", part=_no_clip),
    "omit_loss_scale": Fault(
        "the loss is not averaged over microbatches and replicas", part=_unit_seed
    ),
    "stale_replica": Fault("one replica keeps its old parameters", part=_stale_replica),
    "stale_copies": Fault(
        "forward and backward read parameters that no update has written", part=_stale_copies
    ),
    "stale_master": Fault("the master is not updated", part=_stale_master),
    "no_master": Fault("the master is rounded to bfloat16 after every update", part=_no_master),
    "narrow_sums": Fault("gradients of microbatches are summed in bfloat16", part=_narrow_sums),
    "narrow_reduction": Fault("gradients are reduced in bfloat16", operand=_narrow_reduction),
    "dead_fused_kernel": Fault(
        "the fused optimizer does nothing for whole vectors", part=partial(_dead_kernel, flat=True)
    ),
    "dead_plain_kernel": Fault(
        "an optimizer without a fused kernel does nothing", part=partial(_dead_kernel, flat=False)
    ),
    **BATCHES,
    "lose_last_gradient": Fault(
        "the last microbatch's gradient comes after the reduction", part=_lose_last_gradient
    ),
    "lose_tied_gradient": Fault(
        "a second holder's gradient of a tied parameter is lost", part=_lose_tied_gradient
    ),
    "short_add": Fault("a sum of gradients leaves out its last operand", part=_short_add),
    "free_early": Fault("a value is freed before its last reader", part=_free_early),
    "free_twice": Fault("a value is freed twice", part=_free_twice),
    **DRAWS,
    "kept_after_cast": Fault(
        "the sum over ranks is added to the gradients that were cast for it", part=_kept_after_cast
    ),
}
"""Name -> fault."""
