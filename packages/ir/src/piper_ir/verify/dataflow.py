"""Check rule R27: every reader gets the value that it asks for, followed back through sends, sums and collectives.

An *atom* is a thing that is computed or loaded once per microbatch, ((chunk, port), mb) or (("", batch tensor), mb), or
once in the whole step, (("", "norm " + bucket), -1). A value is an atom or a sum of atoms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from piper_ir.plan.instr_table import PartTemplate
from piper_ir.plan.plan import Bucket, Channel, Plan, is_state
from piper_ir.program.collectives import law_of
from piper_ir.program.ops import (
    Add,
    Cast,
    Collective,
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
)
from piper_ir.program.program import Chunk
from piper_ir.verify.columns import Ints, PlanColumns, flags, ints
from piper_ir.verify.rules import Findings, part_name
from piper_ir.verify.run import Events
from piper_ir.verify.sharding import bucket_term

Term = tuple[str, str]
"""A chunk and its port."""
Atom = tuple[Term, int]


@dataclass(slots=True, eq=False)  # a frozen one takes four times as long to make
class _Sum:
    """Hold a sum as a tree of terms, opened on demand, since running sums would otherwise take quadratic space.

    `over` are the axes summed over.
    """

    terms: tuple[_Origin, ...]
    over: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _Meeting:
    """Hold the result of one collective, block by block over its members; only a collective can join it.

    `given` is the input of its first member.
    """

    given: _Origin
    kind: str
    channel: Channel
    whole: Mapping[str, _Origin]

    @property
    def name(self) -> str:
        """Return its name in messages, the same for meetings of the same kind on the same."""
        return f"{law_of(self.kind).name} of {_origin_name(self.given)}"

    @property
    def of_experts(self) -> bool:
        """Return whether it brings tokens to experts, or back."""
        return self.kind == "all_to_all" and self.channel.purpose == "expert"


@dataclass(slots=True)
class _Blocks:
    """Hold the blocks that one meeting left on one role."""

    meeting: _Meeting
    role: str


_Origin = Atom | _Sum | _Blocks
SEED = "seed"
NOWHERE = frozenset[str]()
"""No axes."""


def check_dataflow(findings: Findings, events: Events, order: list[int]) -> None:
    """Check R27: follow values along the events, in an order in which they happen, then compare all reads of steps."""
    flow = _Dataflow(findings)
    columns = findings.columns
    special = columns.rows_of(
        lambda p: not isinstance(p.op, Compute | Load | Seed | Fold) and not bucket_term(p.op)
    )
    followed = np.zeros(len(columns.role), dtype=np.bool_)
    followed[columns.row_instr[special]] = True
    moves, compute = followed.tolist(), columns.compute.tolist()
    rows: list[int] = columns.first_row.tolist()
    for event in order:
        members = events.members[event]
        first = members[0]
        if not moves[first]:
            continue
        if compute[first]:
            for row in range(rows[first], rows[first + 1]):
                flow.compute(row)
        else:
            flow.communicate([rows[i] for i in members])
    flow.compare()
    at = {i: n for n, e in enumerate(order) for i in events.members[e]} if flow.problems else {}
    for row, text in sorted(flow.problems, key=lambda p: (at[columns.row_instr[p[0]]], p[0])):
        number, index = columns.place(int(columns.row_instr[row]))
        part = findings.plan.roles[number].program[index].parts[int(columns.row_index[row])]
        findings.add_at("R27-dataflow", f"{part_name(part)}{text}", int(columns.row_instr[row]))


class _Atoms:
    """Number the terms of a plan, and hold the atom of each value that is one.

    The atom of term t in microbatch mb has number t * stride + mb + 1; -1 is none. Terms of buckets are of mb -1.
    """

    def __init__(self, columns: PlanColumns) -> None:
        self._columns = columns
        self._terms: dict[Term, int] = {}
        self.stride = columns.plan.microbatches + 2
        written = [self._written(part) for part in columns.parts]
        terms = ints([t for each in written for t in each])
        writes = columns.writes
        once = flags([bool(bucket_term(part.op)) for part in columns.parts])[columns.row_part]
        self._mb = np.where(once, -1, columns.row_mb)
        self.of = np.full(columns.count, -1)
        self.of[writes.values] = self._atoms(terms[writes.slots], writes.rows)
        self._all = list(self._terms)

    def _written(self, part: PartTemplate) -> list[int]:
        match part.op:
            case Compute() as op:
                ports = self._columns.plan.chunk(op.variant).steps[op.step].writes
                return [self.number((op.chunk, port)) for port in ports]
            case Load(tensor=tensor):
                return [self.number(("", tensor))]
            case Seed():
                return [self.number(("", SEED))]
            case op:
                term = bucket_term(op)
                return [self.number(term) if term else -1] * len(part.writes)

    def _atoms(self, terms: Ints, rows: Ints) -> Ints:
        return np.where(terms < 0, -1, terms * self.stride + self._mb[rows] + 1)

    def number(self, term: Term) -> int:
        """Return the number of a term."""
        return self._terms.setdefault(term, len(self._terms))

    def get(self, value: int) -> Atom | None:
        """Return the atom that a value is, if any."""
        number = int(self.of[value])
        if number < 0:
            return None
        term, mb = divmod(number, self.stride)
        return self._all[term], mb - 1

    def move(self, source: int, values: list[int]) -> bool:
        """Let values be the atom that another one is; return whether it is one."""
        number = self.of[source]
        self.of[values] = number
        return bool(number >= 0)

    def unlike(self, only: Sequence[Sequence[Term | None]]) -> Ints:
        """Return the rows that read another value than the one term that their part asks for; by number of the part.

        A part that asks for something else than one term has None, and reads another value for sure.
        """
        reads = self._columns.reads
        asked = ints([-1 if t is None else self._terms.get(t, -1) for each in only for t in each])
        wanted = self._atoms(asked[reads.slots], reads.rows)
        return np.unique(reads.rows[(wanted < 0) | (wanted != self.of[reads.values])])


class _Dataflow:
    """Follow the origins of the values of a plan, and compare them with the terms that their readers ask for.

    `problems` are rows of parts, each with its problem.
    """

    def __init__(self, findings: Findings) -> None:
        self._plan, self._columns = findings.plan, findings.columns
        self.problems: list[tuple[int, str]] = []
        self._atoms = _Atoms(findings.columns)
        self._numbers: list[int] = self._columns.row_part.tolist()
        names = [role.role for role in self._plan.roles]
        self._roles = [names[r] for r in self._columns.role[self._columns.row_instr].tolist()]
        self._origins: dict[int, _Origin] = {}  # of values that are no atoms
        self._asked: dict[tuple[str, str], list[_Asked]] = {}
        self._axes: dict[str, tuple[str, ...]] = {}
        self._tangents = _tangents(self._plan)
        self._weights = [
            f"out{k}"
            for c in self._plan.chunks
            for k, o in enumerate(c.outputs)
            if o.kind == "weight"
        ]

    def _origin(self, value: int) -> _Origin:
        return self._atoms.get(value) or self._origins[value]

    def _op(self, row: int) -> Op:
        return self._columns.parts[self._numbers[row]].op

    def communicate(self, rows: list[int]) -> None:
        """Follow the values of a meeting on a channel: of a send and its receive, or of a collective."""
        op, columns = self._op(rows[0]), self._columns
        if isinstance(op, Collective):
            reads = {self._roles[row]: self._origin(columns.reads.of(row)[0]) for row in rows}
            found = self._collected(op, reads)
            for row in rows:
                self._origins[columns.writes.of(row)[0]] = found[self._roles[row]]
            return
        source = next(v for row in rows for v in columns.reads.of(row))
        values = [v for row in rows for v in columns.writes.of(row)]
        if not self._atoms.move(source, values):
            self._origins.update(dict.fromkeys(values, self._origins[source]))

    def _collected(self, op: Collective, reads: Mapping[str, _Origin]) -> Mapping[str, _Origin]:
        """Return a collective's result on each role, given the input of each role's member."""
        law, channel = op.law, self._plan.channel(op.channel)
        over = self._over(channel)
        total = _Sum(tuple(reads.values()), over)
        first = next(iter(reads.values()))
        if isinstance(first, _Blocks) and _takes_back(op, channel, first.meeting):
            if all(origin == _Blocks(first.meeting, role) for role, origin in reads.items()):
                return first.meeting.whole
        match law.result:
            case "sum" if law.writes == "whole":
                return dict.fromkeys(reads, total)
            case "first" if law.writes == "whole" and not over:
                return dict.fromkeys(
                    reads, reads[min(reads, key=lambda r: self._plan.role(r).ranks[0])]
                )
            case "sum":
                whole: Mapping[str, _Origin] = dict.fromkeys(reads, total)
            case "first" | "blocks" | "previous":
                whole = reads
            case _:
                assert_never(law.result)
        meeting = _Meeting(first, op.kind, channel, whole)
        return {role: _Blocks(meeting, role) for role in reads}

    def _over(self, channel: Channel) -> tuple[str, ...]:
        """Return the axes along which the members of a channel really differ."""
        axes = self._axes.get(channel.id)
        if axes is None:
            axes = self._axes[channel.id] = tuple(
                a for a in channel.over if self._plan.mesh.size(a) > 1
            )
        return axes

    def compute(self, row: int) -> None:
        """Record the writes of a part that is no step of a chunk, and compare the reads of an update."""
        op = self._op(row)
        match op:
            case Add() | Zeros() | SquaredNorm():
                self._origins[self._columns.writes.of(row)[0]] = self._written(op, row)
            case Update():
                self.problems += [(row, text) for text in self._update_problems(op, row)]
            case Compute() | Load() | Seed() | Fold() | Fresh() | Cast():
                pass  # writes are atoms; folded gradients are followed by `sharding`
            case Send() | Recv() | Collective():
                raise AssertionError("communication happens in `communicate`")
            case _:
                assert_never(op)

    def compare(self) -> None:
        """Compare the reads of all steps with the terms that they ask for; most ask for one atom."""
        columns = self._columns
        asks = [self._asks(p.op) if isinstance(p.op, Compute) else [] for p in columns.parts]
        only = [
            [asked.only for asked in each] or [None] * len(p.reads)
            for each, p in zip(asks, columns.parts, strict=True)
        ]
        asking = flags([bool(each) for each in asks])[columns.row_part]
        unlike = self._atoms.unlike(only)
        for row in unlike[asking[unlike]].tolist():
            for value, asked in zip(
                columns.reads.of(row), asks[columns.row_part[row]], strict=False
            ):
                if problem := asked.problem(self._origin(value), int(columns.row_mb[row])):
                    name = columns.table.name(value)
                    self.problems.append((row, f" reads {name} as {asked.name}: {problem}"))

    def _written(self, op: Add | Zeros | SquaredNorm, row: int) -> _Origin:
        """Return the origin of the one value that an op writes."""
        match op:
            case Add():
                return _Sum(tuple([self._origin(v) for v in self._columns.reads.of(row)]))
            case Zeros():
                return _Sum(())
            case SquaredNorm(buckets=buckets, once=once, over=over):
                along = frozenset(a for a in over if self._plan.mesh.size(a) > 1)
                return _Sum(
                    tuple([_counted(b, along if b in once else frozenset()) for b in buckets])
                )
            case _:
                assert_never(op)

    def _asks(self, op: Compute) -> list[_Asked]:
        """Return the terms that a step asks for, by its reads of values."""
        key = (op.variant, op.step)
        if key not in self._asked:
            chunk = self._plan.chunk(op.variant)
            ports = chunk.steps[op.step].reads
            self._asked[key] = [self._ask(chunk, p) for p in ports if not is_state(chunk, p)]
        return self._asked[key]

    def _ask(self, chunk: Chunk, port: str) -> _Asked:
        if port.startswith("tan"):
            return _Asked(
                port, frozenset(self._term(chunk, *term) for term in self._tangents[chunk.id, port])
            )
        if not port.startswith("in"):
            return _Asked(port, frozenset([((chunk.id, port), NOWHERE)]))
        entry = chunk.inputs[int(port[2:])]
        if entry.kind == "batch":
            return _Asked(port, frozenset([(("", entry.ref), NOWHERE)]))
        source, _, output = entry.ref.rpartition(":")
        return _Asked(port, frozenset([self._term(chunk, source, output)]))

    def _term(self, reader: Chunk, source: str, port: str) -> tuple[Term, frozenset[str]]:
        """Return the term that a chunk reads of another, and the axes over which it is summed up.

        It is exchanged if only one of the two is of experts.
        """
        writer = self._plan.chunk(source) if source else reader
        axes = {reader.trades, writer.trades}
        term = (source, port) if len(axes) == 1 else _exchanged((source, port), axes - {""})
        return term, frozenset(dict(writer.terms).get(port, ())) if source else NOWHERE

    def _update_problems(self, op: Update, row: int) -> Iterable[str]:
        if self._plan.evaluates:
            return  # of no buckets (R25)
        reads = list(self._columns.reads.of(row))
        if op.weighted:
            yield from self._weight_problems(self._origin(reads.pop(0)))
        if op.normed:
            opened = _open(self._origin(reads.pop(0)))
            wanted = Counter([self._norm(bucket, opened) for bucket in self._plan.buckets])
            if opened != wanted:
                yield (
                    f": the norm that it reads is not the sum over each bucket, once: "
                    f"{_difference(opened, wanted)}"
                )

    def _norm(self, bucket: Bucket, opened: Opened) -> tuple[Atom, frozenset[str]]:
        """Return how a bucket counts in the norm: over the ranks that share it, and once for replicas."""
        shared = frozenset(
            a for a in (*bucket.shard.optim, *bucket.parts) if self._plan.mesh.size(a) > 1
        )
        for atom, over in opened:
            if over > shared and atom == _counted(bucket.id, over):
                return atom, over
        return _counted(bucket.id, frozenset()), shared

    def _weight_problems(self, origin: _Origin) -> Iterable[str]:
        plan = self._plan
        replicated = frozenset(a for a in plan.replicated if plan.mesh.size(a) > 1)
        last = plan.chunks[-1].id
        opened = _open(origin)
        wanted = Counter(
            {
                (((last, port), mb), replicated): 1
                for port in self._weights
                for mb in range(plan.microbatches)
            }
        )
        if opened != wanted:
            yield (
                f": the weight that it divides by is not the sum over microbatches and replicas: "
                f"{_difference(opened, wanted)}"
            )


def _exchanged(term: Term, axes: Iterable[str]) -> Term:
    """Return a term as it is after an exchange with the experts along an axis."""
    chunk, port = term
    return chunk, f"{port} exchanged along {', '.join(sorted(axes))}"


def _counted(bucket: str, once: frozenset[str]) -> Atom:
    """Return the atom of a bucket's norm, which ranks that have the same along some axes count once."""
    return (
        "",
        f"norm, once along {', '.join(sorted(once))}, {bucket}" if once else f"norm {bucket}",
    ), -1


