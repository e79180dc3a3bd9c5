"""Choose the random numbers of a chunk and microbatch: as one device draws them for the whole batch, or torch's.

The rule is `piper_ops.random.draws`'; a job may ask for torch's own generator instead (`Job(draws="microbatches")`).
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Literal

import torch

from piper_ir.plan.plan import Plan
from piper_ir.program.program import Chunk
from piper_ops import DrawsOfCall, Key

Draws = Literal["rows", "microbatches"]
"""The ways to draw random numbers: by row, whatever the plan, or by microbatch with torch's generator."""


def drawing_of(
    plan: Plan, chunk: Chunk, draws: Draws, seed: int, step: int, row: int, device: torch.device,
    key: Callable[[str], Key] | None = None,
) -> DrawsOfCall:  # fmt: skip
    """Return how a chunk draws for the microbatch that begins with `row` of the global batch, in a step from 0.

    `key` is as in DrawsOfCall.
    """
    whole = plan.rows * plan.microbatches * plan.replicas
    if draws == "rows":
        return DrawsOfCall(chunk.draws, seed, step, row, whole, key=key)
    set_seed = generator(device).manual_seed
    return DrawsOfCall(
        chunk.draws,
        seed,
        step,
        row,
        whole,
        lambda place: set_seed(rng_seed(seed, step, row, place)),
    )


def rng_seed(seed: int, step: int, row: int, where: str) -> int:
    """Return the seed of torch's generator before an operation draws for a microbatch: a hash in 0..2**63-1.

    `seed` is the job's, `step` the optimizer step from 0, `row` the first row of the microbatch in the global batch,
    and `where` the draw's place in the model (`Draw.place`). The seed depends on nothing else, so neither the mesh nor
    the order of a plan changes the drawn numbers as long as the rows per microbatch are equal.
    """
    digest = blake2b(f"{seed}/{step}/{row}/{where}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(device: torch.device) -> torch.Generator:
    """Return the generator that random operations of a device draw from; to seed it asks nothing of the device."""
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()  # there are none before
    return torch.cuda.default_generators[device.index]
