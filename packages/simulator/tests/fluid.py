"""Contention once more, by the definitions and without any cleverness: what the engine is held against.

At each moment all rates are computed anew, of everything that runs: max-min fair levels by bisection, the law of
compute from decision 13. Nothing is shared with the simulator but the types of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from piper_ir.fold.timing import Prepared
from piper_simulator.contention.rates import Flow

EPS = 1e-12
Rates = Mapping[int, float]


def water_levels(flows: Sequence[Flow]) -> list[float]:
    """Max-min fair rates in (0, 1] on links of capacity 1. The water rises in all flows at once, each to `largest` at
    most; those that cannot rise any more, as a link of theirs would run over, keep their level."""
    level: dict[int, float] = {}
    while len(level) < len(flows):
        low, high = 0.0, 1.0
        if fits(flows, level, high):
            low = high
        for _ in range(60 if low < high else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(flows, level, middle) else (low, middle)
        rising = [i for i in range(len(flows)) if i not in level]
        stuck = [i for i in rising if wants(flows[i]) <= low + 1e-9]
        for i in rising:
            if i not in stuck and not fits(
                flows,
                {**level, **{j: min(low, wants(flows[j])) for j in rising if j != i}},
                low + 1e-7,
            ):
                stuck.append(i)
        for i in stuck:
            level[i] = min(low, wants(flows[i]))
    return [level[i] / wants(f) for i, f in enumerate(flows)]


def wants(flow: Flow) -> float:
    return flow.largest if flow.shares else 1.0


def fits(flows: Sequence[Flow], level: Mapping[int, float], water: float) -> bool:
    """Whether all links hold it when those without a level of their own are as high as the water."""
    load: dict[int, float] = {}
    for i, f in enumerate(flows):
        for r, share in f.shares.items():
            load[r] = load.get(r, 0.0) + share * min(level.get(i, water), f.largest) / f.largest
    return all(x <= 1 + EPS for x in load.values())


@dataclass
class Fluid:
    """Runs a plan's steps; `seen`: is told the messages that run together (group -> rate) whenever that changes. The
    times of node x of step k are at [k][x]."""

    prepared: Prepared
    durations: Sequence[float]
    flows: Sequence[Flow]
    latency: float = 0.0
    issue: float = 0.0
    steps: int = 1
    launches: Sequence[float] = ()
    seen: Callable[[Rates], None] = lambda rates: None
    now: float = 0.0
    start: dict[tuple[int, int], float] = field(default_factory=dict)
    end: dict[tuple[int, int], float] = field(default_factory=dict)

    def run(self) -> None:
        p = self.prepared
        left: dict[tuple[int, int], float] = {}  # (step, node), of a group its first
        total = self.steps * len(p)
        while len(self.end) < total:
            begun = self.beginning()
            for step, node in begun:
                left[step, node] = self.work(node)
                for member in self.members(node):
                    self.start[step, member] = self.now
            over = [k for k, x in left.items() if x <= EPS]
            if over:
                for step, node in over:
                    del left[step, node]
                    for member in self.members(node):
                        self.end[step, member] = self.now
                continue
            rates = self.rates(list(left))
            ends = [x / rates[k] for k, x in left.items()]
            wakes = [t - self.now for t in self.moments() if t > self.now + EPS]
            ahead = min([*ends, *wakes], default=inf)
            assert ahead < inf, "a deadlock"
            for k in left:
                left[k] -= rates[k] * ahead
                if left[k] < 1e-11:
                    left[k] = 0.0
            self.now += ahead

    def work(self, node: int) -> float:
        g = self.prepared.group_of[node]
        return self.durations[node] if g < 0 else self.flows[g].seconds

    def members(self, node: int) -> Sequence[int]:
        g = self.prepared.group_of[node]
        return (node,) if g < 0 else self.prepared.groups[g]

    def beginning(self) -> list[tuple[int, int]]:
        """What can begin now; groups by their first member."""
        p, heads = self.prepared, set()
        for nodes in p.streams:
            k = sum((step, x) in self.end for step in range(self.steps) for x in nodes)
            if k < self.steps * len(nodes):
                head = k // len(nodes), nodes[k % len(nodes)]
                if head not in self.start and self.ready(*head):
                    heads.add(head)
        return [
            (step, x)
            for step, x in sorted(heads)
            if self.members(x)[0] == x and all((step, m) in heads for m in self.members(x))
        ]

    def ready(self, step: int, node: int) -> bool:
        waits = all(self.done(step, w) <= self.now + EPS for w in self.prepared.waits[node])
        updated = self.update_before(node)
        if step and updated is not None:
            waits = waits and self.done(step - 1, updated) <= self.now + EPS
        return waits and self.issued(step, node) <= self.now + EPS

    def issued(self, step: int, node: int) -> float:
        """When a host is ready to launch, or later, so that the last launch is not after the end of the kernels."""
        offsets = self.prepared.offsets
        r = self.role(node)
        program = range(offsets[r], offsets[r + 1])
        before = step * sum(map(self.hosted, program)) + sum(
            map(self.hosted, program[: node - offsets[r]])
        )
        launch = self.hosted(node) - self.issue
        return before + self.issue + max(0.0, launch - self.durations[node])

    def hosted(self, node: int) -> float:
        return self.issue + (self.launches[node] if self.launches else 0.0)

    def update_before(self, node: int) -> int | None:
        """Return what a collective on states waits for in the step before: the last that its role computes."""
        p, role = self.prepared, self.role(node)
        first = p.streams[p.stream_of[node]][0] == node
        if not first or p.group_of[node] < 0 or self.is_transfer(node) or p.waits[node]:
            return None
        return next(
            (
                nodes[-1]
                for nodes in p.streams
                if p.group_of[nodes[0]] < 0 and self.role(nodes[0]) == role
            ),
            None,
        )

    def role(self, node: int) -> int:
        return next(r for r, after in enumerate(self.prepared.offsets[1:]) if node < after)

    def done(self, step: int, node: int) -> float:
        """When a node and all before it on its stream have arrived."""
        nodes = self.prepared.streams[self.prepared.stream_of[node]]
        before = [(k, x) for k in range(step + 1) for x in nodes if k < step or x <= node]
        return max(
            self.end.get(x, inf) + (self.latency if self.is_transfer(x[1]) else 0.0) for x in before
        )

    def is_transfer(self, node: int) -> bool:
        g = self.prepared.group_of[node]
        return g >= 0 and self.prepared.p2p[g]

    def moments(self) -> list[float]:
        """When something that is not under way changes what can begin."""
        arrivals = [
            t + self.latency
            for (_, x), t in self.end.items()
            if self.latency and self.is_transfer(x)
        ]
        if not self.issue and not any(self.launches):
            return arrivals
        left = (
            (s, x)
            for s in range(self.steps)
            for x in range(len(self.prepared))
            if (s, x) not in self.start
        )
        return arrivals + [self.issued(*k) for k in left]

    def rates(self, running: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
        group_of = self.prepared.group_of
        messages = [k for k in running if group_of[k[1]] >= 0]
        flows = [self.flows[group_of[k[1]]] for k in messages]
        rates = dict(zip(messages, water_levels(flows), strict=True))
        self.seen({group_of[k[1]]: rate for k, rate in rates.items()})
        for k in running:
            if k not in rates:
                role = self.role(k[1])
                taken = [
                    (f.takes[role], rates[m]) for m, f in zip(messages, flows) if role in f.takes
                ]
                rates[k] = max(
                    1 / 8, 1 - sum(f_sm + f_memory * rate for (f_sm, f_memory), rate in taken)
                )
        return rates
