"""Random numbers by a key on the device, as a CUDA graph reads it, and by the key of the host."""

from __future__ import annotations

import torch

from piper_ops import key_of, signed
from piper_ops.random.counter import numbers, numbers_at

CPU = torch.device("cpu")


def test_a_key_on_the_device_draws_the_numbers_of_the_key() -> None:
    """Also where the product of increment and index leaves 64 bits."""
    for text in ("3/0/layers.0.drop#0", "3/1/layers.0.drop#0"):
        key = key_of(text)
        start, increment = torch.tensor([*map(signed, key)])
        for first in (0, 5, 2**40 + 1):
            both = [
                torch.cat([part.clone() for _, part in numbers(k, first, 9, CPU)])
                for k in (key, (start, increment))
            ]
            assert torch.equal(*both)
        elements = torch.tensor([4, 1, 2**45])
        assert torch.equal(
            numbers_at(key, elements), numbers_at((start, increment), elements.clone())
        )
