"""Seed random operations, by the same rule for a plan and for its reference on one device."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import torch

from piper_ir.program import Chunk


def rng_seed(seed: int, step: int, row: int, where: int | str) -> int:
    """Return the seed of torch's generator before a forward part that draws random numbers: a hash in 0..2**63-1.

    `seed` is the job's, `step` the optimizer step from 0, `row` the first row of the microbatch in the global batch,
    and `where` the chunk's place in the model (`rng_places`). The seed depends on nothing else, so neither the mesh nor
    the order of a plan changes what is drawn as long as the rows per microbatch are equal.
    """
    digest = blake2b(f"{seed}/{step}/{row}/{where}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(device: torch.device) -> torch.Generator:
    """Return the generator that random operations of a device draw from; to seed it asks nothing of the device."""
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()  # there are none before
    return torch.cuda.default_generators[device.index]


def rng_places(chunks: Iterable[Chunk]) -> dict[str, int | str]:
    """Return for each chunk id, in program order, the `where` of `rng_seed`.

    It is the value of its coordinate "layer" for the first chunk with that value, and the chunk's id for all others:
    chunks without a layer, a layer's second visit, and the further chunks of a layer that is cut. So no two chunks draw
    the same numbers.
    """
    places: dict[str, int | str] = {}
    taken: set[int] = set()
    for chunk in chunks:
        layer = chunk.coords.get("layer")
        places[chunk.id] = chunk.id if layer is None or layer in taken else layer
        if layer is not None:
            taken.add(layer)
    return places