@dataclass(frozen=True, slots=True)
class _Asked:
    """Hold the value that a port asks for: a sum of terms (chunk, port) of its microbatch, each over some axes.

    `only` is the term if there is a single one that is not summed.
    """

    name: str
    terms: frozenset[tuple[Term, frozenset[str]]]
    only: Term | None = None

    def __post_init__(self) -> None:
        if len(self.terms) == 1:
            ((term, over),) = self.terms
            object.__setattr__(self, "only", None if over else term)

    def problem(self, origin: _Origin, mb: int) -> str:
        """Return how a value differs from the terms that the port asks for in a microbatch; "" when it does not."""
        if isinstance(origin, tuple) and origin == (self.only, mb):
            return ""
        opened = _open(origin)
        wanted = Counter({((term, mb), over): 1 for term, over in self.terms})
        return "" if opened == wanted else _difference(opened, wanted)


Opened = Counter[tuple[Atom, frozenset[str]]]


def _open(origin: _Origin) -> Opened:
    """Return each atom of a sum, with the axes over which it was summed, and how often it counts."""
    opened: Opened = Counter()
    todo: list[tuple[_Origin, frozenset[str]]] = [(origin, frozenset())]
    while todo:
        term, over = todo.pop()
        if isinstance(term, _Sum):
            todo += [(t, over.union(term.over)) for t in term.terms]
        elif (
            isinstance(term, _Blocks)
            and isinstance(atom := term.meeting.given, tuple)
            and term.meeting.of_experts
        ):
            opened[(_exchanged(atom[0], term.meeting.channel.over), atom[1]), over] += 1
        elif isinstance(term, _Blocks):
            opened[(("", f"blocks of {term.meeting.name}"), -1), over] += 1
        else:
            opened[term, over] += 1
    return opened


