"""Check rules R30 to R32: the states that ranks share, and the values that stand for them while they are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from piper_ir.plan.instr_table import PartTemplate
from piper_ir.plan.plan import Bucket, Channel, Plan
from piper_ir.program.collectives import FROM_HOST, law_of
from piper_ir.program.ops import Cast, Collective, Compute, Fold, Fresh, Op
from piper_ir.verify.columns import HappensBefore, Ints, flags
from piper_ir.verify.rules import Findings
from piper_ir.verify.training import ALIGNMENT

Named = dict[int, str]
"""The bucket of each value that stands for one."""


def bucket_term(op: Op) -> tuple[str, str] | None:
    """Return the term of a bucket's parameters or gradients, as a chunk (none) and a port, if an op writes these."""
    match op:
        case Collective(bucket=bucket) if bucket:
            return "", f"parameters of {bucket}"
        case Fresh(bucket=bucket) | Cast(bucket=bucket):
            return "", f"gradients of {bucket}"
        case _:
            return None


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
    for number, role in enumerate(findings.plan.roles):
        _SharedValues(findings, number, orders[role.role], asked).check()


def _gathers(part: PartTemplate) -> str:
    """Return the bucket whose parameters a part gathers from states alone; "" for none."""
    op = part.op
    if not isinstance(op, Collective) or op.kind == FROM_HOST or part.reads:
        return ""
    return op.bucket if len(part.writes) == 1 else ""


class _Asked:
    """Find the buckets whose gathered parameters a step of a chunk reads, and the ones whose gradients it adds to."""

    def __init__(self, plan: Plan) -> None:
        home = {p: b for b in plan.buckets for p in b.params}
        self._steps: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
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
                self._steps[chunk.variant, step] = sorted(reads), sorted(added)

    def of(self, op: Compute) -> tuple[list[str], list[str]]:
        """Return the buckets to read and to add to, sorted."""
        return self._steps.get((op.variant, op.step), ([], []))


@dataclass(slots=True)
class _Buffer:
    """Hold the uses of one gradient buffer by one role, by index of the instruction.

    Attributes:
        bucket: the bucket whose gradients it holds.
        steps: the collectives that reduce it, one after the other, each a kind and a channel.
        adds: the steps of chunks that add to it.
        scatters: the collectives that there are.
        folds: the folds of their results.
    """

    bucket: str
    steps: tuple[tuple[str, str], ...]
    adds: list[int] = field(default_factory=list)
    scatters: list[int] = field(default_factory=list)
    folds: list[int] = field(default_factory=list)


