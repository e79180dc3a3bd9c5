"""Run all ranks of a plan in one process and one thread, for tests and debugging: milliseconds per step.

Communication is a copy. The order is the real engine's: each rank issues its program in order; compute runs when it is
issued and delays the instructions after it; communication goes on beside it on its stream, in order, and meets its
peers (a send ends when the peer receives).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

import torch

from piper_ir.ground.errors import ExecutionError, PiperError, RankError
from piper_ir.plan.plan import COMPUTE, inside_channel
from piper_ir.program.collectives import Law, law_of
from piper_ir.program.ops import Compute
from piper_runtime.engine.failures import cause_of, place_of
from piper_runtime.engine.fibers import Fiber
from piper_runtime.engine.memory import Counter
from piper_runtime.engine.trace import TimedSpan
from piper_runtime.rank.batches.batch_totals import counting_ranks
from piper_runtime.rank.binding.rank import BoundComm, BoundInstr, Rank
from piper_runtime.rank.binding.step_collectives import SPOILED, no_exchange


@dataclass
class _State:
    """Track how far one rank is in its step."""

    rank: Rank
    counter: Counter | None
    issued: int = 0
    done: dict[str, int] = field(default_factory=dict)
    queues: dict[str, deque[BoundInstr]] = field(default_factory=dict)
    posted: set[str] = field(default_factory=set)
    posted_at: dict[str, float] = field(default_factory=dict)
    spans: list[TimedSpan] = field(default_factory=list)
    fiber: Fiber | None = None
    started: float = 0.0

    def ready(self, entry: BoundInstr) -> bool:
        return all(self.done.get(stream, 0) >= n for stream, n in entry.waits)

    @property
    def finished(self) -> bool:
        return self.issued == len(self.rank.entries) and not any(self.queues.values())


class _CountedHere:
    """Add up the counts of the ranks of this process; a rank that has not counted yet does so now."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    def begin(self) -> None:
        """Do nothing: each rank starts its own count."""

    def give(self, counted: torch.Tensor) -> None:
        """Do nothing: `total` asks the ranks."""

    def total(self) -> torch.Tensor:
        """Return the sum over the ranks that count."""
        return torch.stack([r.feed.count() for r in self._ranks]).sum(0)


