"""Make random numbers by counting: each is a function of a key and of its index alone.

The generator is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). A key
is a start and an odd increment of 64 bits; word i of it is mix(start + i * increment) in arithmetic modulo 2**64. So
any range of words is made at once, by integer operations on tensors that are exact on every device. A word serves two
elements, the even one by its lower 32 bits, the odd one by its upper ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from hashlib import blake2b

import torch
from torch import Tensor

Key = tuple[int | Tensor, int | Tensor]
"""The start and the increment: integers, or numbers (torch.int64) on the device whose tensors draw by them."""

_ODD = 0xAAAAAAAAAAAAAAAA
_MASK = (1 << 64) - 1
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""The shifts of the mix, each with the factor that follows."""
BLOCK = {"cpu": 1 << 14}
"""The words that are made at once, by type of device: on a CPU as many as stay in its cache."""
BLOCK_ELSEWHERE = 1 << 20


def key_of(text: str) -> tuple[int, int]:
    """Return the start and the increment that belong to a text: the halves of its BLAKE2b digest of 128 bits.

    The increment is made odd, and changed if its bits alternate too little, as in the paper.
    """
    digest = blake2b(text.encode(), digest_size=16).digest()
    start, step = (int.from_bytes(part, "little") for part in (digest[:8], digest[8:]))
    step |= 1
    return start, step if (step ^ (step >> 1)).bit_count() >= 24 else step ^ _ODD


def signed(word: int | Tensor) -> int | Tensor:
    """Return 64 bits as the integer of torch.int64 that has them; numbers on a device have it already."""
    if isinstance(word, Tensor):
        return word
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


@cache
def _indexes(device: torch.device) -> Tensor:
    return torch.arange(BLOCK.get(device.type, BLOCK_ELSEWHERE), device=device)


def _mix(words: Tensor) -> Tensor:
    """Mix words in place."""
    shifted = torch.empty_like(words)
    for shift, factor in _STEPS:
        torch.bitwise_right_shift(words, shift, out=shifted)
        shifted.bitwise_and_(_MASK >> shift)  # torch has no shift that fills with zeros
        words.bitwise_xor_(shifted)
        if factor != 1:
            words.mul_(signed(factor))
    return words


def numbers(
    key: Key, start: int, count: int, device: torch.device
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the numbers of the elements from `start` on, as parts of 32 bits (torch.int32) with their places.

    A part is overwritten when the next one is asked for.
    """
    indexes, first, begin = _indexes(device), start // 2, 0
    steps = indexes * signed(key[1])
    words = torch.empty_like(indexes)
    while begin < count:
        skip = start % 2 if begin == 0 else 0
        need = min((count - begin + skip + 1) // 2, indexes.numel())
        counters = torch.add(steps[:need], signed(key[0] + first * key[1]), out=words[:need])
        part = _mix(counters).view(torch.int32)[skip : skip + count - begin]
        yield slice(begin, begin + part.numel()), part
        begin += part.numel()
        first += need


def numbers_at(key: Key, elements: Tensor) -> Tensor:
    """Return the numbers of elements (int64, any order) as torch.int32."""
    words = _mix(elements.bitwise_right_shift(1).mul_(signed(key[1])).add_(signed(key[0])))
    return (
        words.view(torch.int32)
        .view(*elements.shape, 2)
        .gather(-1, elements.bitwise_and(1)[..., None])[..., 0]
    )
