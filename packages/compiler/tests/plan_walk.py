"""An independent little executor for plans, which knows nothing of `piper_ir.fold.memory`.

One host per role issues in program order and computes, other streams communicate by rendezvous; buffers live in a
table. It stops with an error at any misuse.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from piper_ir.plan.plan import COMPUTE, Instr, Part, Plan, RolePlan
from piper_ir.program.ops import Collective, Compute, Recv, Send


@dataclass
class _Role:
    plan: RolePlan
    live: dict[str, int]
    held: int
    peak: int = 0
    issued: int = 0
    done: dict[str, int] = field(default_factory=dict)
    queues: dict[str, deque[Instr]] = field(default_factory=dict)


def walk(plan: Plan, seed: int = 0) -> dict[str, int]:
    """Run the plan in a random interleaving; role -> most bytes held. AssertionError for a deadlock, a leak, a
    misuse."""
    return _Walk(plan, Random(seed)).run()


class _Walk:
    def __init__(self, plan: Plan, rng: Random) -> None:
        self.plan, self.rng = plan, rng
        self.sizes = {v: value.nbytes for v, value in plan.values.items()}
        self.roles = {r.role: _Role(r, {}, sum(s.nbytes for s in r.states)) for r in plan.roles}
        for role in self.roles.values():
            role.peak = role.held
            self._allocate(role, role.plan.allocs_first)

    def run(self) -> dict[str, int]:
        left = sum(len(r.plan.program) for r in self.roles.values())
        while left:
            moves = [r for r in self.roles.values() if self._can_issue(r)]
            meetings = self._meetings()
            assert moves or meetings, f"deadlock with {left} instructions left: {self._stuck()}"
            chosen = self.rng.randrange(len(moves) + len(meetings))
            if chosen < len(moves):
                left -= self._issue(moves[chosen])
            else:
                left -= self._meet(meetings[chosen - len(moves)])
        for role in self.roles.values():
            assert not role.live, f"{role.plan.role} ends the step with {sorted(role.live)[:4]}"
        return {name: r.peak for name, r in self.roles.items()}

    def _can_issue(self, role: _Role) -> bool:
        if role.issued == len(role.plan.program):
            return False
        instr = role.plan.program[role.issued]
        return instr.stream != COMPUTE or self._ready(role, instr)

    def _ready(self, role: _Role, instr: Instr) -> bool:
        return all(role.done.get(stream, 0) >= n for stream, n in instr.waits)

    def _issue(self, role: _Role) -> int:
        instr = role.plan.program[role.issued]
        role.issued += 1
        if instr.stream != COMPUTE:
            role.queues.setdefault(instr.stream, deque()).append(instr)
            return 0
        self._free(role, instr.frees_before)
        for part in instr.parts:
            self._run(role, part)
        self._allocate(role, instr.allocs_after)
        role.done[COMPUTE] = role.done.get(COMPUTE, 0) + 1
        return 1

    def _run(self, role: _Role, part: Part) -> None:
        self._use(role, part.reads)
        sig = None
        if isinstance(part.op, Compute):
            sig = self.plan.chunk(part.op.chunk).steps[part.op.step]  # type: ignore[index]  # a plan has no B
        if sig is not None and (sig.liveness.consumed or sig.liveness.segments != ((),)):
            self._segments(role, part)
        self._allocate(role, part.writes, quiet=sig is not None and sig.liveness.segments != ((),))
        self._free(role, part.frees)

    def _segments(self, role: _Role, part: Part) -> None:
        """The step's code piece by piece: each holds its bytes, and a dying input goes after its last use."""
        assert isinstance(part.op, Compute)
        chunk = self.plan.chunk(part.op.chunk)
        sig = chunk.steps[part.op.step]  # type: ignore[index]  # a plan has no B
        values = iter(part.reads)
        at = {}
        for index, port in enumerate(sig.reads):
            state = port.startswith("in") and chunk.inputs[int(port[2:])].kind in (
                "param",
                "buffer",
            )
            if not state:
                at[index] = next(values)
        # A value behind two ports dies with the later of the two.
        final = {
            v: i
            for i, v in sorted(
                at.items(),
                key=lambda p: (
                    sig.liveness.consumed.index(p[0]) if p[0] in sig.liveness.consumed else -1
                ),
            )
        }
        held = role.held
        for k, segment in enumerate(sig.liveness.segments):
            role.peak = max(role.peak, held + max(segment, default=0))  # type: ignore[type-var]  # bound sizes are ints
            if k < len(sig.liveness.consumed):
                index = sig.liveness.consumed[k]
                if index in at and final[at[index]] == index and at[index] in part.frees:
                    held -= self.sizes[at[index]]

    def _meetings(self) -> list[list[tuple[_Role, Instr]]]:
        """Communications whose members all stand first on their streams, ready."""
        fronts: dict[str, list[tuple[_Role, Instr]]] = {}
        for role in self.roles.values():
            for queue in role.queues.values():
                if queue and self._ready(role, queue[0]):
                    channel = queue[0].parts[0].op.channel  # type: ignore[union-attr]  # only communication is queued
                    fronts.setdefault(channel, []).append((role, queue[0]))
        return [
            members
            for channel, members in fronts.items()
            if len(members) == len(self.plan.channel(channel).roles)
        ]

    def _meet(self, members: list[tuple[_Role, Instr]]) -> int:
        ops = [instr.parts[0].op for _, instr in members]
        if isinstance(ops[0], Collective):
            assert len({op.bucket for op in ops}) == 1  # type: ignore[union-attr]  # all are collectives
        else:
            assert {type(op) for op in ops} == {Send, Recv}
            sizes = {
                self.sizes[v] for _, i in members for v in (*i.parts[0].reads, *i.parts[0].writes)
            }
            assert len(sizes) == 1, "a receive of other bytes than were sent"
        for role, instr in members:
            self._use(role, (*instr.parts[0].reads, *instr.parts[0].writes))
            role.queues[instr.stream].popleft()
            role.done[instr.stream] = role.done.get(instr.stream, 0) + 1
        return len(members)

    def _allocate(self, role: _Role, values: tuple[str, ...], quiet: bool = False) -> None:
        for v in values:
            assert v not in role.live, f"{v} is allocated twice on {role.plan.role}"
            role.live[v] = self.sizes[v]
            role.held += self.sizes[v]
        if not quiet:
            role.peak = max(role.peak, role.held)

    def _free(self, role: _Role, values: tuple[str, ...]) -> None:
        for v in values:
            role.held -= role.live.pop(v)

    def _use(self, role: _Role, values: tuple[str, ...]) -> None:
        gone = [v for v in values if v not in role.live]
        assert not gone, f"{role.plan.role} uses {gone[0]}, which is not alive"

    def _stuck(self) -> str:
        fronts = [
            f"{r.plan.role}/{s}: {q[0].name}"
            for r in self.roles.values()
            for s, q in r.queues.items()
            if q
        ]
        hosts = [
            f"{n}: {r.plan.program[r.issued].name}"
            for n, r in self.roles.items()
            if r.issued < len(r.plan.program)
        ]
        return ", ".join(hosts + fronts)
