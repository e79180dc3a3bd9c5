"""Check rules R21 to R26: the plan is one training step, and each bucket is updated when its gradient is complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from math import isclose

from piper_ir.ground.expert_tokens import counts_tokens
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Bucket, Part, Plan, RolePlan
from piper_ir.program.collectives import law_of
from piper_ir.program.ops import KEEP_ALL, Collective, Compute, Fold, Seed, SquaredNorm, Update
from piper_ir.program.program import Step
from piper_ir.verify.happens_before import HappensBefore
from piper_ir.verify.rules import Findings
from piper_ir.verify.values import UsePosition

STEPS: tuple[Step, ...] = ("F", "R", "I", "W")
ALIGNMENT = 256
"""The multiple of bytes at which CUDA's allocator and vectorised kernels assume that a tensor starts."""

_RolePosition = tuple[RolePlan, UsePosition]


def check_steps(findings: Findings) -> None:
    """Check R21, and the parts of R26 on how loss gradients start and updates are weighted."""
    plan = findings.plan
    variants: dict[tuple[str, int], str] = {}
    ran: dict[tuple[str, int, str], list[_RolePosition]] = {}
    for role, place, part in _parts(plan):
        op = part.op
        if isinstance(op, Compute):
            ran.setdefault((op.chunk, part.mb, op.step), []).append((role, place))
            if op.keep != KEEP_ALL:
                variants[op.chunk, part.mb] = op.variant
        elif isinstance(part.op, Seed):
            expected = 1 / (plan.microbatches * plan.replicas) if plan.loss_kind == "mean" else 1.0
            if not isclose(part.op.value, expected, rel_tol=1e-12):
                findings.add(
                    "R26-scale", f"the loss gradient starts from {part.op.value!r}; {expected!r} is expected", role, place[0]
                )
        elif isinstance(part.op, Update) and part.op.weighted != (plan.loss_kind == "sum") and not plan.evaluates:
            findings.add("R26-scale", f"weighted is {part.op.weighted}, but the loss is a {plan.loss_kind}", role, place[0])
    if plan.chunks and plan.microbatches > len(ran):  # said once, since there may be any number of microbatches
        findings.add("R21-steps", f"the plan has {plan.microbatches} microbatches, and runs {len(ran)} steps in all")
        return
    _check_buffers(findings, ran)
    for chunk in plan.chunks:
        for mb in range(plan.microbatches):
            before: _RolePosition | None = None
            steps = plan.chunk(variants.get((chunk.id, mb), chunk.id)).steps
            for step in STEPS:
                runs = ran.get((chunk.id, mb, step), [])
                times = 0 if step not in steps or steps[step].empty else 1
                if len(runs) != times:
                    roles = f" (on {', '.join(role.role for role, _ in runs)})" if runs else ""
                    findings.add(
                        "R21-steps",
                        f"{step} of chunk {chunk.id} runs {len(runs)} times{roles} for microbatch {mb}; {times} expected",
                    )
                elif runs:
                    _check_follows(findings, f"{step} of chunk {chunk.id} for microbatch {mb}", runs[0], before)
                    before = runs[0]


def _check_buffers(findings: Findings, ran: dict[tuple[str, int, str], list[_RolePosition]]) -> None:
    """Check R21 for buffers: forwards use an updated buffer as on one device, by microbatch and on one role."""
    plan = findings.plan
    outputs = [o for c in plan.chunks for o in c.outputs if o.kind == "buffer"]
    for name in dict.fromkeys(o.ref for o in outputs if not counts_tokens(o.ref)):
        updating = {c.id for c in plan.chunks if any(o.kind == "buffer" and o.ref == name for o in c.outputs)}
        reading = {c.id for c in plan.chunks if any(i.kind == "buffer" and i.ref == name for i in c.inputs)}
        users = [c.id for c in plan.chunks if c.id in updating | reading]
        update: _RolePosition | None = None
        reads: list[_RolePosition] = []  # since the update
        for mb, user in product(range(plan.microbatches), users):
            for where in ran.get((user, mb, "F"), []):
                what = "updates a buffer" if user in updating else f"reads the buffer {name}, which others update"
                follows = [update, *reads] if user in updating else [update]
                for before in follows:
                    _check_follows(findings, f"F of chunk {user}, which {what}, for microbatch {mb}", where, before)
                if user in updating:
                    update, reads = where, []
                else:
                    reads.append(where)


