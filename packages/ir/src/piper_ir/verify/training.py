"""Check rules R21 to R23: the plan is one training step, on parameters that lie as buckets say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import product
from math import isclose

import numpy as np

from piper_ir.ground.expert_tokens import counts_tokens
from piper_ir.ground.sizes import bind
from piper_ir.plan.plan import Bucket, Plan, RolePlan
from piper_ir.program.ops import KEEP_ALL, Compute, Op, Seed, Update
from piper_ir.program.program import Chunk, Param, Signature, Step
from piper_ir.verify.columns import Ints, flags, ints
from piper_ir.verify.rules import Findings
from piper_ir.verify.values import UsePosition

STEPS: tuple[Step, ...] = ("F", "R", "I", "W", "B")
ALIGNMENT = 256
"""The multiple of bytes at which CUDA's allocator and vectorised kernels assume that a tensor starts."""

_RolePosition = tuple[RolePlan, UsePosition]


def check_steps(findings: Findings) -> None:
    """Check R21, and the parts of R26 on how loss gradients start and updates are weighted."""
    plan, columns = findings.plan, findings.columns
    scaled = _is_scaled(plan)
    wrong = [_scale_problem(plan, part.op, scaled) for part in columns.parts]
    for row in flags(list(map(bool, wrong)))[columns.row_part].nonzero()[0]:
        problem = wrong[columns.row_part[row]]
        findings.add_at("R26-scale", problem, int(columns.row_instr[row]))
    runs = _Runs(findings)
    if plan.chunks and plan.microbatches > runs.different:
        # said once, since there may be any number of microbatches
        findings.add(
            "R21-steps",
            f"the plan has {plan.microbatches} microbatches, and runs {runs.different} steps in all",
        )
        return
    _check_buffers(findings, runs.of)
    _check_runs(findings, runs)


class _Runs:
    """Hold where each step of a chunk runs in each microbatch, as rows in a table.

    A key is the number of a (chunk, step) and a microbatch; `rows` are the rows that compute, in order of their keys.
    """

    def __init__(self, findings: Findings) -> None:
        plan = findings.plan
        self._columns = columns = findings.columns
        self._many = int(columns.row_mb.max(initial=0)) + 1
        self._number = {c.id: n for n, c in enumerate(plan.chunks)}
        steps = [
            self._step(p.op.chunk, p.op.step) if isinstance(p.op, Compute) else -1
            for p in columns.parts
        ]
        step = ints(steps)[columns.row_part]
        rows = (step >= 0).nonzero()[0]
        keys = step[rows] * self._many + columns.row_mb[rows]
        order = np.argsort(keys, kind="stable")
        self.rows, keys = rows[order], keys[order]
        self._keys, first, self._times = np.unique(keys, return_index=True, return_counts=True)
        self._first = first
        self.different = len(self._keys)

    def _step(self, chunk: str, step: Step) -> int:
        return self._number.setdefault(chunk, len(self._number)) * len(STEPS) + STEPS.index(step)

    def of(self, chunk: str, mb: int, step: Step) -> list[_RolePosition]:
        """Return where a step runs in a microbatch, in order of roles and programs."""
        if mb >= self._many:
            return []
        key = self._step(chunk, step) * self._many + mb
        n = int(np.searchsorted(self._keys, key))
        if n == len(self._keys) or self._keys[n] != key:
            return []
        first = int(self._first[n])
        return [self._place(int(row)) for row in self.rows[first : first + int(self._times[n])]]

    def _place(self, row: int) -> _RolePosition:
        columns = self._columns
        number, index = columns.place(int(columns.row_instr[row]))
        return columns.plan.roles[number], (index, int(columns.row_index[row]))

    @cached_property
    def table(self) -> tuple[Ints, Ints]:
        """Return how often each step runs, and the row where it does first: by chunk, step and microbatch."""
        step, mb = np.divmod(self._keys, self._many)
        at = (*np.divmod(step, len(STEPS)), mb)
        shape = len(self._number), len(STEPS), self._columns.plan.microbatches
        times, rows = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        times[at], rows[at] = self._times, self.rows[self._first]
        return times, rows

    @cached_property
    def variants(self) -> Mapping[tuple[int, int], str]:
        """Return the variant of each chunk (by number) and microbatch that runs under a policy."""
        columns = self._columns
        ops = [p.op if isinstance(p.op, Compute) else None for p in columns.parts]
        rows = columns.rows_of(lambda p: isinstance(p.op, Compute) and p.op.keep != KEEP_ALL)
        found: dict[tuple[int, int], str] = {}
        for part, mb in zip(
            columns.row_part[rows].tolist(), columns.row_mb[rows].tolist(), strict=True
        ):
            if (op := ops[part]) is not None:
                found[self._number[op.chunk], mb] = op.variant
        return found


