"""Write a plan as text with one line per thing, and parse it: `parse_plan(format_plan(plan)) == plan` for every plan.

    piper plan 1
    plan {"program_key":"...","mesh":...}                   everything without a line of its own, as JSON
    chunk {...}                                             also variant, param, buffer, batch, channel, bucket
    value layer0:out0@3 activation float32[2,8]
    role pp0 {"placed":{"pp":0},...}
      12 compute F layer0 @3 reads x@3 writes h@3 frees x@3 + W layer1 @2 ... | waits recv#4 frees a@2 allocs b@4
      13 send    Send pp0>pp1.act @3 node send.h@3 reads h@3 | waits compute#10
    end

The line of an instruction has its position in the role's program, its stream, its parts joined by "+", and after "|"
its waits (stream#count), the values that it frees before its parts and allocates after them, and given seconds (an
overlapped pair). A part has its op with arguments, @microbatch, `node` (left out if it is chunk.step@microbatch),
reads, writes, frees; "keeping" goes before a policy of recomputation. Words with spaces, and keywords of this format,
are JSON strings. Empty lines and comments, which start with "#", are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, assert_never, get_args

from piper_ir.ground.codec import decode, encode
from piper_ir.ground.errors import FormatError, PiperError
from piper_ir.ground.sizes import Dim, TensorSpec
from piper_ir.plan.plan import (
    PLAN_VERSION,
    Bucket,
    Category,
    Channel,
    Instr,
    Part,
    Plan,
    RolePlan,
    Value,
)
from piper_ir.plan.text_words import Words, read_value, whole_number, written_word
from piper_ir.program.collectives import COLLECTIVES, kind_named
from piper_ir.program.ops import (
    KEEP_ALL,
    Add,
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
    op_name,
)  # fmt: skip
from piper_ir.program.program import BatchTensor, Buffer, Chunk, Param

_HEADER = f"piper plan {PLAN_VERSION}"
_END = "end"
_TABLES: dict[str, tuple[str, Any]] = {
    "param": ("params", Param),
    "buffer": ("buffers", Buffer),
    "batch": ("batch", BatchTensor),
    "chunk": ("chunks", Chunk),
    "variant": ("variants", Chunk),
    "channel": ("channels", Channel),
    "bucket": ("buckets", Bucket),
}
_STEPS = ("F", "B", "R", "I", "W")
_SPEC = re.compile(r"(\w+)(\[.*\])\Z", re.DOTALL)


def format_plan(plan: Plan) -> str:
    """Return the text of a plan, in the plan's own order; equal plans give equal text."""
    rest = {
        k: v
        for k, v in encode(plan).items()
        if k not in ("values", "roles", *(f for f, _ in _TABLES.values()))
    }
    lines = [_HEADER, f"plan {_json(rest)}"]
    for word, (name, _) in _TABLES.items():
        lines += [f"{word} {_json(encode(item))}" for item in getattr(plan, name)]
    for key, value in plan.values.items():
        alias = "" if key == value.id else f" {written_word(key)}"
        lines.append(f"value {written_word(value.id)} {value.category} {_spec(value.spec)}{alias}")
    for role in plan.roles:
        head = {k: v for k, v in encode(role).items() if k not in ("role", "program")}
        lines += [f"role {written_word(role.role)} {_json(head)}", *_instruction_lines(role)]
    return "\n".join([*lines, _END]) + "\n"


def _instruction_lines(role: RolePlan) -> Iterator[str]:
    digits = max(4, len(str(len(role.program) - 1)))
    width = max((len(written_word(s)) for s in role.streams), default=0)
    for index, instr in enumerate(role.program):
        tail = [
            *_clause("waits", (f"{s}#{n}" for s, n in instr.waits)),
            *_clause("frees", instr.frees_before),
            *_clause("allocs", instr.allocs_after),
            *([] if instr.seconds is None else ["takes", written_word(json.dumps(instr.seconds))]),
        ]
        line = (
            f"{index:>{digits}} {written_word(instr.stream):<{width}} "
            f"{' + '.join(map(_part, instr.parts))}"
        )
        yield line + (f" | {' '.join(tail)}" if tail else "")


def _part(part: Part) -> str:
    words = [*_op(part.op)]
    if part.mb != -1:
        words.append(f"@{part.mb}")
    if part.node != _usual_node(part.op, part.mb):
        words += _clause("node", (part.node,))
    words += [*_clause("reads", part.reads), *_clause("writes", part.writes)]
    words += [*_clause("holding", part.held), *_clause("frees", part.frees)]
    return " ".join(words)


def _usual_node(op: Op, mb: int) -> str:
    return f"{op.chunk}.{op.step}@{mb}" if isinstance(op, Compute) else ""


