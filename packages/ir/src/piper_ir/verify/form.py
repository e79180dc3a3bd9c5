"""Check rules R01 to R10: each piece of a plan, seen alone, is well formed; later checks index without asking.

`signatures` checks the reads and writes of parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import assert_never

import numpy as np

from piper_ir.ground.sizes import ITEM_BYTES, bind
from piper_ir.plan.instr_table import InstrTemplate
from piper_ir.plan.plan import COMPUTE, Category, Channel, Instr, Plan, RolePlan, State
from piper_ir.plan.plan_bytes import flat_bytes
from piper_ir.program.collectives import LAWS
from piper_ir.program.ops import (
    COMM,
    Add,
    Cast,
    Collective,
    Comm,
    Compute,
    Fold,
    Fresh,
    Load,
    Op,
    Recv,
    Seed,
    Send,
    SquaredNorm,
    Update,
    Zeros,
    op_name,
)
from piper_ir.verify.chunks import check_ports
from piper_ir.verify.columns import Ints, PlanColumns, flags, ints
from piper_ir.verify.rules import Findings, part_name
from piper_ir.verify.signatures import Signatures


def check_tables(findings: Findings) -> None:
    """Check R01, R02, R06 and R09: roles, streams and channels are consistent, and every name is known."""
    plan = findings.plan
    _ids(findings)
    _ranks(findings)
    names = _Names(findings)
    for role in plan.roles:
        if len(set(role.streams)) != len(role.streams) or COMPUTE not in role.streams:
            findings.add("R02-streams", f"streams are {', '.join(role.streams)}", role)
        for value in names.unknown_first(role):
            findings.add(
                "R06-names", f"there is no value {value} in the plan, to be allocated first", role
            )
    for channel in plan.channels:
        problem = _channel_problem(plan, channel)
        if problem:
            findings.add("R09-channels", f"channel {channel.id}: {problem}")
    for number in names.suspects():
        role, index = plan.roles[findings.columns.role[number]], int(findings.columns.index[number])
        instr = role.program[index]
        if instr.stream not in role.streams:
            findings.add(
                "R02-streams", f"the role has the streams {', '.join(role.streams)}", role, index
            )
        for name in names.unknown(instr):
            findings.add("R06-names", f"there is no {name} in the plan", role, index)


def check_instructions(findings: Findings) -> None:
    """Check R03, R04, R05, R07, R08 and R10 on plans whose tables hold."""
    plan, columns = findings.plan, findings.columns
    signatures, states = Signatures(findings), _States(plan)
    beside = _of_streams(columns)
    for number, role in enumerate(plan.roles):
        start = columns.starts[number]
        problems: dict[int, list[tuple[str, str]]] = {}
        sound: set[int] = set()  # the same ones in other microbatches are so too
        for index, kind in enumerate(_alike(plan, role)):
            if kind not in sound:
                content = list(_content_problems(role, index, signatures))
                if content:
                    problems[index] = content
                else:
                    sound.add(kind)
        suspects = beside[(beside >= start) & (beside < columns.starts[number + 1])] - start
        if len(suspects):
            done = dict.fromkeys(role.streams, 0)
            for index, instr in enumerate(role.program):
                if found := list(_stream_problems(role, instr, done)):
                    problems[index] = found + problems.get(index, [])
                done[instr.stream] += 1
        for index in sorted(problems):
            for rule, problem in sorted(problems[index], key=lambda problem: problem[0]):
                findings.add(rule, problem, role, index)
        states.check(findings, role)


def _of_streams(columns: PlanColumns) -> Ints:
    """Return the instructions that break R04 or R05, numbered through all roles."""
    waiting, on = columns.waits
    late = waiting[on >= waiting]
    elsewhere = [
        instrs[~columns.compute[instrs]]
        for instrs in (
            columns.early[1],
            columns.made[1],
            columns.row_instr[columns.frees.rows],
        )
    ]
    return np.unique(np.concatenate([late, *elsewhere]))


def _stream_problems(
    role: RolePlan, instr: Instr, done: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Yield (rule, problem) of the allocations, frees and waits of an instruction.

    `done` has the number of instructions before it, by stream.
    """
    if instr.stream != COMPUTE and (
        instr.frees_before or instr.allocs_after or any(p.frees for p in instr.parts)
    ):
        text = f"stream {instr.stream} allocates or frees; move it to a compute instruction"
        yield "R04-allocation", text
    for stream, count in instr.waits:
        if not 1 <= count <= done.get(stream, 0):
            yield "R05-waits", _wait_problem(role, stream, count, done)


