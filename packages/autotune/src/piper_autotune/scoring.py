"""Scoring one candidate: compile, time by the fast sweep or the event engine, memory from the plan. Runs in workers: neither
torch nor optuna is needed here."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Literal

from piper_autotune.problem import Problem, Variants
from piper_autotune.rows import size_text
from piper_compiler import Strategy, compile_program
from piper_ir.collector import no_garbage_collection
from piper_ir.errors import CaptureError, PiperError
from piper_ir.plan import Plan, RolePlan
from piper_ir.program import Program
from piper_ir.timing import period, prepare, sweep
from piper_simulator import simulate
from piper_simulator.metrics import device_bytes
from piper_simulator.model import CostModel


@dataclass(frozen=True)
class Scored:
    """A plan's prediction, as in `Row`. `reason`: why it does not fit; empty when it does."""

    period_s: float
    step_s: float
    peak_bytes: int
    device_bytes: int
    source: Literal["sweep", "engine"]
    reason: str = ""


@dataclass(frozen=True)
class Refused:
    """A candidate without a plan; `kind` as in `Row`."""

    kind: str
    reason: str


@dataclass(frozen=True)
class Needs:
    """The program at this number of rows is needed first."""

    rows: int


class _Missing(Exception):
    def __init__(self, rows: int) -> None:
        self.rows = rows


def score(problem: Problem, strategy: Strategy, variants: Variants, engine: bool = False) -> Scored | Refused | Needs:
    """What becomes of a strategy. With `engine` the event engine gives the times, else the sweep."""
    try:
        with no_garbage_collection():
            return _predicted(problem, _plan(problem, strategy, variants), engine)
    except _Missing as e:
        return Needs(e.rows)
    except PiperError as e:
        return Refused("illegal", str(e))
    except Exception as e:  # a directive of the user's may fail in any way, and is one candidate of many
        last = traceback.extract_tb(e.__traceback__)[-1]
        return Refused("illegal", f"compiling it raised {type(e).__name__}: {e} ({last.filename}:{last.lineno})")


def _plan(problem: Problem, strategy: Strategy, variants: Variants) -> Plan:
    def at_rows(rows: int) -> Program:
        if rows not in variants:
            raise _Missing(rows)
        found = variants[rows]
        if isinstance(found, str):
            raise CaptureError(found)
        return problem.program if found is None else found

    lowered = compile_program(
        problem.program, strategy, global_batch=problem.global_batch, training=problem.training, costs=problem.costs,
        at_rows=at_rows,
    )  # fmt: skip
    return lowered.plan


def _predicted(problem: Problem, plan: Plan, engine: bool) -> Scored | Refused:
    if problem.one_role and len(plan.roles) > 1:
        return Refused("illegal", problem.one_role)
    cluster = problem.cluster
    if engine:
        found = simulate(plan, cluster, costs=problem.costs)
        period_s, step_s = found.period_s, found.step_s
    else:
        model, prepared = CostModel(plan, cluster, problem.costs), prepare(plan)
        durations = [model.work(role, instr).seconds for role, _, instr in plan.instructions()]
        period_s = period(prepared, durations, latency=plan.hop, issue=model.issue_s)
        step_s = sweep(prepared, durations, latency=plan.hop, issue=model.issue_s).makespan
    allocator = None if problem.costs is None else problem.costs.allocator
    held = [(device_bytes(plan, role, role.peak_bytes, cluster, allocator), role) for role in plan.roles]
    most, fullest = max(held, key=lambda h: h[0])
    reason = _reason(problem.memory_limit, most, fullest)
    peak_bytes = max(role.peak_bytes for role in plan.roles)
    return Scored(period_s, step_s, peak_bytes, most, "engine" if engine else "sweep", reason)


def _reason(limit: int | None, held: int, role: RolePlan) -> str:
    """Why a plan does not fit: which rank, by how much, at which instruction, and what fills it."""
    if limit is None or held <= limit:
        return ""
    owners = sorted(role.peak_by_category.items(), key=lambda o: -o[1])[:3]
    instr = f"instruction {role.peak_at} {role.program[role.peak_at].name}" if role.program else "its start"
    return (
        f"rank {role.ranks[0]} ({role.role}) needs {size_text(held)}, {size_text(held - limit)} more than the limit of "
        f"{size_text(limit)}; fullest in {instr}: {', '.join(f'{c} {size_text(b)}' for c, b in owners)}"
    )
