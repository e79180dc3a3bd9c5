"""Schedule zero-bubble pipelines by lists: forwards in time under a policy, and backwards in time by given keys.

Both run the microbatches of a stage in order. They admit a microbatch to the first of a device's two stages only while
the second one has, or can still get, the memory for one: the second stage gets back the memory that its microbatches
hold, but not always the memory that these freed at their I. So the oldest microbatch can always go on: under any limit
that holds one microbatch, no policy and no keys end in a deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from piper_compiler.recipes.zb_problem import FORWARD, INPUT, WEIGHT, Problem, Queue, Stages, Swept

NEVER = float("inf")


class Policy(NamedTuple):
    """Say which operation a device runs next.

    Attributes:
        prefer: (phase, chunk) pairs; the first that can start runs.
        ahead: by chunk, how many microbatches may be between F and I.
        pending: how many W must wait, with forwards to come, for a W to run first.
        yields: whether a W also runs before another operation when memory delays a forward.
        last: whether the last of two stages with a W waiting is served first.
        wait: the share of a W by which it may delay an operation that becomes ready meanwhile.
    """

    prefer: tuple[tuple[int, int], ...]
    ahead: tuple[int, int]
    pending: int
    yields: bool
    last: bool
    wait: float = 0.0


class Rules(NamedTuple):
    """Hold a policy per device, and the pace at which microbatches enter.

    Microbatch k enters the pipeline not before (k - lead) times the slowest device's time for one. With a small lead
    the operations meet in a fixed pattern, as a tight memory limit asks for; a lead of m sets no pace.
    """

    policies: tuple[Policy, ...]
    lead: int


class Cutoff(NamedTuple):
    """Say when a run is given up.

    It is given up when its makespan must exceed `makespan` or its span must exceed `span`, and the sum of both must
    exceed `both`. No makespan is smaller than `least`.
    """

    makespan: float
    span: float
    both: float
    least: float

    def hopeless(self, makespan: float, span: float) -> bool:
        """Return whether a run is to be given up, given lower bounds of its makespan and span."""
        makespan = max(makespan, self.least)
        return (makespan > self.makespan or span > self.span) and makespan + span > self.both


class _Move(NamedTuple):
    """Describe a possible move of a device: the next operation of one kind.

    The last three are from `_keeps`, for forwards of the first of two stages.

    Attributes:
        kind: phase + 3 stage.
        ahead: for forwards, how far ahead of the next I the next one may be, as a difference of numbers; 0 for I.
        keeps: the memory that one forward keeps.
        second: the kind of the second stage's forwards.
        reserve: the memory that one of these forwards keeps.
        after: the memory that one of these forwards keeps after I.
    """

    kind: int
    ahead: int
    keeps: float
    second: int
    reserve: float
    after: float


class Greedy:
    """Run a problem once under one policy per device."""

    def __init__(self, problem: Problem, rules: Rules) -> None:
        pipeline = problem.stages
        self.problem, self.policies, self.width = problem, rules.policies, 3 * len(pipeline.seconds)
        of = pipeline.of_devices()
        self.next = list(range(self.width))
        """The next operation of each kind."""
        self.moves = [
            [self._move(mine, q, *x) for x in q.prefer]
            for mine, q in zip(of, rules.policies, strict=True)
        ]
        """The possible moves of each device, by preference."""
        self.weights = [
            [3 * s + WEIGHT for s in mine[:: -1 if q.last else 1]]
            for mine, q in zip(of, rules.policies, strict=True)
        ]
        """The kinds of each device's W, by preference."""
        self.waiting = [0] * pipeline.devices
        """The number of waiting W of each device."""
        enter = [max(0, k - rules.lead) * problem.pace for k in range(problem.microbatches)]
        self.arrives = [NEVER] * (problem.count + self.width)
        """The time at which each operation's input arrives; after the last of each kind comes an entry `NEVER`."""
        self.arrives[: problem.count : self.width] = enter
        self.used = [0.0] * pipeline.devices

    def _move(self, stages: list[int], policy: Policy, phase: int, chunk: int) -> _Move:
        ahead = policy.ahead[chunk] * self.width - INPUT if phase == FORWARD else 0
        return _Move(3 * stages[chunk] + phase, ahead, *_keeps(self.problem.stages, stages, chunk))

    def run(self, cut: Cutoff | None = None) -> tuple[list[Queue], Swept] | None:
        """Return the orders and their times, or None when the run was cut.

        A search spends most of its time here, hence the local names.
        """
        problem, width, policies, moves = self.problem, self.width, self.policies, self.moves
        upcoming, arrives, waiting, used = self.next, self.arrives, self.waiting, self.used
        seconds, memory, after, lag, device, limits = (
            problem.seconds, problem.memory, problem.after, problem.lag, problem.device, problem.limit,
        )  # fmt: skip
        p = len(policies)
        end, first, free, idle = [-1.0] * problem.count, [0.0] * p, [0.0] * p, [0.0] * p
        orders: list[Queue] = [[] for _ in range(p)]
        wake = [0.0] * p  # when a device may have something new to do
        events = [(0.0, r) for r in range(p)]
        while events:
            now, r = heappop(events)
            if wake[r] != now:
                continue
            best, blocked, later = -1, False, NEVER
            for kind, ahead, keeps, second, reserve, held in moves[r]:
                op = upcoming[kind]
                at = arrives[op]
                if at > now:
                    if at < later:
                        later = at
                    continue
                if ahead:
                    if op - upcoming[kind + INPUT] >= ahead:
                        continue
                    need = used[r] + keeps
                    if second >= 0 and upcoming[second] + INPUT == upcoming[second + INPUT]:
                        need += self._missing(second, reserve, held)
                    if need > limits[r]:
                        blocked = True
                        continue
                best = op
                break
            if waiting[r]:
                policy = policies[r]
                if best < 0 or waiting[r] >= policy.pending or (blocked and policy.yields):
                    best = self._weight(r, now, best, blocked, later)
            if best < 0:
                wake[r] = later
                if later < NEVER:
                    heappush(events, (later, r))
                continue
            if now > free[r]:
                if orders[r]:
                    idle[r] += now - free[r]
                else:
                    first[r] = now
                if cut is not None and cut.hopeless(first[r] + idle[r] + problem.busy[r], idle[r]):
                    return None
            orders[r].append(best)
            kind = best % width
            upcoming[kind] += width
            if kind % 3:
                waiting[r] += 1 if kind % 3 == INPUT else -1
            used[r] += memory[best]
            done = now + seconds[best]
            end[best] = free[r] = wake[r] = done
            heappush(events, (done, r))
            op = after[best]
            if op >= 0:
                r = device[op]
                arrives[op] = done = done + lag[op]
                if free[r] <= done < wake[r]:
                    wake[r] = done
                    heappush(events, (done, r))
        assert sum(map(len, orders)) == problem.count, "no policy ends in a deadlock"
        return orders, Swept(end, first, free)

    def _weight(self, r: int, now: float, best: int, blocked: bool, later: float) -> int:
        """Return the next W of device r if it comes before `best`, or fits before the next arrival; else `best`.

        Nothing arrives before `later`.
        """
        policy, upcoming, kinds = self.policies[r], self.next, self.weights[r]
        kind = kinds[0]
        if upcoming[kind] > upcoming[kind - 1]:
            kind = kinds[1]  # none of the first stage waits
        if best >= 0:
            if not (blocked and policy.yields) and not any(
                [upcoming[x - WEIGHT] < self.problem.count for x in kinds]
            ):
                return best
        elif not blocked:
            done = now + self.problem.seconds[kind] * (1 - policy.wait)
            if done > later and any([self._comes(r, done, move) for move in self.moves[r]]):
                return best
        return upcoming[kind]

    def _missing(self, second: int, reserve: float, held: float) -> float:
        """Return the memory that a device's second stage lacks for one microbatch once all it has are done with I."""
        waiting = (self.next[second + INPUT] - self.next[second + WEIGHT] + 1) // self.width
        return max(0.0, reserve - waiting * held)

    def _comes(self, r: int, by: float, move: _Move) -> bool:
        """Return whether an operation that no limit delays arrives before `by`."""
        kind, ahead, keeps, second, reserve, after = move
        upcoming = self.next
        op = upcoming[kind]
        if self.arrives[op] >= by:
            return False
        if not ahead:
            return True
        need = self.used[r] + keeps
        if second >= 0 and upcoming[second] + INPUT == upcoming[second + INPUT]:
            need += self._missing(second, reserve, after)
        return op - upcoming[kind + INPUT] < ahead and need <= self.problem.limit[r]


