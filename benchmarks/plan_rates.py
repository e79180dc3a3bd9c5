"""Measure how fast plans are simulated, swept and verified: instructions per second on 1F1B of given durations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import piper
from benchmarks.measure import Goal, Row, rate_row, repeated
from piper_ir.fold.steady_state import period
from piper_ir.fold.timing import Prepared, prepare, sweep
from piper_ir.plan.plan import Plan
from piper_ir.verify import verify
from piper_simulator import Work, load_cluster, message_flows, run_engine, wiring

ENGINE_GOAL = Goal("above", 50_000)
CONTENDED_GOAL = Goal("above", 30_000)
SWEEP_GOAL = Goal("above", 500_000)
UNIT = "instr/s"


@dataclass(frozen=True)
class Case:
    """Hold a plan, as a DAG and with a duration per instruction."""

    title: str
    plan: Plan
    prepared: Prepared
    durations: tuple[float, ...]


@lru_cache(maxsize=8)
def pipeline(pp: int, microbatches: int) -> Case:
    """Return 1F1B with durations that differ by stage, and a latency per hop."""
    stage_s = [1.0 + 0.1 * (s % 3) for s in range(pp)]
    program = piper.synthetic(stages=pp, F=stage_s, I=stage_s, W=stage_s, hop=0.1)
    strategy = piper.Strategy(
        piper.Mesh(pp=pp), piper.recipes.one_f_one_b(pp=pp, microbatches=microbatches)
    )
    plan = piper.compile(program, strategy).plan
    prepared = prepare(plan)
    spans = piper.simulate(plan).trace.spans
    durations = tuple(s.end - s.start for s in spans)
    return Case(
        f"1F1B pp={pp} m={microbatches}, {len(prepared):,} instructions", plan, prepared, durations
    )


def cases(quick: bool) -> list[Case]:
    """Return a plan of everyday size, and a large one."""
    return [pipeline(4, 8)] if quick else [pipeline(8, 64), pipeline(8, 256)]


def simulate_rows(quick: bool) -> list[Row]:
    """Measure the event engine alone, inside of `piper.simulate`, and under contention."""
    recipes = {"interleaved": piper.recipes.interleaved, "dualpipe_v": piper.recipes.dualpipe_v}
    rows = [row for case in cases(quick) for row in _simulated(case, quick)]
    return rows + [
        contended(name, recipe, 4 if quick else 8, 16 if quick else 64, quick)
        for name, recipe in recipes.items()
    ]


def contended(
    name: str, recipe: Callable[..., Any], pp: int, microbatches: int, quick: bool
) -> Row:
    """Return two chunks per device and dp=4 on nodes of one H100 each.

    Compute takes 1 ms, and messages of 40 MB share the NICs.
    """
    program = piper.synthetic(stages=2 * pp, F=1e-3, I=1e-3, W=1e-3, params=40_000_000)
    directives = (
        *recipe(pp=pp, microbatches=microbatches),
        *piper.recipes.data_parallel(over=("dp",)),
    )
    plan = piper.compile(
        program, piper.Strategy(piper.Mesh(pp=pp, dp=4), directives), global_batch=4 * microbatches
    ).plan
    prepared, cluster = prepare(plan), load_cluster(f"h100x1*{4 * pp}")
    message = Work(40e6 / cluster.links.inter_bandwidth, "formula", bytes=40_000_000)
    work = [message if instr.comm else Work(1e-3, "formula") for _, _, instr in plan.instructions()]
    seconds, found = [w.seconds for w in work], message_flows(plan, prepared, work, wiring(cluster))
    (times,) = run_engine(prepared, seconds, flows=found)
    longer = sum(
        end - start > 1.001 * s
        for start, end, s in zip(times.start, times.end, seconds, strict=True)
    )
    note = f"CPU time; {longer / len(prepared):.0%} of the instructions take longer than alone"
    taken = repeated(
        lambda: run_engine(prepared, seconds, flows=found), 3 if quick else 9, time.process_time
    )
    title = (
        f"SimPy engine under contention, {name} pp={pp} dp=4 m={microbatches}, {len(prepared):,} "
        f"instructions"
    )
    return rate_row("simulate", title, len(prepared), taken, UNIT, CONTENDED_GOAL, note)


def sweep_rows(quick: bool) -> list[Row]:
    """Measure the fixed-order sweep, what it needs once per plan, and `verify`."""
    return [row for case in cases(quick) for row in _swept(case, quick)]


def _simulated(case: Case, quick: bool) -> list[Row]:
    def rate(name: str, call: Callable[[], object], note: str) -> Row:
        return _rate("simulate", f"{name}, {case.title}", case, call, quick, ENGINE_GOAL, note)

    plan, prepared, durations = case.plan, case.prepared, case.durations
    whole = (
        "whole call: durations, engine, steady-state period, memory curve, Span objects, plan key"
    )
    return [
        rate(
            "SimPy engine",
            lambda: run_engine(prepared, durations, latency=plan.hop),
            "start, end and ready of every instruction",
        ),
        rate("piper.simulate", lambda: piper.simulate(plan), whole),
    ]


def _swept(case: Case, quick: bool) -> list[Row]:
    def rate(
        name: str, call: Callable[[], object], goal: Goal | None = None, note: str = ""
    ) -> Row:
        return _rate("sweep", f"{name}, {case.title}", case, call, quick, goal, note)

    plan, prepared, durations = case.plan, case.prepared, case.durations
    periodic = "sweeps until steps repeat; instructions of one step per second"
    return [
        rate("sweep", lambda: sweep(prepared, durations, latency=plan.hop), SWEEP_GOAL),
        rate("prepare", lambda: prepare(plan), note="once per plan"),
        rate(
            "steady-state period",
            lambda: period(prepared, durations, latency=plan.hop),
            note=periodic,
        ),
        rate("verify", lambda: verify(plan)),
    ]


def _rate(
    section: str,
    name: str,
    case: Case,
    call: Callable[[], object],
    quick: bool,
    goal: Goal | None = None,
    note: str = "",
) -> Row:
    seconds = repeated(call, 3 if quick else 9)
    return rate_row(section, name, len(case.prepared), seconds, UNIT, goal, note)
