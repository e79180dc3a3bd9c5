"""What messages take, by size: point-to-point between neighbours, reductions over groups; between ranks that do nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piper_runtime.gloo import GlooCommunicators
from piper_runtime.profiler_plans import channels_plan, group_channel
from piper_runtime.rank import Comm

BLOCK_BYTES = 1 << 23
"""About what the messages of one timed block add up to, so that a clock's grain and one bad wake-up do not count."""
FEWEST, MOST = 3, 100
"""Messages in a block."""


@dataclass(frozen=True)
class MessageSample:
    """Blocks of messages of one size. `members` of the group; `seconds` and `busy`, processor seconds of this rank, per message:
    one entry per block."""

    op: str
    bytes: int
    members: tuple[int, ...]
    seconds: tuple[float, ...]
    busy: tuple[float, ...]


class Messages:
    """The communicators over which one rank measures, all ranks taking part."""

    def __init__(self, rank: int, world: int, communicators: GlooCommunicators, alive: Callable[[], None]) -> None:
        self._rank, self._world, self._communicators, self._alive = rank, world, communicators, alive
        self._partitions = [_blocks(world, size) for size in range(2, world + 1) if world % size == 0]
        groups = tuple(dict.fromkeys([tuple(range(world)), *(g for p in self._partitions for g in p)]))
        communicators.connect(channels_plan(world, groups))
        self._meeting = self._reduce(tuple(range(world)), torch.zeros(1))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        _finish(self._meeting)

    def measure(self, sizes: Sequence[int], repeats: int) -> list[MessageSample]:
        """Every size between the ranks of each pair (2k, 2k + 1), a message there and one back, and over every partition of the
        ranks into groups of equal size; all pairs at once, and all groups of a partition."""
        found = []
        for size in sizes:
            tensor = torch.zeros(max(1, size // 4))
            if self._rank ^ 1 < self._world:
                there, back = self._pair(tensor)
                found.append(self._blocks("p2p", tensor, (there, back), repeats))
            for partition in self._partitions:
                members = next(g for g in partition if self._rank in g)
                found.append(self._blocks("all_reduce", tensor, (self._reduce(members, tensor),), repeats, members))
        return found

    def _blocks(
        self, op: str, tensor: torch.Tensor, turn: Sequence[Callable[[], Any]], repeats: int, members: tuple[int, ...] = ()
    ) -> MessageSample:
        count = min(MOST, max(FEWEST, BLOCK_BYTES // tensor.nbytes))
        seconds, busy = [], []
        for _ in range(repeats + 1):
            self.barrier()
            begin, begin_busy = time.perf_counter(), time.process_time()
            for _ in range(count):
                for message in turn:
                    _finish(message)
            seconds.append((time.perf_counter() - begin) / (count * len(turn)))
            busy.append((time.process_time() - begin_busy) / (count * len(turn)))
            self._alive()
        pair = (min(self._rank, self._rank ^ 1), max(self._rank, self._rank ^ 1))
        return MessageSample(op, tensor.nbytes, members or pair, tuple(seconds[1:]), tuple(busy[1:]))

    def _pair(self, tensor: torch.Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """To the other rank of the pair and back, as this rank sees it."""
        low, high = self._rank & ~1, self._rank | 1
        kinds = ("send", "recv") if self._rank == low else ("recv", "send")
        ways = ((low, high), (high, low))
        there, back = (
            self._communicators.bind(Comm(kind, f"{a}>{b}", (a, b), lambda: tensor)) for kind, (a, b) in zip(kinds, ways)
        )
        return there, back

    def _reduce(self, members: tuple[int, ...], tensor: torch.Tensor) -> Callable[[], Any]:
        return self._communicators.bind(Comm("all_reduce", group_channel(members), members, lambda: tensor))


def _finish(message: Callable[[], Any]) -> None:
    """Run a communication to its end, whether its closure does that or starts it and returns what waits for it."""
    wait = message()
    if wait is not None:
        wait()


def _blocks(world: int, size: int) -> list[tuple[int, ...]]:
    return [tuple(range(first, first + size)) for first in range(0, world, size)]