class _SharedValues:
    """Check the gathered and reduced values of one role."""

    def __init__(
        self, findings: Findings, number: int, order: HappensBefore, asked: _Asked
    ) -> None:
        self.findings, self.order, self.asked = findings, order, asked
        self.columns, self.number = findings.columns, number
        self.role = findings.plan.roles[number]
        self.gathered: Named = {}
        self.copies: Named = {}  # of parameters, or of shards of them, from the host
        self.buffers: dict[int, _Buffer] = {}
        self.sums: dict[
            int, tuple[int, int]
        ] = {}  # value -> its buffer, and the steps that are done

    def check(self) -> None:
        """Add the violations of the role."""
        rows, which = self._rows(_gathers)
        parts: list[int] = which.tolist()
        values: list[int] = self.columns.writes.first_of(rows).tolist()
        buckets = {n: _gathers(self.columns.parts[n]) for n in set(parts)}
        self.gathered.update(zip(values, map(buckets.__getitem__, parts), strict=True))
        for index, part, row in self._each(
            lambda p: isinstance(p.op, Collective | Fresh | Cast) and not _gathers(p)
        ):
            self._follow(index, part.op, row)
        for index, part, row in self._each(self._concerns):
            if isinstance(part.op, Fold):
                self._fold(index, part.op.bucket, self.columns.reads.of(row)[0])
            else:
                op = part.op if isinstance(part.op, Compute) else None
                self._held(index, op, self.columns.held.of(row))
        for value, buffer in self.buffers.items():
            self._check_buffer(value, buffer)

    def _rows(self, fact: Callable[[PartTemplate], object]) -> tuple[Ints, Ints]:
        """Return the rows of the parts of the role with a fact, in program order, and the numbers of the parts."""
        columns, start = self.columns, self.columns.starts[self.number]
        end = columns.starts[self.number + 1]
        known = columns.row_part[columns.first_row[start] : columns.first_row[end]]
        with_it = [False] * len(columns.parts)
        for n in np.unique(known).tolist():
            with_it[n] = bool(fact(columns.parts[n]))
        rows = flags(with_it)[known].nonzero()[0] + columns.first_row[start]
        return rows, columns.row_part[rows]

    def _each(
        self, fact: Callable[[PartTemplate], bool]
    ) -> Iterator[tuple[int, PartTemplate, int]]:
        """Yield the parts of the role with a fact, in program order, each with its instruction and its row."""
        columns = self.columns
        rows, parts = self._rows(fact)
        instrs = columns.row_instr[rows] - columns.starts[self.number]
        for index, n, row in zip(instrs.tolist(), parts.tolist(), rows.tolist(), strict=True):
            yield index, columns.parts[n], row

    def _concerns(self, part: PartTemplate) -> bool:
        """Return whether a part holds, or is to hold, values of buckets; or adds a sum to gradients."""
        if isinstance(part.op, Fold) or part.held:
            return True
        return isinstance(part.op, Compute) and any(self.asked.of(part.op))

    def _name(self, value: int) -> str:
        return self.columns.table.name(value)

    def _follow(self, index: int, op: Op, row: int) -> None:
        """Record gathered parameters and gradient buffers, and check how buffers are scattered."""
        reads, writes = self.columns.reads.of(row), self.columns.writes.of(row)
        match op:
            case Collective(kind="from_host", bucket=bucket) if bucket:
                self.copies |= dict.fromkeys(writes, bucket)
                if not self.findings.plan.bucket(bucket).shard.params:
                    self.gathered |= dict.fromkeys(writes, bucket)
            case Collective(bucket=bucket) if bucket:
                self._gather(index, bucket, reads)
                self.gathered |= dict.fromkeys(writes, bucket)
            case Fresh(bucket=bucket) | Cast(bucket=bucket) if not reads:
                steps = self._steps(bucket, kept=isinstance(op, Cast))
                self.buffers[writes[0]] = _Buffer(bucket, steps)
                self.sums[writes[0]] = writes[0], 0
            case Cast(bucket=bucket):
                self._cast(index, bucket, reads[0], writes[0])
            case Collective() if reads[0] in self.sums:
                self._scatter(index, op, reads[0], writes[0])
            case _:
                pass

    def _gather(self, index: int, bucket: str, reads: list[int]) -> None:
        """Check that a gather of parameters which are on the host reads this rank's shard of them."""
        brought = [self.copies.get(v) for v in reads]
        if brought != [bucket] * len(reads):
            text = f"it gathers {bucket} from {', '.join(map(self._name, reads))}, which is no copy of its shard"
            self.findings.add("R31-gathered", text, self.role, index)

    def _steps(self, id: str, *, kept: bool) -> tuple[tuple[str, str], ...]:
        """Return the collectives that reduce a buffer of a bucket's gradients, or the cast of kept gradients."""
        bucket = self.findings.plan.bucket(id)
        if self.role.role not in bucket.roles:
            return ()
        scatters = bucket.scatter[bucket.roles.index(self.role.role) :][:1]
        scattered = [] if kept and bucket.shard.grads else [("reduce_scatter", c) for c in scatters]
        reduced = [("all_reduce", bucket.channel)] if kept and bucket.channel else []
        return (*scattered, *reduced)

    def _cast(self, index: int, bucket: str, value: int, result: int) -> None:
        """Check the cast of a buffer."""
        buffer, done = self.sums.get(value, (-1, 0))
        if buffer < 0 or self.buffers[buffer].bucket != bucket or done:
            text = f"it casts {self._name(value)}, which is no buffer of gradients of {bucket}"
            self.findings.add("R32-contributions", text, self.role, index)
        else:
            self.sums[result] = buffer, done

    def _scatter(self, index: int, op: Collective, value: int, result: int) -> None:
        number, done = self.sums[value]
        buffer = self.buffers[number]
        bucket = self.findings.plan.bucket(buffer.bucket)
        kind, channel = buffer.steps[done] if done < len(buffer.steps) else ("", "")
        if (op.kind, op.channel) != (kind, channel):
            given = f"{self._name(value)} is given to {op.law.name} on channel {op.channel}"
            wanted = f"{law_of(kind).name} on {channel}" if kind else "nothing"
            text = f"{given}; {wanted} is expected"
            self.findings.add("R32-contributions", text, self.role, index)
        spec = self.findings.plan.kinds[self._name(value)][0] if bucket.casts else None
        if spec is not None and (dtype := spec.dtype) != bucket.reduce_dtype:
            text = f"{self._name(value)} is reduced in {dtype}; {bucket.reduce_dtype} is expected"
            self.findings.add("R32-contributions", text, self.role, index)
        buffer.scatters.append(index)
        self.sums[result] = number, done + 1

    def _fold(self, index: int, bucket: str, value: int) -> None:
        number, done = self.sums.get(value, (-1, 0))
        buffer = self.buffers.get(number)
        if buffer is None or buffer.bucket != bucket or done < len(buffer.steps):
            description = (
                "no sum of gradients"
                if buffer is None
                else f"a sum of gradients of {buffer.bucket}"
            )
            self.findings.add(
                "R32-contributions",
                f"it adds {self._name(value)} to {bucket}, which is {description}",
                self.role,
                index,
            )
        else:
            buffer.folds.append(index)

    def _held(self, index: int, op: Compute | None, held: list[int]) -> None:
        reads, adds = self.asked.of(op) if op is not None else ([], [])
        gathered = [self.gathered[v] for v in held if v in self.gathered]
        buffers = [self.buffers[v] for v in held if v in self.buffers]
        added = [buffer.bucket for buffer in buffers]
        if sorted(gathered) != reads:
            text = f"it holds gathered parameters of {gathered}, and reads parameters of {reads}"
            self.findings.add("R31-gathered", text, self.role, index)
        if sorted(added) != adds or len(gathered) + len(added) < len(held):
            self.findings.add(
                "R32-contributions",
                f"it holds buffers of {added}, and adds to {adds}",
                self.role,
                index,
            )
        for buffer in buffers:
            buffer.adds.append(index)

    def _check_buffer(self, number: int, buffer: _Buffer) -> None:
        problem, index, value = "", -1, self._name(number)
        if len(buffer.scatters) != len(buffer.steps):
            times, wanted = len(buffer.scatters), len(buffer.steps)
            expected = "once" if wanted == 1 else f"{wanted} times"
            problem = f"{value} is reduced {times} times; {expected} is expected"
        elif len(buffer.folds) != 1:
            problem = f"the sum of {value} is folded {len(buffer.folds)} times; once is expected"
        elif late := self.order.late(buffer.adds, buffer.scatters[0]):
            problem, index = (
                f"it adds to {value}, which instruction {buffer.scatters[0]} reduces without waiting for it",
                late[0],
            )
        if problem:
            self.findings.add("R32-contributions", problem, self.role, index)
