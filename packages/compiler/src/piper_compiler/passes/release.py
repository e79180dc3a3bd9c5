"""Frees: when each value dies, decided at compile time (rule 22).

A value whose last reader computes dies right after it. A value that is read by communication dies at a later compute
instruction, which waits for it: the first one that starts after the communication's end in a run without frees under canonical
durations, so that the wait costs nothing there. A fixed distance in instructions deadlocks; counting references makes the peak
a matter of luck.
"""

from __future__ import annotations

from bisect import bisect_left

from piper_compiler.passes.draft import Name, Place, Releases, RoleDraft
from piper_ir.timing import Times


def releases(draft: RoleDraft[Name], offset: int, times: Times) -> Releases[Name]:
    """The frees of a role, and the waits that they need. `offset`: number of the role's first node in `times`."""
    compute = draft.compute
    starts = [times.start[offset + k] for k in compute]
    last, instr_of, sent = _readers(draft)
    frees: dict[int, list[Name]] = {}
    before: dict[int, list[Name]] = {}
    waits: dict[int, list[Place]] = {}
    done, places = times.done, draft.places
    for value, readers in sent.items():
        end = max([done[offset + k] for k in readers])
        # Nothing may start that late: then the Update, which ends every role's program, waits for it.
        k = compute[min(max(bisect_left(starts, end), bisect_left(compute, readers[-1])), len(compute) - 1)]
        own = last.pop(value, None)
        if own is not None and instr_of[own] >= k:
            k = instr_of[own]
            frees.setdefault(own, []).append(value)
        else:
            before.setdefault(k, []).append(value)
        waits.setdefault(k, []).extend([places[reader] for reader in readers])
    for value, own in last.items():
        if own in frees:
            frees[own].append(value)
        else:
            frees[own] = [value]
    return Releases(frees, before, waits)


def _readers(draft: RoleDraft[Name]) -> tuple[dict[Name, int], list[int], dict[Name, list[int]]]:
    """Value -> the number of the last compute part that reads it (or writes it, when nothing reads it), part -> its instruction,
    and value -> the communications that read it. A value that only communication reads is in the last alone."""
    last: dict[Name, int] = {}
    instr_of: list[int] = []
    sent: dict[Name, list[int]] = {}
    for k, (parts, channel) in enumerate(zip(draft.parts, draft.channels, strict=True)):
        if channel:
            instr_of.append(k)
            for v in parts[0][3]:
                sent.setdefault(v, []).append(k)
            continue
        for _, _, _, reads, writes in parts:
            q = len(instr_of)
            for v in writes:
                last[v] = q
            for v in reads:
                last[v] = q
            instr_of.append(k)
    return last, instr_of, sent
