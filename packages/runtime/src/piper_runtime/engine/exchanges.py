"""Run the collectives inside of steps: the code of a step waits for each, as for any other of its ops."""

from __future__ import annotations

from collections.abc import Callable

import torch

from piper_ir.plan.plan import inside_channel
from piper_ir.program.collectives import law_of
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundComm, Rank


class Exchanges:
    """Run collectives of one rank, each by a kind and an axis; `communicate` binds them to a communicator.

    A call takes an operand as `piper_ops.pointwise.collectives` describes it and returns a new tensor. The operand of a
    reduce-scatter is undefined afterwards. An all-reduce works in place: it returns its operand.
    """

    def __init__(self, rank: Rank, communicate: Callable[[BoundComm], Thunk]) -> None:
        self._rank, self._communicate = rank, communicate
        self._bound: dict[tuple[str, str], _Slot] = {}

    def __call__(self, kind: str, axis: str, given: torch.Tensor) -> torch.Tensor:
        slot = self._bound.get((kind, axis))
        if slot is None:
            slot = self._bound[kind, axis] = self._bind(kind, axis)
        law = law_of(kind)
        given = given.contiguous()
        if law.in_place:
            result = given
        elif law.writes == "part":
            result = torch.empty(given.shape[1:], dtype=given.dtype, device=given.device)
        else:
            lead = () if law.reads == "whole" else (len(slot.peers),)
            result = torch.empty((*lead, *given.shape), dtype=given.dtype, device=given.device)
        slot.given, slot.result = given, result
        with self._rank.untracked():  # gloo makes other tensors of the same memory
            slot.run()
        slot.given = slot.result = None
        return result

    def _bind(self, kind: str, axis: str) -> _Slot:
        plan, rank = self._rank.plan, self._rank
        channel = inside_channel(axis, rank.role.role)
        slot = _Slot(plan.peers(plan.channel(channel), rank.rank))
        result = None if law_of(kind).in_place else slot.output
        slot.run = self._communicate(BoundComm(kind, channel, slot.peers, slot.input, result))
        return slot


class _Slot:
    """Hold the tensors of one kind of collective while it runs."""

    def __init__(self, peers: tuple[int, ...]) -> None:
        self.peers = peers
        self.given: torch.Tensor | None = None
        self.result: torch.Tensor | None = None
        self.run: Thunk = lambda: None

    def input(self) -> torch.Tensor:
        assert self.given is not None
        return self.given

    def output(self) -> torch.Tensor:
        assert self.result is not None
        return self.result
