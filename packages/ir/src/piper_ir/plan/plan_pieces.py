"""Write the JSON text of a plan in pieces, quicker than `encode` of `piper_ir.ground.codec` would.

A plan of many microbatches says nearly the same very often. Here programs and values are written from the texts of
their parts, each made once. The text is that of `encode`, to the byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted  # what json.dumps writes of a text
from typing import Any

from piper_ir.ground.codec import FORMAT_VERSION, encode, register_pieces, tagged
from piper_ir.ground.node_ids import named
from piper_ir.plan.instr_table import InstrTable, PartTemplate
from piper_ir.plan.plan import Plan


def plan_pieces(plan: Plan) -> Iterator[str]:
    """Yield the text of a plan in pieces."""
    roles = tuple(replace(role, program=()) for role in plan.roles)
    head = {"format": "Plan", "version": FORMAT_VERSION} | encode(
        replace(plan, roles=roles, values={})
    )
    for k, (key, value) in enumerate(head.items()):
        yield f"{',' if k else '{'}{quoted(key)}:"
        if key == "roles":
            yield from _roles(plan, value)
        elif key == "values":
            yield from _values(plan)
        else:
            yield _text(value)
    yield "}"


def _roles(plan: Plan, bare: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    known: dict[int, list[str]] = {}
    yield "["
    for k, (role, fields) in enumerate(zip(plan.roles, bare, strict=True)):
        yield ",{" if k else "{"
        for n, (key, value) in enumerate(fields.items()):
            yield f"{',' if n else ''}{quoted(key)}:"
            yield _program(role.table, known) if key == "program" else _text(value)
        yield "}"
    yield "]"


def _values(plan: Plan) -> Iterator[str]:
    known: dict[int, str] = {}
    begin = "{"
    for value, kind in plan.kinds.items():
        rest = known.get(id(kind))
        if rest is None:
            spec, category = kind
            rest = known[id(kind)] = (
                f',"spec":{_text(encode(spec))},"category":{quoted(category)}}}'
            )
        name = quoted(value)
        yield f'{begin}{name}:{{"id":{name}{rest}'
        begin = ","
    yield "{}" if begin == "{" else "}"


def _program(table: InstrTable, known: dict[int, list[str]]) -> str:
    """Return the text of a program; `known` has the quoted names of the values that several programs share."""
    names = known.get(id(table.values))
    if names is None:
        names = known[id(table.values)] = [quoted(name) for name in table.values.names]
    streams = [quoted(t.stream) for t in table.templates]
    ops: dict[int, str] = {}
    places = [f"[{quoted(stream)},{n}]" for stream, n in table.places]
    instr_texts = []
    for i, (k, mb) in enumerate(zip(table.used, table.mbs, strict=True)):
        template, shift = table.templates[k], max(mb, 0)
        parts = ",".join([_part(p, mb + p.ahead, shift, names, ops) for p in template.parts])
        text = f'{{"stream":{streams[k]},"parts":[{parts}]'
        if table.waits[i]:
            text += f',"waits":[{",".join([places[j] for j in table.waits[i]])}]'
        for key, column in (("frees_before", table.early), ("allocs_after", table.made)):
            if column.get(i):
                text += f',"{key}":[{",".join([names[v] for v in column[i]])}]'
        instr_texts.append(
            text + ("}" if template.seconds is None else f',"seconds":{_text(template.seconds)}}}')
        )
    return f"[{','.join(instr_texts)}]"


def _part(
    part: PartTemplate, mb: int, shift: int, names: Sequence[str], ops: dict[int, str]
) -> str:
    op = ops.get(id(part.op))
    if op is None:
        op = ops[id(part.op)] = _text(tagged(part.op))
    text = f'{{"node":{quoted(named(part.node, part.tail, mb))},"op":{op}'
    if mb != -1:
        text += f',"mb":{mb}'
    for key, values in (
        ("reads", part.reads),
        ("writes", part.writes),
        ("frees", part.frees),
        ("held", part.held),
    ):
        if values:
            text += f',"{key}":[{",".join([names[v + shift] for v in values])}]'
    return text + "}"


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


register_pieces(Plan, plan_pieces)
