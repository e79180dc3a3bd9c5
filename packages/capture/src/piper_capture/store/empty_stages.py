"""Add the chunks of stages without layers, which pass on the values of the stage before."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from piper_capture.store.captured import Captured
from piper_capture.store.codestore import PassedOn
from piper_capture.store.refitted import refitted
from piper_capture.torch_api import _torch
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.select import EMPTY
from piper_ir.program.program import Chunk, Input, Output, Program


def with_empty_stages(captured: Captured, after: Mapping[int, Sequence[str]]) -> Captured:
    """Return a capture with a chunk for each empty stage; `after` has the chunks before it, whose values it passes on.

    Its coordinate `empty` is the stage. Raises DirectiveError where nothing of these chunks is read further on.
    """
    if not after:
        return captured
    program = captured.program
    with _torch.capturing():
        for stage, before in sorted(after.items()):
            program = _with_stage(captured, program, stage, before)
    return replace(captured, program=program, under={}, shared={}, layered={}, tiled={})


def _with_stage(captured: Captured, program: Program, stage: int, before: Sequence[str]) -> Program:
    """Return the program with the chunk of one empty stage behind all chunks up to the last of `before`."""
    place = 1 + max(k for k, chunk in enumerate(program.chunks) if chunk.id in before)
    # The chunks of empty stages that stand there already come first.
    while EMPTY in program.chunks[place].coords:
        before, place = (program.chunks[place].id,), place + 1
    makers = {chunk.id for chunk in program.chunks if chunk.id in before}
    read: dict[str, Input] = {}
    for chunk in program.chunks[place:]:
        for entry in chunk.inputs:
            if entry.kind == "value" and entry.ref.partition(":")[0] in makers:
                known = read.get(entry.ref, entry)
                read[entry.ref] = replace(known, needs_grad=known.needs_grad or entry.needs_grad)
    if not read:
        raise DirectiveError(
            f"stage {stage} is empty, and nothing that {', '.join(before)} makes is read behind it; there is nothing to "
            f"pass on"
        )
    inputs = tuple(read.values())
    passed = PassedOn(tuple(i.spec for i in inputs), tuple(i.needs_grad for i in inputs))
    code = hashlib.sha256(repr(passed).encode()).hexdigest()[:16]
    captured.code.add_passed(code, passed)
    outputs = tuple(Output("value", i.spec, needs_grad=i.needs_grad) for i in inputs)
    id = f"{EMPTY}{stage}"
    chunk = refitted(captured.code, Chunk(id, {EMPTY: stage}, inputs, outputs, {}, {}), code)
    renamed = {ref: f"{id}:out{k}" for k, ref in enumerate(read)}
    behind = (_reading(one, renamed) for one in program.chunks[place:])
    return replace(program, chunks=(*program.chunks[:place], chunk, *behind), variants=())


def _reading(chunk: Chunk, renamed: Mapping[str, str]) -> Chunk:
    """Return a chunk that reads values under other names."""
    if not any(entry.ref in renamed for entry in chunk.inputs if entry.kind == "value"):
        return chunk
    inputs = tuple(
        replace(entry, ref=renamed.get(entry.ref, entry.ref)) if entry.kind == "value" else entry
        for entry in chunk.inputs
    )
    return replace(chunk, inputs=inputs)
