"""An independent judge of orders and of the plans made of them. It shares no code with the recipes, the compiler or the
timing sweep: it takes anything with `stage`, `phase` and `mb`, runs the devices itself, and stops with an
AssertionError.

    validate(orders, stages, microbatches)   the invariants of an order
    execute(orders, ...)                     its times, every device in order
    orders_of(plan)                          what each role of a plan computes
    validate_plan(plan, ...)                 the same of a plan, and its communication

A plan is `Any` here: nothing of piper is imported.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Item(Protocol):
    """What a slot holds."""

    @property
    def stage(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def mb(self) -> int: ...


class Did(NamedTuple):
    """What a plan computes."""

    stage: int
    phase: str
    mb: int


Table = Sequence[Sequence[Sequence[Item]]]
Key = tuple[int, str, int]


@dataclass(frozen=True)
class Run:
    """Seconds per device: `start` of its first action, `end` of its last, `busy` in between."""

    start: list[float]
    end: list[float]
    busy: list[float]

    @property
    def makespan(self) -> float:
        return max(self.end)

    @property
    def idle(self) -> list[float]:
        """The global bubble of each device."""
        return [self.makespan - busy for busy in self.busy]

    @property
    def span(self) -> float:
        return max(e - s - b for s, e, b in zip(self.start, self.end, self.busy, strict=True))


def validate(orders: Table, stages: int, microbatches: int) -> None:
    """The invariants of an order; AssertionError says which does not hold, and where."""
    _complete(orders, stages, microbatches)
    _in_sequence(orders)
    assert min(peaks(orders)) >= 0
    sent, received = _ends(orders, stages)
    assert sent == received, (
        f"sent and not received: {sent - received}; received and not sent: {received - sent}"
    )
    execute(orders, stages=stages)


def _complete(orders: Table, stages: int, microbatches: int) -> None:
    """Each stage and microbatch has one F and either one B, or one I and one W."""
    found: dict[tuple[int, int], list[str]] = {
        (s, i): [] for s in range(stages) for i in range(microbatches)
    }
    for slots in orders:
        for slot in slots:
            for a in slot:
                assert (a.stage, a.mb) in found, (
                    f"there is no stage {a.stage} with microbatch {a.mb}"
                )
                found[a.stage, a.mb].append(a.phase)
    for (stage, mb), phases in found.items():
        assert sorted(phases) in (["B", "F"], ["F", "I", "W"]), (
            f"stage {stage}, microbatch {mb} has {phases}"
        )


def _in_sequence(orders: Table) -> None:
    """F before B or I, I before W, all on one device; those of one slot count as after each other in the order
    written."""
    homes = {
        (a.stage, a.mb): d
        for d, slots in enumerate(orders)
        for slot in slots
        for a in slot
        if a.phase == "F"
    }
    seen: dict[tuple[int, int], str] = {}
    for device, slots in enumerate(orders):
        for slot in slots:
            for a in slot:
                before, at = seen.get((a.stage, a.mb), ""), homes[a.stage, a.mb]
                assert at == device, (
                    f"{a.stage}{a.phase}{a.mb} is on device {device}, its F on {at}"
                )
                assert (before, a.phase) in {("", "F"), ("F", "B"), ("F", "I"), ("I", "W")}, (
                    f"{a.stage}{a.phase}{a.mb} on device {device} follows {before or 'nothing'}"
                )
                seen[a.stage, a.mb] = a.phase


def peaks(orders: Table) -> list[int]:
    """Most activations open on each device; an activation is open from the start of F to the end of B or W. -1 where
    more are closed than were opened."""
    out = []
    for slots in orders:
        live = most = 0
        for slot in slots:
            live += sum(a.phase == "F" for a in slot)
            most = max(most, live)
            live -= sum(a.phase in "BW" for a in slot)
            if live < 0:
                most = -1
                break
        out.append(most)
    return out


def _ends(
    orders: Table, stages: int
) -> tuple[Counter[tuple[object, ...]], Counter[tuple[object, ...]]]:
    """What is sent, as the senders see it, and what is received, as the receivers do: (value, from, to)."""
    home = {
        (a.stage, a.mb): d
        for d, slots in enumerate(orders)
        for slot in slots
        for a in slot
        if a.phase == "F"
    }
    back = {
        (a.stage, a.mb): d
        for d, slots in enumerate(orders)
        for slot in slots
        for a in slot
        if a.phase in "BI"
    }
    sent: Counter[tuple[object, ...]] = Counter()
    received: Counter[tuple[object, ...]] = Counter()
    for d, slots in enumerate(orders):
        for a in (a for slot in slots for a in slot if a.phase != "W"):
            step = 1 if a.phase == "F" else -1
            homes, value = (home, "act") if a.phase == "F" else (back, "grad")
            if 0 <= a.stage + step < stages and homes.get((a.stage + step, a.mb), d) != d:
                sent[value, a.stage, a.mb, d, homes[a.stage + step, a.mb]] += 1
            if 0 <= a.stage - step < stages and homes.get((a.stage - step, a.mb), d) != d:
                received[value, a.stage - step, a.mb, homes[a.stage - step, a.mb], d] += 1
    return sent, received


def execute(
    orders: Table,
    *,
    stages: int,
    times: Mapping[str, float | Sequence[float]] | None = None,
    overlap: float | None = None,
    hop: float = 0.0,
) -> Run:
    """Run every device in order. `times`: seconds of F, I and W, for all stages or one per stage; a slot of a forward
    and a backward takes `overlap` (default: their sum), and starts when both can. `hop`: seconds between devices.
    AssertionError for a deadlock."""
    seconds = {
        phase: [float(t)] * stages if isinstance(t, int | float) else list(t)
        for phase, t in (times or {"F": 1.0, "I": 1.0, "W": 1.0}).items()
    }
    seconds["B"] = [i + w for i, w in zip(seconds["I"], seconds["W"], strict=True)]
    done: dict[Key, tuple[float, int]] = {}
    waiting: dict[Key, list[int]] = defaultdict(list)
    at, clock = [0] * len(orders), [0.0] * len(orders)
    start, busy = [-1.0] * len(orders), [0.0] * len(orders)
    todo = deque(range(len(orders)))
    while todo:
        d = todo.popleft()
        while at[d] < len(orders[d]):
            slot = orders[d][at[d]]
            needs = [key for a in slot for key in _needs(a, stages)]
            if missing := [key for key in needs if key not in done]:
                waiting[missing[0]].append(d)
                break
            begin = max([clock[d], *(done[key][0] + hop * (done[key][1] != d) for key in needs)])
            takes = (
                sum(seconds[a.phase][a.stage] for a in slot)
                if len(slot) == 1 or overlap is None
                else overlap
            )
            start[d] = begin if start[d] < 0 else start[d]
            clock[d], busy[d], at[d] = begin + takes, busy[d] + takes, at[d] + 1
            for a in slot:
                for key in _gives(a):
                    done[key] = clock[d], d
                    todo.extend(waiting.pop(key, ()))
    stuck = {d: orders[d][k] for d, k in enumerate(at) if k < len(orders[d])}
    assert not stuck, f"deadlock: {stuck}"
    return Run(start, clock, busy)


def _needs(a: Item, stages: int) -> list[Key]:
    match a.phase:
        case "F":
            return [(a.stage - 1, "act", a.mb)] if a.stage else []
        case "W":
            return [(a.stage, "grad", a.mb)]
        case _:
            later = [(a.stage + 1, "grad", a.mb)] if a.stage < stages - 1 else []
            return [(a.stage, "act", a.mb), *later]


def _gives(a: Item) -> list[Key]:
    return {"F": [(a.stage, "act", a.mb)], "W": []}.get(a.phase, [(a.stage, "grad", a.mb)])


def orders_of(plan: Any) -> list[list[tuple[Did, ...]]]:
    """What each role of a plan computes, one slot per part: B is I and W there."""
    out = []
    for role in plan.roles:
        slots: list[tuple[Did, ...]] = []
        for instr in role.program:
            for part in instr.parts:
                if type(part.op).__name__ == "Compute":
                    stage = plan.chunk(part.op.chunk).coords["stage"]
                    slots.append((Did(stage, part.op.step, part.mb),))
        out.append(slots)
    return out


def validate_plan(plan: Any, stages: int, microbatches: int) -> None:
    """The invariants of the order that a plan computes in, of its sends and receives, and that its streams, in order,
    come to an end when a transfer needs both of its ends."""
    validate(orders_of(plan), stages, microbatches)
    ends: dict[str, dict[str, list[str]]] = defaultdict(lambda: {"Send": [], "Recv": []})
    for role in plan.roles:
        for instr in role.program:
            op = instr.parts[0].op
            if type(op).__name__ in ("Send", "Recv"):
                ends[op.channel][type(op).__name__].append(instr.parts[0].node.split(".", 1)[1])
    for channel, both in ends.items():
        assert both["Send"] == both["Recv"], f"{channel}: {both}"
    _streams_end(plan)


def _streams_end(plan: Any) -> None:
    queues: dict[tuple[str, str], deque[Any]] = {}
    done: Counter[tuple[str, str]] = Counter()
    for role in plan.roles:
        for instr in role.program:
            queues.setdefault((role.role, instr.stream), deque()).append(instr)
    moved = True
    while moved:
        moved = False
        fronts: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for (role, stream), queue in queues.items():
            while queue and all(done[role, s] >= n for s, n in queue[0].waits):
                channel = getattr(queue[0].parts[0].op, "channel", None)
                if channel is not None:
                    fronts[channel].append((role, stream))
                    break
                queue.popleft()
                done[role, stream] += 1
                moved = True
        for channel, ends in fronts.items():
            if len(ends) == len(plan.channel(channel).roles):
                for end in ends:
                    queues[end].popleft()
                    done[end] += 1
                moved = True
    stuck = {end: queue[0] for end, queue in queues.items() if queue}
    assert not stuck, f"the streams stop at {stuck}"