def _content_problems(
    role: RolePlan, index: int, signatures: Signatures
) -> Iterator[tuple[str, str]]:
    """Yield (rule, problem) of an instruction's parts; other microbatches have the same."""
    template = role.table.templates[role.table.used[index]]
    if problem := _parts_problem(template):
        yield "R03-parts", problem.format(*map(part_name, role.program[index].parts))
    rows = signatures.columns.rows_at(role, index)
    for k, (part, row) in enumerate(zip(template.parts, rows, strict=True)):
        for problem in signatures.problems(row):
            name = part_name(role.program[index].parts[k])
            yield "R07-signature", f"{name}: {problem}"
        if isinstance(part.op, COMM) and (
            problem := _use_problem(signatures.plan, role, template.stream, part.op)
        ):
            yield "R10-channel-use", problem


def _ids(findings: Findings) -> None:
    plan = findings.plan
    tables: dict[str, Iterable[str]] = {
        "role": (r.role for r in plan.roles),
        "channel": (c.id for c in plan.channels),
        "bucket": (b.id for b in plan.buckets),
        "chunk": (c.id for c in plan.chunks),
        "variant": (v.variant for v in plan.variants),
        "parameter": (p.name for p in plan.params),
        "buffer": (b.name for b in plan.buffers),
        "batch tensor": (b.name for b in plan.batch),
    }
    for what, ids in tables.items():
        for id, count in Counter(ids).items():
            if count > 1:
                findings.add("R06-names", f"{count} {what}s are called {id}; ids must differ")
    check_ports(findings)
    _sizes(findings)
    roles = {r.role for r in plan.roles}
    params = {p.name for p in plan.params}
    for bucket in plan.buckets:
        missing = [f"role {r}" for r in bucket.roles if r not in roles]
        missing += [f"parameter {p}" for p in bucket.params if p not in params]
        if bucket.channel and bucket.channel not in {c.id for c in plan.channels}:
            missing.append(f"channel {bucket.channel}")
        dtypes = dict.fromkeys(bucket.every_dtype)
        missing += [f"dtype {dtype}" for dtype in dtypes if dtype not in ITEM_BYTES]
        if missing:
            findings.add(
                "R06-names",
                f"bucket {bucket.id} names {', '.join(missing)}, which the plan does not have",
            )


def _sizes(findings: Findings) -> None:
    """Check for R07 that all shapes of a plan are plain numbers, and that it has rows."""
    plan = findings.plan
    for name, count in (("rows in a microbatch", plan.rows), ("microbatches", plan.microbatches)):
        if count < 1:
            findings.add("R07-signature", f"the plan has {count} {name}; at least one is needed")
    named = [("parameter", p.name, p.spec) for p in plan.params]
    named += [("buffer", b.name, b.spec) for b in plan.buffers]
    # Microbatches share specs, objects that the plan keeps alive.
    given = plan.kinds.given
    kinds = findings.columns.table.kinds if given is None else given.values()
    known = {id(spec): spec for spec in [spec for spec, _ in kinds] + [s for *_, s in named]}
    wrong = {n for n, spec in known.items() if not all(map(_is_size, spec.shape))}
    values = [("value", id, spec) for id, (spec, _) in findings.kinds.items()] if wrong else []
    for what, name, spec in [*values, *named]:
        if id(spec) in wrong:
            findings.add(
                "R07-signature",
                f"{what} {name} is a {spec}; in a plan all sizes are integers from 0",
            )


