"""Explain how often a step gathers parameters that ranks share, how many bytes move, and why a window ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from piper_ir.graph.graph_parts import Replication
from piper_ir.ground.sizes import ITEM_BYTES
from piper_ir.plan.plan import Bucket, Plan, RolePlan
from piper_ir.plan.plan_bytes import state_message_bytes
from piper_ir.program.ops import Cast, Collective, Compute, Fresh
from piper_ir.tools import size_text


@dataclass
class _Windows:
    """Count a role's uses of whole buckets of one kind: gathered parameters, or buffers of gradients.

    Attributes:
        by_bucket: the windows of each bucket.
        uses: the steps of chunks that use them.
        moved: the bytes of all gathers, or scatters.
    """

    by_bucket: dict[str, int] = field(default_factory=dict)
    uses: int = 0
    moved: int = 0

    @property
    def count(self) -> int:
        return sum(self.by_bucket.values())


def sharing(plan: Plan, replication: Mapping[str, Replication]) -> str:
    """Return per role the gathers, scatters and copies from the host of a step; "" if ranks share nothing."""
    shared = [b for b in plan.buckets if b.shard.optim or b.away]
    lines = [
        line
        for role in plan.roles
        for line in _role(plan, role, [b for b in shared if role.role in b.roles], replication)
    ]
    return "\n".join(["shared states: what a step gathers and scatters", *lines]) if lines else ""


def _role(
    plan: Plan, role: RolePlan, buckets: list[Bucket], replication: Mapping[str, Replication]
) -> Iterable[str]:
    if not buckets:
        return
    gathered, reduced, copied = _counted(plan, role)
    if copied.moved:
        yield (
            f"  {role.role:10} {copied.count} copies of parameters from the host, {size_text(copied.moved)} in all"
        )
    buckets = [b for b in buckets if b.shard.optim]
    if not buckets:
        return
    policies = [replication[c] for c in dict.fromkeys(_chunks(role)) if c in replication]
    whole = sum(b.numel * ITEM_BYTES[b.compute_dtype] for b in buckets if b.lent)
    yield (
        f"  {role.role:10} {_gathers(gathered, whole, _room([p.resident_bytes for p in policies]))}"
    )
    if whole and (small := [b for b in buckets if not b.lent]):
        size = sum(b.numel * ITEM_BYTES[b.compute_dtype] for b in small)
        yield f"             {len(small)} of these stay whole through the step, {size_text(size)} (whole_mb)"
    whole = sum(b.numel * ITEM_BYTES[b.reduce_dtype] for b in buckets if b.shard.grads)
    yield f"             {_scatters(reduced, whole, _room([p.reduced_bytes for p in policies]))}"


def _chunks(role: RolePlan) -> Iterable[str]:
    return (p.op.chunk for i in role.program for p in i.parts if isinstance(p.op, Compute))


def _counted(plan: Plan, role: RolePlan) -> tuple[_Windows, _Windows, _Windows]:
    """Return the windows of gathered parameters, of gradients, which end with a scatter, and of copies."""
    gathered, reduced, copied = _Windows(), _Windows(), _Windows()
    kind_of: dict[str, _Windows] = {}
    bucket_of: dict[str, str] = {}
    for part in (p for instr in role.program for p in instr.parts):
        match part.op:
            case Collective(bucket=id) as op if id and op.kind != "all_reduce":
                windows = gathered if op.law.state == "param" else reduced
                windows = copied if op.law.route == "host" else windows
                windows.by_bucket[id] = windows.by_bucket.get(id, 0) + 1
                windows.moved += state_message_bytes(plan.bucket(id), op, plan.mesh)
                kind_of.update(dict.fromkeys(part.writes, windows))
            case Fresh(bucket=id):
                bucket_of[part.writes[0]] = id
                kind_of[part.writes[0]] = reduced
            case Cast(bucket=id):
                bucket_of[part.writes[0]] = id
            case Collective(kind="reduce_scatter") if part.reads and part.reads[0] in bucket_of:
                id = bucket_of[part.reads[0]]
                reduced.by_bucket[id] = reduced.by_bucket.get(id, 0) + 1
                reduced.moved += plan.values[part.reads[0]].nbytes
            case _:
                for value in part.held:
                    kind_of[value].uses += 1
    return gathered, reduced, copied


def _room(bytes_: list[int | None]) -> str:
    """Return the limit as the strategy says it."""
    if None in bytes_:
        return '"step"'
    return f"{max((b for b in bytes_ if b is not None), default=0) / 2**20:.3g}"


def _gathers(found: _Windows, whole: int, room: str) -> str:
    head = (
        f"{found.count} gathers of {len(found.by_bucket)} buckets, {size_text(found.moved)} in all"
    )
    return (
        f"{head}{_ends(found, whole, f'resident_mb={room}')}"
        if whole
        else f"{head}, at the start of the step"
    )


def _scatters(found: _Windows, whole: int, room: str) -> str:
    head = (
        f"{found.count} scatters of {len(found.by_bucket)} buckets, {size_text(found.moved)} in all"
    )
    return (
        f"{head}{_ends(found, whole, f'reduced_mb={room}')}"
        if whole
        else f"{head}, at the end of the step"
    )


def _ends(found: _Windows, whole: int, limit: str) -> str:
    """Return why the windows end: nothing uses the bucket any more, or another one needs the room."""
    last = len(found.by_bucket)
    early = found.count - last
    text = f"; {found.uses / max(1, found.count):.1f} uses each; {last} end with the last use"
    if early:
        name = limit.partition("=")[0]
        text += f', {early} make room for other buckets ({limit}; {name}="step" keeps {size_text(whole)} and has none of these)'
    return text
