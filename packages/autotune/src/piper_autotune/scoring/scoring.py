"""Score one candidate: compile it, time it by the fast sweep or the event engine, and read memory from the plan.

This runs in workers: neither torch nor optuna is needed here. A plan is a table (`piper_ir.plan.instr_table`), in which
the sweep needs no instruction by name. Plans that the engine scores are verified, so that a candidate that breaks a
rule of plans cannot be the best.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from piper_autotune.space.problem import TuningProblem, Variants, Wanted, wanted_by, with_runs
from piper_autotune.space.sketch import wanted_for_graph
from piper_compiler import (
    CompileRequest,
    Lowered,
    Strategy,
    completed,
    directives,
    lowered,
    replicate,
)
from piper_ir.graph.graph import Graph
from piper_ir.ground.errors import CaptureError, PiperError
from piper_ir.plan.plan import Plan, RolePlan
from piper_ir.program.costs import AllocatorCosts
from piper_ir.program.ops import Step
from piper_ir.program.program import Program
from piper_ir.tools import no_garbage_collection, size_text
from piper_ir.verify import verify
from piper_simulator import (
    SHOWN,
    Cluster,
    Device,
    DeviceModel,
    RunsInterval,
    device_memory,
    load_of,
    model_for,
    simulate,
    software_buffers,
    step_and_period_alone,
    too_much,
    under_load,
)


@dataclass(frozen=True)
class Scored:
    """Hold a plan's prediction, as in `Row`; `reason` says why the plan does not fit, and is empty when it does."""

    period_s: float
    step_s: float
    peak_bytes: int
    device_bytes: int
    source: Literal["sweep", "engine"]
    reason: str = ""
    notes: tuple[str, ...] = ()
    low_s: float | None = None
    high_s: float | None = None


@dataclass(frozen=True)
class Refused:
    """Report a candidate without a plan; `kind` is as in `Row`."""

    kind: str
    reason: str


@dataclass(frozen=True)
class Needs:
    """Request a program."""

    wanted: Wanted


class _Missing(Exception):
    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted


def score(
    problem: TuningProblem,
    strategy: Strategy,
    variants: Variants,
    engine: bool = False,
    known: dict[object, Scored | Refused] | None = None,
) -> Scored | Refused | Needs:
    """Return the outcome for a strategy; with `engine` the event engine gives the times, else the sweep.

    `known` keeps the sweep's outcomes of this problem: strategies that make the same plan are scored once.
    """
    compiling = _Compiling(problem, strategy, variants)
    try:
        with no_garbage_collection():
            request = compiling.request()
            graph, rows = completed(request)
            if engine or known is None:
                return _of_plan(problem, lowered(graph, rows, request), engine)
            key = _plan_key(strategy, graph)
            outcome = known.get(key)
            if outcome is None:
                outcome = known[key] = _of_plan(problem, lowered(graph, rows, request), engine)
            return outcome
    except _Missing as e:
        return Needs(e.wanted)
    except PiperError as e:
        return Refused("illegal", str(e))
    except (
        Exception
    ) as e:  # a directive of the user's may fail in any way, and is one candidate of many
        last = traceback.extract_tb(e.__traceback__)[-1]
        return Refused(
            "illegal",
            f"compiling it raised {type(e).__name__}: {e} ({last.filename}:{last.lineno})",
        )


@dataclass(frozen=True)
class _Compiling:
    """Hold a strategy with everything to compile it."""

    problem: TuningProblem
    strategy: Strategy
    variants: Variants

    def request(self) -> CompileRequest:
        of = self.problem
        wanted = wanted_for_graph(of, self.strategy)
        program = self._program(wanted) if wanted.special else of.program
        return CompileRequest(
            program,
            self.strategy,
            of.global_batch,
            of.training,
            of.costs,
            of.options,
            self.at_rows,
            keyed=False,
        )

    def at_rows(self, rows: int, runs: Mapping[str, Collection[Step]]) -> Program:
        wanted = wanted_by(self.strategy, self.problem, rows)
        return self._program(with_runs(wanted, runs) if self.problem.compiles else wanted)

    def _program(self, wanted: Wanted) -> Program:
        if wanted not in self.variants:
            raise _Missing(wanted)
        variant = self.variants[wanted]
        if isinstance(variant, str):
            raise CaptureError(variant)
        return self.problem.program if variant is None else variant


