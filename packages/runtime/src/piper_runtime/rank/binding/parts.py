"""Bind each part of a plan to a closure, once per plan, so that running it costs little host time.

Both engines run these. A closure reads and writes `store.values`, which holds the only reference to every value. A
value that dies in a part is taken out of it, so that boxed code frees it at its last use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never

import torch

from piper_ir.ground.expert_tokens import counts_tokens
from piper_ir.plan.plan import HOST, Part, is_state
from piper_ir.program.ops import (
    KEEP_ALL,
    Add,
    Cast,
    Collective,
    Compute,
    Fold,
    Fresh,
    Load,
    Recv,
    Seed,
    Send,
    SquaredNorm,
    Update,
    Zeros,
)
from piper_ir.program.program import Chunk
from piper_ops import drawing
from piper_runtime.rank.batches.batches import microbatch_rows
from piper_runtime.rank.batches.feed import upload
from piper_runtime.rank.binding.overflow import naming_overflow
from piper_runtime.rank.binding.rank_state import RankState
from piper_runtime.rank.binding.shared import shared_arguments
from piper_runtime.rank.binding.update_scale import scale_of
from piper_runtime.rank.values.rng import drawing_of
from piper_runtime.rank.values.scalars import scalar_name
from piper_runtime.rank.values.store import empty_value

Thunk = Callable[[], object]
"""A closure that is called for its effect; its result is ignored."""
Operand = Callable[[], torch.Tensor]


def bind_part(part: Part, rank: RankState) -> Thunk:
    """Return the closure that runs one part of the compute stream."""
    match part.op:
        case Compute():
            return _compute(part, rank)
        case Load():
            run = _load(part, part.op, rank)
        case Seed():
            run = _fill(part, rank, part.op.value, part.op.dtype, scaled=part.op.scaled)
        case Zeros():
            run = _fill(part, rank, 0.0, part.op.dtype)
        case Add():
            run = _add(part, rank)
        case SquaredNorm():
            run = _squared_norm(part, part.op, rank)
        case Fresh():
            run = _fresh(part, rank)
        case Cast():
            run = _cast(part, part.op, rank)
        case Fold():
            run = _fold(part, part.op, rank)
        case Update():
            run = _update(part, part.op, rank)
        case Send() | Recv() | Collective():
            raise TypeError(
                f"{part.node}: communication has no closure of its own; it is bound by bind_operand"
            )
        case _:
            assert_never(part.op)
    return _then_free(run, part.frees, rank)


def bind_operand(part: Part, rank: RankState) -> Operand:
    """Return the closure that gives the tensor of a part that communicates.

    It is the tensor to send, to receive into, or to give to a collective, whose result goes there too unless there is a
    `bind_result`.
    """
    values = rank.store.values
    match part.op:
        case Send():
            source = part.reads[0]
            return lambda: values[source]
        case Recv():
            target = part.writes[0]
            return lambda: values[target]
        case Collective() as op if op.bucket and op.law.route == "host":
            (flat, _), target = _state_ends(op, rank), part.writes[0]
            return lambda: values[target].copy_(flat, non_blocking=True)
        case Collective() as op if op.bucket and not part.reads:
            flat, _ = _state_ends(op, rank)
            return lambda: flat
        case Collective() as op if op.law.in_place:
            source, target = part.reads[0], part.writes[0]
            beside = op.law.route == "host"  # the stream orders it, and the host goes on
            return lambda: values[target].copy_(values[source], non_blocking=beside)
        case Collective():
            source = part.reads[0]
            return lambda: values[source]
        case _:
            raise TypeError(f"{part.node}: {type(part.op).__name__} does not communicate")


def bind_result(part: Part, rank: RankState) -> Operand | None:
    """Return the closure that gives the tensor which a collective writes; None if it works in place."""
    if not isinstance(part.op, Collective) or part.op.law.in_place:
        return None
    if not part.writes:
        _, flat = _state_ends(part.op, rank)
        return lambda: flat
    values, target = rank.store.values, part.writes[0]
    return lambda: values[target]


def _state_ends(op: Collective, rank: RankState) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensors that a collective on a bucket's state gives, and gets unless the plan names a value."""
    store, bucket = rank.store, op.bucket
    match op.law.state:
        case "param":
            return store.own_params[bucket], store.flat_params[bucket]
        case "grad" if op.law.in_place:
            return store.own_grads[bucket], store.own_grads[bucket]
        case "grad":
            return store.flat_grads[bucket], store.own_grads[bucket]
        case "":
            raise TypeError(f"{op.law.name} works on no state, and it names {bucket}")
        case _:
            assert_never(op.law.state)


def bind_alloc(value: str, rank: RankState) -> Thunk:
    """Return the closure that makes a buffer for a value that communication will write."""
    values, device = rank.store.values, rank.device
    shape, dtype = empty_value(rank.plan, value)
    if rank.plan.kinds[value][1] == HOST:
        return _alloc_on_host(value, rank)

    def alloc() -> None:
        values[value] = torch.empty(shape, dtype=dtype, device=device)

    return alloc