class InlineEngine:
    """Run steps of ranks that are bound to one plan; `counters`, by rank, observe their memory."""

    def __init__(self, ranks: Sequence[Rank]):
        self._ranks = ranks
        self.counters: dict[int, Counter] = {}
        self._meeting = {r.rank: _meeting(r) for r in ranks}
        self._mates: dict[tuple[int, str], tuple[int, ...]] = {}
        counting = set(counting_ranks(ranks[0].plan)) if ranks else set()
        meeting = _CountedHere([r for r in ranks if r.rank in counting])
        for r in ranks:
            r.feed.totals.meeting = meeting

    def step(self, step: int) -> dict[int, list[TimedSpan]]:
        """Run one optimizer step; return the spans of every rank.

        Raises ExecutionError when a part raised (named, with its rank), or in a deadlock (with each rank's wait).
        """
        states = {r.rank: _State(r, self.counters.get(r.rank)) for r in self._ranks}
        with torch.no_grad():
            for state in states.values():
                self._observed(state, -1, lambda state=state: state.rank.begin(step))
            try:
                self._run_all(states)
            finally:
                for state in states.values():
                    if state.fiber is not None:
                        state.fiber.cancel()
            if not all(s.finished for s in states.values()):
                raise ExecutionError(
                    f"step {step}: deadlock; "
                    + "; ".join(_stuck(s) for s in states.values() if not s.finished)
                )
            for state in states.values():
                state.rank.end()
        return {r: s.spans for r, s in states.items()}

    def _run_all(self, states: dict[int, _State]) -> None:
        """Run all ranks until each is done or blocked for ever."""
        waiting = deque(states.values())
        while waiting:
            state = waiting.popleft()
            woken = self._advance(state, states)
            waiting.extend(s for s in woken if s not in waiting)

    def _advance(self, state: _State, states: dict[int, _State]) -> list[_State]:
        """Run one rank until it blocks; return the ranks that a communication has set free."""
        woken: list[_State] = []
        moved = True
        while moved:
            moved = self._issue(state)
            inside = self._exchange(state, states)
            moved = moved or inside is not None
            woken += [p for p in inside or () if p is not state]
            for stream in [s for s, q in state.queues.items() if q]:
                partners = self._communicate(state, stream, states)
                moved = moved or partners is not None
                woken += [p for p in partners or () if p is not state]
        return woken

    def _issue(self, state: _State) -> bool:
        entries, moved = state.rank.entries, False
        while state.issued < len(entries):
            entry = entries[state.issued]
            if entry.comm is not None:
                state.queues.setdefault(entry.stream, deque()).append(entry)
            elif state.fiber is not None or state.ready(entry):
                if state.fiber is not None and not state.fiber.answered:
                    break
                moved = True
                if not self._run(state, entry):
                    break
            else:
                break
            state.issued += 1
            moved = True
        return moved

    def _run(self, state: _State, entry: BoundInstr) -> bool:
        """Run an instruction, or go on with it; return whether it is done, and does not wait for others inside."""
        try:
            if state.fiber is None:
                state.started = time.perf_counter()
            done = self._go_on(state, entry)
        except PiperError:
            raise
        except Exception as e:
            raise failure(state.rank, entry, e) from e
        if done:
            state.fiber = None
            state.rank.exchange = no_exchange
            state.spans.append((entry.index, state.started, time.perf_counter()))
            state.done[COMPUTE] = state.done.get(COMPUTE, 0) + 1
        return done

    def _go_on(self, state: _State, entry: BoundInstr) -> bool:
        work = entry.work
        assert work is not None
        if state.fiber is None and entry.index not in self._meeting[state.rank.rank]:
            self._observed(state, entry.index, work)
            return True
        if state.fiber is None:
            fiber = state.fiber = Fiber(lambda: self._observed(state, entry.index, work))
            state.rank.exchange = fiber.exchange
            fiber.start()
            return fiber.done
        state.fiber.go_on()
        return state.fiber.done

    def _exchange(self, state: _State, states: dict[int, _State]) -> list[_State] | None:
        """Answer a request inside of an instruction once all members have it; return them, or None to wait."""
        if state.fiber is None or state.fiber.request is None or state.fiber.answered:
            return None
        asked = state.fiber.request
        members = [states[p] for p in self._along(state.rank, asked.axis)]
        fibers = [
            m.fiber
            for m in members
            if m.fiber is not None and m.fiber.request is not None and not m.fiber.answered
        ]
        fibers = [f for f in fibers if f.request is not None and f.request.axis == asked.axis]
        if len(fibers) < len(members):
            return None
        requests = [f.request for f in fibers if f.request is not None]
        kinds = {(r.kind, r.given.shape, r.given.dtype) for r in requests}
        if len(kinds) > 1:
            channel = inside_channel(asked.axis, state.rank.role.role)
            raise ExecutionError(
                f"collectives that do not fit together meet inside of steps on channel {channel}: {kinds}"
            )
        results = stacked_collective(asked.kind, [r.given for r in requests])
        if law_of(asked.kind).spoils:
            _spoil([r.given for r in requests])
        for fiber, result in zip(fibers, results, strict=True):
            fiber.answer(result)
        return members

    def _along(self, rank: Rank, axis: str) -> tuple[int, ...]:
        """Return the ranks that a rank meets inside of steps along an axis, itself among them."""
        key = rank.rank, axis
        if key not in self._mates:
            channel = rank.plan.channel(inside_channel(axis, rank.role.role))
            self._mates[key] = tuple(rank.plan.peers(channel, rank.rank))
        return self._mates[key]

    def _observed(self, state: _State, index: int, work: object) -> None:
        assert callable(work)
        if state.counter is None:
            work()
            return
        with state.counter.during(index):
            work()

    def _communicate(
        self, state: _State, stream: str, states: dict[int, _State]
    ) -> list[_State] | None:
        """Try the head of a communication stream; return the ranks that took part, or None when it must wait."""
        entry = state.queues[stream][0]
        if not state.ready(entry):
            return None
        comm = entry.comm
        assert comm is not None
        if comm.channel not in state.posted:
            state.posted.add(comm.channel)
            state.posted_at[comm.channel] = time.perf_counter()
        members = [states[p] for p in comm.peers]
        if not all(comm.channel in m.posted for m in members):
            return None
        heads = [_head(m, comm) for m in members]
        _transfer(heads, [_ends(m, h) for m, h in zip(members, heads)])
        end = time.perf_counter()
        for member, head in zip(members, heads):
            member.posted.discard(comm.channel)
            member.queues[head.stream].popleft()
            member.done[head.stream] = member.done.get(head.stream, 0) + 1
            member.spans.append((head.index, member.posted_at[comm.channel], end))
        return members


