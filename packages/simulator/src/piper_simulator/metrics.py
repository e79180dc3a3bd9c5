"""Compute figures of merit.

They say what a role's compute leaves idle, what of that communication explains, and how much of a device is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from piper_ir.intervals import Idle, Interval, idle
from piper_ir.ops import Compute
from piper_ir.plan import COMPUTE, Plan
from piper_ir.sizes import bind
from piper_ir.timing import Prepared, Times


def idle_times(plan: Plan, prepared: Prepared, times: Times, durations: Sequence[float], latency: float) -> list[Idle]:
    """Return what each role leaves idle, over one step from a common start.

    Its compute stream is exposed to communication while one of its communication streams transfers, or a transfer of it
    is under way."""
    out = []
    for r, role in enumerate(plan.roles):
        working: list[Interval] = []
        moving: list[Interval] = []
        busy = 0.0
        for node, instr in enumerate(role.program, prepared.offsets[r]):
            g = prepared.group_of[node]
            if g >= 0:
                moving.append((times.start[node], times.end[node] + (latency if prepared.p2p[g] else 0.0)))
            elif instr.stream == COMPUTE and durations[node]:
                working.append((times.start[node], times.end[node]))
                busy += durations[node]
        out.append(idle(working, moving, busy))
    return out


def model_flops(plan: Plan, tokens_per_row: int) -> int:
    """Return the model FLOPs of one step in the field's convention.

    It is 6 N + 12 L h s per token (llm-foundry), N all parameters once, attention without causal discount: three times
    the full products of F (4 b h s^2 d). There is no recompute. Of experts N has as much as a token visits ("active
    parameters": Switch, arXiv 2101.03961; torchtitan)."""
    visited = _visited(plan, plan.rows * tokens_per_row)
    n = sum(round(bind(p.spec.numel, plan.rows) * visited.get(p.name, 1.0)) for p in plan.params)
    kernels = [k for chunk in plan.chunks if "F" in chunk.steps for k in chunk.steps["F"].cost.kernels if k.kind == "attention"]
    attention = sum(4 * prod(bind(d, plan.rows) for d in k.dims) * k.count for k in kernels)
    return 6 * n * plan.global_batch * tokens_per_row + 3 * attention * plan.microbatches * plan.replicas


def _visited(plan: Plan, tokens: int) -> dict[str, float]:
    """Return for each parameter of experts the part of it that a token visits, at so many tokens per microbatch.

    Each of a batch of products [M, K] x [K, N], one per expert, has M of them. Places that no token took are in M: what
    runs does not know."""
    shapes = {p.name: tuple(bind(d, plan.rows) for d in p.spec.shape) for p in plan.params}
    out: dict[str, float] = {}
    for chunk in plan.chunks:
        rows: dict[tuple[int, ...], int] = {}
        for kernel in chunk.steps["F"].cost.kernels if "F" in chunk.steps else ():
            if kernel.kind == "matmul" and len(kernel.dims) == 4:
                experts, m, n, k = (bind(d, plan.rows) for d in kernel.dims)
                rows[experts, n, k] = rows[experts, k, n] = m
        for name in (i.ref for i in chunk.inputs if i.kind == "param"):
            if (m := rows.get(shapes[name], 0)) and m < tokens:
                out[name] = max(out.get(name, 0.0), m / tokens)
    return out


def executed_flops(plan: Plan) -> int:
    """Return the FLOPs of what runs in one step, on all ranks."""
    of = {(c.id, step): sig.cost.flops for c in plan.chunks for step, sig in c.steps.items()}
    total = 0
    for role in plan.roles:
        parts = (part.op for instr in role.program for part in instr.parts)
        total += len(role.ranks) * sum(of[op.chunk, op.step] for op in parts if isinstance(op, Compute) and op.step != "B")
    return total


def main_dtype(plan: Plan) -> str:
    """Return the dtype of most of the plan's matmul FLOPs, in which utilisation is counted.

    It is float32 for a plan without any."""
    weight: dict[str, int] = {}
    for chunk in plan.chunks:
        for kernel in chunk.steps["F"].cost.kernels if "F" in chunk.steps else ():
            if kernel.kind == "matmul":
                weight[kernel.dtype] = weight.get(kernel.dtype, 0) + bind(kernel.flops, 0) * kernel.count
    return max(weight, key=lambda d: weight[d], default="float32")
