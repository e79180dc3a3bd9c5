"""Bind a plan to one rank: its tensors, and the waits and work of each instruction; engines decide only when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, assert_never

import torch

from piper_ir.ground.errors import PlanError
from piper_ir.plan.plan import COMPUTE, Instr, Part, Plan
from piper_ir.program.collectives import Law, law_of
from piper_ir.program.ops import COMM, Collective, Recv, Send
from piper_runtime.rank.binding.parts import (
    Operand,
    Thunk,
    bind_alloc,
    bind_operand,
    bind_part,
    bind_result,
)
from piper_runtime.rank.binding.rank_state import Probe, RankJob, RankState
from piper_runtime.rank.values.code import ExportedCode
from piper_runtime.rank.values.device import CPU, NumberReader


@dataclass(frozen=True, slots=True)
class BoundComm:
    """Hold one communication, bound to a rank.

    Attributes:
        kind: "send", "recv" or a kind of `piper_ir.program.collectives`.
        peers: the ranks of the channel's instance, ascending; source and destination for a send and its receive.
        operand: gives the tensor that is sent, received into, or given to a collective.
        result: gives the tensor that a collective writes; None if that is the operand itself.
    """

    kind: str
    channel: str
    peers: tuple[int, ...]
    operand: Operand
    result: Operand | None = None

    @property
    def law(self) -> Law | None:
        """Return the law of a collective; None for a send or a receive."""
        return None if self.kind in ("send", "recv") else law_of(self.kind)

    def alone(self) -> None:
        """Run this communication on a channel without another rank: a collective copies its operand to its result."""
        tensor = self.operand()
        if self.result is not None:
            self.result().copy_(tensor)


@dataclass(frozen=True, slots=True)
class BoundInstr:
    """Hold one instruction, bound to a rank; exactly one of `work` and `comm` is set.

    Attributes:
        waits: how many instructions of which other streams must be done before it.
        name: its name in printed plans.
    """

    index: int
    stream: str
    waits: tuple[tuple[str, int], ...]
    name: str
    work: Thunk | None = None
    comm: BoundComm | None = None


@dataclass(frozen=True)
class Binder:
    """Turn a rank's program into closures; tests replace it to plant mistakes.

    Attributes:
        part: binds a part of the compute stream.
        operand: binds the tensor of a communication.
        instr: gives the instruction to bind, which is the plan's.
    """

    part: Callable[[Part, RankState], Thunk] = bind_part
    operand: Callable[[Part, RankState], Operand] = bind_operand
    instr: Callable[[Instr, RankState], Instr] = lambda instr, _: instr


class Rank(RankState):
    """Hold one rank of a plan with its states and its bound program."""

    binder: ClassVar[Binder] = Binder()

    def __init__(
        self, plan: Plan, rank: int, code: ExportedCode, job: RankJob,
        params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], probe: Probe | None = None,
        device: torch.device = CPU, numbers: NumberReader | None = None,
    ):  # fmt: skip
        super().__init__(plan, rank, code, job, params, buffers, probe, device, numbers)
        behind = own_waits(self.role.program)
        self._peers: dict[str, tuple[int, ...]] = {}
        self.entries = tuple(
            self._entry(i, instr, behind.get(i, ())) for i, instr in enumerate(self.role.program)
        )

    def _entry(self, index: int, instr: Instr, behind: tuple[tuple[str, int], ...]) -> BoundInstr:
        instr = self.binder.instr(instr, self)
        if instr.comm:
            return BoundInstr(
                index, instr.stream, instr.waits + behind, instr.name, comm=self._comm(instr)
            )
        return BoundInstr(index, instr.stream, instr.waits, instr.name, work=self._work(instr))

    def _comm(self, instr: Instr) -> BoundComm:
        part = instr.parts[0]
        op = part.op
        if not isinstance(op, COMM) or instr.stream == COMPUTE:
            raise PlanError(
                f"role {self.role.role}: {instr.name} communicates on stream {instr.stream!r}; it needs a stream "
                f"of its own"
            )
        if op.channel not in self._peers:
            self._peers[op.channel] = self.plan.peers(self.plan.channel(op.channel), self.rank)
        peers, operand = self._peers[op.channel], self.binder.operand(part, self)
        return BoundComm(comm_kind(op), op.channel, peers, operand, bind_result(part, self))

    def _work(self, instr: Instr) -> Thunk:
        parts = [self.binder.part(p, self) for p in instr.parts]
        runs = tuple(parts + [bind_alloc(v, self) for v in instr.allocs_after])
        if len(runs) == 1 and not instr.frees_before:
            return runs[0]
        values, dead = self.store.values, instr.frees_before

        def work() -> None:
            for v in dead:
                del values[v]
            for run in runs:
                run()

        return work

    def begin(self, step: int) -> None:
        """Start a step: drop the leftovers of the last one, and make the first receive buffers."""
        self.prepare(step)
        self.allocate_first()

    def prepare(self, step: int) -> None:
        """Start a step on the host: drop the leftovers of the last one."""
        self.step = step
        self.host.begin()
        with self.untracked():
            self.feed.begin(step)
        self.buffer_mb.clear()
        self.counted.clear()
        self.dropped.begin()
        self.expert_tokens = {}
        for by_mb in self.scalars.values():
            by_mb.clear()

    def allocate_first(self) -> None:
        """Make the receive buffers that are there when the step begins."""
        for v in self.role.allocs_first:
            bind_alloc(v, self)()

    def end(self) -> None:
        """End a step after its last instruction, when all its streams are done.

        Raises NonFiniteLossError when a number that was not read in the step is not finite.
        """
        self.numbers.finish()
        self.end_counts()
        self.optimizer.end_step()


def comm_kind(op: Send | Recv | Collective) -> str:
    """Return the kind of the `BoundComm` that carries out an op."""
    match op:
        case Send():
            return "send"
        case Recv():
            return "recv"
        case Collective(kind=kind):
            return kind
        case _:
            assert_never(op)


def own_waits(program: Sequence[Instr]) -> dict[int, tuple[tuple[str, int], ...]]:
    """Return, by index of a communication, its wait for an earlier one on its own stream.

    It exists if the communication takes the earlier one's result, or spoils an operand that the earlier one reads. A
    plan leaves both to the order of the stream, but an engine may post a communication before its predecessor has
    ended.
    """
    count: dict[str, int] = {}
    written: dict[tuple[str, str], int] = {}
    read: dict[tuple[str, str], int] = {}
    waits: dict[int, tuple[tuple[str, int], ...]] = {}
    for index, instr in enumerate(program):
        if not instr.comm:
            continue
        part, stream = instr.parts[0], instr.stream
        state = (
            (f"{part.op.law.state} {part.op.bucket}",)
            if isinstance(part.op, Collective) and part.op.bucket
            else ()
        )
        needed = max((written.get((stream, v), 0) for v in (*part.reads, *state)), default=0)
        if isinstance(part.op, Collective) and part.op.law.spoils:
            needed = max([needed, *[read.get((stream, v), 0) for v in part.reads]])
        if needed:
            waits[index] = ((stream, needed),)
        count[stream] = count.get(stream, 0) + 1
        read |= {(stream, v): count[stream] for v in part.reads}
        written |= {(stream, v): count[stream] for v in (*part.writes, *state)}
    return waits
