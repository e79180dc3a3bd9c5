"""Frees: when each value dies, decided at compile time (rule 22).

A value whose last reader computes dies right after it. A value that is read by communication dies at a later compute
instruction, which waits for it: the first one that starts after the communication's end in a run without frees under canonical
durations, so that the wait costs nothing there. A fixed distance in instructions deadlocks; counting references makes the peak
a matter of luck.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace

from piper_ir.plan import COMPUTE, Instr, Part, RolePlan
from piper_ir.timing import Prepared, Times

Place = tuple[int, int]
"""An instruction, in program order, and the part of it."""


def with_frees(role: RolePlan, offset: int, prepared: Prepared, times: Times) -> RolePlan:
    """The role's plan with frees and the waits that they need. `offset`: number of the role's first node in `prepared`."""
    compute = [k for k, instr in enumerate(role.program) if instr.stream == COMPUTE]
    starts = [times.start[offset + k] for k in compute]
    last, sent = _readers(role.program)
    frees: dict[tuple[int, int], list[str]] = {}
    before: dict[int, list[str]] = {}
    waits: dict[int, dict[str, int]] = {}
    order = _stream_order(role.program)
    for value, readers in sent.items():
        end = max(times.done[offset + k] for k in readers)
        after = max(readers)
        # Nothing may start that late: then the Update, which ends every role's program, waits for it.
        k = compute[min(max(bisect_left(starts, end), bisect_left(compute, after)), len(compute) - 1)]
        own = last.get(value)
        if own is not None and own[0] >= k:
            k = own[0]
            frees.setdefault(own, []).append(value)
        else:
            before.setdefault(k, []).append(value)
        for reader in readers:
            stream = role.program[reader].stream
            waits.setdefault(k, {})[stream] = max(waits.get(k, {}).get(stream, 0), order[reader] + 1)
    for value, own in last.items():
        if value not in sent:
            frees.setdefault(own, []).append(value)
    program = [_freed(k, instr, frees, before, waits) for k, instr in enumerate(role.program)]
    return replace(role, program=tuple(program))


def _freed(
    k: int,
    instr: Instr,
    frees: Mapping[tuple[int, int], list[str]],
    before: Mapping[int, list[str]],
    waits: Mapping[int, Mapping[str, int]],
) -> Instr:
    if instr.stream != COMPUTE:
        return instr
    parts = tuple(
        [
            Part(part.node, part.op, part.mb, part.reads, part.writes, tuple(frees[k, p])) if (k, p) in frees else part
            for p, part in enumerate(instr.parts)
        ]
    )
    merged = dict(instr.waits)
    for stream, n in waits.get(k, {}).items():
        merged[stream] = max(merged.get(stream, 0), n)
    return Instr(instr.stream, parts, tuple(merged.items()), tuple(before.get(k, ())), instr.allocs_after)


def _readers(program: tuple[Instr, ...]) -> tuple[dict[str, Place], dict[str, list[int]]]:
    """Value -> last compute reader (or its writer, when nothing reads it), and value -> the communications that read it. A
    value that only communication reads is in the second alone."""
    last: dict[str, Place] = {}
    sent: dict[str, list[int]] = {}
    for k, instr in enumerate(program):
        for p, part in enumerate(instr.parts):
            if instr.stream == COMPUTE:
                last.update(dict.fromkeys((*part.writes, *part.reads), (k, p)))
            else:
                for v in part.reads:
                    sent.setdefault(v, []).append(k)
    return last, sent


def _stream_order(program: tuple[Instr, ...]) -> list[int]:
    """Per instruction, how many of its stream stand before it."""
    counts: dict[str, int] = {}
    out = []
    for instr in program:
        out.append(counts.get(instr.stream, 0))
        counts[instr.stream] = out[-1] + 1
    return out


def without_repeats(role: RolePlan) -> RolePlan:
    """The role's plan without waits that an earlier instruction of the same stream has waited for already."""
    seen: dict[str, dict[str, int]] = {}
    program = []
    for instr in role.program:
        known = seen.setdefault(instr.stream, {})
        waits = tuple(sorted((s, n) for s, n in instr.waits if n > known.get(s, 0)))
        known.update(waits)
        same = waits == instr.waits
        program.append(instr if same else Instr(instr.stream, instr.parts, waits, instr.frees_before, instr.allocs_after))
    return replace(role, program=tuple(program))
