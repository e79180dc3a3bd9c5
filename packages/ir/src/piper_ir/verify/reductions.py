"""Check rules R24 to R26: each bucket's gradient is complete, reduced once and clipped alike before its update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from piper_ir.plan.instr_table import PartTemplate
from piper_ir.plan.plan import Bucket, Plan, RolePlan
from piper_ir.program.collectives import law_of
from piper_ir.program.ops import Cast, Collective, Compute, Fold, SquaredNorm, Update
from piper_ir.verify.columns import HappensBefore, PlanColumns
from piper_ir.verify.rules import Findings
from piper_ir.verify.values import UsePosition


def reduces_kept(bucket: Bucket) -> bool:
    """Return whether ranks reduce the gradients of a bucket that they keep, whole or in shards, once in a step."""
    return bool(bucket.channel) or bool(bucket.shard.optim and not bucket.shard.grads)


@dataclass(slots=True)
class _Use:
    """Hold the uses of one bucket by one role."""

    accumulations: list[UsePosition] = field(default_factory=list)
    uses: list[UsePosition] = field(default_factory=list)
    norms: list[UsePosition] = field(default_factory=list)
    gathers: list[UsePosition] = field(default_factory=list)
    copies: list[UsePosition] = field(default_factory=list)
    scatters: list[UsePosition] = field(default_factory=list)
    casts: list[UsePosition] = field(default_factory=list)
    folds: list[UsePosition] = field(default_factory=list)
    reductions: list[UsePosition] = field(default_factory=list)
    updates: list[UsePosition] = field(default_factory=list)

    def sort(self) -> None:
        """Bring all lists into program order."""
        for name in self.__slots__:
            getattr(self, name).sort()

    def of_collective(self, op: Collective) -> list[UsePosition]:
        """Return the list for a collective on the bucket."""
        if op.law.state == "param":
            return self.gathers if op.law.route != "host" else self.copies
        return self.scatters if op.law.writes == "part" else self.reductions


def check_reductions(findings: Findings, orders: dict[str, HappensBefore]) -> None:
    """Check R24, R25, and the part of R26 that all updates clip alike."""
    columns = findings.columns
    touched = _Touched(findings.plan)
    all_updates: list[tuple[RolePlan, int, Update]] = []
    for number, role in enumerate(findings.plan.roles):
        updates: list[tuple[RolePlan, int, Update]] = []
        uses: dict[str, _Use] = defaultdict(_Use)
        for part, places in _places(columns, number):
            touched.record(uses, part, places)
            op = part.op
            updates += [(role, i, op) for i, _ in places if isinstance(op, Update)]
        updates.sort(key=lambda update: update[1])
        all_updates += updates
        for use in uses.values():
            use.sort()
        for bucket in findings.plan.buckets:
            if role.role in bucket.roles:
                order = orders[role.role]
                _BucketOnRole(findings, role, order, bucket, uses[bucket.id]).check()
            elif bucket.id in uses and (touches := _touches(uses[bucket.id])):
                index = touches[0][0]
                findings.add(
                    "R25-update",
                    f"it touches bucket {bucket.id}, which {', '.join(bucket.roles)} hold",
                    role,
                    index,
                )
    _check_clips(findings, all_updates)


def _touches(use: _Use) -> list[UsePosition]:
    """Return where a bucket itself is worked on, not parameters or gradients in it."""
    return [
        *use.updates,
        *use.reductions,
        *use.norms,
        *use.gathers,
        *use.copies,
        *use.scatters,
        *use.casts,
        *use.folds,
    ]


def _places(columns: PlanColumns, role: int) -> Iterator[tuple[PartTemplate, list[UsePosition]]]:
    """Yield each part of the templates of a role, with its places in the program."""
    first, end = (columns.first_row[columns.starts[role + k]] for k in (0, 1))
    numbers = columns.row_part[first:end]
    order = np.argsort(numbers, kind="stable")
    start = columns.starts[role]
    instrs = (columns.row_instr[first:end] - start)[order].tolist()
    indexes = columns.row_index[first:end][order].tolist()
    found, starts = np.unique(numbers[order], return_index=True)
    for part, (a, b) in zip(found.tolist(), pairwise([*starts.tolist(), len(order)]), strict=True):
        yield columns.parts[part], list(zip(instrs[a:b], indexes[a:b], strict=True))


def _check_clips(findings: Findings, updates: Iterable[tuple[RolePlan, int, Update]]) -> None:
    """Check that the whole gradient is clipped to one norm, and that all of it is scaled or nothing."""
    clips: dict[float | bool | None, str] = {}
    scales: dict[float | bool | None, str] = {}
    for role, index, op in updates:
        if not op.buckets:
            continue
        for done, by, known in (("clipped", op.clip, clips), ("scaled", op.scaled, scales)):
            if by not in known:
                known[by] = role.role
                if len(known) > 1:
                    differ = ", ".join(f"{value} on {where}" for value, where in known.items())
                    findings.add(
                        "R26-scale", f"gradients are {done} differently: {differ}", role, index
                    )


class _Touched:
    """Record which buckets each step of a chunk uses (it reads a parameter or adds to its gradient), and adds to."""

    def __init__(self, plan: Plan) -> None:
        self._steps: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
        home = {p: b.id for b in plan.buckets for p in b.params}
        for chunk in (*plan.chunks, *plan.variants):
            for step, sig in chunk.steps.items():
                ports = [int(p[2:]) for p in sig.reads if p.startswith("in")]
                refs = [chunk.inputs[k].ref for k in ports if chunk.inputs[k].kind == "param"]
                added = {
                    home[chunk.inputs[k].ref]
                    for k in sig.accumulates
                    if chunk.inputs[k].ref in home
                }
                self._steps[chunk.variant, step] = (
                    added | {home[r] for r in refs if r in home},
                    added,
                )

    def record(self, uses: dict[str, _Use], part: PartTemplate, places: list[UsePosition]) -> None:
        """Add the accesses of the parts of a template to the uses of the buckets."""
        match part.op:
            case Compute() as op:
                used, added = self._steps[op.variant, op.step]
                for b in used:
                    uses[b].uses += places
                for b in added:
                    uses[b].accumulations += places
            case SquaredNorm(buckets=buckets):
                for b in buckets:
                    uses[b].norms += places
            case Update(buckets=buckets):
                for b in buckets:
                    uses[b].updates += places
            case Fold(bucket=b):
                uses[b].folds += places
            case Cast(bucket=b) if not part.reads:
                uses[b].casts += places
            case Collective(bucket=b) as op if b:
                uses[b].of_collective(op).extend(places)
            case _:
                pass


class _BucketOnRole:
    """Check R24 and R25 for one bucket on one role that holds it."""

    def __init__(
        self, findings: Findings, role: RolePlan, order: HappensBefore, bucket: Bucket, use: _Use
    ) -> None:
        self.findings, self.role, self.order, self.bucket, self.use = (
            findings,
            role,
            order,
            bucket,
            use,
        )

    def add(self, rule: str, message: str, index: int = -1) -> None:
        """Add a violation that names the bucket."""
        self.findings.add(rule, f"bucket {self.bucket.id} {message}", self.role, index)

    def check(self) -> None:
        """Add the faults of the bucket's reductions, or else of its update."""
        bucket, use = self.bucket, self.use
        if self.findings.plan.evaluates:
            self._check_unchanged()
            return
        added = use.folds if bucket.shard.grads else use.accumulations
        if bucket.shard.optim:
            self._check_gathers(bucket.gather[bucket.roles.index(self.role.role)])
        if bucket.casts:
            self._check_cast(added)
            self._check_update(None)
            return
        if use.casts:
            self.add("R24-reduction", "is cast, and it is reduced in place", use.casts[0][0])
        complete: int | None = None
        if bucket.shard.optim and not bucket.shard.grads:
            channel = bucket.scatter[bucket.roles.index(self.role.role)]
            complete = self._check_reductions(
                use.scatters, channel, "reduce_scatter", added[-1][0] if added else -1
            )
            if complete is None:
                return
        elif use.scatters:
            self.add(
                "R24-reduction",
                "is scattered in place, and its gradients are not kept so",
                use.scatters[0][0],
            )
            return
        if bucket.channel or use.reductions:
            last = max(added[-1][0] if added else -1, -1 if complete is None else complete)
            complete = self._check_reductions(use.reductions, bucket.channel, "all_reduce", last)
            if complete is None:
                return
        self._check_update(complete)

    def _check_unchanged(self) -> None:
        """Check that an evaluation gathers the bucket if it is sharded, and does nothing else with it."""
        use = self.use
        if self.bucket.shard.optim:
            self._check_gathers(self.bucket.gather[self.bucket.roles.index(self.role.role)])
        if changes := [
            *use.accumulations,
            *use.reductions,
            *use.scatters,
            *use.casts,
            *use.folds,
            *use.norms,
            *use.updates,
        ]:
            self.add("R25-update", "is changed here, in the plan of an evaluation", changes[0][0])

    def _check_gathers(self, channel: str) -> None:
        """Check the gathers of the bucket: in place once before all uses, or into a value each (see `sharding`)."""
        gathers, used = self.use.gathers, bool(self.use.uses)
        table = self.role.table
        for place in gathers:
            op = table.templates[table.used[place[0]]].parts[0].op
            assert isinstance(op, Collective)
            if op.kind != "all_gather" or op.channel != channel:
                self.add(
                    "R31-gathered",
                    f"is gathered by {op.law.name} on channel {op.channel}; its channel is {channel}",
                    place[0],
                )
        if self.bucket.lent:
            return
        if len(gathers) != int(used):
            self.add("R31-gathered", f"is gathered {len(gathers)} times; {int(used)} is expected")
        for use in self.use.uses if len(gathers) == 1 else ():
            if not self.order.precedes(gathers[0][0], use[0]):
                self.add(
                    "R31-gathered",
                    f"is used here, without waiting for its gather by instruction {gathers[0][0]}",
                    use[0],
                )
                break

    def _check_cast(self, added: list[UsePosition]) -> None:
        """Check that kept gradients are cast once for their reduction, after the last that is added to them.

        The fold of the sum over ranks then comes after it; R32 follows it from value to value.
        """
        bucket, use = self.bucket, self.use
        wanted = int(reduces_kept(bucket))
        for place in [*use.scatters, *use.reductions]:
            text = f"is reduced in place, in {bucket.accumulate_dtype}; {bucket.reduce_dtype} is expected"
            self.add("R24-reduction", text, place[0])
        if len(use.casts) != wanted:
            again = use.casts[1][0] if len(use.casts) > 1 else -1
            text = f"is cast {len(use.casts)} times for its reduction; {wanted} is expected"
            self.add("R24-reduction", text, again)
        elif wanted:
            late = [place for place in added if place > use.casts[0]]
            if len(late) > int(bool(bucket.shard.grads)):  # one fold is that of the sum itself
                text = f"is accumulated into by instruction {late[0][0]}, after its cast for the reduction"
                self.add("R24-reduction", text, use.casts[0][0])

    def _check_reductions(
        self, found: list[UsePosition], channel: str, kind: str, last: int
    ) -> int | None:
        """Check that the bucket is reduced once, by this kind of collective, after instruction `last`; return where."""
        wanted = int(bool(channel))
        if len(found) != wanted:
            again = found[1][0] if len(found) > 1 else -1
            self.add("R24-reduction", f"is reduced {len(found)} times; {wanted} is expected", again)
            return None
        index = found[0][0]
        table = self.role.table
        op = table.templates[table.used[index]].parts[0].op
        assert isinstance(op, Collective)
        if op.kind != kind:
            self.add(
                "R24-reduction",
                f"is given to {op.law.name}; {law_of(kind).name} is expected",
                index,
            )
        elif op.channel != channel:
            self.add(
                "R24-reduction",
                f"is reduced on channel {op.channel}; its channel is {channel}",
                index,
            )
        elif last > index:
            self.add(
                "R24-reduction",
                f"is accumulated into by instruction {last}, after this reduction of it",
                index,
            )
        elif last >= 0 and not self.order.precedes(last, index):
            self.add(
                "R24-reduction",
                f"is reduced without waiting for instruction {last}, which accumulates into it",
                index,
            )
        else:
            return index
        return None

    def _check_update(self, reduction: int | None) -> None:
        if len(self.use.updates) != 1:
            again = self.use.updates[1][0] if len(self.use.updates) > 1 else -1
            self.add(
                "R25-update", f"is updated {len(self.use.updates)} times; once is expected", again
            )
            return
        update = self.use.updates[0]
        for what, place in [("update", update), *(("norm", n) for n in self.use.norms)]:
            if reduction is not None and not self.order.precedes(reduction, place[0]):
                self.add(
                    "R25-update",
                    f"has its {what} here, without waiting for its reduction by instruction {reduction}",
                    place[0],
                )
            last = max(
                [*self.use.folds, *(self.use.accumulations if what == "norm" else self.use.uses)],
                default=(-1, 0),
            )
            if last > place:
                self.add(
                    "R25-update",
                    f"has its {what} here, before instruction {last[0]} uses it",
                    place[0],
                )
        for norm in self.use.norms:
            if norm > update:
                self.add(
                    "R25-update",
                    f"has its norm taken here, after its update by instruction {update[0]}",
                    norm[0],
                )
