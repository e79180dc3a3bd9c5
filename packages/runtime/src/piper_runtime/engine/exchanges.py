"""Run the collectives inside of steps: the code of a step waits for each where it starts it, or where it reads it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from piper_ir.plan.plan import inside_channel
from piper_ir.program.collectives import law_of
from piper_runtime.engine.streams import Posted
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundComm, Rank
from piper_runtime.rank.binding.step_collectives import result_of


class Exchanges:
    """Run collectives of one rank, each by a kind and an axis; `communicate` binds them to a communicator.

    A call takes an operand as `piper_ops.pointwise.collectives` describes it and returns a new tensor. The operand of a
    reduce-scatter is undefined afterwards. An all-reduce works in place: it returns its operand.
    """

    def __init__(self, rank: Rank, communicate: Callable[[BoundComm], Thunk]) -> None:
        self._rank, self._communicate = rank, communicate
        self._bound: dict[tuple[str, str], _Slot] = {}
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, kind: str, axis: str, given: torch.Tensor) -> torch.Tensor:
        slot = self._slot(kind, axis)
        given = given.contiguous()
        result = result_of(kind, len(slot.peers), given)
        slot.given, slot.result = given, result
        with self._rank.untracked():  # gloo makes other tensors of the same memory
            slot.run()
        slot.given = slot.result = None
        return result

    def post(
        self, kind: str, axis: str, degree: int, given: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """Start a collective, and return a function that waits for its result.

        A communicator of the CPU carries it on in its own threads, a CUDA device on a stream of its own.
        """
        slot = self._slot(kind, axis)
        given = given.contiguous()
        result = result_of(kind, degree, given)
        slot.given, slot.result = given, result
        with self._rank.untracked():
            finish = slot.run.start() if isinstance(slot.run, Posted) else self._beside(slot.run)
        slot.given = slot.result = None
        operand = [
            given
        ]  # it may be a copy of the step's tensor, which nothing else keeps until the end

        def wait() -> torch.Tensor:
            with self._rank.untracked():
                finish()
            operand.clear()
            return result

        return wait

    def _beside(self, run: Thunk) -> Thunk:
        """Issue a collective on a stream of its own behind the compute issued so far; return its wait.

        Operand and result live until compute has waited, so that the allocator need not know the other stream.
        """
        if self._rank.device.type != "cuda":
            run()
            return _nothing
        compute = torch.cuda.current_stream(self._rank.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._rank.device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            run()
        done = self._stream.record_event()
        return lambda: compute.wait_event(done)

    def _slot(self, kind: str, axis: str) -> _Slot:
        slot = self._bound.get((kind, axis))
        if slot is None:
            slot = self._bound[kind, axis] = self._bind(kind, axis)
        return slot

    def _bind(self, kind: str, axis: str) -> _Slot:
        plan, rank = self._rank.plan, self._rank
        channel = inside_channel(axis, rank.role.role)
        slot = _Slot(plan.peers(plan.channel(channel), rank.rank))
        result = None if law_of(kind).in_place else slot.output
        slot.run = self._communicate(BoundComm(kind, channel, slot.peers, slot.input, result))
        return slot


def _nothing() -> None:
    """Wait for a collective that has ended."""


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