def _is_size(size: object) -> bool:
    return isinstance(size, int) and size >= 0


def _ranks(findings: Findings) -> None:
    plan = findings.plan
    owner: dict[int, str] = {}
    for role in plan.roles:
        wrong = [f"{a}={c}" for a, c in role.placed.items() if not 0 <= c < plan.mesh.size(a)]
        if wrong:
            findings.add("R01-ranks", f"{', '.join(wrong)} is outside of {plan.mesh}", role)
        elif role.ranks != plan.mesh.ranks(role.placed):
            findings.add(
                "R01-ranks",
                f"the ranks at {dict(role.placed)} are {plan.mesh.ranks(role.placed)}",
                role,
            )
        for rank in role.ranks:
            if rank in owner:
                findings.add("R01-ranks", f"rank {rank} is also in role {owner[rank]}", role)
            owner[rank] = role.role
    idle = sorted(set(range(plan.mesh.world)) - owner.keys())
    if idle:
        findings.add(
            "R01-ranks",
            f"no role has rank{'s' if len(idle) > 1 else ''} {', '.join(map(str, idle))} of {plan.mesh}",
        )


def _channel_problem(plan: Plan, channel: Channel) -> str:
    unknown = [r for r in channel.roles if r not in plan._roles]
    if unknown:
        return f"there is no role {', '.join(unknown)}"
    if problem := _channel_streams_problem(plan, channel):
        return problem
    if len(set(channel.roles)) != len(channel.roles):
        return f"a role occurs twice in {', '.join(channel.roles)}"
    if channel.kind == "group":
        axes = {role: plan.role(role).placed.keys() - set(channel.over) for role in channel.roles}
        odd = [role for role in axes if axes[role] != axes[channel.roles[0]]]
        differ = [
            f"its roles {channel.roles[0]} and {role} place different axes, so members would differ"
            for role in odd
        ]
        return "".join(differ[:1]) if axes else "it has no roles"
    if len(channel.roles) != 2:
        return f"p2p needs a source and a destination, it has {len(channel.roles)} roles"
    source, destination = (plan.role(r).placed for r in channel.roles)
    same = source.keys() == destination.keys()
    return "" if same else f"its roles place different axes, {dict(source)} and {dict(destination)}"


def _channel_streams_problem(plan: Plan, channel: Channel) -> str:
    """Return the fault of a channel's streams and of the multiprocessors that it takes; "" if there is none."""
    if len(channel.streams) != len(channel.roles):
        return f"it has {len(channel.roles)} roles and {len(channel.streams)} streams; one stream per role is expected"
    if channel.sms and (
        len(channel.sms) != len(channel.roles) or any(n is not None and n < 0 for n in channel.sms)
    ):
        return (
            f"its sms are {channel.sms}; per role none or a number that is not negative is expected"
        )
    for role, stream in zip(channel.roles, channel.streams, strict=True):
        if channel.purpose == "tensor" and stream == COMPUTE:
            continue
        if stream == COMPUTE or stream not in plan.role(role).streams:
            return f"role {role} has no communication stream {stream}"
    return ""


