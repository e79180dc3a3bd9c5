"""The abstract run of `verify` agrees with a literal one of hosts that issue, queues and meetings, step by step."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from packages.ir.tests.plans_for_tests import SCALAR, good_plan
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan import COMPUTE, Channel, Instr, Part, Plan, RolePlan, Value
from piper_ir.program.ops import Add, Collective, Recv, Send
from piper_ir.verify.columns import PlanColumns
from piper_ir.verify.rules import Findings, Violation
from piper_ir.verify.run import Events, _conditions, _edges, meetings, run
from tests.helpers.cases import each_case
from tests.helpers.random_plans import random_plan

ROLES = ("a", "b", "c")
STREAMS = (COMPUTE, "s0", "s1", "s2")
VALUES = {"v": Value("v", SCALAR, "scalar")}


@dataclass
class _Host:
    """Run one role: a thread issues in program order and computes, and each communication stream is a queue."""

    role: RolePlan
    at: int = 0
    queues: dict[str, deque[Instr]] = field(default_factory=dict)
    issued: deque[Instr] = field(default_factory=deque)
    done: Counter[str] = field(default_factory=Counter)

    def waited(self, instr: Instr) -> bool:
        return all(self.done[s] >= n for s, n in instr.waits)

    def issue(self) -> bool:
        before = self.at
        while self.at < len(self.role.program):
            instr = self.role.program[self.at]
            if instr.comm:
                self.queues.setdefault(instr.stream, deque()).append(instr)
                self.issued.append(instr)
            elif self.waited(instr):
                self.done[COMPUTE] += 1
            else:
                break
            self.at += 1
        return self.at > before

    def ready(self, channel: str, serial: bool) -> str | None:
        """Return the stream whose next instruction can meet its peers on a channel now."""
        heads = [s for s, q in self.queues.items() if q and q[0].parts[0].op.channel == channel]  # type: ignore[union-attr]  # COMM
        heads = [s for s in heads if self.waited(self.queues[s][0])]
        if serial:
            heads = [s for s in heads if self.queues[s][0] is self.issued[0]]
        return heads[0] if heads else None

    def finish(self, stream: str) -> None:
        self.issued.remove(self.queues[stream].popleft())
        self.done[stream] += 1


def _runs(plan: Plan, serial: bool) -> bool:
    """Return whether the literal run gets to its end."""
    hosts = {r.role: _Host(r) for r in plan.roles}
    moved = True
    while moved:
        moved = any([host.issue() for host in hosts.values()])
        for channel in plan.channels:
            streams = {r: hosts[r].ready(channel.id, serial) for r in channel.roles}
            if all(streams.values()):
                moved = True
                for role, stream in streams.items():
                    assert stream is not None
                    hosts[role].finish(stream)
    return all(h.at == len(h.role.program) and not h.issued for h in hosts.values())


@st.composite
def _plans(draw: st.DrawFn) -> Plan:
    """Put communication and compute in one global order, which every role follows but for a few swaps of neighbours."""
    pairs = [(x, y) for x in ROLES for y in ROLES if x != y]
    stream = st.sampled_from(STREAMS[1:])
    channels = [Channel(f"{x}>{y}", "p2p", (x, y), (draw(stream), draw(stream))) for x, y in pairs]
    channels.append(Channel("all", "group", ROLES, (draw(stream), draw(stream), draw(stream))))
    steps = draw(
        st.lists(
            st.one_of(st.sampled_from(channels), st.sampled_from(ROLES)), min_size=4, max_size=12
        )
    )
    programs: dict[str, list[Instr]] = {r: [] for r in ROLES}
    for k, step in enumerate(steps):
        if isinstance(step, str):
            programs[step].append(Instr(COMPUTE, (Part(f"n{k}", Add()),)))
        elif step.kind == "group":
            for role in ROLES:
                met = Part(f"n{k}", Collective("all_reduce", step.id), -1, ("v",), ("v",))
                programs[role].append(Instr(step.stream_on(role), (met,)))
        else:
            for role, op in zip(
                step.roles,
                (
                    Part(f"n{k}", Send(step.id), -1, ("v",)),
                    Part(f"n{k}", Recv(step.id), -1, (), ("v",)),
                ),
            ):
                programs[role].append(Instr(step.stream_on(role), (op,)))
    roles = tuple(RolePlan(r, {}, (), tuple(_disturbed(draw, programs[r])), STREAMS) for r in ROLES)
    return Plan("", Mesh(), 1, 1, (), roles, tuple(channels), (), VALUES, ())


def _disturbed(draw: st.DrawFn, program: list[Instr]) -> list[Instr]:
    """Swap neighbours on different channels, then add waits for earlier instructions."""
    for k in draw(
        st.lists(st.integers(0, max(0, len(program) - 2)), max_size=6 if len(program) > 1 else 0)
    ):
        program[k], program[k + 1] = program[k + 1], program[k]
    findings: list[Instr] = []
    counts: Counter[str] = Counter()
    for instr in program:
        others = [s for s in STREAMS if counts[s] and s != instr.stream]
        chosen = draw(st.lists(st.sampled_from(others), unique=True, max_size=2)) if others else []
        findings.append(
            Instr(
                instr.stream,
                instr.parts,
                tuple((s, draw(st.integers(1, counts[s]))) for s in chosen),
            )
        )
        counts[instr.stream] += 1
    return findings


def _verdict(plan: Plan) -> list[Violation]:
    findings = Findings(plan)
    met = meetings(findings)
    assert not findings.violations, "swaps of neighbours keep the number of sends and receives"
    order = run(findings, Events(findings.columns, met))
    assert bool(order) == all(v.rule != "R19-deadlock" for v in findings.violations)
    return findings.violations


SEEN: Counter[str] = Counter()


@settings(max_examples=200)
@given(_plans())
def _compare(plan: Plan) -> None:
    rules = [v.rule for v in _verdict(plan)]
    ordinary, serial = _runs(plan, serial=False), _runs(plan, serial=True)
    assert rules == ([] if serial else ["R20-issue-order"] if ordinary else ["R19-deadlock"])
    SEEN[rules[0] if rules else "runs"] += 1


def test_the_abstract_run_hangs_when_the_literal_run_does() -> None:
    SEEN.clear()
    _compare()
    assert min(SEEN[k] for k in ("runs", "R20-issue-order", "R19-deadlock")) >= 5, SEEN


def test_the_literal_run_of_the_good_plan_ends() -> None:
    assert _runs(good_plan(), serial=False) and _runs(good_plan(), serial=True)


@each_case("serial", [True, False])
def test_the_run_has_the_conditions_that_name_a_cycle(serial: bool) -> None:
    """Compare the columns that a run goes by with the conditions that messages name, on random plans."""
    for seed in range(20):
        plan, _ = random_plan(seed)
        columns = PlanColumns(plan)
        events = Events(columns, [])
        edges = zip(*map(list, _edges(events, serial)), strict=True)
        named = [(b, i) for i, all_of in _conditions(events, serial) for b, _ in all_of]
        assert sorted(edges) == sorted(named)
