"""Hash the content of programs and plans."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from piper_ir.ground.codec import text_pieces


def content_key(document: Any) -> str:
    """Return the hash of the content of a program or plan, without the reasons of collectives.

    These hold the numbers of the user's lines, which a comment above them changes.
    """
    signatures: dict[int, Any] = {}
    parts = document.chunks, document.variants
    if any(sig.collectives for chunks in parts for chunk in chunks for sig in chunk.steps.values()):
        chunks, variants = (tuple(_silent(chunk, signatures) for chunk in each) for each in parts)
        document = replace(document, chunks=chunks, variants=variants)
    digest = hashlib.sha256()
    for piece in text_pieces(document):
        digest.update(piece.encode())
    return digest.hexdigest()[:16]


def _silent(chunk: Any, signatures: dict[int, Any]) -> Any:
    """Return a chunk whose collectives give no reason; chunks that share a signature still do."""
    for sig in chunk.steps.values():
        if id(sig) not in signatures:
            signatures[id(sig)] = replace(
                sig, collectives=tuple(replace(c, why="") for c in sig.collectives)
            )
    return replace(chunk, steps={step: signatures[id(sig)] for step, sig in chunk.steps.items()})