def _meeting(rank: Rank) -> frozenset[int]:
    """Return the indexes of a rank's instructions with collectives inside of a step."""
    plan, program = rank.plan, rank.role.program if rank.plan.shared or rank.plan.experts else ()
    return frozenset(
        k
        for k, instr in enumerate(program)
        for op in [part.op for part in instr.parts]
        if isinstance(op, Compute) and plan.chunk(op.variant).steps[op.step].collectives
    )


def stacked_collective(kind: str, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return each device's result of a collective inside of a step, given the devices' operands.

    These stack along a leading dimension, or take it away (`piper_ops.pointwise.collectives`).
    """
    law = law_of(kind)
    whole = [g if law.reads == "whole" and law.blocks else g.unsqueeze(0) for g in given]
    got = collected(law, whole)
    return [g.squeeze(0) if law.writes == "part" or not law.blocks else g for g in got]


def _head(state: _State, comm: BoundComm) -> BoundInstr:
    """Return the instruction that a rank has posted on a channel: the head of the one stream that uses it."""
    return next(
        q[0]
        for q in state.queues.values()
        if q and q[0].comm is not None and q[0].comm.channel == comm.channel
    )


def _ends(state: _State, entry: BoundInstr) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor that a member gives, and the one that it gets."""
    assert entry.comm is not None
    try:
        sent = entry.comm.operand()
        return sent, sent if entry.comm.result is None else entry.comm.result()
    except Exception as e:
        raise failure(state.rank, entry, e) from e


def _transfer(heads: list[BoundInstr], ends: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    operands, got = [g for g, _ in ends], [g for _, g in ends]
    kinds = [h.comm.kind for h in heads if h.comm is not None]
    law = None if heads[0].comm is None else heads[0].comm.law
    specs = {(t.shape, t.dtype) for t in operands}
    if len(specs) > 1 or (len(set(kinds)) > 1 if law is not None else kinds != ["send", "recv"]):
        met = ", ".join(
            f"{h.name} with {t.dtype} {tuple(t.shape)}" for h, t in zip(heads, operands)
        )
        raise ExecutionError(f"instructions that do not fit together meet on a channel: {met}")
    if law is None:
        got[1].copy_(operands[0])
        return
    if law.route == "host":  # the operand is the copy; on a CUDA device it may be under way
        return
    results = collected(law, operands)
    if law.spoils:  # before the results, which may stand in the spoiled operands
        _spoil(operands)
    for target, result in zip(got, results, strict=True):
        target.copy_(result)


def _spoil(given: list[torch.Tensor]) -> None:
    for tensor in given:
        tensor.fill_(SPOILED)


def collected(law: Law, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return each member's result of a collective, given the members' tensors in the order of ranks."""
    match law.result:
        case "blocks" if law.reads == "whole":
            blocks = [t.chunk(len(given)) for t in given]
            return [torch.cat(column) for column in zip(*blocks, strict=True)]
        case "blocks":
            return [torch.cat(given)] * len(given)
        case "sum":
            whole = given[0].clone()
            for other in given[1:]:
                whole += other
        case "first":
            whole = given[0].clone()
        case "previous":
            return [given[k - 1].clone() for k in range(len(given))]
        case _:
            assert_never(law.result)
    return list(whole.chunk(len(given))) if law.writes == "part" else [whole] * len(given)


def failure(rank: Rank, entry: BoundInstr, error: BaseException) -> RankError:
    """Return the exception of a part as an error that names its rank, step and instruction."""
    return RankError(f"{place_of(rank, entry)}: {cause_of(rank, entry, error)}")


def _stuck(state: _State) -> str:
    rank = state.rank
    heads = [q[0] for q in state.queues.values() if q]
    if state.issued < len(rank.entries):
        heads.insert(0, rank.entries[state.issued])
    return ", ".join(
        f"rank {rank.rank} is at {e.name} on {e.stream}, which waits for {_reason(state, e)}"
        for e in heads
    )


def _reason(state: _State, entry: BoundInstr) -> str:
    unmet = [
        f"{n} of {s} (done {state.done.get(s, 0)})"
        for s, n in entry.waits
        if state.done.get(s, 0) < n
    ]
    if unmet:
        return " and ".join(unmet)
    assert entry.comm is not None
    peers = [p for p in entry.comm.peers if p != state.rank.rank]
    return f"its peers {', '.join(map(str, peers))} on channel {entry.comm.channel}"