def _alloc_on_host(value: str, rank: RankState) -> Thunk:
    """Return the closure that makes a buffer for a value in the memory of the host."""
    values, host = rank.store.values, rank.host
    shape, dtype = empty_value(rank.plan, value)

    def alloc() -> None:
        with rank.untracked():
            values[value] = host.take(shape, dtype)

    return alloc


def _then_free(run: Thunk, dying: tuple[str, ...], rank: RankState) -> Thunk:
    if not dying:
        return run
    values = rank.store.values

    def run_and_free() -> None:
        run()
        for v in dying:
            del values[v]

    return run_and_free


def _load(part: Part, op: Load, rank: RankState) -> Thunk:
    values, feed, target = rank.store.values, rank.feed, part.writes[0]
    shape, dtype = empty_value(rank.plan, target)

    def load() -> None:
        with rank.untracked():
            rows = feed.take(op.tensor, part.mb)
        values[target] = torch.empty(shape, dtype=dtype).copy_(rows)

    def load_on_device() -> None:
        with rank.untracked():
            rows = feed.take(op.tensor, part.mb)
        values[target] = upload(rows, shape, dtype, rank.device)

    return load if rank.device.type == "cpu" else load_on_device


def _fill(
    part: Part, rank: RankState, number: float, dtype_name: str, *, scaled: bool = False
) -> Thunk:
    values, target, dtype, device = (
        rank.store.values,
        part.writes[0],
        getattr(torch, dtype_name),
        rank.device,
    )

    def fill() -> None:
        values[target] = torch.full((), number, dtype=dtype, device=device)

    running = rank.loss_scale
    if not scaled or running is None:
        return fill

    def fill_scaled() -> None:
        values[target] = torch.full((), number * running.value, dtype=dtype, device=device)

    return fill_scaled


def _add(part: Part, rank: RankState) -> Thunk:
    values, target = rank.store.values, part.writes[0]
    first, *rest = part.reads

    def add() -> None:
        total = values[first] + values[rest[0]] if rest else values[first].clone()
        for v in rest[1:]:
            total += values[v]
        values[target] = total

    return add


def _squared_norm(part: Part, op: SquaredNorm, rank: RankState) -> Thunk:
    values, target, dtype, device = (
        rank.store.values,
        part.writes[0],
        getattr(torch, op.dtype),
        rank.device,
    )
    flats = [
        rank.store.own_grads[b] for b in op.buckets if b not in op.once or _counts(b, op, rank)
    ]
    norm = torch.empty(
        (), dtype=dtype, device=device
    )  # made once, since a step counts the result alone

    def squared_norm() -> None:
        total = torch.zeros((), dtype=dtype, device=device)
        with rank.untracked():
            for flat in flats:
                total += torch.linalg.vector_norm(flat, dtype=dtype, out=norm).square_()
        values[target] = total

    return squared_norm


def _counts(bucket: str, op: SquaredNorm, rank: RankState) -> bool:
    """Return whether a rank is the first of the ranks that hold the same part of a bucket."""
    plan_bucket = rank.plan.bucket(bucket)
    alike = [a for a in op.over if a not in (*plan_bucket.shard.optim, *plan_bucket.parts)]
    return not rank.plan.mesh.index_along(alike, rank.rank)


def _fresh(part: Part, rank: RankState) -> Thunk:
    values, target, device = rank.store.values, part.writes[0], rank.device
    shape, dtype = empty_value(rank.plan, target)

    def fresh() -> None:
        values[target] = torch.zeros(shape, dtype=dtype, device=device)

    return fresh


def _cast(part: Part, op: Cast, rank: RankState) -> Thunk:
    values, target, kept = rank.store.values, part.writes[0], rank.store.flat_grads[op.bucket]
    _, dtype = empty_value(rank.plan, target)

    def cast_kept() -> None:
        values[target] = kept.to(dtype)
        kept.zero_()

    def cast() -> None:
        values[target] = values[source].to(dtype)

    if not part.reads:
        return cast_kept
    source = part.reads[0]
    return cast


def _fold(part: Part, op: Fold, rank: RankState) -> Thunk:
    values, kept, source = rank.store.values, rank.store.own_grads[op.bucket], part.reads[0]

    def fold() -> None:
        kept.add_(values[source])

    return fold


def _update(part: Part, op: Update, rank: RankState) -> Thunk:
    if rank.plan.evaluates:
        return lambda: None  # the end of the step
    flats = [rank.store.flat_grads[b] for b in op.buckets]
    scale_now = scale_of(part, op, rank)

    def update() -> None:
        scale = scale_now()
        if rank.probe is not None:
            with rank.untracked():
                rank.probe(
                    rank, op.buckets if scale is not None else (), 1.0 if scale is None else scale
                )
        rank.before_update()
        if scale is not None:
            rank.optimizer.update(op.buckets, scale, rank.untracked)
        for flat in flats:
            flat.zero_()

    return update