def _scale_problem(plan: Plan, op: Op, scaled: bool) -> str:
    """Return the fault of the number from which a loss gradient starts, or of an update's weight; "" if none."""
    if isinstance(op, Seed):
        expected = 1 / (plan.microbatches * plan.replicas) if plan.loss_kind == "mean" else 1.0
        if not isclose(op.value, expected, rel_tol=1e-12):
            return f"the loss gradient starts from {op.value!r}; {expected!r} is expected"
        if op.scaled != scaled:
            return f"scaled is {op.scaled}, but the updates have scaled={not op.scaled}"
    elif isinstance(op, Update) and op.weighted != (plan.loss_kind == "sum") and not plan.evaluates:
        return f"weighted is {op.weighted}, but the loss is a {plan.loss_kind}"
    return ""


def _is_scaled(plan: Plan) -> bool:
    """Return whether the first update divides gradients by the scale of the loss; R26 says that all do alike."""
    for table in [role.table for role in plan.roles]:
        scaled = [
            [p.op.scaled for p in t.parts if isinstance(p.op, Update)] for t in table.templates
        ]
        for k in reversed(table.used):
            if scaled[k]:
                return scaled[k][0]
    return False


def _check_runs(findings: Findings, runs: _Runs) -> None:
    """Check R21 for chunks: each step runs once for each microbatch, after the step before it."""
    for chunk, mb in _suspects(findings, runs):
        before: _RolePosition | None = None
        steps = _steps_of(findings.plan, chunk, mb, runs)
        whole = bool(runs.of(chunk.id, mb, "B"))
        for step in STEPS:
            found = runs.of(chunk.id, mb, step)
            times = int(_expected(steps, step, whole))
            if len(found) != times:
                roles = f" (on {', '.join(role.role for role, _ in found)})" if found else ""
                findings.add(
                    "R21-steps",
                    f"{step} of chunk {chunk.id} runs {len(found)} times{roles} for microbatch {mb}; {times} "
                    f"expected",
                )
            elif found:
                _check_follows(
                    findings, f"{step} of chunk {chunk.id} for microbatch {mb}", found[0], before
                )
                before = found[0]


def _suspects(findings: Findings, runs: _Runs) -> Iterator[tuple[Chunk, int]]:
    """Yield the chunks and microbatches whose steps do not all run once, on one role and in order."""
    plan, columns = findings.plan, findings.columns
    times, rows = runs.table
    times, rows = times[: len(plan.chunks)], rows[: len(plan.chunks)]
    expected = np.zeros(times.shape, np.int64)
    whole = times[:, STEPS.index("B")] > 0
    for n, chunk in enumerate(plan.chunks):
        for k, step in enumerate(STEPS):
            by_whole = [_expected(chunk.steps, step, w) for w in (False, True)]
            expected[n, k] = np.where(whole[n], by_whole[1], by_whole[0])
    for (n, mb), name in runs.variants.items():
        steps = plan.chunk(name).steps
        expected[n, :, mb] = [_expected(steps, step, bool(whole[n, mb])) for step in STEPS]
    bad = (times != expected).any(axis=1)
    role, index = columns.role[columns.row_instr], columns.index[columns.row_instr]
    last = np.full(bad.shape, -1)
    for k in range(len(STEPS)):
        here, row = times[:, k] == 1, rows[:, k]
        both = here & (last >= 0)
        earlier = (index[row] < index[last]) | (
            (index[row] == index[last]) & (columns.row_index[row] < columns.row_index[last])
        )
        bad |= both & ((role[row] != role[last]) | earlier)
        last = np.where(here, row, last)
    for n, mb in zip(*bad.nonzero(), strict=True):
        yield plan.chunks[n], int(mb)