class _Names:
    """Find the names in instructions that the plan does not have."""

    def __init__(self, findings: Findings) -> None:
        plan = findings.plan
        self._findings = findings
        self._tables: dict[str, Collection[str]] = {
            "chunk": plan._chunks,
            "batch tensor": {b.name for b in plan.batch},
            "channel": plan._channels,
            "bucket": plan._buckets,
            "collective": LAWS,
        }

    def unknown_first(self, role: RolePlan) -> list[str]:
        """Return the values to be allocated first that the plan does not have."""
        exists = self._findings.exists[self._findings.columns.known(ints(role.table.first))]
        return [] if exists.all() else [v for v in role.allocs_first if v not in self._values]

    def suspects(self) -> list[int]:
        """Return the instructions that name a stream, value or thing which does not exist, or may do so."""
        columns, exists = self._findings.columns, self._findings.exists
        streams = [role.streams for role in self._findings.plan.roles for _ in role.table.templates]
        faulty = [
            t.stream not in known or any(self._unknown_in_op(p.op) for p in t.parts)
            for t, known in zip(columns.templates, streams, strict=True)
        ]
        found = [flags(faulty)[columns.template].nonzero()[0]]
        for uses in (columns.reads, columns.writes, columns.frees, columns.held):
            found.append(columns.row_instr[uses.rows[~exists[uses.values]]])
        for values, instrs in (columns.early, columns.made):
            found.append(instrs[~exists[values]])
        suspects: list[int] = np.unique(np.concatenate(found)).tolist()
        return suspects

    @cached_property
    def _values(self) -> Collection[str]:
        return self._findings.kinds

    def unknown(self, instr: Instr) -> list[str]:
        """Return the names in an instruction that the plan does not have."""
        values = [*instr.frees_before, *instr.allocs_after]
        names: list[str] = []
        for part in instr.parts:
            values += (*part.reads, *part.writes, *part.frees, *part.held)
            names += self._unknown_in_op(part.op)
        return [*(f"value {v}" for v in values if v not in self._values), *names]

    def _unknown_in_op(self, op: Op) -> list[str]:
        unknown = [(kind, n) for kind, n in _names_in(op) if n not in self._tables[kind]]
        known = f" (known are {', '.join(LAWS)})"
        return [f"{kind} {n}{known if kind == 'collective' else ''}" for kind, n in unknown]


def _names_in(op: Op) -> Iterable[tuple[str, str]]:
    """Yield (kind of thing, name) of each name in an op."""
    match op:
        case Compute():
            yield "chunk", op.variant
        case Load(tensor=tensor):
            yield "batch tensor", tensor
        case Send(channel=channel) | Recv(channel=channel):
            yield "channel", channel
        case Collective(kind=kind, channel=channel, bucket=bucket):
            yield from [("collective", kind), ("channel", channel)]
            yield from [("bucket", bucket)] if bucket else []
        case SquaredNorm(buckets=buckets) | Update(buckets=buckets):
            yield from [("bucket", bucket) for bucket in buckets]
        case Fresh(bucket=bucket) | Cast(bucket=bucket) | Fold(bucket=bucket):
            yield "bucket", bucket
        case Seed() | Add() | Zeros():
            pass
        case _:
            assert_never(op)


def _alike(plan: Plan, role: RolePlan) -> Sequence[int]:
    """Return a number for each instruction of a role, equal for those alike but for their microbatch.

    The microbatches of the table are the plan's, unless the plan says another number of them.
    """
    table = role.table
    return table.alike if table.values.count == plan.microbatches else range(len(table))


def _parts_problem(instr: InstrTemplate) -> str:
    """Return the fault of the parts of an instruction, with {k} for the name of part k."""
    if not instr.parts:
        return "it has no part"
    communications = [k for k, p in enumerate(instr.parts) if isinstance(p.op, COMM)]
    if instr.stream == COMPUTE:
        return (
            f"{{{communications[0]}}} is communication; it needs a stream of its own"
            if communications
            else ""
        )
    if not communications:
        return f"{{0}} belongs on the stream {COMPUTE}"
    return (
        f"it has {len(instr.parts)} parts; a communication has one" if len(instr.parts) > 1 else ""
    )


def _wait_problem(role: RolePlan, stream: str, count: int, done: Mapping[str, int]) -> str:
    if stream not in done:
        return f"it waits for the stream {stream}; the role has {', '.join(role.streams)}"
    earlier = done[stream]
    return (
        f"it waits for {count} instructions of {stream}, of which {earlier} stand before it; 1 to "
        f"{earlier} can be waited for"
    )


