"""Compute figures of merit: a role's idle time, the part that communication explains, and a device's utilisation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from piper_ir.fold.timing import Prepared, Times
from piper_ir.ground.intervals import Idle, Interval, idle
from piper_ir.ground.sizes import bind
from piper_ir.plan.instr_table import InstrTable
from piper_ir.plan.plan import COMPUTE, Plan
from piper_ir.program.ops import Compute
from piper_ir.program.program import Step
from piper_simulator.cluster.cluster import Cluster
from piper_simulator.durations.cost_model import Work
from piper_simulator.durations.expert_loads import devices_of, tokens_of
from piper_simulator.durations.expert_work import loaded


def idle_times(
    plan: Plan, prepared: Prepared, times: Times, durations: Sequence[float], latency: float
) -> list[Idle]:
    """Return each role's idle time over one step from a common start.

    Its compute stream is exposed to communication while one of its communication streams transfers, or a transfer of it
    is under way.
    """
    idles = []
    for r, role in enumerate(plan.roles):
        working: list[Interval] = []
        moving: list[Interval] = []
        busy = 0.0
        own = slice(*prepared.offsets[r : r + 2])
        columns = prepared.group_of[own], times.start[own], times.end[own], durations[own]
        for stream, g, start, end, seconds in zip(role.table.streams, *columns, strict=True):
            if g >= 0:
                moving.append((start, end + latency if prepared.p2p[g] else end))
            elif stream == COMPUTE and seconds:
                working.append((start, end))
                busy += seconds
        idles.append(idle(working, moving, busy))
    return idles


def inside_seconds(prepared: Prepared, work: Sequence[Work]) -> float:
    """Return the seconds of messages inside of steps on the role that has most of them, given the work per node."""
    return max(
        [sum([w.inside_s for w in work[a:b] if w.inside]) for a, b in pairwise(prepared.offsets)],
        default=0.0,
    )


def model_flops(plan: Plan, tokens_per_row: int) -> int:
    """Return the model FLOPs of one step in the field's convention.

    It is 6 N + 12 L h s per token (llm-foundry), N all parameters once, attention without causal discount: three times
    the full products of F (4 b h s^2 d). There is no recompute. Of experts N counts the ones that a token visits
    ("active parameters": Switch, arXiv 2101.03961; torchtitan). If devices share chunks, all of them together count.
    """
    visited = _visited(plan, plan.rows * tokens_per_row)
    n = sum(
        round(bind(p.spec.numel, plan.rows) * visited.get(p.name, 1.0)) for p in plan.whole_params
    )
    return 6 * n * plan.global_batch * tokens_per_row + attention_flops(plan)


def attention_flops(plan: Plan) -> int:
    """Return the part of attention in the model FLOPs of one step, 12 L h s per token."""
    kernels = [
        k
        for chunk in plan.chunks
        if "F" in chunk.steps
        for k in chunk.steps["F"].cost.kernels
        if k.kind == "attention"
    ]
    forward = sum(
        4 * prod(bind(d, plan.rows) for d in k.dims) * k.count * k.shared * k.counts
        for k in kernels
    )
    return 3 * forward * plan.microbatches * plan.replicas


def _visited(plan: Plan, tokens: int) -> dict[str, float]:
    """Return for each parameter of experts the part of it that a token visits, at so many tokens per microbatch.

    In a batch of products [M, K] x [K, N], one per expert, each expert has M of the tokens. M includes places that no
    token took, which only a run knows. In a grouped product all experts of [E, K, N] share the M rows. If devices share
    experts, or cut each one, M are of the tokens of all of these devices, and of a dropless mixture on average.
    """
    shapes = {p.name: tuple(bind(d, plan.rows) for d in p.spec.shape) for p in plan.params}
    visited: dict[str, float] = {}
    for chunk in plan.chunks:
        rows: dict[tuple[int, ...], float] = {}
        shared: dict[tuple[int, ...], float] = {}
        for kernel in loaded(chunk, "F", 1.0).kernels if "F" in chunk.steps else ():
            if kernel.kind == "matmul" and len(kernel.dims) == 4:
                experts, m, n, k = (bind(d, plan.rows) for d in kernel.dims)
                rows[experts, n, k] = rows[experts, k, n] = m
            elif kernel.rows_dim is not None:
                m, n, k = (bind(d, plan.rows) for d in kernel.dims)
                shared[n, k] = shared[k, n] = m
        for name in (i.ref for i in chunk.inputs if i.kind == "param"):
            shape = shapes[name]
            each = rows.get(shape, 0.0)
            if not each and len(shape) == 3 and shape[0]:
                each = shared.get(shape[1:], 0.0) / shape[0]
            there = tokens_of(chunk, tokens) * devices_of(plan, chunk)
            if 0 < each < there:
                visited[name] = max(visited.get(name, 0.0), each / there)
    return visited


def without_formula(plan: Plan) -> dict[str, float]:
    """Return the operators of unknown FLOPs, each with its share of the bytes that all compute of a step moves.

    The share is of bytes because the FLOPs are missing.
    """
    total, of = 0, dict[str, int]()
    costs = [sig.cost for chunk in plan.chunks for sig in chunk.steps.values()]
    count = Counter(map(id, costs))  # equal layers share theirs
    for cost in {id(c): c for c in costs}.values():
        for kernel in cost.kernels:
            moved = count[id(cost)] * kernel.count * bind(kernel.bytes, plan.rows)
            total += moved
            if not kernel.formula:
                of[kernel.op] = of.get(kernel.op, 0) + moved
    return {
        op: moved / total if total else 0.0
        for op, moved in sorted(of.items(), key=lambda x: (-x[1], x[0]))
    }


MOST_NAMED = 8
"""The number of operators that a note names one by one."""


def flop_notes(
    missing: Mapping[str, float], mfu: float | None, hfu: float | None, attention: float = 0.0
) -> list[str]:
    """Return warnings about FLOPs: the operators of `without_formula`, and utilisations that cannot be.

    `attention` is its share of the model FLOPs.
    """
    notes = []
    if missing:
        names = ", ".join(
            f"{op} ({share:.1%} of the bytes moved)"
            for op, share in [*missing.items()][:MOST_NAMED]
        )
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        notes.append(
            f"no formula says how many FLOPs these operators do: {names}{more}; one per element is counted, so a "
            f"predicted time may be far too short. piper.op_cost(NAME, flops=...) gives an operator of yours one, "
            f"`piper profile` measures"
        )
    for name, value in (("model", mfu), ("hardware", hfu)):
        if value is not None and value > 1:
            notes.append(
                f"{name} FLOP utilisation of {value:.0%}: no device computes above its peak. "
                f"{_why_above_peak(missing, value, hfu, attention)}"
            )
    return notes


def _why_above_peak(
    missing: Mapping[str, float], value: float, hfu: float | None, attention: float
) -> str:
    """Return a sentence on the cause of a utilisation above 100 %."""
    if hfu is not None and hfu > 1:
        return (
            "The durations are shorter than the FLOPs allow: the costs are of a faster device, or "
            "the cluster's peak is too low"
        )
    if missing:
        return "The step is predicted too short: FLOPs of operators without a formula are missing from it"
    if value * (1 - attention / 2) <= 1:
        return (
            f"Model FLOPs count causal attention in full, 12 x layers x length x width per token, {attention:.0%} of "
            f"them here, and kernels skip half of it: compare tokens per second, or give "
            f"simulate(model_flops_per_step=...)"
        )
    return (
        "The model has more FLOPs by 6 N per token than its kernels run: some parameters are not used for every "
        "token (experts, embeddings of a small model); give simulate(model_flops_per_step=...)"
    )


def executed_flops(plan: Plan) -> int:
    """Return the executed FLOPs of one step, on all ranks, without places of dropless experts that no row takes."""
    of = {
        (c.variant, step): loaded(c, step, 1.0).flops
        for c in (*plan.chunks, *plan.variants)
        for step in c.steps
    }
    total = 0
    for role in plan.roles:
        runs = step_runs(role.table)
        total += len(role.ranks) * sum(of[step] * times for step, times in runs.items())
    return total


def step_runs(table: InstrTable) -> Counter[tuple[str, Step]]:
    """Return how often a role runs each step of a chunk's variant, in the order in which it first does."""
    runs: Counter[tuple[str, Step]] = Counter()
    for k, times in Counter(table.used).items():
        for op in [part.op for part in table.templates[k].parts]:
            if isinstance(op, Compute):
                runs[op.variant, op.step] += times
    return runs