def _takes_back(op: Collective, channel: Channel, taken: _Meeting) -> bool:
    """Return whether a collective is the inverse of the one that made these blocks, among the same members."""
    before = taken.channel
    same = set(channel.roles) == set(before.roles) and set(channel.over) == set(before.over)
    return same and op.law.undoes == taken.kind


def _origin_name(origin: _Origin) -> str:
    if isinstance(origin, _Blocks):
        return f"blocks of {origin.meeting.name}"
    return _names(_open(origin))


def _difference(opened: Opened, wanted: Opened) -> str:
    lines = []
    if wanted - opened:
        lines.append(f"missing {_names(wanted - opened)}")
    if opened - wanted:
        lines.append(f"not asked for {_names(opened - wanted)}")
    return "; ".join(lines)


def _names(terms: Opened) -> str:
    shown = []
    for (((chunk, port), mb), over), count in sorted(
        terms.items(), key=lambda t: (t[0][0], sorted(t[0][1]))
    ):
        name = f"{chunk}:{port}" if chunk else port
        axes = f" summed over {', '.join(sorted(over))}" if over else ""
        shown.append(
            f"{f'{count} x ' if count > 1 else ''}{name}{f'@{mb}' if mb >= 0 else ''}{axes}"
        )
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _tangents(plan: Plan) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Return for each output, as (chunk, "tan{k}"), its tangent's terms: gradients of its readers, a loss's seed."""
    sums: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for chunk in plan.chunks:
        for k, output in enumerate(chunk.outputs):
            sums[chunk.id, f"tan{k}"] = [("", SEED)] if output.kind == "loss" else []
    for chunk in plan.chunks:
        written = {p for sig in chunk.steps.values() for p in sig.writes}
        for k, entry in enumerate(chunk.inputs):
            if entry.kind == "value" and f"gin{k}" in written:
                source, _, port = entry.ref.rpartition(":")
                sums[source, f"tan{port.removeprefix('out')}"].append((chunk.id, f"gin{k}"))
    return sums