def _use_problem(plan: Plan, role: RolePlan, stream: str, op: Comm) -> str:
    channel = plan.channel(op.channel)
    kind = "group" if isinstance(op, Collective) else "p2p"
    if channel.kind != kind:
        return f"channel {channel.id} is {channel.kind}; {op_name(op)} needs {kind}"
    if isinstance(op, Send) and channel.roles[0] != role.role:
        return f"channel {channel.id} is fed by role {channel.roles[0]}"
    if isinstance(op, Recv) and channel.roles[1] != role.role:
        return f"channel {channel.id} delivers to role {channel.roles[1]}"
    if role.role not in channel.roles:
        return f"channel {channel.id} joins {', '.join(channel.roles)}"
    if stream != channel.stream_on(role.role):
        return f"channel {channel.id} uses the stream {channel.stream_on(role.role)} here"
    return ""


_StateName = tuple[Category, str, bool]
"""The category, name and `flat` of a state."""


class _States:
    """Check R08: the states that a role must own; the parameters in a bucket are one flat state of it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._home = {p: b.id for b in plan.buckets for p in b.params}
        self._sizes: dict[_StateName, int] = {}
        for p in plan.params:
            if p.name not in self._home:
                self._sizes["param", p.name, False] = bind(p.spec.nbytes, 0)
        for buffer in plan.buffers:
            self._sizes["buffer", buffer.name, False] = bind(buffer.spec.nbytes, 0)
        for bucket in plan.buckets:
            for kind, size in flat_bytes(bucket, plan.mesh).items():
                self._sizes[kind, bucket.id, True] = size

    def needed(self, role: RolePlan) -> Collection[_StateName]:
        chunks = {op.chunk for op in role.table.ops if isinstance(op, Compute)}
        inputs = (i for c in self._plan.chunks if c.id in chunks for i in c.inputs)
        names: list[_StateName] = []
        for i in inputs:
            if i.kind == "param":
                names.append(("param", self._home.get(i.ref, i.ref), i.ref in self._home))
            elif i.kind == "buffer":
                names.append(("buffer", i.ref, False))
        names += [
            (kind, b.id, True)
            for b in self._plan.buckets
            if role.role in b.roles
            for kind in flat_bytes(b)
        ]
        return dict.fromkeys(names)

    def _on_host(self, state: State) -> bool:
        bucket = self._plan._buckets.get(state.name) if state.flat else None
        return bool(bucket and bucket.on_host(state.category))

    def check(self, findings: Findings, role: RolePlan) -> None:
        """Compare the states of a role with the states that it uses."""
        owned = {(s.category, s.name, s.flat) for s in role.states}
        needed = self.needed(role)
        here = {name for _, name, flat in needed if flat}
        for name in needed:
            if name not in owned:
                findings.add(
                    "R08-states", f"it uses {name[0]}:{name[1]} and has no such state", role
                )
        for id, count in Counter(s.id for s in role.states).items():
            if count > 1:
                findings.add("R08-states", f"it has the state {id} {count} times", role)
        for state in role.states:
            size = self._sizes.get((state.category, state.name, state.flat))
            if state.flat and state.name in self._plan._buckets and state.name not in here:
                findings.add(
                    "R08-states",
                    f"it has the state {state.id} of a bucket that it does not use",
                    role,
                )
            if (there := self._on_host(state)) != state.host:
                place = "host" if there else "device"
                findings.add("R08-states", f"the state {state.id} is to be on the {place}", role)
            if state.category == "optim" and state.flat and state.name in self._plan._buckets:
                continue  # of any size: it is the optimizer's
            if size != state.nbytes:
                expected = "the plan has no such tensor" if size is None else f"{size} are expected"
                findings.add(
                    "R08-states", f"the state {state.id} has {state.nbytes} bytes; {expected}", role
                )