def _plan_key(strategy: Strategy, graph: Graph) -> object:
    """Return a key that is equal only for strategies of a problem that make the same plan; `graph` is complete.

    The size of buckets counts by the buckets that it makes, unless a user's directive may read it. The rest of a bucket
    follows from its parameters and the directives.
    """
    items = directives.simplest(strategy.directives)
    if all(type(d).__module__.startswith("piper_compiler.") for d in items):
        items = tuple([replace(d, bucket_mb=1) if type(d) is replicate else d for d in items])
    return Strategy(strategy.mesh, items), tuple([b.params for b in graph.buckets.values()])


def _of_plan(problem: TuningProblem, lowered: Lowered, engine: bool) -> Scored | Refused:
    plan = lowered.plan
    if engine:
        verify(plan)
    if problem.one_role and len(plan.roles) > 1:
        return Refused("illegal", problem.one_role)
    cluster = problem.cluster
    notes: tuple[str, ...] = ()
    interval: RunsInterval | None = None
    if engine:
        simulation = simulate(
            plan, cluster, costs=problem.costs, model=problem.model, load=problem.load
        )
        period_s, step_s, notes = simulation.period_s, simulation.step_s, simulation.notes
        if problem.model is DeviceModel:  # whose figures published runs were compared with
            interval = simulation.interval
    else:
        under = None if problem.load is None else load_of(plan, problem.load)
        factory = problem.model if under is None else under_load(problem.model, under.loads)
        model = model_for(plan, cluster, problem.costs, factory)
        step_s, period_s = step_and_period_alone(lowered.prepared, model, plan)
    allocator = None if problem.costs is None else problem.costs.allocator
    usages = [
        (
            _used(plan, role, device, allocator),
            role,
            rank,
            problem.limit_of(device),
        )
        for role in plan.roles
        for rank, device in _devices(cluster, role)
    ]
    most = max(nbytes for nbytes, *_ in usages)
    reason = _reason(*max(usages, key=lambda h: h[0] - (h[3] or 0)))
    peak_bytes = max(role.peak_bytes for role in plan.roles)
    return Scored(
        period_s,
        step_s,
        peak_bytes,
        most,
        "engine" if engine else "sweep",
        reason,
        notes,
        None if interval is None else interval.low,
        None if interval is None else interval.high,
    )


def _used(
    plan: Plan, role: RolePlan, device: Device | None, allocator: AllocatorCosts | None
) -> int:
    """Return the bytes of a device that a role uses, with the buffers of the device's software stack."""
    buffers = software_buffers(plan, role, None if device is None else device.stack)
    return device_memory(plan, role, role.peak_bytes, device, allocator, buffers).total


def _devices(cluster: Cluster | None, role: RolePlan) -> list[tuple[int, Device | None]]:
    """Return the types of devices that a role runs on, each with the first rank there."""
    if cluster is None or len(cluster.kinds) == 1:
        return [(role.ranks[0], None if cluster is None else cluster.device)]
    return [
        (rank, cluster.of(rank))
        for rank in {cluster.kind_of(rank): rank for rank in reversed(role.ranks)}.values()
    ]


def _reason(held: int, role: RolePlan, rank: int, limit: int | None) -> str:
    """Return why a plan does not fit: which rank, by how much, where, and the owners of its memory; "" if it fits."""
    if limit is None or held <= limit:
        return ""
    largest = sorted(role.peak_by_category.items(), key=lambda o: -o[1])[:SHOWN]
    instr = (
        f"instruction {role.peak_at} {role.program[role.peak_at].name}"
        if role.program
        else "its start"
    )
    return too_much(
        rank, role.role, held, limit, instr, (f"{c} {size_text(b)}" for c, b in largest)
    )
