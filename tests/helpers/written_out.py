"""Directives that place and order each group of chunks and each microbatch, for compositions without a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from piper_compiler import order, overlap, place, split, split_backward
from piper_ir.ground.select import Where, where
from piper_ir.program.program import Chunk, Program
from tests.helpers import models

if TYPE_CHECKING:
    from tests.helpers.compositions import Composition

Phase = Literal["F", "B", "I", "W"]
Task = tuple[int, Phase, int]
"""Group of chunks, phase, microbatch."""


def has_backward(chunk: Chunk) -> bool:
    """Whether any gradient is computed in a chunk: not if everything in it and before it is frozen."""
    return any(not signature.empty for step, signature in chunk.steps.items() if step != "F")


def blocks_of(program: Program) -> list[tuple[str, ...]]:
    """The chunks in program order, those together that must share a device: from the first to the last that uses a
    buffer which is updated."""
    updated = {o.ref for chunk in program.chunks for o in chunk.outputs if o.kind == "buffer"}
    blocks: list[tuple[str, ...]] = []
    last = {name: k for k, chunk in enumerate(program.chunks) for name in updated & _buffers(chunk)}
    until = -1
    for k, chunk in enumerate(program.chunks):
        blocks.append((*(blocks.pop() if k <= until else ()), chunk.id))
        until = max([until, *(last[name] for name in updated & _buffers(chunk))])
    return blocks


def _buffers(chunk: Chunk) -> set[str]:
    return {i.ref for i in chunk.inputs if i.kind == "buffer"} | {
        o.ref for o in chunk.outputs if o.kind == "buffer"
    }


def groups_of(program: Program, count: int) -> list[tuple[str, ...]]:
    """The chunks in `count` contiguous groups, as even as they go; fewer when the model has fewer."""
    blocks = blocks_of(program)
    count = min(count, len(blocks))
    edges = [round(k * len(blocks) / count) for k in range(count + 1)]
    return [tuple(id for block in blocks[a:b] for id in block) for a, b in pairwise(edges)]


def _group_count(c: Composition) -> int:
    return {"v": 2 * c.pp, "shared": c.pp - 1}.get(c.placement, c.pp)


def written_out_pipeline(c: Composition, program: Program) -> tuple[Any, ...]:
    """Directives without a recipe: split, place for every group, and an order per device."""
    groups = groups_of(program, _group_count(c))
    on = _devices(c, len(groups))
    streams = {"send": "sends", "recv": "receives"} if c.shared_streams else {}
    places = []
    for g, chunks in enumerate(groups):
        for device in sorted({on[g, i] for i in range(c.microbatches)}):
            mine = tuple(i for i in range(c.microbatches) if on[g, i] == device)
            places.append(place(where(chunk=chunks, mb=mine), on=dict(pp=device), **streams))
    halves = _split_backwards(c, groups, program)
    apart = [split_backward(where(chunk=groups[g], mb=i)) for g, i in sorted(halves)]
    orders = []
    sequence = _with_halves(c, _sequence(c, len(groups)), halves) if c.schedule != "default" else []
    for device in range(c.pp):
        tasks = [
            t
            for t in sequence
            if on[t[0], t[2]] == device and has_phase(program, groups[t[0]], t[1])
        ]
        if len(tasks) > 1:
            orders.append(
                order(
                    *_paired(
                        c, [where(chunk=groups[g], phase=phase, mb=i) for g, phase, i in tasks]
                    )
                )
            )
    return (split(where(), microbatches=c.microbatches), *apart, *places, *orders)


def has_phase(program: Program, chunks: tuple[str, ...], phase: Phase) -> bool:
    """Whether any of the chunks has a node of that phase."""
    steps = ("I", "W") if phase == "B" else (phase,)
    return any(
        s in program.chunk(id).steps and not program.chunk(id).steps[s].empty
        for id in chunks
        for s in steps
    )


def _split_backwards(
    c: Composition, groups: list[tuple[str, ...]], program: Program
) -> set[tuple[int, int]]:
    """The groups and microbatches whose backward is split."""
    rng = Random(c.seed + 2)
    cells = [
        (g, i)
        for g, chunks in enumerate(groups)
        if has_phase(program, chunks, "B")
        for i in range(c.microbatches)
    ]
    keep = {"whole": 0.0, "split": 1.0, "mixed": 0.5}[c.backward]
    return {cell for cell in cells if rng.random() < keep}


def _with_halves(c: Composition, tasks: list[Task], halves: set[tuple[int, int]]) -> list[Task]:
    """The tasks with I in the place of a split B, and W somewhere after it."""
    rng = Random(c.seed + 3)
    out: list[Task] = []
    waiting: list[tuple[int, Task]] = []
    for at, (g, phase, i) in enumerate(tasks):
        half = phase == "B" and (g, i) in halves
        out.append((g, "I" if half else phase, i))
        if half:
            waiting.append(
                (at + (rng.randrange(len(tasks)) if c.schedule == "random" else 2), (g, "W", i))
            )
        out += [task for due, task in waiting if due <= at]
        waiting = [(due, task) for due, task in waiting if due > at]
    return out + [task for _, task in waiting]


def _paired(c: Composition, items: list[Where]) -> list[Any]:
    """The items of an order; with `overlap` every other pair of neighbours is one item."""
    if not c.overlap:
        return list(items)
    out: list[Any] = []
    for k in range(0, len(items), 3):
        out += (
            [overlap(*items[k : k + 2]), *items[k + 2 : k + 3]] if k + 1 < len(items) else items[k:]
        )
    return out


def _devices(c: Composition, groups: int) -> dict[tuple[int, int], int]:
    """(group, microbatch) -> device; every device gets something."""
    cells = [(g, i) for g in range(groups) for i in range(c.microbatches)]
    match c.placement:
        case "v":
            return {(g, i): min(g, 2 * c.pp - 1 - g) for g, i in cells}
        case "shared":
            return {(g, i): c.pp - 1 if g == groups - 1 and i % 2 else g for g, i in cells}
        case "random":
            return _random_devices(c, cells)
        case _:
            return {(g, i): g for g, i in cells}


def _random_devices(c: Composition, cells: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
    rng = Random(c.seed)
    if models.case(c.model).buffers:  # a chunk that updates a buffer runs on one device
        groups = list(dict.fromkeys(g for g, _ in cells))
        rng.shuffle(groups)
        home = {g: k if k < c.pp else rng.randrange(c.pp) for k, g in enumerate(groups)}
        return {(g, i): home[g] for g, i in cells}
    shuffled = rng.sample(cells, len(cells))
    return {cell: k if k < c.pp else rng.randrange(c.pp) for k, cell in enumerate(shuffled)}


def _sequence(c: Composition, groups: int) -> list[Task]:
    """A global order of all tasks that respects the data: F along the groups, B against them, F before B."""
    m = c.microbatches
    if c.schedule == "gpipe":
        forward: list[Task] = [(g, "F", i) for i in range(m) for g in range(groups)]
        return forward + [(g, "B", i) for i in range(m) for g in reversed(range(groups))]
    rng = Random(c.seed + 1)
    left: dict[int, list[Task]] = {
        i: [*((g, "F", i) for g in range(groups)), *((g, "B", i) for g in reversed(range(groups)))]
        for i in range(m)
    }
    out: list[Task] = []
    while left:
        i = rng.choice(sorted(left)) if c.schedule == "random" else _next_1f1b(left, groups)
        group, phase, _ = left[i][0]
        if (
            phase == "F" and models.case(c.model).buffers
        ):  # buffers are updated in the order of microbatches
            i = min(
                k
                for k, tasks in left.items()
                if k <= i and tasks[0][1] == "F" and tasks[0][0] <= group
            )
        out.append(left[i].pop(0))
        if not left[i]:
            del left[i]
    return out


def _next_1f1b(left: Mapping[int, list[Task]], groups: int) -> int:
    """The microbatch to go on with: a forward that has begun; a new forward while fewer than `groups` are in flight;
    else the oldest backward."""
    begun = [i for i, tasks in left.items() if len(tasks) < 2 * groups]
    new = [i for i in left if i not in begun]
    forward = [i for i in begun if left[i][0][1] == "F"]
    if forward:
        return forward[0]
    return new[0] if new and len(begun) < groups else begun[0]
