"""Measure the duration of messages by size, between neighbours and over groups, while ranks do nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from piper_ir.program.collectives import COLLECTIVES, law_of
from piper_runtime.engine.core_waits import core_waits_of_all
from piper_runtime.profile.device_clocks import Clock
from piper_runtime.profile.measured_plans import channels_plan, group_channel
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundComm
from piper_runtime.transport.gloo import GlooCommunicators
from piper_runtime.transport.nccl import NcclCommunicators

BLOCK_BYTES, BLOCK_BYTES_ON_DEVICE = 1 << 23, 1 << 28
"""The bytes that the messages of one timed block add up to, against a clock's grain and bad wake-ups."""
ISSUE_S = 50e-6
"""An upper bound of the seconds that a host takes to issue a message to a device."""
FEWEST, MOST, MOST_OF_BLOCKS = 3, 100, 40
"""The bounds of the number of messages in a block; the last is for collectives of buckets."""
WHOLE_BLOCKS = 4
"""The least repeats with blocks of full length; fewer repeats ask for a quick look, with shorter blocks."""
MOST_BETWEEN = 1 << 20
"""The most bytes that ranks exchange between two steps that are measured: more only takes longer."""
MEETING = "all_reduce"
"""The collective that synchronises ranks."""
LEAST_OF_BLOCKS, MOST_OF_PAIRS = 1 << 10, 1 << 20
"""The fewest bytes of measured collectives of blocks, and the most bytes of measured collectives between pairs.

Blocks are parts of buckets, of 256 bytes and more; no directive makes collectives between pairs yet.
"""


@dataclass(frozen=True)
class MessageSample:
    """Hold timed blocks of messages of one size.

    `members` has the ranks of the group; `seconds` and `busy`, processor seconds of this rank (0 on CUDA, where the
    device carries them), are per message, one entry per block. `waited` has for each block the seconds that this rank's
    threads waited for a core, all threads together.
    """

    op: str
    bytes: int
    members: tuple[int, ...]
    seconds: tuple[float, ...]
    busy: tuple[float, ...]
    waited: tuple[float, ...]