def _check_follows(findings: Findings, what: str, position: _RolePosition, before: _RolePosition | None) -> None:
    if before is None:
        return
    role, place = position
    if role.role != before[0].role:
        findings.add("R21-steps", f"{what}: runs here, the one that it follows on role {before[0].role}", role, place[0])
    elif place < before[1]:
        findings.add("R21-steps", f"{what}: runs before instruction {before[1][0]}, which it must follow", role, place[0])


def _parts(plan: Plan) -> Iterator[tuple[RolePlan, UsePosition, Part]]:
    for role, index, instr in plan.instructions():
        for p, part in enumerate(instr.parts):
            yield role, (index, p), part


def check_layout(findings: Findings) -> None:
    """Check R22."""
    params = {p.name: p for p in findings.plan.params}
    for bucket in findings.plan.buckets:
        where = f"bucket {bucket.id}"
        item, end, last = bucket.narrowest, 0, "the start"
        if len(bucket.params) != len(bucket.offsets):
            findings.add("R22-buckets", f"{where} has {len(bucket.params)} parameters and {len(bucket.offsets)} offsets")
            continue
        for name, offset in zip(bucket.params, bucket.offsets, strict=True):
            if params[name].spec.dtype != bucket.compute_dtype:
                findings.add(
                    "R22-buckets", f"{where} has {name} in {bucket.compute_dtype}; chunks read {params[name].spec.dtype}"
                )
            if offset * item % ALIGNMENT:
                findings.add(
                    "R22-buckets", f"{where}: {name} starts at byte {offset * item}, which is no multiple of {ALIGNMENT}"
                )
            if offset < end:
                findings.add("R22-buckets", f"{where}: {name} starts at element {offset}, inside of {last}, which ends at {end}")
            end, last = offset + bind(params[name].spec.numel, 0), name
        if end > bucket.numel:
            findings.add("R22-buckets", f"{where} has {bucket.numel} elements; {last} ends at {end}")


def check_holders(findings: Findings) -> None:
    """Check R23."""
    plan = findings.plan
    inside: dict[str, Bucket] = {}
    for bucket in plan.buckets:
        for name in bucket.params:
            if name in inside:
                findings.add("R23-holders", f"parameter {name} is in the buckets {inside[name].id} and {bucket.id}")
            inside[name] = bucket
    users: dict[str, set[str]] = {}
    for role in plan.roles:
        for chunk in sorted({part.op.chunk for i in role.program for part in i.parts if isinstance(part.op, Compute)}):
            for entry in plan.chunk(chunk).inputs:
                if entry.kind == "param":
                    users.setdefault(entry.ref, set()).add(role.role)
    for param in plan.params:
        held = inside.get(param.name)
        if param.trained != (held is not None):
            text = "is trained and in no bucket" if held is None else f"is not trained, but in bucket {held.id}"
            findings.add("R23-holders", f"parameter {param.name} {text}")
        elif held is not None and users.get(param.name, set()) != set(held.roles):
            uses, holds = ", ".join(sorted(users.get(param.name, ()))) or "no role", ", ".join(sorted(held.roles))
            findings.add("R23-holders", f"parameter {param.name} is used by {uses}; its bucket {held.id} is held by {holds}")
    for bucket in plan.buckets:
        problem = _members_problem(plan, bucket)
        if problem:
            findings.add("R23-holders", f"bucket {bucket.id}: {problem}")


def _members_problem(plan: Plan, bucket: Bucket) -> str:
    """Return the fault, if any, of a bucket's channel, which must join just the ranks that keep the same of it."""
    for name in bucket.roles:
        open_axes = [a for a in plan.replicated if plan.mesh.size(a) > 1 and a not in plan.role(name).placed]
        missing = [a for a in open_axes if a not in bucket.over and not (a in plan.experts and a in bucket.parts)]
        if missing:
            return f"role {name} is replicated along {', '.join(missing)}, the bucket along {', '.join(bucket.over) or 'nothing'}"
    summed = {a for p in plan.params if p.name in bucket.params for a in p.summed}
    if lost := [a for a in summed if a not in bucket.over]:
        return f"the devices along {', '.join(lost)} make terms of its gradients, and it does not add them"
    alone = [a for a in bucket.over if plan.mesh.size(a) > 1 and a not in (*plan.replicated, *summed)]
    if alone:
        along = ", ".join(plan.replicated) or "none"
        return f"it adds gradients along {', '.join(alone)}, and rows are shared out along {along}"
    if mixed := [a for a in bucket.over if a in bucket.parts]:
        return f"it adds gradients along {', '.join(mixed)}, where each rank has another part of its parameters"
    over = tuple(a for a in bucket.over if a not in bucket.shard.optim)
    several = len(bucket.roles) > 1 or any(plan.mesh.size(a) > 1 for a in over)
    if not bucket.channel:
        return "several ranks hold it, and no channel reduces it" if several else ""
    if not several:
        return f"one rank holds it, so channel {bucket.channel} has nothing to reduce"
    channel = plan.channel(bucket.channel)
    if channel.kind != "group" or set(channel.roles) != set(bucket.roles) or set(channel.over) != set(over):
        joins = f"the {channel.kind} channel {channel.id} joins {', '.join(channel.roles)} over ({', '.join(channel.over)})"
        return f"{joins}; {', '.join(bucket.roles)} over ({', '.join(over)}) hold it"
    return ""


