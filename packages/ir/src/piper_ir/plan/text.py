"""Write a plan as text for people, with one line per thing; different plans have different texts.

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
are JSON strings. Programs read plans as JSON (`piper_ir.plan.plan_file`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, assert_never

from piper_ir.ground.codec import encode
from piper_ir.ground.sizes import TensorSpec
from piper_ir.plan.plan import (
    PLAN_VERSION,
    Part,
    Plan,
    RolePlan,
)
from piper_ir.program.ops import (
    KEEP_ALL,
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
    op_name,
)  # fmt: skip

_HEADER = f"piper plan {PLAN_VERSION}"
_END = "end"
_TABLES = {
    "param": "params",
    "buffer": "buffers",
    "batch": "batch",
    "chunk": "chunks",
    "variant": "variants",
    "channel": "channels",
    "bucket": "buckets",
}
_KEYWORDS = {
    "+", "|", "node", "reads", "writes", "holding", "frees", "waits", "allocs", "takes",
    "weighted", "clip", "scaled", "holds", "once", "over", "keeping", "apart",
}  # fmt: skip
_BARE = re.compile(r'[^\s"@#|+{\[][^\s"]*\Z')


def format_plan(plan: Plan) -> str:
    """Return the text of a plan, in the plan's own order; equal plans give equal text."""
    rest = {
        k: v for k, v in encode(plan).items() if k not in ("values", "roles", *_TABLES.values())
    }
    lines = [_HEADER, f"plan {_json(rest)}"]
    for word, name in _TABLES.items():
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
        line = f"{index:>{digits}} {written_word(instr.stream):<{width}} {' + '.join(map(_part, instr.parts))}"
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
    """Return the words of an op: its name (of a chunk its step), the names that it is about, and its settings."""
    name = op_name(op)
    names: tuple[str, ...] = ()
    settings: list[str] = []
    match op:
        case Compute(chunk=chunk, step=step, keep=keep, apart=apart):
            name, names = step, (chunk,)
            settings = [
                *_clause("keeping", () if keep == KEEP_ALL else (keep,)),
                *["apart"] * apart,
            ]
        case (
            Load(tensor=subject)
            | Zeros(dtype=subject)
            | Fresh(bucket=subject)
            | Cast(bucket=subject)
            | Fold(bucket=subject)
            | Send(channel=subject)
            | Recv(channel=subject)
        ):
            names = (subject,)
        case Seed(value=value, dtype=dtype, scaled=scaled):
            settings = [json.dumps(value), written_word(dtype), *["scaled"] * scaled]
        case Add():
            pass
        case SquaredNorm(buckets=buckets, dtype=dtype, once=once, over=over):
            names = (dtype, *buckets)
            settings = [*_clause("once", once), *_clause("over", over)]
        case Collective(channel=channel, bucket=bucket):
            names = (channel, bucket) if bucket else (channel,)
        case Update(
            buckets=names,
            weighted=weighted,
            clip=clip,
            workspace=workspace,
            scaled=scaled,
            host_workspace=hosted,
        ):
            settings = ["weighted"] * weighted + (
                [] if clip is None else ["clip", json.dumps(clip)]
            )
            settings += ["scaled"] * scaled + (["holds", str(workspace)] if workspace else [])
            settings += ["on_host", str(hosted)] if hosted else []
        case _:
            assert_never(op)
    return [name, *map(written_word, names), *settings]


def _clause(name: str, words: Iterable[str]) -> list[str]:
    written = [written_word(w) for w in words]
    return [name, *written] if written else []


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _spec(spec: TensorSpec) -> str:
    return f"{spec.dtype}{_json(encode(spec.shape))}"


def written_word(text: str) -> str:
    """Return a word as a line has it: with spaces, or if it is a keyword, as a JSON string."""
    return text if _BARE.match(text) and text not in _KEYWORDS else json.dumps(text)