def repeated_share(plan: Plan) -> float:
    """Return the share of FLOPs in which devices that share chunks repeat each other's computation."""
    degree, total, repeated = plan.mesh.degree(plan.shared), 0.0, 0.0
    for chunk in plan.chunks:
        steps = (sig for step, sig in chunk.steps.items() if step != "B")  # R, I and W say the same
        for kernel in (k for sig in steps for k in sig.cost.kernels):
            flops = bind(kernel.flops, plan.rows) * kernel.count
            total, repeated = total + flops, repeated + flops * (1 - kernel.shared / degree)
    return repeated / total if total else 0.0


def main_dtype(plan: Plan) -> str:
    """Return the dtype of most of the plan's matmul FLOPs, for its utilisation; float32 without any."""
    weight: dict[str, int] = {}
    for chunk in plan.chunks:
        for kernel in chunk.steps["F"].cost.kernels if "F" in chunk.steps else ():
            if kernel.kind == "matmul":
                weight[kernel.dtype] = (
                    weight.get(kernel.dtype, 0) + bind(kernel.flops, 0) * kernel.count
                )
    return max(weight, key=lambda d: weight[d], default="float32")


@dataclass(frozen=True, slots=True)
class Rates:
    """Hold the rates of steady state; `notes` are warnings, and `attention` is its share of the model FLOPs."""

    tokens_per_s: float | None
    mfu: float | None
    hfu: float | None
    notes: tuple[str, ...]
    attention: float = 0.0


