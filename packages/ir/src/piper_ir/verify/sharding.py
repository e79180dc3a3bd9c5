"""Check rules R30 to R32: the states that ranks share, and the values that stand for them while they are whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from piper_ir.plan.plan import Bucket, Channel, Part, Plan, RolePlan
from piper_ir.program.ops import Collective, Compute, Fold, Fresh
from piper_ir.verify.happens_before import HappensBefore
from piper_ir.verify.rules import Findings
from piper_ir.verify.training import ALIGNMENT

Named = dict[str, str]
"""The bucket of each value that stands for one."""


def check_shards(findings: Findings) -> None:
    """Check R30."""
    for bucket in findings.plan.buckets:
        problem = _shard_problem(findings.plan, bucket)
        if problem:
            findings.add("R30-shards", f"bucket {bucket.id} {problem}")


def _shard_problem(plan: Plan, bucket: Bucket) -> str:
    shard, axes = bucket.shard, set(bucket.shard.optim)
    if not axes:
        extra = shard.params or shard.grads or bucket.gather or bucket.scatter
        return (
            "shares parameters or gradients, or has channels for it, with whole optimizer states"
            if extra
            else ""
        )
    if not set(shard.params) <= set(shard.grads) <= axes <= set(bucket.over):
        return f"is replicated along {bucket.over} and shared along {shard}; each must be among the one before"
    if any(kept and set(kept) != axes for kept in (shard.params, shard.grads)):
        return f"is shared along {shard}; the axes of parameters and gradients are all of the optimizer's, or none"
    parts = plan.mesh.degree(shard.optim)
    if bucket.numel % parts or bucket.numel // parts * bucket.narrowest % ALIGNMENT:
        return f"has {bucket.numel} elements, which {parts} ranks cannot share in whole {ALIGNMENT} bytes"
    return _state_channels_problem(plan, bucket)


def _state_channels_problem(plan: Plan, bucket: Bucket) -> str:
    """Return the fault, if any, of the channels that gather a bucket's parameters and scatter its gradients."""
    axes = set(bucket.shard.optim)
    for what, channels in (("gather", bucket.gather), ("scatter", bucket.scatter)):
        if len(channels) != len(bucket.roles):
            return f"has {len(channels)} channels to {what} for {len(bucket.roles)} roles"
        for role, id in zip(bucket.roles, channels, strict=True):
            channel = next((c for c in plan.channels if c.id == id), None)
            if channel is None or not _joins(channel, role, axes):
                return (
                    f"needs a channel to {what} on role {role} among the ranks along "
                    f"{', '.join(sorted(axes))}; it names {id!r}"
                )
    return ""


def _joins(channel: Channel, role: str, axes: set[str]) -> bool:
    return channel.kind == "group" and channel.roles == (role,) and set(channel.over) == axes


def check_sharded_use(findings: Findings, orders: dict[str, HappensBefore]) -> None:
    """Check R31 and R32 for values; `training` checks changes of states in place."""
    asked = _Asked(findings.plan)
    for role in findings.plan.roles:
        _SharedValues(findings, role, orders[role.role], asked).check()


class _Asked:
    """Find the buckets whose gathered parameters a step of a chunk reads, and the ones whose gradients it adds to."""

    def __init__(self, plan: Plan) -> None:
        home = {p: b for b in plan.buckets for p in b.params}
        self._steps: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
        for chunk in (
            (*plan.chunks, *plan.variants)
            if any(b.shard.grads or b.lent for b in plan.buckets)
            else ()
        ):
            for step, sig in chunk.steps.items():
                ports = [chunk.inputs[int(p[2:])] for p in sig.reads if p.startswith("in")]
                reads = {
                    home[i.ref].id
                    for i in ports
                    if i.kind == "param" and i.ref in home and home[i.ref].lent
                }
                adds = {chunk.inputs[k].ref for k in sig.accumulates}
                added = {home[p].id for p in adds if p in home and home[p].shard.grads}
                self._steps[chunk.variant, step] = reads, added

    def of(self, op: Compute) -> tuple[set[str], set[str]]:
        """Return the buckets to read and to add to."""
        return self._steps.get((op.variant, op.step), (set(), set()))


@dataclass(slots=True)
class _Buffer:
    """Hold the uses of one gradient buffer by one role, by index of the instruction."""

    bucket: str
    adds: list[int] = field(default_factory=list)
    scatters: list[int] = field(default_factory=list)
    folds: list[int] = field(default_factory=list)


