"""Clocks of ranks: an offset that was put in is found again, within the error that is stated."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.report.tests import samples
from packages.report.tests.chrome_documents import problems
from piper_ir.ground.trace import Trace
from piper_report.facts import clocks
from piper_report.facts.clocks import NOTE, aligned, offsets
from piper_report.facts.transfers import transfers
from piper_report.pages.chrome import chrome_trace

PLAN = samples.plan()
TRACE = samples.executed(samples.simulation().trace)
WORLD = PLAN.mesh.world


def shifted(trace: Trace, by: dict[int, float]) -> Trace:
    """As if the clock of a rank went ahead by so many seconds."""
    move = {r: by.get(r, 0.0) for r in range(WORLD)}
    spans = tuple(
        replace(s, start=s.start + move[s.rank], end=s.end + move[s.rank]) for s in trace.spans
    )
    memory = tuple(replace(m, time=m.time + move[m.rank]) for m in trace.memory)
    return replace(trace, spans=spans, memory=memory)


@given(
    st.lists(st.floats(-10, 10), min_size=WORLD - 1, max_size=WORLD - 1),
    st.lists(st.floats(0, 1e-3), min_size=len(TRACE.spans), max_size=len(TRACE.spans)),
)
def test_a_shifted_clock_is_found_within_its_error(by: list[float], waits: list[float]) -> None:
    """Every end of a transfer may last longer, to either side, than the moment in which both are there."""
    ahead = dict(enumerate(by, start=1))
    spans = tuple(replace(s, start=s.start - w, end=s.end + w) for s, w in zip(TRACE.spans, waits))
    found = offsets(PLAN, shifted(replace(TRACE, spans=spans), ahead))
    assert found[0].seconds == 0 and found[0].error <= 1e-9
    for rank, shift in ahead.items():
        assert abs(found[rank].seconds + shift) <= found[rank].error + 1e-9
        assert found[rank].slack == 0 and found[rank].error < inf


def test_negative_control_the_error_shrinks_with_the_waits() -> None:
    """The stated error is as long as a transfer and what both ends wait beside it, not more."""
    for wait in (1e-3, 1e-5):
        spans = tuple(
            replace(s, start=s.start - wait, end=s.end + wait)
            for s in samples.simulation().trace.spans
        )
        found = offsets(PLAN, shifted(replace(TRACE, spans=spans), {1: 4.0}))
        assert found[1].error <= 7e-4 + 3 * wait


def test_an_aligned_trace_keeps_every_transfer_in_order() -> None:
    moved = aligned(PLAN, shifted(TRACE, {1: 5.0, 2: -3.0, 3: 1e-3}))
    for group in transfers(PLAN, moved):
        assert max(s.start for s in group) <= min(s.end for s in group) + 1e-9
    assert min(s.start for s in moved.spans) == 0
    assert problems(chrome_trace(moved)) == []
    assert (
        moved.notes[NOTE.format(1)].startswith("offset -5 s +- ")
        and NOTE.format(0) not in moved.notes
    )
    assert chrome_trace(moved)["otherData"][NOTE.format(2)].startswith("offset +3 s +- ")


def test_clocks_that_agree_are_left_alone() -> None:
    moved = aligned(PLAN, TRACE)
    assert moved.spans == TRACE.spans and moved.memory == TRACE.memory
    assert moved.notes[NOTE.format(3)].startswith("offset 0 s +- ")


def test_transfers_that_contradict_each_other_say_by_how_much() -> None:
    """The other end of one transfer was over 2 ms before the first began, and the other way round in another."""
    p2p = [g for g in transfers(PLAN, TRACE) if {s.rank for s in g} == {0, 2}]
    first, last = p2p[0], p2p[-1]
    late, early = next(s for s in first if s.rank == 2), next(s for s in last if s.rank == 2)
    start, end = min(s.start for s in first), max(s.end for s in last)
    changed = {
        late: replace(late, start=start - 3e-3, end=start - 2e-3),
        early: replace(early, start=end + 2e-3, end=end + 3e-3),
    }
    found = offsets(PLAN, replace(TRACE, spans=tuple(changed.get(s, s) for s in TRACE.spans)))
    assert found[2].slack == pytest.approx(2e-3, rel=0.5) and found[2].error >= found[2].slack
    assert "contradict each other by" in str(found[2])


def test_contradictions_are_settled_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding made a cycle of these bounds negative in one direction alone, with the least slack of the other."""
    ms = {
        (0, 1): 0.14523909521431703, (0, 3): 0.087558021394078, (1, 0): -0.054614149304478485,
        (1, 2): -0.10189231200245358, (1, 3): 0.2006023123580455, (2, 0): 0.17524627761817904,
        (2, 1): -0.0562744379813787, (3, 0): 0.01027213328487189, (3, 1): 0.19211868469783648,
    }  # fmt: skip
    bounds = {pair: value / 1e3 for pair, value in ms.items()}
    monkeypatch.setattr(clocks, "_bounds", lambda plan, trace: bounds)
    for offset in offsets(PLAN, TRACE).values():
        assert offset.slack == pytest.approx(7.908e-5, rel=1e-3) and offset.error < inf


def test_a_rank_without_transfers_is_unknown() -> None:
    plan = samples.plan_of(pp=1, dp=1)
    two = samples.plan_of(pp=2, microbatches=1)
    lonely = Trace(
        two.key,
        "executed",
        tuple(s for s in samples.executed(_simulated(two)).spans if s.stream == "compute"),
    )
    found = offsets(two, lonely)
    assert found[1].error == inf and "unknown" in str(found[1]) and not found[1].needed
    assert aligned(two, lonely).spans == lonely.spans
    assert offsets(plan, Trace(plan.key, "executed", ())) == {}


def _simulated(plan) -> Trace:
    from piper_simulator import simulate

    return simulate(plan).trace