def _steps_of(plan: Plan, chunk: Chunk, mb: int, runs: _Runs) -> Mapping[Step, Signature]:
    number = plan.chunks.index(chunk)
    return plan.chunk(runs.variants.get((number, mb), chunk.id)).steps


def _expected(steps: Mapping[Step, Signature], step: Step, whole: bool) -> bool:
    """Return whether a step runs, beside a whole backward (B) or in place of it."""
    other = whole if step in ("R", "I", "W") else step == "B" and not whole
    return not other and step in steps and not steps[step].empty


def _check_buffers(
    findings: Findings, runs: Callable[[str, int, Step], list[_RolePosition]]
) -> None:
    """Check R21 for buffers: forwards use an updated buffer as on one device, by microbatch and on one role."""
    plan = findings.plan
    outputs = [o for c in plan.chunks for o in c.outputs if o.kind == "buffer"]
    for name in dict.fromkeys(o.ref for o in outputs if not counts_tokens(o.ref)):
        updating = {
            c.id
            for c in plan.chunks
            if any(o.kind == "buffer" and o.ref == name for o in c.outputs)
        }
        reading = {
            c.id for c in plan.chunks if any(i.kind == "buffer" and i.ref == name for i in c.inputs)
        }
        users = [c.id for c in plan.chunks if c.id in updating | reading]
        update: _RolePosition | None = None
        reads: list[_RolePosition] = []  # since the update
        for mb, user in product(range(plan.microbatches), users):
            for where in runs(user, mb, "F"):
                what = (
                    "updates a buffer"
                    if user in updating
                    else f"reads the buffer {name}, which others update"
                )
                follows = [update, *reads] if user in updating else [update]
                for before in follows:
                    _check_follows(
                        findings,
                        f"F of chunk {user}, which {what}, for microbatch {mb}",
                        where,
                        before,
                    )
                if user in updating:
                    update, reads = where, []
                else:
                    reads.append(where)


def _check_follows(
    findings: Findings, what: str, position: _RolePosition, before: _RolePosition | None
) -> None:
    if before is None:
        return
    role, place = position
    if role.role != before[0].role:
        findings.add(
            "R21-steps",
            f"{what}: runs here, the one that it follows on role {before[0].role}",
            role,
            place[0],
        )
    elif place < before[1]:
        findings.add(
            "R21-steps",
            f"{what}: runs before instruction {before[1][0]}, which it must follow",
            role,
            place[0],
        )


def check_layout(findings: Findings) -> None:
    """Check R22."""
    params = {p.name: p for p in findings.plan.params}
    for bucket in findings.plan.buckets:
        where = f"bucket {bucket.id}"
        item, end, last = bucket.narrowest, 0, "the start"
        if len(bucket.params) != len(bucket.offsets):
            findings.add(
                "R22-buckets",
                f"{where} has {len(bucket.params)} parameters and {len(bucket.offsets)} offsets",
            )
            continue
        for name, offset in zip(bucket.params, bucket.offsets, strict=True):
            if params[name].spec.dtype != bucket.compute_dtype:
                findings.add(
                    "R22-buckets",
                    f"{where} has {name} in {bucket.compute_dtype}; chunks read {params[name].spec.dtype}",
                )
            if offset * item % ALIGNMENT:
                findings.add(
                    "R22-buckets",
                    f"{where}: {name} starts at byte {offset * item}, which is no multiple of {ALIGNMENT}",
                )
            if offset < end:
                findings.add(
                    "R22-buckets",
                    f"{where}: {name} starts at element {offset}, inside of {last}, which ends at {end}",
                )
            end, last = offset + bind(params[name].spec.numel, 0), name
        if end > bucket.numel:
            findings.add(
                "R22-buckets", f"{where} has {bucket.numel} elements; {last} ends at {end}"
            )