def rates_of(
    plan: Plan,
    target: Cluster | None,
    period_s: float,
    tokens_per_row: int | None,
    model_flops_per_step: float | None,
) -> Rates:
    """Return the rates of a plan with a period, without the rates for which a number is missing."""
    per_second = 1 / period_s if period_s > 0 else None
    tokens_per_s = _rate(plan.global_batch * (tokens_per_row or 0), per_second)
    if target is None:
        return Rates(tokens_per_s, None, None, ())
    attention = 0.0
    if model_flops_per_step is None and tokens_per_row is not None:
        model_flops_per_step = model_flops(plan, tokens_per_row)
        attention = attention_flops(plan) / max(model_flops_per_step, 1)
    dtype = main_dtype(plan)
    top = target.peak_of(plan.mesh.world, dtype)
    mfu, hfu = (
        _rate(model_flops_per_step, per_second, top),
        _rate(executed_flops(plan), per_second, top),
    )
    unknown = [k for k, kind in enumerate(target.kinds) if dtype not in kind.device.peak_flops]
    guesses = [target.kinds[k].device.guess(dtype, target.name_of(k)) for k in unknown]
    notes = tuple(guesses) if mfu is not None or hfu is not None else ()
    return Rates(tokens_per_s, mfu, hfu, notes, attention)


def _rate(amount: float | None, per_second: float | None, top: float = 1.0) -> float | None:
    """Return an amount per second over the top; None when a value is unknown or zero."""
    return None if not amount or per_second is None else amount * per_second / top