class Justify:
    """Run once backwards in time: of the operations that could be last on a device, the one with the largest key is.

    This makes the end of a schedule as tight as `Greedy` makes its start. Counted from the end, W takes a unit's memory
    and F gives it back.
    """

    def __init__(self, problem: Problem, key: Sequence[float]) -> None:
        pipeline, count = problem.stages, problem.count
        self.problem, self.key, self.width = problem, key, 3 * len(pipeline.seconds)
        of = pipeline.of_devices()
        self.moves = [
            [
                (3 * s + x, x, *_keeps(pipeline, mine, c))
                for c, s in enumerate(mine)
                for x in range(3)
            ]
            for mine in of
        ]
        """The possible moves of each device: kind, phase, and the memory that W takes, as in `_Move`."""
        self.next = list(range(count - self.width, count))
        """The next operation of each kind."""
        self.arrives = [NEVER] * (count + self.width)
        """The time at which each operation's reader is there; after the last of each kind comes an entry `NEVER`."""
        self.arrives[INPUT : count : self.width] = [0.0] * problem.microbatches
        self.arrives[WEIGHT:count:3] = [0.0] * (count // 3)

    def run(self) -> list[Queue]:
        problem, key, width, moves, upcoming, arrives = (
            self.problem,
            self.key,
            self.width,
            self.moves,
            self.next,
            self.arrives,
        )
        p, activation = len(moves), problem.stages.activation
        used, free, wake = [0.0] * p, [0.0] * p, [0.0] * p
        orders: list[Queue] = [[] for _ in range(p)]
        events = [(0.0, r) for r in range(p)]
        while events:
            now, r = heappop(events)
            if wake[r] != now:
                continue
            best, largest, later = -1, -1.0, NEVER
            for kind, phase, keeps, second, reserve, _ in moves[r]:
                op = upcoming[kind]
                at = arrives[op]
                if at > now:
                    if at < later:
                        later = at
                    continue
                if key[op] <= largest or (phase == INPUT and op < upcoming[kind + 1]):
                    continue
                if phase == WEIGHT:
                    need = used[r] + keeps
                    if second >= 0 and upcoming[second] + WEIGHT == upcoming[second + WEIGHT]:
                        need += reserve
                    if need > problem.limit[r]:
                        continue
                best, largest = op, key[op]
            if best < 0:
                wake[r] = later
                if later < NEVER:
                    heappush(events, (later, r))
                continue
            orders[r].append(best)
            kind = best % width
            upcoming[kind] -= width
            done = free[r] = wake[r] = now + problem.seconds[best]
            heappush(events, (done, r))
            if kind % 3 == WEIGHT:
                used[r] += activation[kind // 3]
                continue
            if kind % 3 == FORWARD:
                used[r] -= activation[kind // 3]
            op = problem.needs[best]
            if op >= 0:
                arrives[op] = at = done + problem.lag[best]
                r = problem.device[op]
                if free[r] <= at < wake[r]:
                    wake[r] = at
                    heappush(events, (at, r))
        return [queue[::-1] for queue in orders]


def _keeps(stages: Stages, mine: Sequence[int], chunk: int) -> tuple[float, int, float, float]:
    """Return the memory that one microbatch of a chunk keeps, and the memory that its second stage must reserve.

    If the device has a second stage after the chunk's, the other three are the kind of that stage's forwards, the
    memory that one of them keeps (there must be room for it while the second stage has nothing to give back), and the
    memory that it keeps after I. Otherwise they are -1 and 0.
    """
    keeps = stages.activation[mine[chunk]]
    if chunk or len(mine) == 1:
        return keeps, -1, 0.0, 0.0
    return keeps, 3 * mine[1], stages.activation[mine[1]], stages.kept[mine[1]]
