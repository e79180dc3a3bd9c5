"""Predict the seconds of a plan's step and nothing else, for fits that ask many times; and the parts of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Compute
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.cluster.device import Device
from piper_simulator.durations.cost_model import work_of
from piper_simulator.durations.device_model import DeviceModel
from piper_simulator.durations.kernels import kernel_seconds, step_took
from piper_simulator.durations.software_kernels import run_kernels
from piper_simulator.interval import RunsInterval, interval_of
from piper_simulator.memory.role_devices import peak_memory
from piper_simulator.times.splitting import split
from piper_simulator.times.timed import PlanWork, durations_of, time_steps


def period(plan: Plan, cluster: Cluster) -> float:
    """Return the seconds per step in steady state, as `simulate` does."""
    return time_steps(_taken(plan, cluster)).period_s


def period_and_interval(plan: Plan, cluster: Cluster) -> tuple[float, RunsInterval | None]:
    """Return the seconds per step in steady state, and the interval in which 80 % of measured periods fall."""
    taken = _taken(plan, cluster)
    period_s = time_steps(taken).period_s
    return period_s, interval_of(plan, cluster, taken, period_s)


def _taken(plan: Plan, cluster: Cluster) -> PlanWork:
    parts = split(plan, cluster, shared=True)
    return durations_of(parts.plan, cluster, None, DeviceModel, contention=True)


def held_and_reserved(plan: Plan, cluster: Cluster) -> tuple[int, int]:
    """Return the bytes of the fullest rank, as torch's allocator counts them: allocated, and reserved."""
    used = peak_memory(plan, split(plan, cluster, shared=True), cluster, None).used
    return max(u.held for u in used), max(u.reserved for u in used)


@dataclass(frozen=True)
class StepParts:
    """Hold the seconds of a step on the role that computes the longest.

    Attributes:
        role: name of that role.
        kernels: by kind of kernel, and "launch" for the seconds by which launches make the step longer.
        inside: messages inside of steps, by mesh axis and kind.
        others: updates, loads and the like.
        waiting: the rest of the period, in which the role waits for others or for messages.
        period: all of them together.
    """

    role: str
    kernels: dict[str, float]
    inside: dict[str, float]
    others: float
    waiting: float
    period: float


def step_parts(plan: Plan, cluster: Cluster) -> StepParts:
    """Return the parts of a step's seconds."""
    parts = split(plan, cluster, shared=True).plan
    model = DeviceModel(parts, cluster, None)
    works = iter(work_of(model, parts))
    found: list[StepParts] = []
    whole = period(plan, cluster)
    at_once = cluster.each_device(lambda d: replace(d, launch_s=0.0))
    launch = max(0.0, whole - period(plan, at_once))
    for role in parts.roles:
        device = cluster.of(role.ranks[0])
        kernels: defaultdict[str, float] = defaultdict(float)
        inside: defaultdict[str, float] = defaultdict(float)
        others = 0.0
        for instr in role.program:
            work = next(works)
            if instr.comm:
                continue
            ops = [p.op for p in instr.parts if isinstance(p.op, Compute)]
            for message in work.inside:
                inside[f"{message.op} over {message.axis}"] += message.exposed_s
            steps = sum([_step(parts, op, device, kernels) for op in ops])
            others += max(0.0, work.seconds - work.inside_s - steps)
        kernels["launch"] = launch
        known = sum(kernels.values()) + sum(inside.values()) + others
        waiting = max(0.0, whole - known)
        found.append(StepParts(role.role, dict(kernels), dict(inside), others, waiting, whole))
    return min(found, key=lambda f: f.waiting)


def _step(plan: Plan, op: Compute, device: Device, kernels: defaultdict[str, float]) -> float:
    """Return the seconds of a step, and add the ones of its kernels by kind."""
    chunk = plan.chunk(op.variant)
    stack = device.stack
    whole = stack is not None and stack.recomputed == "whole" and chunk.keep == "inputs"
    step = "F" if whole and op.step == "R" else op.step
    cost = chunk.steps[step].cost
    for kernel in cost.kernels if stack is None else run_kernels(stack, cost.kernels, step):
        seconds = kernel.count * kernel_seconds(device, kernel, step).seconds
        kernels[kernel.kind] += seconds
    return step_took(device, cost, step).seconds
