"""Simulate a plan: time, memory and idle time per rank, and a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from piper_ir.fold.memory import Usage, scan
from piper_ir.fold.memory_owners import owners
from piper_ir.fold.timing import Prepared
from piper_ir.ground.errors import PlanError
from piper_ir.ground.keywords import checked_call
from piper_ir.ground.limits import MOST_STEP_INSTRUCTIONS, most
from piper_ir.ground.trace import MemSample, Span, Trace
from piper_ir.plan.plan import Plan, RolePlan, check_plan
from piper_ir.program.costs import Costs
from piper_ir.tools import Brief, no_garbage_collection, size_text, time_text
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.named import load_cluster
from piper_simulator.durations.checked import under_load
from piper_simulator.durations.cost_model import CostModelFactory
from piper_simulator.durations.device_model import DeviceModel
from piper_simulator.durations.expert_loads import ExpertLoad, GivenLoad, load_notes, load_of
from piper_simulator.interval import RunsInterval, interval_of, stack_advice
from piper_simulator.memory.footprint import footprint
from piper_simulator.memory.host_memory import host_bytes_by_node, host_notes
from piper_simulator.memory.oom import OomVerdict
from piper_simulator.memory.role_devices import PeakMemory, peak_memory
from piper_simulator.memory.snapshot import Snapshot, snapshot
from piper_simulator.metrics import (
    flop_notes,
    idle_times,
    inside_seconds,
    rates_of,
    without_formula,
)
from piper_simulator.times.jitter import Distribution, TimedPlan, distribution
from piper_simulator.times.splitting import SplitPlan, split
from piper_simulator.times.timed import (
    PlanWork,
    Timed,
    contention_applies,
    durations_of,
    time_steps,
)
from piper_simulator.unaligned_work import unaligned_notes
from piper_simulator.whole_work import whole_notes


@dataclass(frozen=True, repr=False)
class Simulation(Brief):
    """Hold the results of a simulation: times in seconds, sizes in bytes; tuples are indexed by rank.

    Attributes:
        step_s: makespan of one step from a common start.
        period_s: time per step in steady state; rates use it.
        tokens_per_s: None without tokens_per_row.
        mfu: model FLOPs over peak; None without tokens_per_row or peak.
        hfu: executed FLOPs over peak; None without peak.
        exposed_comm_s: seconds in which compute is idle while the rank communicates; the maximum over ranks.
        inside_comm_s: seconds of messages inside of steps, which count as busy compute; the maximum over ranks.
        global_bubble_s: step_s - busy compute; the maximum over ranks.
        span_bubble_s: last end - first start - busy; the maximum over ranks.
        bubble_s: the global bubble of each rank.
        peak_bytes: allocated, with the workspace of the kernels of the cluster's devices.
        device_bytes: peak_bytes with allocator, context and communicators.
        held_bytes: allocated bytes as torch's allocator counts them: peak_bytes with the buffers of the software stack.
        reserved_bytes: bytes that this allocator takes from the device.
        interval: the interval in which 80 % of measured periods fall; None where durations are given or measured, or of
            another cost model.
        peak_by_category: peak_bytes by category.
        slowed_s: how much longer the compute of a rank took because of messages beside it, the maximum over ranks; None
            if contention was not simulated.
        without_formula: operators of unknown FLOPs, with their share of the bytes that compute moves.
        notes: warnings, see `summary`.
        ooms: a verdict for each role that needs more than its devices have, see `oom`.
        load: of experts, which the times hold for; None for a plan without experts.
        limit_bytes: the memory of each rank's device; None without a cluster.
        host_bytes: the most bytes of values that each rank has in the memory of its host.
        worst_step_s: `step_s` under the worst load of experts, if that is not the one of `step_s`.
    """

    step_s: float
    period_s: float
    tokens_per_s: float | None
    mfu: float | None
    hfu: float | None
    exposed_comm_s: float
    global_bubble_s: float
    span_bubble_s: float
    bubble_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    device_bytes: tuple[int, ...]
    peak_by_category: tuple[Mapping[str, int], ...]
    slowed_s: float | None
    without_formula: Mapping[str, float]
    notes: tuple[str, ...]
    ooms: tuple[OomVerdict, ...]
    inside_comm_s: float
    _run: _Run = field(repr=False)
    load: ExpertLoad | None = None
    worst_step_s: float | None = None
    limit_bytes: tuple[int | None, ...] = ()
    held_bytes: tuple[int, ...] = ()
    reserved_bytes: tuple[int, ...] = ()
    host_bytes: tuple[int, ...] = ()
    interval: RunsInterval | None = None

    def facts(self) -> Iterator[tuple[str, object]]:
        """Yield the headline: times, rates, and the memory of the fullest device."""
        yield "step", time_text(self.step_s)
        yield "period", time_text(self.period_s)
        if self.interval is not None:
            yield "80 % inside", self.interval.range_text
        if self.tokens_per_s is not None:
            yield "tokens/s", f"{self.tokens_per_s:,.0f}"
        if self.mfu is not None:
            yield "MFU", f"{self.mfu:.1%}"
        yield "ranks", len(self.device_bytes)
        yield "fullest device", size_text(max(self.device_bytes, default=0))
        if any(self.host_bytes):
            nodes = host_bytes_by_node(self.host_bytes, self._run.cluster)
            yield "fullest host", size_text(max(nodes))
        yield "fits", "yes" if self.fits else "no"

    @property
    def fits(self) -> bool:
        """Return whether every device has the memory that it needs; True without a cluster."""
        return not self.ooms

    @property
    def oom(self) -> OomVerdict | None:
        """Return the verdict on the role that runs out of memory first; None when all fit."""
        return min(self.ooms, key=lambda v: (v.time_s, v.ranks[0]), default=None)

    def memory(self, rank: int) -> dict[str, int]:
        """Return the bytes used on a rank's device at its peak, by lines that add up to its `device_bytes`.

        The lines of `piper_simulator.memory.footprint.LINES` add up to its `peak_bytes`; the others are beside tensors.
        Raises IndexError for a rank outside of the plan.
        """
        return self._run.footprint(rank)

    def memory_snapshot(self, rank: int) -> Snapshot:
        """Return the memory of a rank through the last step, for torch's memory visualiser.

        The format is that of `torch.cuda.memory._snapshot()`. Raises IndexError for a rank outside of the plan.
        """
        return self._run.snapshot(rank)

    @cached_property
    def trace(self) -> Trace:
        """Return the trace of the last step, in seconds from its first start; it is made on first use."""
        with no_garbage_collection():
            return self._run.trace()

    @cached_property
    def role_trace(self) -> Trace:
        """Return the same as `trace`, once for all ranks that do the same at the same times (`Trace.alike`)."""
        with no_garbage_collection():
            return self._run.trace(by_role=True)

    def distribution(self, jitter: float, *, seed: int = 0, repetitions: int = 200) -> Distribution:
        """Return how the step is spread when durations vary.

        In each repetition every instruction and message takes its duration times an independent lognormal number, with
        mean 1 and `jitter` as coefficient of variation; see `piper_simulator.times.jitter`. Raises PlanError for a
        negative jitter, and for no repetitions.
        """
        with no_garbage_collection():
            return self._run.distribution(jitter, seed=seed, repetitions=repetitions)

    def summary(self) -> dict[str, Any]:
        """Return the headline as plain numbers, of the worst rank if there is one per rank.

        `memory` has the parts of the fullest device's memory, see `memory`. `oom` is the first verdict, None when all
        fits. `sources` is the share that each source has in the seconds of all instructions. `notes` name the cluster's
        constants that are assumed, not calibrated or guessed.
        """
        fullest = max(
            range(len(self.device_bytes)), key=lambda r: self.device_bytes[r], default=None
        )
        return {
            "step_s": self.step_s,
            "period_s": self.period_s,
            "interval": None
            if self.interval is None
            else {
                "low": self.interval.low,
                "high": self.interval.high,
                "stack": self.interval.stack,
            },
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "exposed_comm_s": self.exposed_comm_s,
            "inside_comm_s": self.inside_comm_s,
            "global_bubble_s": self.global_bubble_s,
            "span_bubble_s": self.span_bubble_s,
            "peak_bytes": max(self.peak_bytes, default=0),
            "device_bytes": max(self.device_bytes, default=0),
            "allocated_bytes": max(self.held_bytes, default=0),
            "reserved_bytes": max(self.reserved_bytes, default=0),
            "host_bytes": max(host_bytes_by_node(self.host_bytes, self._run.cluster), default=0),
            "memory": {} if fullest is None else self.memory(fullest),
            "oom": None if self.oom is None else self.oom.as_dict() | {"text": self.oom.text},
            "slowed_s": self.slowed_s,
            "load": None
            if self.load is None
            else self.load.as_dict() | {"worst_step_s": self.worst_step_s},
            "sources": self._run.sources(),
            "without_formula": dict(self.without_formula),
            "notes": list(self.notes),
        }


@checked_call(PlanError)
def simulate(
    plan: Plan,
    cluster: str | Path | Cluster | None = None,
    *,
    costs: Costs | None = None,
    steps: int = 1,
    tokens_per_row: int | None = None,
    model_flops_per_step: float | None = None,
    contention: bool = True,
    model: CostModelFactory = DeviceModel,
    load: GivenLoad | None = None,
) -> Simulation:
    """Run a plan on a cluster (a name or a file, see `load_cluster`, or a Cluster).

    `cluster` may be left out only when all compute has given durations; everything else then takes no time. `costs`
    come before the cost model's formulas. `notes` name costs of another machine or model, and durations that they lack.
    `steps` follow each other without a barrier. `tokens_per_row` (default: the plan's) enables rates;
    `model_flops_per_step` replaces the model FLOPs that the plan's own parameters suggest.

    `contention`: messages that share links slow each other down, and compute beside them
    (`piper_simulator.contention.flows`). Without it every instruction takes its duration, as in the sweep of a search.
    It has no effect with given durations, and on a CPU, where messages always take their processor seconds from compute
    (`piper_simulator.durations.device_model`).

    `model`: the cost model (`piper_simulator.durations.cost_model`), by default the formulas and tables of Piper.

    `load`: of experts that ranks share, tokens of the fullest rank over the mean of all. It is a number, `Zipf(s)`,
    or the metrics.jsonl of a run, or its folder; of several loads the times are the means, and `worst_step_s` is under
    the worst. Without one all ranks have equally many, and `notes` say so. It decides how long dropless experts take
    (`piper_simulator.durations.expert_work`); experts with a capacity compute all their places under any load.

    Raises ClusterError for an unknown cluster, for too few devices, for no cluster if a duration must be computed, and
    for a stream that takes more SMs than its devices have; PlanError for a deadlock, for steps < 1, and for a load that
    cannot be.
    """
    check_plan("simulate", plan)
    if type(steps) is not int or steps < 1:
        raise PlanError(f"simulate(steps={steps!r}): at least one step is needed, as an integer")
    instructions = sum(len(role.program) for role in plan.roles)
    if steps * instructions > MOST_STEP_INSTRUCTIONS:
        least = most(MOST_STEP_INSTRUCTIONS, instructions)
        raise PlanError(
            f"simulate(steps={steps}): at most {least} steps of a plan of {instructions} instructions are accepted"
        )
    target = cluster if cluster is None or isinstance(cluster, Cluster) else load_cluster(cluster)
    with no_garbage_collection():
        experts = load_of(plan, load)
        parts = split(plan, target, shared=contention and contention_applies(plan, target))
        durations_by = partial(durations_of, parts.plan, target, costs, contention=contention)
        durations = durations_by(model if experts is None else under_load(model, experts.loads))
        timed = time_steps(durations, steps)
        memory = peak_memory(plan, parts, target, costs)
        run = _Run(plan, target, parts, durations, timed, memory, steps - 1)
        simulation = _folded(run, tokens_per_row or plan.tokens_per_row, model_flops_per_step)
        if model is DeviceModel and costs is None:
            simulation = replace(
                simulation,
                interval=interval_of(plan, target, durations, simulation.period_s),
                notes=(*simulation.notes, *stack_advice(plan, target)),
            )
        if experts is None:
            return simulation
        worst_s = simulation.step_s
        if experts.worst > experts.mean:
            worst_load = ((experts.worst, 1.0),)
            worst_s = time_steps(durations_by(under_load(model, worst_load)), steps).first.makespan
        return replace(
            simulation,
            load=experts,
            worst_step_s=worst_s if worst_s > simulation.step_s else None,
            notes=(*simulation.notes, *load_notes(plan, experts)),
        )


def _folded(
    run: _Run, tokens_per_row: int | None, model_flops_per_step: float | None
) -> Simulation:
    """Return the figures of a run."""
    plan, cluster, parts, timed = run.plan, run.cluster, run.parts, run.timed
    peaks, used = run.memory.peaks, run.memory.used
    step_s = timed.first.makespan
    gaps = idle_times(parts.plan, run.prepared, timed.first, timed.durations, plan.hop)
    order, whole = parts.role_of, tuple(parts.of[r] for r in parts.role_of)
    rates = rates_of(plan, cluster, timed.period_s, tokens_per_row, model_flops_per_step)
    missing = without_formula(plan) if cluster is not None else {}
    hosted = tuple(plan.roles[r].host_peak_bytes for r in whole)
    more = (
        *flop_notes(missing, rates.mfu, rates.hfu, rates.attention),
        *whole_notes(plan, cluster, step_s),
        *unaligned_notes(plan, cluster, step_s),
        *host_notes(hosted, cluster),
    )
    notes = tuple(dict.fromkeys((*run.durations.notes, *rates.notes, *more)))
    run = replace(run, notes=_of_trace(cluster, notes))
    return Simulation(
        step_s=step_s,
        period_s=timed.period_s,
        tokens_per_s=rates.tokens_per_s,
        mfu=rates.mfu,
        hfu=rates.hfu,
        exposed_comm_s=max((g.exposed or 0.0 for g in gaps), default=0.0),
        global_bubble_s=max((step_s - g.busy for g in gaps), default=0.0),
        span_bubble_s=max((g.span for g in gaps), default=0.0),
        bubble_s=tuple(step_s - gaps[r].busy for r in order),
        peak_bytes=tuple(peaks[r].total for r in whole),
        device_bytes=tuple(used[k].total for k in order),
        peak_by_category=tuple(peaks[r].bytes for r in whole),
        slowed_s=timed.slowed_s,
        without_formula=missing,
        notes=notes,
        ooms=tuple(run.verdicts()),
        inside_comm_s=inside_seconds(run.prepared, run.durations.work),
        limit_bytes=tuple(run.memory.devices.limit(k) for k in order),
        held_bytes=tuple(used[k].held for k in order),
        reserved_bytes=tuple(used[k].reserved for k in order),
        host_bytes=hosted,
        _run=run,
    )


def _of_trace(target: Cluster | None, notes: tuple[str, ...]) -> dict[str, str]:
    cluster = {} if target is None else {"cluster": target.name}
    return cluster | ({"warnings": "; ".join(notes)} if notes else {})


def _named(role: RolePlan, instr: int) -> str:
    """Return an instruction's name for people."""
    return (
        f"instruction {instr} {role.program[instr].name}"
        if 0 <= instr < len(role.program)
        else "its start"
    )


@dataclass(frozen=True)
class _Run:
    """Hold everything from which figures and traces are made.

    Attributes:
        parts: the plan with its roles split; `durations` and `timed` are of that plan.
        step: the number of the last step.
        notes: of the trace.
    """

    plan: Plan
    cluster: Cluster | None
    parts: SplitPlan
    durations: PlanWork
    timed: Timed
    memory: PeakMemory
    step: int
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def prepared(self) -> Prepared:
        """Return the nodes of the split plan."""
        return self.durations.prepared

    @cached_property
    def usages(self) -> list[list[Usage]]:
        """Return the memory of the roles of `plan` through a step, which is large, on first use."""
        return [list(scan(self.memory.counted, role)) for role in self.memory.counted.roles]

    def distribution(self, jitter: float, *, seed: int, repetitions: int) -> Distribution:
        """Return how the step is spread when durations vary."""
        varying = TimedPlan(self.plan, self.parts, self.durations, self.timed.durations)
        return distribution(varying, jitter, seed=seed, repetitions=repetitions)

    def trace(self, by_role: bool = False) -> Trace:
        """Return the trace: spans and memory by rank, in program order; `by_role`: of the first of equal ranks.

        A memory sample stands at its instruction's start: only the stream "compute" allocates and frees, in program
        order, so the peak in program order is the peak in time.
        """
        times, origin = self.timed.last, min(self.timed.last.start, default=0.0)
        parts, roles = self.parts, self.parts.plan.roles
        names = [[instr.name for instr in role.program] for role in roles]
        spans: list[Span] = []
        memory: list[MemSample] = []
        alike = tuple(role.ranks for role in roles) if by_role else ()
        firsts = {ranks[0] for ranks in alike}
        for rank, r in enumerate(parts.role_of):
            if by_role and rank not in firsts:
                continue
            first = self.prepared.offsets[r]
            for i, instr in enumerate(roles[r].program):
                node = first + i
                w = self.durations.work[node]
                start, end, ready = (
                    times.start[node] - origin,
                    times.end[node] - origin,
                    times.ready[node] - origin,
                )
                spans.append(
                    Span(
                        rank,
                        instr.stream,
                        i,
                        names[r][i],
                        start,
                        end,
                        ready,
                        w.bytes,
                        w.flops,
                        w.source,
                        w.inside_s,
                    )
                )
            usages = self.usages[parts.of[r]]
            memory.extend(
                MemSample(rank, u.instr, times.start[first + u.instr] - origin, u.bytes)
                for u in usages
            )
        whole = tuple(spans), tuple(memory)
        return Trace(
            self.plan.key, "simulated", *whole, step=self.step, notes=self.notes, alike=alike
        )

    def footprint(self, rank: int) -> dict[str, int]:
        k, counted = self.parts.role_of[rank], self.memory.counted
        return footprint(counted, counted.roles[self.parts.of[k]], self.memory.used[k])

    def snapshot(self, rank: int) -> Snapshot:
        k, counted, times = self.parts.role_of[rank], self.memory.counted, self.timed.last
        role, first = counted.roles[self.parts.of[k]], self.prepared.offsets[k]
        origin = min(times.start, default=0.0)
        nodes = range(first, first + len(role.program))
        return snapshot(
            counted, role, [(times.start[n] - origin, times.end[n] - origin) for n in nodes]
        )

    def verdicts(self) -> Iterator[OomVerdict]:
        """Yield a verdict on each role that needs more than its devices have, at its time in the first step."""
        parts, times, memory = self.parts, self.timed.first, self.memory
        counted, devices, origin = memory.counted, memory.devices, min(times.start, default=0.0)
        roles = zip(parts.plan.roles, parts.of, memory.used, strict=True)
        for k, (part, r, needs) in enumerate(roles):
            limit = devices.limit(k)
            if limit is None or needs.total <= limit:
                continue
            role, most, beside = counted.roles[r], memory.peaks[r], memory.beside[r]
            start = -1, sum(s.nbytes for s in role.device_states)
            moments = memory.walks[r].moments()
            at = next(
                instr
                for instr, nbytes in chain([start], moments, [(most.instr, most.total)])
                if devices.memory(k, nbytes, beside.at(instr, nbytes)).total > limit
            )
            yield OomVerdict(
                ranks=part.ranks,
                role=part.role,
                needs=needs.total,
                limit=limit,
                fullest=_named(role, most.instr),
                at=_named(role, at),
                instr=at,
                time_s=times.start[self.prepared.offsets[k] + at] - origin if at >= 0 else 0.0,
                beside=needs.total - needs.allocated,
                _find_owners=partial(owners, counted, role),
            )

    def sources(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        first = 0
        for role in self.parts.plan.roles:
            for work in self.durations.work[first : first + len(role.program)]:
                seconds[work.source] = seconds.get(work.source, 0.0) + work.seconds * len(
                    role.ranks
                )
            first += len(role.program)
        total = sum(seconds.values())
        return {name: s / total for name, s in sorted(seconds.items())} if total else {}