def _compute(part: Part, rank: RankState) -> Thunk:
    assert isinstance(part.op, Compute)
    chunk, step = rank.plan.chunk(part.op.variant), part.op.step
    signature = chunk.steps[step]
    function = rank.steps(chunk.code, step)
    values = rank.store.values
    template, keep, take = _arguments(part, chunk, rank)
    views = shared_arguments(part, chunk, rank)
    writes = part.writes
    taken = {v for _, v in take}
    after = tuple(v for v in part.frees if v not in taken)
    expected = len(signature.writes)

    def compute() -> None:
        args: list[Any] = template.copy()
        for i, v in keep:
            args[i] = values[v]
        for i, v, size, stride, offset in views:
            args[i] = values[v].as_strided(size, stride, offset)
        for i, v in take:
            args[i] = values.pop(v)
        results = function(args)
        if len(results) != expected:
            raise TypeError(
                f"{part.node}: the code returned {len(results)} tensors for {expected} ports "
                f"{', '.join(signature.writes)}"
            )
        for v, t in zip(writes, results):
            values[v] = t

    run: Thunk = naming_overflow(compute, part.node) if chunk.experts else compute
    if step == "F":
        run = _forward(
            rank.dropped.counting(run, chunk) if chunk.experts else run, part, chunk, rank
        )
    elif chunk.random and (step == "R" or (step == "B" and chunk.keep != KEEP_ALL)):
        run = _drawing(run, part, chunk, rank)  # the same numbers as its forward
    return _then_free(run, after, rank) if after else run


def _arguments(
    part: Part, chunk: Chunk, rank: RankState
) -> tuple[list[torch.Tensor | None], list[tuple[int, str]], list[tuple[int, str]]]:
    """Return the argument list with states filled in, and (index, value) of the values that go into it.

    First come the values that stay alive, then the values that die at this use.
    """
    assert isinstance(part.op, Compute)
    signature, store = chunk.steps[part.op.step], rank.store
    template: list[torch.Tensor | None] = []
    ports: list[tuple[int, str]] = []
    unread = iter(part.reads)
    for port in signature.reads:
        if is_state(chunk, port):
            entry = chunk.inputs[int(port[2:])]
            template.append(
                store.params.get(entry.ref) if entry.kind == "param" else store.buffers[entry.ref]
            )
        else:
            ports.append((len(template), next(unread)))
            template.append(None)
    template += [store.grads.get(chunk.inputs[i].ref) for i in signature.accumulates]
    last = {v: i for i, v in ports}
    take = [(i, v) for i, v in ports if v in part.frees and last[v] == i]
    keep = [p for p in ports if p not in take]
    return template, keep, take


def _forward(run: Thunk, part: Part, chunk: Chunk, rank: RankState) -> Thunk:
    """Return F with its random numbers, and losses, weights and new buffers handed on after it."""
    writes = dict(zip(chunk.steps["F"].writes, part.writes, strict=True))
    outputs = [(o, writes[f"out{k}"]) for k, o in enumerate(chunk.outputs) if f"out{k}" in writes]
    scalars = [
        (_recorder(scalar_name(o), v, part.mb, rank), v)
        for o, v in outputs
        if o.kind not in ("value", "buffer")
    ]
    buffers = [(o.ref, v) for o, v in outputs if o.kind == "buffer"]
    if chunk.random:
        run = _drawing(run, part, chunk, rank)
    if not (scalars or buffers):
        return run
    values, store, mb = rank.store.values, rank.store, part.mb

    def forward() -> None:
        run()
        for read, v in scalars:
            read(values[v])
        for name, v in buffers:
            if counts_tokens(name):
                rank.count(name, values[v])
                continue
            # A role may run its microbatches out of order; the content after the step is that of the last one.
            if rank.buffer_mb.get(name, -1) < mb:
                rank.buffer_mb[name] = mb
                store.buffers[name].copy_(values[v])

    return forward


def _recorder(kind: str, value: str, mb: int, rank: RankState) -> Callable[[torch.Tensor], None]:
    return rank.numbers.reader(
        empty_value(rank.plan, value)[1], lambda number: rank.record(kind, mb, number)
    )


def _drawing(run: Thunk, part: Part, chunk: Chunk, rank: RankState) -> Thunk:
    """Return a closure that runs a part of a chunk with the random numbers of its microbatch."""
    row = microbatch_rows(rank.plan, rank.plan.replica_of(rank.rank), part.mb).start

    def drawn() -> None:
        with drawing(
            drawing_of(rank.plan, chunk, rank.draws, rank.seed, rank.step, row, rank.device),
            opaque=chunk.opaque,
        ):
            run()

    return drawn