def check_holders(findings: Findings) -> None:
    """Check R23."""
    plan = findings.plan
    inside = _check_one_bucket(findings)
    users = _users(plan)
    for param in plan.params:
        own_bucket = inside.get(param.name)
        if param.trained != (own_bucket is not None):
            text = (
                "is trained and in no bucket"
                if own_bucket is None
                else f"is not trained, but in bucket {own_bucket.id}"
            )
            findings.add("R23-holders", f"parameter {param.name} {text}")
        elif own_bucket is not None and users.get(param.name, set()) != set(own_bucket.roles):
            uses, holds = (
                ", ".join(sorted(users.get(param.name, ()))) or "no role",
                ", ".join(sorted(own_bucket.roles)),
            )
            findings.add(
                "R23-holders",
                f"parameter {param.name} is used by {uses}; its bucket {own_bucket.id} is held by {holds}",
            )
    params = {p.name: p for p in plan.params}
    for bucket in plan.buckets:
        problem = _members_problem(plan, bucket, [params[name] for name in bucket.params])
        if problem:
            findings.add("R23-holders", f"bucket {bucket.id}: {problem}")


def _check_one_bucket(findings: Findings) -> dict[str, Bucket]:
    """Check that no parameter is in two buckets; return the bucket of each parameter that is in one."""
    inside: dict[str, Bucket] = {}
    for bucket in findings.plan.buckets:
        for name in bucket.params:
            if name in inside:
                findings.add(
                    "R23-holders",
                    f"parameter {name} is in the buckets {inside[name].id} and {bucket.id}",
                )
            inside[name] = bucket
    return inside


def _users(plan: Plan) -> dict[str, set[str]]:
    """Return the roles whose chunks read each parameter."""
    users: dict[str, set[str]] = {}
    for role in plan.roles:
        for chunk in {op.chunk for op in role.table.ops if isinstance(op, Compute)}:
            for entry in plan.chunk(chunk).inputs:
                if entry.kind == "param":
                    users.setdefault(entry.ref, set()).add(role.role)
    return users


def _members_problem(plan: Plan, bucket: Bucket, members: Iterable[Param]) -> str:
    """Return the fault, if any, of a bucket's axes and channel, which joins just the ranks that keep the same of it."""
    for name in bucket.roles:
        open_axes = [
            a for a in plan.replicated if plan.mesh.size(a) > 1 and a not in plan.role(name).placed
        ]
        missing = [
            a
            for a in open_axes
            if a not in bucket.over and not (a in plan.experts and a in bucket.parts)
        ]
        if missing:
            return (
                f"role {name} is replicated along {', '.join(missing)}, the bucket along "
                f"{', '.join(bucket.over) or 'nothing'}"
            )
    summed = {a for p in members for a in p.summed}
    if lost := [a for a in summed if a not in bucket.over]:
        return f"the devices along {', '.join(lost)} make terms of its gradients, and it does not add them"
    alone = [
        a for a in bucket.over if plan.mesh.size(a) > 1 and a not in (*plan.replicated, *summed)
    ]
    if alone:
        along = ", ".join(plan.replicated) or "none"
        return f"it adds gradients along {', '.join(alone)}, and rows are shared out along {along}"
    if mixed := [a for a in bucket.over if a in bucket.parts]:
        return f"it adds gradients along {', '.join(mixed)}, where each rank has another part of its parameters"
    return _reduction_problem(plan, bucket)


def _reduction_problem(plan: Plan, bucket: Bucket) -> str:
    """Return the fault, if any, of the channel that reduces a bucket's gradients."""
    over = tuple(a for a in bucket.over if a not in bucket.shard.optim)
    several = len(bucket.roles) > 1 or any(plan.mesh.size(a) > 1 for a in over)
    if not bucket.channel:
        return "several ranks hold it, and no channel reduces it" if several else ""
    if not several:
        return f"one rank holds it, so channel {bucket.channel} has nothing to reduce"
    channel = plan.channel(bucket.channel)
    if (
        channel.kind != "group"
        or set(channel.roles) != set(bucket.roles)
        or set(channel.over) != set(over)
    ):
        joins = (
            f"the {channel.kind} channel {channel.id} joins {', '.join(channel.roles)} over "
            f"({', '.join(channel.over)})"
        )
        return f"{joins}; {', '.join(bucket.roles)} over ({', '.join(over)}) hold it"
    return ""