class _SharedValues:
    """Check the gathered and reduced values of one role."""

    def __init__(
        self, findings: Findings, role: RolePlan, order: HappensBefore, asked: _Asked
    ) -> None:
        self.findings, self.role, self.order, self.asked = findings, role, order, asked
        self.gathered: Named = {}
        self.copies: Named = {}  # of parameters, or of shards of them, from the host
        self.buffers: dict[str, _Buffer] = {}
        self.sums: dict[str, str] = {}  # output of a scatter -> its buffer

    def check(self) -> None:
        """Add the violations of the role."""
        self._follow_collectives()
        for index, instr in enumerate(self.role.program):
            for part in instr.parts:
                if isinstance(part.op, Fold):
                    self._fold(index, part.op.bucket, part.reads[0])
                elif isinstance(part.op, Compute) or part.held:
                    self._held(index, part.op if isinstance(part.op, Compute) else None, part.held)
        for value, buffer in self.buffers.items():
            self._check_buffer(value, buffer)

    def _follow_collectives(self) -> None:
        """Find the gathered parameters and the gradient buffers, and check how buffers are scattered."""
        for index, instr in enumerate(self.role.program):
            for part in instr.parts:
                match part.op:
                    case Collective(kind="from_host", bucket=bucket) if bucket:
                        self.copies |= dict.fromkeys(part.writes, bucket)
                        if not self.findings.plan.bucket(bucket).shard.params:
                            self.gathered |= dict.fromkeys(part.writes, bucket)
                    case Collective(bucket=bucket) if bucket:
                        self._gather(index, part)
                        self.gathered |= dict.fromkeys(part.writes, bucket)
                    case Fresh(bucket=bucket):
                        self.buffers[part.writes[0]] = _Buffer(bucket)
                    case Collective() if part.reads[0] in self.buffers:
                        self._scatter(index, part.op, part.reads[0], part.writes[0])
                    case _:
                        pass

    def _gather(self, index: int, part: Part) -> None:
        """Check that a gather of parameters which are on the host reads this rank's shard of them."""
        assert isinstance(part.op, Collective)
        brought = [self.copies.get(v) for v in part.reads]
        if brought != [part.op.bucket] * len(part.reads):
            text = f"it gathers {part.op.bucket} from {', '.join(part.reads)}, which is no copy of its shard"
            self.findings.add("R31-gathered", text, self.role, index)

    def _scatter(self, index: int, op: Collective, value: str, result: str) -> None:
        bucket = self.findings.plan.bucket(self.buffers[value].bucket)
        channel = (
            bucket.scatter[bucket.roles.index(self.role.role)]
            if self.role.role in bucket.roles
            else ""
        )
        if op.kind != "reduce_scatter" or op.channel != channel:
            text = f"{value} is given to {op.law.name} on channel {op.channel}; ReduceScatter on {channel} is expected"
            self.findings.add("R32-contributions", text, self.role, index)
        self.buffers[value].scatters.append(index)
        self.sums[result] = value

    def _fold(self, index: int, bucket: str, value: str) -> None:
        buffer = self.buffers.get(self.sums.get(value, ""))
        if buffer is None or buffer.bucket != bucket:
            description = (
                "no sum of gradients"
                if buffer is None
                else f"a sum of gradients of {buffer.bucket}"
            )
            self.findings.add(
                "R32-contributions",
                f"it adds {value} to {bucket}, which is {description}",
                self.role,
                index,
            )
        else:
            buffer.folds.append(index)

    def _held(self, index: int, op: Compute | None, held: tuple[str, ...]) -> None:
        reads, adds = self.asked.of(op) if op is not None else (set[str](), set[str]())
        gathered = [self.gathered[v] for v in held if v in self.gathered]
        added = [self.buffers[v].bucket for v in held if v in self.buffers]
        if sorted(gathered) != sorted(reads):
            text = f"it holds gathered parameters of {gathered}, and reads parameters of {sorted(reads)}"
            self.findings.add("R31-gathered", text, self.role, index)
        if sorted(added) != sorted(adds) or len(gathered) + len(added) < len(held):
            self.findings.add(
                "R32-contributions",
                f"it holds buffers of {added}, and adds to {sorted(adds)}",
                self.role,
                index,
            )
        for v in held:
            if v in self.buffers:
                self.buffers[v].adds.append(index)

    def _check_buffer(self, value: str, buffer: _Buffer) -> None:
        problem, index = "", -1
        if len(buffer.scatters) != 1:
            problem = f"{value} is scattered {len(buffer.scatters)} times; once is expected"
        elif len(buffer.folds) != 1:
            problem = f"the sum of {value} is folded {len(buffer.folds)} times; once is expected"
        elif late := [i for i in buffer.adds if not self.order.precedes(i, buffer.scatters[0])]:
            problem, index = (
                f"it adds to {value}, which instruction {buffer.scatters[0]} scatters without waiting for it",
                late[0],
            )
        if problem:
            self.findings.add("R32-contributions", problem, self.role, index)
