"""Permute numbers without a table: each image is computed alone, so that a dataset of any size needs no memory."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from math import isqrt

_MASK = 2**64 - 1
_ROUNDS = 4
"""The number of pairs of rounds; each half has then gone through four functions of the other."""


class Permutation:
    """Map 0..n-1 one-to-one onto itself, by a seed and an epoch.

    It is a Feistel network on pairs (left, right) with `height` x `width` >= n elements: a round adds a function of one
    half to the other half, modulo its size, which can be undone whatever the function is. An image that is not below n
    is mapped again until it is (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). The
    pairs are fewer than n + 2 + sqrt(n), so that one pass is nearly always enough. `height` is even, since a rotation
    of an odd number of elements is an even permutation: half of all permutations could not be reached.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        if n < 1:
            raise ValueError(f"Permutation({n}): at least one element is needed")
        self._n = n
        self._height = 2 * ((isqrt(n - 1) + 2) // 2)
        self._width = -(-n // self._height)
        digest = blake2b(f"{seed}/{epoch}".encode(), digest_size=16 * _ROUNDS).digest()
        words = [int.from_bytes(digest[i : i + 8], "big") for i in range(0, len(digest), 8)]
        self._keys = tuple(zip(words[::2], words[1::2], strict=True))

    def __call__(self, k: int) -> int:
        """Return the image of k, which is in 0..n-1."""
        height, width, n = self._height, self._width, self._n
        left, right = divmod(k, width)
        while True:
            for one, other in self._keys:
                left = (left + _mixed(right ^ one)) % height
                right = (right + _mixed(left ^ other)) % width
            if (image := left * width + right) < n:
                return image


@lru_cache(maxsize=8)
def permutation(n: int, seed: int, epoch: int) -> Permutation:
    """Return the permutation of an epoch; a run needs the ones of one epoch or, at a boundary, of two."""
    return Permutation(n, seed, epoch)


def _mixed(x: int) -> int:
    """Return 64 bits that each depend on all of x: the last part of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
