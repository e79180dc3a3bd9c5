"""List scheduling of zero-bubble pipelines: forwards in time under a policy, and backwards in time by given keys.

Both run the microbatches of a stage in order, and admit a microbatch to the first of a device's two stages only while its
second one has, or can still get, the memory for one. So the oldest microbatch can always go on: no policy and no keys end in a
deadlock, from the smallest limit that holds one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from piper_compiler.recipes.zb_problem import FORWARD, INPUT, WEIGHT, Problem, Queue, Swept

NEVER = float("inf")


class Policy(NamedTuple):
    """What a device does next. `prefer`: (phase, chunk), the first that can start runs. `ahead`: per chunk, how many microbatches
    may be between F and I. `pending`: with so many W waiting, and forwards to come, a W runs first. `yields`: a W also runs
    before another operation when memory holds a forward up. `last`: of two stages with a W waiting the last one is served.
    `wait`: the share of a W by which it may delay what arrives meanwhile."""

    prefer: tuple[tuple[int, int], ...]
    ahead: tuple[int, int]
    pending: int
    yields: bool
    last: bool
    wait: float = 0.0


class Rules(NamedTuple):
    """A policy per device. Microbatch k enters the pipeline not before (k - lead) times what the slowest device needs for one:
    with a small lead the operations meet in a fixed pattern, as a tight memory limit asks for; with m of them there is no
    such pace."""

    policies: tuple[Policy, ...]
    lead: int


class Greedy:
    """One run of a problem under one policy per device."""

    def __init__(self, problem: Problem, rules: Rules) -> None:
        given = problem.stages
        p, n = given.devices, len(given.seconds)
        self.problem, self.policies = problem, rules.policies
        self.home, self.width = given.home, n
        self.of = [[s for s in range(n) if self.home[s] == r] for r in range(p)]
        self.next = [[0, 0, 0] for _ in range(n)]
        """Per stage and phase the next microbatch."""
        self.moves = [
            [(phase, chunk, self.of[r][chunk], self.next[self.of[r][chunk]]) for phase, chunk in rules.policies[r].prefer]
            for r in range(p)
        ]
        """Per device what it may do next, as it prefers it."""
        self.waiting = [0] * p
        """Per device how many W wait."""
        self.arrives = [NEVER] * problem.count
        enter = [max(0, k - rules.lead) * problem.pace for k in range(problem.microbatches)]
        self.arrives[:: 3 * n] = enter
        self.used, self.free = [0.0] * p, [0.0] * p
        self.first, self.end = [0.0] * p, [-1.0] * problem.count
        self.orders: list[Queue] = [[] for _ in range(p)]
        self.events = [*((0.0, r) for r in range(p)), *((at, 0) for at in enter if at)]
        """Times at which a device may have something new to do."""

    def run(self) -> tuple[list[Queue], Swept]:
        while self.events:
            now, r = heappop(self.events)
            if self.free[r] <= now:
                op = self._choose(r, now)
                if op >= 0:
                    self._start(op, r, now)
        return self.orders, Swept(self.end, self.first, self.free)

    def _choose(self, r: int, now: float) -> int:
        """The operation that device r starts now, or -1."""
        policy, m, arrives = self.policies[r], self.problem.microbatches, self.arrives
        best, soon, blocked = -1, NEVER, False
        for phase, chunk, stage, done in self.moves[r]:
            k = done[phase]
            if k >= (done[FORWARD] if phase else m):
                continue
            op = 3 * (stage + self.width * k) + phase
            at = arrives[op]
            if at == NEVER:
                continue
            if not phase:
                if k - done[INPUT] >= policy.ahead[chunk]:
                    continue
                if self._full(r, chunk):
                    blocked |= at <= now
                    continue
            if at <= now:
                best = op
                break
            if at < soon:
                soon = at
        if not self.waiting[r] or (best >= 0 and not (blocked and policy.yields) and self.waiting[r] < policy.pending):
            return best
        return self._weight(r, now, best, soon, blocked)

    def _weight(self, r: int, now: float, best: int, soon: float, blocked: bool) -> int:
        """The next W of device r where it comes before `best`, or fits before what arrives `soon`."""
        policy, problem = self.policies[r], self.problem
        stages = [s for s in self.of[r] if self.next[s][WEIGHT] < self.next[s][INPUT]]
        stage = stages[-1 if policy.last else 0]
        if best >= 0:
            more = any([self.next[s][FORWARD] < problem.microbatches for s in self.of[r]])
            instead = (blocked and policy.yields) or (self.waiting[r] >= policy.pending and more)
        else:
            instead = blocked or now + problem.stages.seconds[stage][WEIGHT] * (1 - policy.wait) <= soon
        return 3 * (stage + self.width * self.next[stage][WEIGHT]) + WEIGHT if instead else best

    def _full(self, r: int, chunk: int) -> bool:
        """Whether the memory of device r has no room for one more microbatch of a chunk."""
        of, keeps = self.of[r], self.problem.stages.activation
        need = self.used[r] + keeps[of[chunk]]
        if chunk == 0 and len(of) > 1 and self.next[of[1]][FORWARD] == self.next[of[1]][WEIGHT]:
            need += keeps[of[1]]
        return need > self.problem.limit[r]

    def _start(self, op: int, r: int, now: float) -> None:
        problem, n = self.problem, self.width
        stage, phase = op // 3 % n, op % 3
        if not self.orders[r]:
            self.first[r] = now
        self.orders[r].append(op)
        self.next[stage][phase] += 1
        if phase:
            self.waiting[r] += 1 if phase == INPUT else -1
        self.used[r] += problem.memory[op]
        end = now + problem.seconds[op]
        self.end[op] = self.free[r] = end
        heappush(self.events, (end, r))
        after = problem.after[op]
        if after >= 0:
            at, to = end + problem.lag[after], problem.device[after]
            self.arrives[after] = at
            if self.free[to] <= at:  # else it looks again when it is free
                heappush(self.events, (at, to))


class Justify:
    """One run backwards in time: of what could be last on a device, the operation with the largest key is. It makes the end of
    a schedule as tight as `Greedy` makes its start. Counted from the end, W takes a unit's memory and F gives it back."""

    def __init__(self, problem: Problem, key: Sequence[float]) -> None:
        given = problem.stages
        p, n = given.devices, len(given.seconds)
        self.problem, self.key, self.home, self.width = problem, key, given.home, n
        self.of = [[s for s in range(n) if self.home[s] == r] for r in range(p)]
        self.left = [[problem.microbatches] * 3 for _ in range(n)]
        """Per stage and phase the microbatches to come, the last ones being done."""
        self.arrives = [NEVER] * problem.count
        self.arrives[INPUT :: 3 * n] = [0.0] * problem.microbatches
        self.used, self.free = [0.0] * p, [0.0] * p
        self.orders: list[Queue] = [[] for _ in range(p)]
        self.events = [(0.0, r) for r in range(p)]

    def run(self) -> list[Queue]:
        while self.events:
            now, r = heappop(self.events)
            if self.free[r] <= now:
                op = self._choose(r, now)
                if op >= 0:
                    self._start(op, r, now)
        return [queue[::-1] for queue in self.orders]

    def _choose(self, r: int, now: float) -> int:
        best, largest = -1, -1.0
        for chunk, stage in enumerate(self.of[r]):
            forward, back, weight = self.left[stage]
            base = 3 * stage - 3 * self.width
            for op in (
                base + 3 * self.width * forward + FORWARD if back < forward else -1,
                base + 3 * self.width * back + INPUT if weight < back else -1,
                base + 3 * self.width * weight + WEIGHT if weight else -1,
            ):
                if op < 0 or self.key[op] <= largest:
                    continue
                ready = self._admits(r, chunk) if op % 3 == WEIGHT else self.arrives[op] <= now
                if ready:
                    best, largest = op, self.key[op]
        return best

    def _admits(self, r: int, chunk: int) -> bool:
        of, stages = self.of[r], self.problem.stages
        need = self.used[r] + stages.activation[of[chunk]]
        if chunk == 0 and len(of) > 1 and self.left[of[1]][FORWARD] == self.left[of[1]][WEIGHT]:
            need += stages.activation[of[1]]
        return need <= self.problem.limit[r]

    def _start(self, op: int, r: int, now: float) -> None:
        problem, n = self.problem, self.width
        stage, phase = op // 3 % n, op % 3
        self.orders[r].append(op)
        self.left[stage][phase] -= 1
        self.free[r] = end = now + problem.seconds[op]
        heappush(self.events, (end, r))
        if phase == WEIGHT:
            self.used[r] += problem.stages.activation[stage]
            return
        if phase == FORWARD:
            self.used[r] -= problem.stages.activation[stage]
        before = problem.needs[op]
        if before >= 0:
            at, to = end + problem.lag[op], problem.device[before]
            self.arrives[before] = at
            if self.free[to] <= at:
                heappush(self.events, (at, to))