@dataclass(slots=True)
class _Use:
    """Say what one role does to one bucket."""

    accumulations: list[UsePosition] = field(default_factory=list)
    uses: list[UsePosition] = field(default_factory=list)
    norms: list[UsePosition] = field(default_factory=list)
    gathers: list[UsePosition] = field(default_factory=list)
    scatters: list[UsePosition] = field(default_factory=list)
    folds: list[UsePosition] = field(default_factory=list)
    reductions: list[UsePosition] = field(default_factory=list)
    updates: list[UsePosition] = field(default_factory=list)


def check_reductions(findings: Findings, orders: dict[str, HappensBefore]) -> None:
    """Check R24, R25, and the part of R26 that all updates clip alike."""
    touched = _Touched(findings.plan)
    updates: list[tuple[RolePlan, int, Update]] = []
    for role in findings.plan.roles:
        uses = {b.id: _Use() for b in findings.plan.buckets}
        for i, instr in enumerate(role.program):
            for p, part in enumerate(instr.parts):
                touched.record(uses, part, (i, p))
                if isinstance(part.op, Update):
                    updates.append((role, i, part.op))
        for bucket in findings.plan.buckets:
            use = uses[bucket.id]
            if role.role in bucket.roles:
                _BucketOnRole(findings, role, orders[role.role], bucket, use).check()
            elif found := [*use.updates, *use.reductions, *use.norms, *use.gathers, *use.scatters, *use.folds]:
                index = found[0][0]
                findings.add("R25-update", f"it touches bucket {bucket.id}, which {', '.join(bucket.roles)} hold", role, index)
    _check_clips(findings, updates)


def _check_clips(findings: Findings, updates: Iterable[tuple[RolePlan, int, Update]]) -> None:
    """Check that the bound of the global norm is one number for the whole gradient."""
    clips: dict[float | None, str] = {}
    for role, index, op in updates:
        if op.buckets and op.clip not in clips:
            clips[op.clip] = role.role
            if len(clips) > 1:
                bounds = ", ".join(f"{clip} on {where}" for clip, where in clips.items())
                findings.add("R26-scale", f"gradients are clipped differently: {bounds}", role, index)


class _Touched:
    """Record which buckets each step of a chunk uses (it reads a parameter or adds to its gradient), and adds to."""

    def __init__(self, plan: Plan) -> None:
        self._steps: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
        home = {p: b.id for b in plan.buckets for p in b.params}
        for chunk in (*plan.chunks, *plan.variants):
            for step, sig in chunk.steps.items():
                ports = [int(p[2:]) for p in sig.reads if p.startswith("in")]
                refs = [chunk.inputs[k].ref for k in ports if chunk.inputs[k].kind == "param"]
                added = {home[chunk.inputs[k].ref] for k in sig.accumulates if chunk.inputs[k].ref in home}
                self._steps[chunk.variant, step] = added | {home[r] for r in refs if r in home}, added

    def record(self, uses: dict[str, _Use], part: Part, place: UsePosition) -> None:
        """Add a part's accesses to the uses of the buckets."""
        match part.op:
            case Compute() as op:
                used, added = self._steps[op.variant, op.step]
                for b in used:
                    uses[b].uses.append(place)
                for b in added:
                    uses[b].accumulations.append(place)
            case SquaredNorm(buckets=buckets):
                for b in buckets:
                    uses[b].norms.append(place)
            case Update(buckets=buckets):
                for b in buckets:
                    uses[b].updates.append(place)
            case Fold(bucket=b):
                uses[b].folds.append(place)
            case Collective(bucket=b) if b and part.op.law.state == "param":
                uses[b].gathers.append(place)
            case Collective(bucket=b) if b and part.op.law.writes == "part":
                uses[b].scatters.append(place)
            case Collective(bucket=b) if b:
                uses[b].reductions.append(place)
            case _:
                pass