def _op(op: Op) -> list[str]:
    name = op_name(op)
    match op:
        case Compute(chunk=chunk, step=step, keep=keep, apart=apart):
            policy = ["keeping", written_word(keep)] if keep != KEEP_ALL else []
            return [step, written_word(chunk), *policy, *["apart"] * apart]
        case Load(tensor=tensor):
            return [name, written_word(tensor)]
        case Seed(value=value, dtype=dtype):
            return [name, json.dumps(value), written_word(dtype)]
        case Add():
            return [name]
        case Zeros(dtype=dtype):
            return [name, written_word(dtype)]
        case SquaredNorm(buckets=buckets, dtype=dtype, once=once, over=over):
            return [
                name,
                written_word(dtype),
                *map(written_word, buckets),
                *_clause("once", once),
                *_clause("over", over),
            ]
        case Fresh(bucket=bucket) | Fold(bucket=bucket):
            return [name, written_word(bucket)]
        case Send(channel=channel) | Recv(channel=channel):
            return [name, written_word(channel)]
        case Collective(channel=channel, bucket=bucket):
            return [name, written_word(channel), *([written_word(bucket)] if bucket else [])]
        case Update(buckets=buckets, weighted=weighted, clip=clip, workspace=held):
            flags = ["weighted"] * weighted + ([] if clip is None else ["clip", json.dumps(clip)])
            flags += ["holds", str(held)] if held else []
            return [name, *map(written_word, buckets), *flags]
        case _:
            assert_never(op)


def _clause(name: str, words: Iterable[str]) -> list[str]:
    written = [written_word(w) for w in words]
    return [name, *written] if written else []


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _spec(spec: TensorSpec) -> str:
    return f"{spec.dtype}{_json(encode(spec.shape))}"


def parse_plan(text: str, where: str = "plan") -> Plan:
    """Return the plan of a text; raise FormatError, which shows the line, its number and the expected content."""
    parser = _Parser(where)
    for number, line in enumerate(text.split("\n"), 1):
        try:
            parser.line(line)
        except PiperError as e:
            shown = line.strip() if len(line) <= 160 else line.strip()[:157] + "..."
            raise FormatError(f"{where}, line {number}: {e}\n  {shown}") from None
    return parser.plan()


