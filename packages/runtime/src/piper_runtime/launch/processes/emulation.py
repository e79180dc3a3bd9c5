"""Run a plan on real processes, streams and rendezvous, with a sleep of the simulated time in place of compute.

This is the `emulated` launcher.

It tests whether a simulation agrees with a run. Everything that can delay a plan is real: one process per rank, one
thread per communication stream, issue in program order, waits, and a message on every channel. A communication sends
the moment at which its rank was there; it starts when its last member is there, and takes its simulated time on all of
them. No tensor of the plan exists. Devices that share the work of chunks begin an instruction together, and sleep for
its messages as well.

Time: an instruction begins when its waits have ended, and sleeps until that moment plus its duration. When this machine
wakes a thread too late, that is not part of the plan, and later sleeps are shorter for it. The same holds for the time
to hand over to another thread or to pass a message, up to `HOST_S`. An instruction that is delayed for longer, after
all its causes were really done, waited for something that the plan does not show, and that counts. The clock is the
machine-wide one of time.perf_counter.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NoReturn

from piper_ir.ground.errors import ExecutionError
from piper_ir.plan.plan import COMPUTE, Plan, RolePlan
from piper_runtime.engine.trace import StepMeasurements, TimedSpan, executed_trace
from piper_runtime.launch.ground.report import RankReport
from piper_runtime.launch.ground.result import WARMUP_STEPS, Run
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.launch.processes.processes import Pool
from piper_runtime.launch.worker.timed_rank import (
    HOST_S,
    LONGEST_S,
    SHORTEST_S,
    EmulationReport,
    EmulationRequest,
)
from piper_runtime.rank.job.job import InitialState

MATTERS = 0.95
"""The share of a role's compute in the longest instructions that matter."""


@dataclass(frozen=True)
class Durations:
    """Hold the simulated seconds of a plan.

    Attributes:
        seconds: by role, one per instruction of its program; equal on all members of a communication.
        latency: of a point-to-point transfer; it occupies no stream.
        issued: by role, how long after its host began with a step each instruction may start; none for at once.
        host_s: by role, seconds in which its host issues a step; it then begins with the next.
    """

    seconds: Mapping[str, Sequence[float]]
    latency: float = 0.0
    issued: Mapping[str, Sequence[float]] = field(default_factory=dict)
    host_s: Mapping[str, float] = field(default_factory=dict)

    def scaled(self, factor: float) -> Durations:
        """Return all durations times a factor."""
        seconds, issued = (
            {role: tuple([factor * s for s in each]) for role, each in by_role.items()}
            for by_role in (self.seconds, self.issued)
        )
        host_s = {role: factor * s for role, s in self.host_s.items()}
        return Durations(seconds, factor * self.latency, issued, host_s)


class Emulation(Run):
    """Hold the result of an emulated run: a Run with times only, in simulated seconds.

    `trace.notes` holds "time_scale" (seconds slept per simulated second) and "host" (how late this machine was).
    """

    def state_dict(self) -> NoReturn:
        """Raise ExecutionError, since nothing was trained."""
        raise ExecutionError(
            'an emulated run trains nothing and has no state_dict; use launcher="processes" (or "inline", in one '
            "process)"
        )


def time_scale(plan: Plan, durations: Durations) -> float:
    """Return the seconds to sleep per simulated second.

    It is 1 if no compute takes time, or if the shortest compute instruction that matters sleeps between `SHORTEST_S`
    and `LONGEST_S`; otherwise it brings that one into these bounds. An instruction counts as at least as long as its
    host takes for one on average.
    """
    shortest = min(
        (s for role in plan.roles if (s := _shortest(role, durations)) > 0), default=SHORTEST_S
    )
    return min(max(shortest, SHORTEST_S), LONGEST_S) / shortest


def _shortest(role: RolePlan, durations: Durations) -> float:
    """Return the shortest of a role's longest compute instructions that together are `MATTERS` of its compute."""
    seconds = durations.seconds[role.role]
    longest = sorted(
        (s for s, instr in zip(seconds, role.program) if instr.stream == COMPUTE), reverse=True
    )
    left, last = MATTERS * sum(longest), 0.0
    for last in longest:
        left -= last
        if left <= 0:
            break
    return max(last, durations.host_s.get(role.role, 0.0) / max(1, len(role.program)))


def emulate(plan: Plan, durations: Durations, options: RunOptions) -> Emulation:
    """Run the steps of a plan with one process per rank on this machine and sleeps instead of compute.

    The first step begins on all ranks at one moment: `step_s[0]` compares with `Simulation.step_s`, `period_s` with its
    `period_s`. Of the options, `steps`, `timeout_s`, `trace` and `pool` count. Raises JobError for unusable steps or
    timeout_s, and ExecutionError with rank, instruction and peer.
    """
    options.check_numbers()
    scale = time_scale(plan, durations)
    slept = durations.scaled(scale)
    blob, meeting = pickle.dumps(plan), uuid.uuid4().hex
    requests: dict[int, EmulationRequest] = {}
    for role in plan.roles:
        request = EmulationRequest(
            blob,
            tuple(slept.seconds[role.role]),
            slept.latency,
            tuple(slept.issued.get(role.role, ())),
            slept.host_s.get(role.role, 0.0),
            options.steps,
            meeting,
        )
        requests |= dict.fromkeys(role.ranks, request)
    patience = (
        options.timeout_s
        + max((s for each in slept.seconds.values() for s in each), default=0.0)
        + slept.latency
        + max(slept.host_s.values(), default=0.0)
    )
    if options.pool is not None:
        reports = options.pool.run(plan, requests, patience)
    else:
        with Pool(plan.mesh.world) as own:
            reports = own.run(plan, requests, patience)
    return _result(plan, reports, scale, options.trace)


def _result(plan: Plan, reports: Mapping[int, RankReport], scale: float, trace: bool) -> Emulation:
    first = reports[0]
    step_s = [
        max(r.finished[i] - (r.finished[i - 1] if i else r.started) for r in reports.values())
        / scale
        for i in range(len(first.finished))
    ]
    spans = (
        {
            rank: [_simulated(s, first.started, scale) for s in r.spans]
            for rank, r in reports.items()
        }
        if trace
        else {}
    )
    held_up = [x for r in reports.values() if isinstance(r, EmulationReport) for x in r.held_up]
    notes = {"time_scale": f"{scale:g}", "host": _about(held_up)}
    return Emulation(
        losses=[],
        step_s=step_s,
        period_s=median(step_s[WARMUP_STEPS:]) if step_s[WARMUP_STEPS:] else None,
        peak_bytes={},
        trace=executed_trace(plan, len(step_s) - 1, StepMeasurements(spans), [], notes),
        rank_states={},
        rank_gradients={},
        memory={},
        _initial=InitialState({}, {}),
    )


def _simulated(span: TimedSpan, begun: float, scale: float) -> TimedSpan:
    index, start, end = span
    return index, (start - begun) / scale, (end - begun) / scale


def _about(held_up: Sequence[float]) -> str:
    counted = [x for x in held_up if x > HOST_S]
    text = (
        f"this machine held instructions up for {median(held_up) * 1e3:.2f} ms (median), at most "
        f"{max(held_up) * 1e3:.2f} ms"
    )
    return (
        f"{text}; {len(counted)} times for more than {HOST_S * 1e3:g} ms, which counts"
        if counted
        else text
    )
