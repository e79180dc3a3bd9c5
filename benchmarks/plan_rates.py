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
    rows = []
    for case in cases(quick):
        plan, prepared, durations = case.plan, case.prepared, case.durations
        rows.append(
            _rate("simulate", f"SimPy engine, {case.title}", case, lambda: run(prepared, durations, latency=plan.hop), quick, ENGINE_GOAL,
                  "start, end and ready of every instruction"),
        )  # fmt: skip
        rows.append(
            _rate("simulate", f"piper.simulate, {case.title}", case, lambda: piper.simulate(plan), quick, ENGINE_GOAL,
                  "whole call: durations, engine, steady-state period, memory curve, Span objects, plan key"),
        )  # fmt: skip
    return rows


def sweep_rows(quick: bool) -> list[Row]:
    """The fixed-order sweep, what it needs once per plan, and `verify`."""
    rows = []
    for case in cases(quick):
        plan, prepared, durations = case.plan, case.prepared, case.durations
        rows += [
            _rate("sweep", f"sweep, {case.title}", case, lambda: sweep(prepared, durations, latency=plan.hop), quick, SWEEP_GOAL),
            _rate("sweep", f"prepare, {case.title}", case, lambda: prepare(plan), quick, note="once per plan"),
            _rate("sweep", f"steady-state period, {case.title}", case, lambda: period(prepared, durations, latency=plan.hop), quick,
                  note="sweeps until steps repeat; instructions of one step per second"),
            _rate("sweep", f"verify, {case.title}", case, lambda: verify(plan), quick),
        ]  # fmt: skip
    return rows


def _rate(
    section: str, name: str, case: Case, call: Callable[[], object], quick: bool, goal: Goal | None = None, note: str = ""
) -> Row:
    seconds = repeated(call, 3 if quick else 9)
    return rate_row(section, name, len(case.prepared), seconds, UNIT, goal, note)
