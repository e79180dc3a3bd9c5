"""Hash the content of programs and plans."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from piper_ir.ground.codec import dumps

Pieces = Callable[[Any], Iterator[str] | None]
"""A function that returns the text of `dumps` in pieces, if it knows a quicker way; else None."""
_QUICKER: list[Pieces] = []


def register_pieces(pieces: Pieces) -> None:
    """Let `content_key` take the text of documents from a function that is quicker than `dumps`, and gives the same."""
    _QUICKER.append(pieces)


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
    pieces = next((found for quicker in _QUICKER if (found := quicker(document)) is not None), None)
    for piece in (dumps(document),) if pieces is None else pieces:
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