class _Parser:
    """Read lines one by one; the header and the last role decide which lines may follow."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._started = self._ended = False
        self._plan: dict[str, Any] | None = None
        self._tables: dict[str, list[Any]] = {name: [] for name, _ in _TABLES.values()}
        self._values: dict[str, Value] = {}
        self._roles: list[tuple[dict[str, Any], list[Instr]]] = []

    def line(self, line: str) -> None:
        text = line.strip()
        if not text or text.startswith("#"):
            return
        if not self._started:
            if text != _HEADER:
                raise FormatError(f"the first line must be {_HEADER!r}")
            self._started = True
            return
        if self._ended:
            raise FormatError("nothing is expected after the line `end`")
        if text == _END:
            self._ended = True
            return
        word, _, rest = text.partition(" ")
        if word.isdecimal():
            self._instruction(whole_number(word, "the number of an instruction"), rest)
        elif word == "plan" and self._plan is None:
            self._plan = _object(rest)
        elif word in _TABLES:
            name, kind = _TABLES[word]
            self._tables[name].append(decode(kind, read_value(rest), word))
        elif word == "value":
            self._value(Words(rest))
        elif word == "role":
            words = Words(rest, limit=1)
            self._roles.append(({"role": words.next("the role's name"), **_object(words.rest)}, []))
        else:
            known = ", ".join(("plan", *_TABLES, "value", "role", "end"))
            raise FormatError(
                f"a line starts with one of {known} (plan once), or with the number of an "
                f"instruction"
            )

    def _value(self, words: Words) -> None:
        id, category, spec = (
            words.next("the value's id"),
            words.next("its category"),
            words.next("its dtype[shape]"),
        )
        match = _SPEC.match(spec)
        if match is None:
            raise FormatError(f"{spec} is not a dtype[shape], such as float32[2,8]")
        shape = decode(tuple[Dim, ...], read_value(match[2]), "shape")
        value = Value(id, TensorSpec(shape, match[1]), decode(Category, category, "category"))
        key = words.next("") if words.more() else id
        words.end()
        if key in self._values:
            raise FormatError(f"there are two values {key}")
        self._values[key] = value

    def _instruction(self, index: int, rest: str) -> None:
        if not self._roles:
            raise FormatError("an instruction needs a line `role` before it")
        head, program = self._roles[-1]
        if index != len(program):
            raise FormatError(f"instruction {len(program)} of role {head['role']} is expected here")
        program.append(_parse_instruction(Words(rest)))

    def plan(self) -> Plan:
        if self._plan is None or not self._ended:
            missing = "plan" if self._plan is None else "end"
            raise FormatError(f"{self._where}: the text has no line `{missing}`; is it truncated?")
        roles = []
        for head, program in self._roles:
            role: RolePlan = decode(
                RolePlan, {**head, "program": []}, f"{self._where}, role {head['role']}"
            )
            roles.append(replace(role, program=tuple(program)))
        empty: dict[str, Any] = {"roles": [], "values": {}, **{name: [] for name in self._tables}}
        plan: Plan = decode(Plan, {**self._plan, **empty}, f"{self._where}, line `plan`")
        tables: dict[str, Any] = {name: tuple(items) for name, items in self._tables.items()}
        return replace(plan, roles=tuple(roles), values=self._values, **tables)


def _parse_instruction(words: Words) -> Instr:
    stream = words.next("a stream")
    parts = [_parse_part(words)] if words.more() and words.peek() != ("|", False) else []
    while words.accept("+"):
        parts.append(_parse_part(words))
    tail = words.accept("|")
    clauses = _clauses(words, ("waits", "frees", "allocs", "takes")) if tail else {}
    words.end(
        "waits, frees, allocs, takes or the end of the line"
        if tail
        else '"+", "|" or the end of the line'
    )
    waits = tuple(map(_wait, clauses.get("waits", ())))
    takes = clauses.get("takes", ())
    if len(takes) > 1:
        raise FormatError(f"one number of seconds is expected after takes, found {len(takes)}")
    seconds = _float(takes[0]) if takes else None
    return Instr(
        stream, tuple(parts), waits, clauses.get("frees", ()), clauses.get("allocs", ()), seconds
    )


def _parse_part(words: Words) -> Part:
    op = _parse_op(words)
    mb = words.microbatch()
    clauses = _clauses(words, ("node", "reads", "writes", "holding", "frees"))
    node = clauses.pop("node", (_usual_node(op, mb),))
    held = clauses.pop("holding", ())
    if len(node) != 1:
        raise FormatError(f"one name is expected after node, found {len(node)}")
    return Part(node[0], op, mb, held=held, **clauses)


def _clauses(words: Words, options: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    clauses: dict[str, tuple[str, ...]] = {}
    while name := words.accept(*(o for o in options if o not in clauses)):
        clauses[name] = words.names()
    return clauses


def _wait(word: str) -> tuple[str, int]:
    stream, mark, count = word.rpartition("#")
    if not mark:
        raise FormatError(f"{word} is not a wait; stream#count is expected, such as compute#3")
    return stream, whole_number(count, f"a number of instructions of {stream}")


def _parse_op(words: Words) -> Op:
    name = words.next("an op")
    if name in _STEPS:
        chunk, keep = (
            words.next("a chunk"),
            words.next("a policy") if words.accept("keeping") else KEEP_ALL,
        )
        return Compute(chunk, name, keep, bool(words.accept("apart")))  # type: ignore[arg-type]  # one of _STEPS
    match name:
        case "Load":
            return Load(words.next("a batch tensor"))
        case "Seed":
            return Seed(_float(words.next("a number")), words.next("a dtype"))
        case "Add":
            return Add()
        case "Zeros":
            return Zeros(words.next("a dtype"))
        case "SquaredNorm":
            dtype, buckets = words.next("a dtype"), words.names()
            once = words.names() if words.accept("once") else ()
            return SquaredNorm(buckets, dtype, once, words.names() if words.accept("over") else ())
        case "Fresh":
            return Fresh(words.next("a bucket"))
        case "Fold":
            return Fold(words.next("a bucket"))
        case "Send":
            return Send(words.next("a channel"))
        case "Recv":
            return Recv(words.next("a channel"))
        case "Update":
            buckets, weighted = words.names(), bool(words.accept("weighted"))
            clip = _float(words.next("a number")) if words.accept("clip") else None
            return Update(
                buckets,
                weighted,
                clip,
                whole_number(words.next("bytes"), "bytes") if words.accept("holds") else 0,
            )
        case _:
            return _parse_collective(name, words)


def _parse_collective(name: str, words: Words) -> Collective:
    kind = kind_named(name)
    if kind is None:
        names = [o.__name__ for o in get_args(Op) if o not in (Compute, Collective)]
        known = ", ".join((*_STEPS, *names, *(law.name for law in COLLECTIVES.values())))
        raise FormatError(f"{name} is no op; the ops are {known}")
    channel, bucket = words.next("a channel"), words.names()
    if len(bucket) > 1:
        raise FormatError(f"{name} takes a channel and at most one bucket, found {len(bucket)}")
    return Collective(kind, channel, *bucket)


def _object(text: str) -> dict[str, Any]:
    value = read_value(text)
    if not isinstance(value, dict):
        raise FormatError("a JSON object is expected")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FormatError(f"a number is expected, found {text!r}") from None
