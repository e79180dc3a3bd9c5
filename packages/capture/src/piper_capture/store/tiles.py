"""Make a captured program whose last chunk computes logits and loss in tiles of tokens."""

from __future__ import annotations

from dataclasses import replace

from piper_capture.store.captured import Captured
from piper_capture.store.refitted import refitted
from piper_capture.store.tiled_loss import refused
from piper_ir.ground.errors import DirectiveError
from piper_ir.program.program import Chunk


def with_tiles(captured: Captured, tiles: int) -> Captured:
    """Return a capture with the loss in `tiles` tiles; the chunk with the loss alone has other code.

    Raises DirectiveError if that loss cannot be computed so.
    """
    if tiles == 1:
        return captured
    if tiles not in captured.tiled:
        try:
            chunks = tuple(
                _tiled(captured, c, tiles) if any(o.kind == "loss" for o in c.outputs) else c
                for c in captured.program.chunks
            )
        except DirectiveError as error:
            raise DirectiveError(f"tile_loss({tiles}): {error}") from None
        program = replace(captured.program, chunks=chunks, variants=())
        captured.tiled[tiles] = replace(
            captured, program=program, under={}, shared={}, layered={}, tiled={}
        )
    return captured.tiled[tiles]


def _tiled(captured: Captured, chunk: Chunk, tiles: int) -> Chunk:
    if chunk.opaque:
        raise refused(
            f"chunk {chunk.id!r} with the loss is an opaque region, which runs as it is written"
        )
    return refitted(captured.code, chunk, captured.code.tiled(chunk.code, tiles))
