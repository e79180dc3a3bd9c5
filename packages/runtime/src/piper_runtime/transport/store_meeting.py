"""Add up numbers that ranks count on the host, through the store of their rendezvous."""

from __future__ import annotations

import time
from typing import Any

import torch

POLL_S = 5e-4
"""The seconds between two looks for another rank's numbers. A store that blocks in C++ would not hear signals."""
KEPT = 2
"""The number of steps whose counts stay in the store: a rank may still read the counts of the step before."""


class StoreMeeting:
    """Let the last of some ranks that hands over its counts in a step add up all of them, and all ranks read the sum.

    So a sum waits for no rank that has handed over its counts, whatever that rank does until it reads the sum.
    """

    def __init__(self, store: Any, rank: int, ranks: tuple[int, ...]) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._step = 0
        self._sums: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """Start a step."""
        self._step += 1
        self._sums.clear()

    def give(self, counted: torch.Tensor) -> None:
        """Hand over this rank's counts of this step; return at once."""
        self._store.set(f"{self._step} {self._rank}", _bytes(counted))
        if self._store.add(f"{self._step} given", 1) == len(self._ranks):
            self._add_up()

    def total(self) -> torch.Tensor:
        """Return the sum over the ranks, once all have given; the same bits on each rank."""
        if self._step not in self._sums:
            self._sums[self._step] = self._read(f"{self._step} sum")
        return self._sums[self._step]

    def _add_up(self) -> None:
        total = torch.stack([self._read(f"{self._step} {rank}") for rank in self._ranks]).sum(0)
        self._store.set(f"{self._step} sum", _bytes(total))
        for key in (*self._ranks, "given", "sum") if self._step > KEPT else ():
            self._store.delete_key(f"{self._step - KEPT} {key}")

    def _read(self, key: str) -> torch.Tensor:
        while not self._store.check([key]):
            time.sleep(POLL_S)
        return torch.frombuffer(bytearray(self._store.get(key)), dtype=torch.float64)


def _bytes(numbers: torch.Tensor) -> bytes:
    return numbers.numpy().tobytes()
