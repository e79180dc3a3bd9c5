"""Where random operations take their state from; the same rule for a plan and for its reference on one device."""

from __future__ import annotations

from hashlib import blake2b

from piper_ir.program import Chunk


def rng_seed(seed: int, step: int, row: int, where: int | str) -> int:
    """Seed of torch's generator before a forward part that draws random numbers: a hash in 0..2**63-1.

    seed: the job's. step: optimizer step, from 0. row: first row of the microbatch in the global batch. where: the value of the
    chunk's coordinate "layer", or the chunk's id if it has none (`rng_place`). It depends on nothing else, so neither the mesh
    nor the order of a plan changes what is drawn as long as the rows per microbatch are equal."""
    digest = blake2b(f"{seed}/{step}/{row}/{where}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def rng_place(chunk: Chunk) -> int | str:
    """The `where` of `rng_seed` for a chunk."""
    return chunk.coords.get("layer", chunk.id)