class Messages:
    """Hold the communicators over which one rank measures, with all ranks taking part."""

    def __init__(
        self, rank: int, world: int, gloo: GlooCommunicators, clock: Clock, device: torch.device, alive: Callable[[], None],
        nccl: NcclCommunicators | None = None,
    ) -> None:  # fmt: skip
        """Set up the measurement with the `clock` of `device`.

        Messages between CUDA devices go over `nccl`; ranks meet over gloo.
        """
        self._rank, self._world, self._clock, self._device, self._alive = (
            rank,
            world,
            clock,
            device,
            alive,
        )
        self._carrier = gloo if nccl is None else nccl
        self._partitions = [
            _blocks(world, size) for size in range(2, world + 1) if world % size == 0
        ]
        everyone = tuple(range(world))
        self._gloo, self._everyone = gloo, everyone
        self._between: dict[int, Thunk] = {}
        self._channels = channels_plan(
            world, tuple(dict.fromkeys([everyone, *(g for p in self._partitions for g in p)]))
        )
        gloo.connect(self._channels)
        self._meeting = gloo.bind(_bound(MEETING, everyone, torch.zeros(1)))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        _finish(self._meeting)

    def between(self, nbytes: int) -> Thunk:
        """Return a closure that lets all ranks exchange so many bytes over gloo, at most `MOST_BETWEEN`.

        After a message caches hold other things, and a core that has slept takes up its work slower.
        """
        count = max(1, min(nbytes, MOST_BETWEEN) // 4)
        if self._world > 1 and count not in self._between:
            comm, _ = self._collective("all_to_all", self._everyone, torch.zeros(count))
            self._between[count] = partial(_finish, self._gloo.bind(comm))
        return self._between.get(count, _nothing)

    def measure(self, sizes: Sequence[int], repeats: int) -> list[MessageSample]:
        """Measure every size between the ranks of each pair (2k, 2k + 1), and over groups of ranks every collective.

        A pair sends a message there and one back. Groups are the ones of every partition of the ranks into groups of
        equal size. All pairs go at once, and all groups of a partition. If tensors consist of a block per member, sizes
        are rounded up to that.
        """
        self._carrier.connect(self._channels)
        samples = []
        pair = (self._rank & ~1, self._rank | 1)
        for size in sizes:
            tensor = torch.zeros(max(1, size // 4), device=self._device)
            if self._world > 1:
                alone = pair[1] == self._world
                samples += self._blocks(
                    "p2p", pair, tensor, () if alone else self._pair(pair, tensor), repeats
                )
            for partition in self._partitions:
                members = next(g for g in partition if self._rank in g)
                for kind, law in COLLECTIVES.items():
                    few, many = (
                        law.blocks and size < min(LEAST_OF_BLOCKS, max(sizes)),
                        law.route == "pairs" and size > MOST_OF_PAIRS,
                    )
                    if not (few or many):
                        comm, whole = self._collective(kind, members, tensor)
                        samples += self._blocks(
                            kind, members, whole, (self._carrier.bind(comm),), repeats
                        )
        return samples

    def _collective(
        self, kind: str, members: tuple[int, ...], tensor: torch.Tensor
    ) -> tuple[BoundComm, torch.Tensor]:
        """Return a collective bound to tensors of its own, and a tensor of the size of its message."""
        law, n = law_of(kind), len(members)
        if not law.blocks:
            return _bound(
                kind, members, tensor, None if law.in_place else torch.empty_like(tensor)
            ), tensor
        each = -(-tensor.numel() // n)
        ends = {"whole": each * n, "part": each}
        operand, got = (
            torch.zeros(ends[extent], device=self._device) for extent in (law.reads, law.writes)
        )
        return _bound(kind, members, operand, got), operand if law.reads == "whole" else got

    def _blocks(
        self,
        op: str,
        members: tuple[int, ...],
        tensor: torch.Tensor,
        turn: Sequence[Callable[[], Any]],
        repeats: int,
    ) -> list[MessageSample]:
        """Return one sample, or none for a rank without a turn, which meets the others all the same."""
        count = block_length(
            op, tensor.nbytes, repeats, BLOCK_BYTES_ON_DEVICE if self._clock.ahead else BLOCK_BYTES
        )
        seconds, busy, waited = [], [], []

        def block(times: int = count) -> None:
            for _ in range(times):
                for message in turn:
                    _finish(message)

        # On a device the first turn only brings the ranks together, and the host issues all while the device sleeps.
        sleep = partial(self._clock.sleep, (count + 1) * len(turn) * ISSUE_S)
        runs: list[Thunk] = [sleep, partial(block, 1), block] if self._clock.ahead else [block]
        for _ in range(repeats + 1):
            waits = (
                core_waits_of_all()
            )  # before the ranks meet: it takes longer on one than on another
            self.barrier()
            if turn:
                begin = time.process_time()
                seconds.append(self._clock.each(runs)[-1] / (count * len(turn)))
                busy.append(
                    0.0
                    if self._clock.ahead
                    else (time.process_time() - begin) / (count * len(turn))
                )
                waited.append(core_waits_of_all() - waits)
            self._alive()
        return (
            [
                MessageSample(
                    op, tensor.nbytes, members, *(tuple(x[1:]) for x in (seconds, busy, waited))
                )
            ]
            if turn
            else []
        )

    def _pair(
        self, pair: tuple[int, int], tensor: torch.Tensor
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return the closures that send to the other rank of the pair and back, as this rank sees them."""
        low, high = pair
        kinds = ("send", "recv") if self._rank == low else ("recv", "send")
        ways = ((low, high), (high, low))
        there, back = (
            self._carrier.bind(BoundComm(kind, f"{a}>{b}", (a, b), lambda: tensor))
            for kind, (a, b) in zip(kinds, ways)
        )
        return there, back


def block_length(op: str, nbytes: int, repeats: int, each: int) -> int:
    """Return how many messages of some bytes a block has that adds up to `each` bytes."""
    most = MOST if op in ("p2p", MEETING) else MOST_OF_BLOCKS
    most = most * min(repeats, WHOLE_BLOCKS) // WHOLE_BLOCKS
    return max(FEWEST, min(most, each // nbytes))


def _bound(
    kind: str, members: tuple[int, ...], given: torch.Tensor, got: torch.Tensor | None = None
) -> BoundComm:
    return BoundComm(
        kind, group_channel(members), members, lambda: given, None if got is None else lambda: got
    )


def _finish(message: Callable[[], Any]) -> None:
    """Run a communication to its end: its closure does that, or starts it and returns a function that waits for it."""
    wait = message()
    if wait is not None:
        wait()


def _nothing() -> None:
    """Exchange nothing, as a rank without others does."""


def _blocks(world: int, size: int) -> list[tuple[int, ...]]:
    return [tuple(range(first, first + size)) for first in range(0, world, size)]
