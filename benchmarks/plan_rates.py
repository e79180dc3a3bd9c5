"""How fast plans are simulated, swept and verified: instructions per second on 1F1B pipelines of given durations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import piper
from benchmarks.measure import Goal, Row, rate_row, repeated
from piper_ir.plan import Plan
from piper_ir.timing import Prepared, period, prepare, sweep
from piper_ir.verify import verify
from piper_simulator.engine import run

ENGINE_GOAL = Goal("above", 50_000)
SWEEP_GOAL = Goal("above", 500_000)
UNIT = "instr/s"


@dataclass(frozen=True)
class Case:
    """A plan, as a DAG and with a duration per instruction."""

    title: str
    plan: Plan
    prepared: Prepared
    durations: tuple[float, ...]


@lru_cache(maxsize=8)
def pipeline(pp: int, microbatches: int) -> Case:
    """1F1B with durations that differ by stage, and a latency per hop."""
    stage_s = [1.0 + 0.1 * (s % 3) for s in range(pp)]
    program = piper.synthetic(stages=pp, F=stage_s, I=stage_s, W=stage_s, hop=0.1)
    strategy = piper.Strategy(piper.Mesh(pp=pp), piper.recipes.one_f_one_b(pp=pp, microbatches=microbatches))
    plan = piper.compile(program, strategy).plan
    prepared = prepare(plan)
    spans = piper.simulate(plan).trace.spans
    durations = tuple(s.end - s.start for s in spans)
    return Case(f"1F1B pp={pp} m={microbatches}, {len(prepared):,} instructions", plan, prepared, durations)


def cases(quick: bool) -> list[Case]:
    """A plan of everyday size, and a large one."""
    return [pipeline(4, 8)] if quick else [pipeline(8, 64), pipeline(8, 256)]


def simulate_rows(quick: bool) -> list[Row]:
    """The event engine alone and inside of `piper.simulate`."""
    return [row for case in cases(quick) for row in _simulated(case, quick)]


def sweep_rows(quick: bool) -> list[Row]:
    """The fixed-order sweep, what it needs once per plan, and `verify`."""
    return [row for case in cases(quick) for row in _swept(case, quick)]


def _simulated(case: Case, quick: bool) -> list[Row]:
    def rate(name: str, call: Callable[[], object], note: str) -> Row:
        return _rate("simulate", f"{name}, {case.title}", case, call, quick, ENGINE_GOAL, note)

    plan, prepared, durations = case.plan, case.prepared, case.durations
    whole = "whole call: durations, engine, steady-state period, memory curve, Span objects, plan key"
    return [
        rate("SimPy engine", lambda: run(prepared, durations, latency=plan.hop), "start, end and ready of every instruction"),
        rate("piper.simulate", lambda: piper.simulate(plan), whole),
    ]


def _swept(case: Case, quick: bool) -> list[Row]:
    def rate(name: str, call: Callable[[], object], goal: Goal | None = None, note: str = "") -> Row:
        return _rate("sweep", f"{name}, {case.title}", case, call, quick, goal, note)

    plan, prepared, durations = case.plan, case.prepared, case.durations
    periodic = "sweeps until steps repeat; instructions of one step per second"
    return [
        rate("sweep", lambda: sweep(prepared, durations, latency=plan.hop), SWEEP_GOAL),
        rate("prepare", lambda: prepare(plan), note="once per plan"),
        rate("steady-state period", lambda: period(prepared, durations, latency=plan.hop), note=periodic),
        rate("verify", lambda: verify(plan)),
    ]


def _rate(
    section: str, name: str, case: Case, call: Callable[[], object], quick: bool, goal: Goal | None = None, note: str = ""
) -> Row:
    seconds = repeated(call, 3 if quick else 9)
    return rate_row(section, name, len(case.prepared), seconds, UNIT, goal, note)
