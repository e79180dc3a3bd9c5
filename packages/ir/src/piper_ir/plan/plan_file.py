"""Write plans as files and read them: small ones instruction by instruction, large ones as the tables that they are.

With very many microbatches nearly all of a plan's text are names that follow from a template and a microbatch. The file
of a plan of more than `MOST_VALUES` values has the templates instead, in a document of format "PlanTables". It reads
back as the same plan, with the same key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import piper_ir.plan.plan_pieces  # noqa: F401 - a quicker way to the text of plans
from piper_ir.ground.codec import dumps, loads
from piper_ir.ground.errors import FormatError
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.instr_table import InstrTable, InstrTemplate, ValueTable
from piper_ir.plan.plan import Category, Plan, Values
from piper_ir.plan.table_kinds import TableKinds

MOST_VALUES = 50_000
"""The most values of a plan whose file names each of them and each instruction."""
_TABLES = re.compile(r'\s*\{\s*"format"\s*:\s*"PlanTables"')

Numbers = tuple[int, ...]
_AtInstr = tuple[tuple[int, Numbers], ...]
"""The numbers of values by the instruction that frees or makes them."""


@dataclass(frozen=True)
class ValueKind:
    """Hold a size and category that many values have."""

    spec: TensorSpec
    category: Category


@dataclass(frozen=True)
class ProgramTable:
    """Hold the columns of an `InstrTable`.

    Attributes:
        waits: by instruction, how far back the instructions are that it waits for.
    """

    templates: tuple[InstrTemplate, ...]
    used: Numbers
    mbs: Numbers
    waits: tuple[Numbers, ...]
    early: _AtInstr
    made: _AtInstr
    first: Numbers


@dataclass(frozen=True)
class PlanTables:
    """Hold a plan whose programs are tables.

    Attributes:
        plan: the plan without programs and values.
        ids: as in `ValueTable`, likewise `tails`, `whole` and `count`.
        kinds: the different kinds of values.
        kind: by value, its kind.
    """

    plan: Plan
    ids: tuple[str, ...]
    tails: tuple[str, ...]
    whole: tuple[bool, ...]
    count: int
    kinds: tuple[ValueKind, ...]
    kind: Numbers
    programs: tuple[ProgramTable, ...]


def plan_text(plan: Plan) -> str:
    """Return the text of a plan's file."""
    if plan.kinds.given is not None or len(plan.values) <= MOST_VALUES:
        return dumps(plan)
    tables = [role.table for role in plan.roles]
    values = tables[0].values  # which all programs share
    kinds = {kind: n for n, kind in enumerate(dict.fromkeys(values.kinds))}
    return dumps(PlanTables(
        replace(plan, roles=tuple(replace(role, program=()) for role in plan.roles), values={}),
        values.ids, values.tails, values.whole, values.count, tuple(ValueKind(*kind) for kind in kinds),
        tuple(kinds[kind] for kind in values.kinds), tuple(map(_columns, tables)),
    ))  # fmt: skip


def read_plan(text: str, where: str = "text") -> Plan:
    """Return the plan of a file; raise FormatError as `loads` of `piper_ir.ground.codec` does."""
    if not _TABLES.match(text):
        return loads(Plan, text, where)
    document = loads(PlanTables, text, where)
    _check(document, where)
    kinds = [(kind.spec, kind.category) for kind in document.kinds]
    values = ValueTable(
        document.ids,
        document.tails,
        tuple(kinds[k] for k in document.kind),
        document.whole,
        document.count,
    )
    programs = [_table(program, values) for program in document.programs]
    roles = tuple(
        replace(role, program=table)
        for role, table in zip(document.plan.roles, programs, strict=True)
    )
    return replace(document.plan, roles=roles, values=Values(TableKinds(programs)))


def _columns(table: InstrTable) -> ProgramTable:
    waits = tuple(tuple(i - j for j in own) for i, own in enumerate(table.waits))
    early, allocated = (
        tuple(sorted((i, tuple(vs)) for i, vs in column.items()))
        for column in (table.early, table.made)
    )
    return ProgramTable(
        tuple(table.templates),
        tuple(table.used),
        tuple(table.mbs),
        waits,
        early,
        allocated,
        table.first,
    )


def _table(program: ProgramTable, values: ValueTable) -> InstrTable:
    waits = [tuple([i - back for back in own]) for i, own in enumerate(program.waits)]
    early, allocated = dict(program.early), dict(program.made)
    return InstrTable(
        values,
        program.templates,
        list(program.used),
        list(program.mbs),
        waits,
        early,
        allocated,
        program.first,
    )


def _check(document: PlanTables, where: str) -> None:
    """Raise FormatError for numbers that lead out of a table, which nothing else would notice before it is used."""
    count, ids = document.count, len(document.ids)
    if not len(document.tails) == len(document.whole) == len(document.kind) == ids or count < 1:
        raise FormatError(
            f"{where}: ids, tails, whole and kind have {ids} entries each, and count is at least 1"
        )
    _within(document.kind, len(document.kinds), f"{where}.kind")
    if len(document.programs) != len(document.plan.roles):
        raise FormatError(
            f"{where}: a program for each of the {len(document.plan.roles)} roles is expected"
        )
    for r, program in enumerate(document.programs):
        here, length = f"{where}.programs[{r}]", len(program.used)
        if not len(program.mbs) == len(program.waits) == length:
            raise FormatError(
                f"{here}: used, mbs and waits have an entry for each of {length} instructions"
            )
        _within(program.used, len(program.templates), f"{here}.used")
        _within((mb + 1 for mb in program.mbs), count + 1, f"{here}.mbs")
        _within(
            (i - back for i, own in enumerate(program.waits) for back in own),
            length,
            f"{here}.waits",
        )
        columns: Sequence[Mapping[int, Numbers]] = dict(program.early), dict(program.made)
        _within((i for column in columns for i in column), length, f"{here}.early and made")
        own = [
            v
            for t in program.templates
            for p in t.parts
            for v in (*p.reads, *p.writes, *p.frees, *p.held)
        ]
        _within(
            [
                *own,
                *program.first,
                *(v for column in columns for vs in column.values() for v in vs),
            ],
            ids * count,
            here,
        )


def _within(numbers: Iterable[int], end: int, where: str) -> None:
    wrong = next((n for n in numbers if not 0 <= n < end), None)
    if wrong is not None:
        raise FormatError(
            f"{where}: the number {wrong} leads out of its table, which has {end} entries"
        )
