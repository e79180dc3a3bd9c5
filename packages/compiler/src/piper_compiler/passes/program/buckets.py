"""Make gradient buckets. They belong to the whole graph and are keyed by the ranks that hold their parameters.

The rules R22-buckets and R23-holders of `piper_ir.verify` check them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from piper_compiler.ports import trains
from piper_compiler.request import Training
from piper_ir.graph.graph import Coord, Editor, Replication
from piper_ir.ground.errors import CompileError
from piper_ir.ground.node_ids import compute_id
from piper_ir.ground.shards import Shards
from piper_ir.ground.sizes import ITEM_BYTES, bind
from piper_ir.plan.plan import Bucket, Channel
from piper_ir.program.program import Param, Program

ALIGN_BYTES = 256
"""The alignment in bytes of a parameter in its bucket, as CUDA's vectorised kernels and NCCL prefer it.

torch's allocator gives the same.
"""

_Purpose = Literal["reduce", "gather", "scatter"]


@dataclass(frozen=True)
class _Kind:
    """Hold the common properties of the parameters of one bucket.

    Attributes:
        dtypes: the dtypes as `Training.bucket_dtypes` returns them.
        unit: the stage whose gradients complete them, if a bucket must not join stages: its gathered parameters or
            gradients would be held for both.
        parts: the axes along which they are sharded.
        summed: the axes along which their gradients are partial sums of devices that share a chunk.
        host: whether they are updated on the host.
        away: whether they are on the host themselves.
    """

    roles: tuple[str, ...]
    dtypes: tuple[str, str, str, str]
    group: int
    limit: int
    policy: Replication
    unit: Coord | None
    parts: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    host: bool = False
    away: bool = False

    @property
    def step(self) -> int:
        """Return the elements that are aligned in the narrowest of its dtypes."""
        return ALIGN_BYTES // min(ITEM_BYTES[dtype] for dtype in self.dtypes if dtype)


@dataclass(slots=True)
class _Filling:
    """Collect the parameters of a bucket that may get more, and their bytes in the dtype of reductions."""

    members: list[Param] = field(default_factory=list)
    nbytes: int = 0


def make_buckets(edit: Editor, training: Training) -> None:
    """Add the buckets of all trained parameters and the channels that reduce them.

    Parameters stand in the order of completion of their gradients. A bucket ends before a parameter that would exceed
    its size. Parameters of one bucket share their roles, replicas, dtypes and optimizer group.
    """
    roles_of = holders(edit, edit.graph.program)
    if training.whole:
        _check_whole(edit, training)
    open_: dict[_Kind, _Filling] = {}
    buckets: list[tuple[_Kind, _Filling]] = []
    hosted, away = _users_alike(edit, edit.hosted), _users_alike(edit, edit.away)
    for param, policy, stage in _by_completion(edit):
        roles = roles_of[param.name]
        chosen = policy
        policy = _of_param(policy, edit.graph.program, param)
        moved = param.name in away and _moves(edit, param, chosen, policy)
        group = training.group_of.get(param.name, 0)
        reduced = len(roles) > 1 or bool(policy.over or param.summed)
        dtypes = training.bucket_dtypes(param, reduced)
        limit = policy.bucket_bytes if reduced or moved else 2**62
        parts = tuple(sorted({p.axis for p in param.layout}))
        unit = stage if policy.shard.grads or moved else None
        on_host = param.name in hosted
        key = _Kind(
            roles, dtypes, group, limit, _shared(policy), unit, parts, param.summed, on_host,
            moved,
        )  # fmt: skip
        filling = open_.get(key)
        item = ITEM_BYTES[dtypes[2] or dtypes[0]]
        if filling is None or filling.nbytes + bind(param.spec.numel, 0) * item > limit:
            filling = open_[key] = _Filling()
            buckets.append((key, filling))
        filling.members.append(param)
        filling.nbytes += _aligned(param, key) * item
    for number, (key, filling) in enumerate(buckets):
        newton_schulz = training.newton_schulz.get(key.group, 0)
        _add(edit, f"bucket{number}", key, filling.members, newton_schulz)


def _moves(edit: Editor, param: Param, chosen: Replication, policy: Replication) -> bool:
    """Return whether a parameter of chunks whose states are on the host is there itself.

    One of at most `whole_bytes` stays on the device, where updated parts are gathered. Raises CompileError where ranks
    share the states of the optimizer and no parameters (zero=1 or 2).
    """
    if not policy.shard.optim or policy.shard.params:
        return True
    if chosen.shard.params:
        return False
    raise CompileError(
        f"parameter {param.name!r} is whole on each rank, while ranks share the states of its optimizer, and "
        f'offload(tensors="states") would gather what they updated on the host; use zero=3, zero=0 or tensors="optim" '
        f"[offload condition 10]",
        edit.away,
    )


WHOLE = {
    "Adafactor": " (it keeps sums over rows and columns of matrices)",
    "Muon": " (it makes the updates of matrices orthogonal)",
    "BatchedMuon": " (it makes the updates of matrices orthogonal)",
}
"""The reasons why optimizers of torch need whole parameters, as a message gives them."""


def _check_whole(edit: Editor, training: Training) -> None:
    """Raise CompileError if ranks shard parameters, or their states, that an optimizer needs whole."""
    optimizer, groups = training.whole, training.whole_groups
    advice = (
        f"and {optimizer} works on whole parameters here{WHOLE.get(optimizer, '')}; use one that updates each "
        f"element by itself, such as AdamW or RMSprop, declare it with piper.elementwise({optimizer}) if it does "
        f"so, or"
    )
    whole = [
        p
        for p in edit.graph.program.params
        if p.trained and training.group_of.get(p.name, 0) in groups
    ]
    if parted := next((p.name for p in whole if _apart(p, training)), None):
        raise CompileError(
            f"each device would have a part of parameter {parted!r} (by shard), {advice} leave shard out"
        )
    sharing = next((r for r in edit.replication.values() if r.shard.optim), None)
    if sharing is not None:
        raise CompileError(
            f"{edit.graph.log[sharing.applied]}: ranks would share the states of the optimizer, each with a part "
            f"of every parameter, {advice} use zero=0"
        )


def _apart(param: Param, training: Training) -> bool:
    """Return whether devices have parts of a tensor that is updated as one: a parameter, or a matrix in a stack."""
    alone = training.group_of.get(param.name, 0) in training.matrix_groups
    stacked = len(param.spec.shape) - 2 if alone else 0
    return any(part.dim >= stacked for part in param.layout)


@lru_cache(64)
def _shared(policy: Replication) -> Replication:
    """Return a policy without the settings that may differ between the parameters of a bucket."""
    return replace(policy, applied=-1, resident_bytes=0, reduced_bytes=0, prefetch=0, whole_bytes=0)


def _of_param(policy: Replication, program: Program, param: Param) -> Replication:
    """Return the policy without the axes along which a parameter's gradient is not summed.

    A parameter of at most `whole_bytes` in the dtype of forward and backward is not sharded itself.
    Devices that share experts have some of the experts each. Devices that share a chunk have a part of the parameter
    each, or all of it with the same gradient: nothing is summed there that its states could be sharded along with.
    """
    apart = {part.axis for part in param.layout}
    over = tuple(a for a in policy.over if a not in apart)
    params, grads, optim = (
        tuple(a for a in axes if a in over or a in param.summed)
        for axes in (policy.shard.params, policy.shard.grads, policy.shard.optim)
    )
    if bind(param.spec.numel, 0) * ITEM_BYTES[param.spec.dtype] <= policy.whole_bytes:
        params = ()
    shard = Shards(params, grads, optim)
    unchanged = (over, shard) == (policy.over, policy.shard)
    return policy if unchanged else replace(policy, over=over, shard=shard)


def _by_completion(edit: Editor) -> list[tuple[Param, Replication, Coord | None]]:
    """Return the trained parameters with policy and stage, in the order of completion of their gradients.

    Backward runs against the program, so a gradient is complete with the first chunk that uses its parameter.
    """
    none = Replication((), 25 * 2**20, "", -1)
    by_name = {p.name: p for p in edit.graph.program.params}
    completed: dict[str, tuple[Replication, Coord | None]] = {}
    for chunk in reversed(edit.graph.program.chunks):
        policy = edit.replication.get(chunk.id, none)
        names = trains(chunk)
        stage = edit.families[compute_id(chunk.id, "F")][0].coords.get("stage") if names else None
        for name in reversed(names):
            other, _ = completed.pop(name, (policy, stage))
            if other.together != policy.together:
                raise CompileError(
                    f"parameter {name!r} is shared by chunks that are replicated in different ways; replicate them "
                    f"together"
                )
            completed[name] = policy, stage
    return [(by_name[name], policy, stage) for name, (policy, stage) in completed.items()]


def _users_alike(edit: Editor, chunks: Sequence[str]) -> set[str]:
    """Return the trained parameters of chunks whose states are on the host, where all of their users are alike."""
    hosted, users = set(chunks), dict[str, dict[bool, str]]()
    if not hosted:
        return set()
    for chunk in edit.graph.program.chunks:
        for name in trains(chunk):
            users.setdefault(name, {})[chunk.id in hosted] = chunk.id
    for name, by_place in users.items():
        if len(by_place) > 1:
            raise CompileError(
                f"parameter {name!r} is of {by_place[True]}, whose states offload puts on the host, and of "
                f"{by_place[False]}, whose it does not; select both",
                tuple(by_place.values()),
            )
    return {name for name, by_place in users.items() if True in by_place}


def _aligned(param: Param, kind: _Kind) -> int:
    """Return the elements that a parameter takes in a bucket."""
    return -(-bind(param.spec.numel, 0) // kind.step) * kind.step


def _add(edit: Editor, id: str, kind: _Kind, members: list[Param], newton_schulz: int) -> None:
    offsets, numel = [], 0
    for param in members:
        offsets.append(numel)
        numel += _aligned(param, kind)
    policy, roles = kind.policy, kind.roles
    shard = policy.shard
    if shard.optim:
        whole = kind.step * edit.graph.mesh.degree(shard.optim)
        numel = -(-numel // whole) * whole
    axes = tuple(a for a in edit.graph.mesh.axes if a in (*policy.over, *kind.summed))
    over = tuple(a for a in axes if a not in shard.optim)
    used = policy.stream or "reduce"
    channel = _channel(edit, roles, over, used, "reduce") if len(roles) > 1 or over else ""
    sharers = roles if shard.optim else ()
    gather = tuple(
        [
            _channel(edit, (role,), shard.optim, policy.gather or "gather", "gather")
            for role in sharers
        ]
    )
    scatter = tuple(
        [
            _channel(edit, (role,), shard.optim, policy.stream or "scatter", "scatter")
            for role in sharers
        ]
    )
    dtype, compute, reduce, accumulate = kind.dtypes
    edit.buckets[id] = Bucket(
        id, tuple(p.name for p in members), tuple(offsets), numel, dtype, roles, axes, kind.group, channel,
        shard, gather, scatter, compute, reduce, kind.parts, kind.host, kind.away,
        accumulate, newton_schulz,
    )  # fmt: skip


def _channel(
    edit: Editor, roles: tuple[str, ...], over: tuple[str, ...], stream: str, purpose: _Purpose
) -> str:
    """Return the channel of a kind of collective, made on first use; channels of one stream share a communicator."""
    name = "+".join(roles) + ("/" + "+".join(over) if over else "")
    id = f"reduce.{name}.{stream}"
    edit.channels.setdefault(id, Channel(id, "group", roles, (stream,) * len(roles), over, purpose))
    return id


def holders(graph: Editor, program: Program) -> dict[str, tuple[str, ...]]:
    """Return for each trained parameter, in order, the roles whose chunks read it; each must update it."""
    trained = {name for chunk in program.chunks for name in trains(chunk)}
    roles_by_param: dict[str, set[str]] = {}
    for chunk in program.chunks:
        mine = [i.ref for i in chunk.inputs if i.kind == "param" and i.ref in trained]
        if mine:
            roles = {node.role for node in graph.families[compute_id(chunk.id, "F")]}
            for name in mine:
                roles_by_param.setdefault(name, set()).update(roles)
    order = list(graph.roles)
    return {name: tuple(sorted(roles, key=order.index)) for name, roles in roles_by_param.items()}