class _BucketOnRole:
    """Check R24 and R25 for one bucket on one role that holds it."""

    def __init__(self, findings: Findings, role: RolePlan, order: HappensBefore, bucket: Bucket, use: _Use) -> None:
        self.findings, self.role, self.order, self.bucket, self.use = findings, role, order, bucket, use

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
        complete: int | None = None
        if bucket.shard.optim and not bucket.shard.grads:
            channel = bucket.scatter[bucket.roles.index(self.role.role)]
            complete = self._check_reductions(use.scatters, channel, "reduce_scatter", added[-1][0] if added else -1)
            if complete is None:
                return
        elif use.scatters:
            self.add("R24-reduction", "is scattered in place, and its gradients are not kept so", use.scatters[0][0])
            return
        if bucket.channel or use.reductions:
            last = max(added[-1][0] if added else -1, -1 if complete is None else complete)
            complete = self._check_reductions(use.reductions, bucket.channel, "all_reduce", last)
            if complete is None:
                return
        self._check_update(complete)

    def _check_unchanged(self) -> None:
        """Check that an evaluation gathers the bucket where it is shared, and does nothing else with it."""
        use = self.use
        if self.bucket.shard.optim:
            self._check_gathers(self.bucket.gather[self.bucket.roles.index(self.role.role)])
        if found := [*use.accumulations, *use.reductions, *use.scatters, *use.folds, *use.norms, *use.updates]:
            self.add("R25-update", "is changed here, in the plan of an evaluation", found[0][0])

    def _check_gathers(self, channel: str) -> None:
        """Check the gathers of the bucket: in place once before all uses, or into a value each (see `sharding`)."""
        gathers, used = self.use.gathers, bool(self.use.uses)
        for place in gathers:
            op = self.role.program[place[0]].parts[0].op
            assert isinstance(op, Collective)
            if op.kind != "all_gather" or op.channel != channel:
                self.add(
                    "R31-gathered", f"is gathered by {op.law.name} on channel {op.channel}; its channel is {channel}", place[0]
                )
        if self.bucket.shard.params:
            return
        if len(gathers) != int(used):
            self.add("R31-gathered", f"is gathered {len(gathers)} times; {int(used)} is expected")
        for use in self.use.uses if len(gathers) == 1 else ():
            if not self.order.precedes(gathers[0][0], use[0]):
                self.add("R31-gathered", f"is used here, without waiting for its gather by instruction {gathers[0][0]}", use[0])
                break

    def _check_reductions(self, found: list[UsePosition], channel: str, kind: str, last: int) -> int | None:
        """Check that the bucket is reduced once, by this kind of collective, after instruction `last`; return where."""
        wanted = int(bool(channel))
        if len(found) != wanted:
            again = found[1][0] if len(found) > 1 else -1
            self.add("R24-reduction", f"is reduced {len(found)} times; {wanted} is expected", again)
            return None
        index = found[0][0]
        op = self.role.program[index].parts[0].op
        assert isinstance(op, Collective)
        if op.kind != kind:
            self.add("R24-reduction", f"is given to {op.law.name}; {law_of(kind).name} is expected", index)
        elif op.channel != channel:
            self.add("R24-reduction", f"is reduced on channel {op.channel}; its channel is {channel}", index)
        elif last > index:
            self.add("R24-reduction", f"is accumulated into by instruction {last}, after this reduction of it", index)
        elif last >= 0 and not self.order.precedes(last, index):
            self.add("R24-reduction", f"is reduced without waiting for instruction {last}, which accumulates into it", index)
        else:
            return index
        return None

    def _check_update(self, reduction: int | None) -> None:
        if len(self.use.updates) != 1:
            again = self.use.updates[1][0] if len(self.use.updates) > 1 else -1
            self.add("R25-update", f"is updated {len(self.use.updates)} times; once is expected", again)
            return
        update = self.use.updates[0]
        for what, place in [("update", update), *(("norm", n) for n in self.use.norms)]:
            if reduction is not None and not self.order.precedes(reduction, place[0]):
                self.add(
                    "R25-update", f"has its {what} here, without waiting for its reduction by instruction {reduction}", place[0]
                )
            last = max([*self.use.folds, *(self.use.accumulations if what == "norm" else self.use.uses)], default=(-1, 0))
            if last > place:
                self.add("R25-update", f"has its {what} here, before instruction {last[0]} uses it", place[0])
        for norm in self.use.norms:
            if norm > update:
                self.add("R25-update", f"has its norm taken here, after its update by instruction {update[0]}", norm[0])
