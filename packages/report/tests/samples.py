"""A small plan, what its execution could have looked like, and result folders made of them: no training, no waiting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from piper_compiler import Strategy, compile_program, recipes, synthetic
from piper_ir.ground.codec import dumps
from piper_ir.ground.mesh import Mesh
from piper_ir.ground.sizes import ITEM_BYTES
from piper_ir.ground.trace import MemSample, Span, Trace
from piper_ir.plan.plan import Plan
from piper_ir.program.costs import CommDuration, Costs, Duration
from piper_simulator import Simulation, simulate

SLOWER = 1.25


def plan_of(pp: int = 2, dp: int = 1, microbatches: int = 3, **times: Any) -> Plan:
    program = synthetic(
        **(
            {
                "stages": pp,
                "F": 1e-3,
                "I": 1e-3,
                "W": 1e-3,
                "activation": 1 << 20,
                "params": 1 << 18,
            }
            | times
        )
    )
    directives = recipes.one_f_one_b(pp=pp, microbatches=microbatches)
    if dp > 1:
        directives = (*directives, *recipes.data_parallel())
    return compile_program(program, Strategy(Mesh(pp=pp, dp=dp), directives)).plan


@cache
def plan() -> Plan:
    """Two stages, each twice: pipeline transfers and reductions, four ranks."""
    return plan_of(pp=2, dp=2)


@cache
def simulation() -> Simulation:
    return simulate(plan(), "h100x8", costs=comm_costs(plan()), tokens_per_row=64)


def comm_costs(plan: Plan) -> Costs:
    """Communication that takes time: a synthetic program's takes none."""
    sizes = {b.numel * ITEM_BYTES[b.dtype] for b in plan.buckets}
    reduce = [
        CommDuration("all_reduce", n, group, Duration(7e-4)) for n in sizes for group in (2, 4)
    ]
    return Costs(comm=(CommDuration("p2p", 0, 2, Duration(3e-4)), *reduce))


def executed(trace: Trace, slower: float = SLOWER, early: float = 2e-4) -> Trace:
    """As an execution would look that takes longer: receives are posted early and wait, memory is of one category."""
    spans = tuple(
        replace(
            s,
            start=max(0.0, s.start * slower - (early if s.name.startswith("recv") else 0.0)),
            end=s.end * slower,
        )
        for s in trace.spans
    )
    memory = tuple(
        MemSample(m.rank, m.instr, m.time * slower, {"measured": sum(m.bytes.values())})
        for m in trace.memory
    )
    return Trace(trace.plan_key, "executed", spans, memory, losses=(3.0, 2.0), step=1)


def study() -> dict[str, Any]:
    """Ten candidates: two measured, one too large, one that does not compile, one with a parameter of its own."""
    rows = [
        _row(n, "1f1b" if n % 2 else "gpipe", 2 ** (n % 4 + 1), 0.1 + 0.01 * n, (40 + 10 * n) << 20)
        for n in range(8)
    ]
    rows[1] |= {"measured_period_s": 0.1, "measured_peak_bytes": 50 << 20, "error": 0.1}
    rows[2] |= {"measured_period_s": 0.15, "measured_peak_bytes": 60 << 20, "error": -0.2}
    rows[3]["params"]["cuts"] = [2, 4]
    rows[7] |= {
        "state": "rejected",
        "kind": "memory",
        "reason": "rank 0 is 10 MiB over the limit at instruction 3",
    }
    absent = {
        "period_s": None,
        "step_s": None,
        "peak_bytes": None,
        "device_bytes": None,
        "source": None,
    }
    rows += [
        _row(8, "gpipe", 3, 0, 0)
        | absent
        | {"state": "rejected", "kind": "illegal", "reason": "<b>8 rows</b> by 3 & more"}
    ]
    rows += [
        _row(9, "gpipe", 3, 0, 0)
        | absent
        | {"state": "rejected", "kind": "illegal", "reason": "8 rows by 3"}
    ]
    head = {
        "format": "Study",
        "version": 1,
        "cluster": "cpu-local",
        "memory_limit": 100 << 20,
        "seed": 0,
    }
    return head | {
        "trials": rows,
        "best": 1,
        "rules": ["A plan that does not fit with more saving does not fit with less."],
    }


def _row(
    number: int, schedule: str, microbatches: int, period: float, nbytes: int
) -> dict[str, Any]:
    scores = {
        "period_s": period,
        "step_s": period,
        "peak_bytes": nbytes,
        "device_bytes": nbytes,
        "source": "sweep",
    }
    others = dict.fromkeys(("reason", "kind", "measured_period_s", "measured_peak_bytes", "error"))
    return {
        "number": number,
        "state": "complete",
        "params": {"schedule": schedule, "m": microbatches},
        **scores,
        **others,
    }


def write_simulation(folder: Path, made: Simulation | None = None, of: Plan | None = None) -> None:
    made = made or simulation()
    columns = zip(made.bubble_s, made.peak_bytes, made.device_bytes, made.peak_by_category)
    names = ("bubble_s", "peak_bytes", "device_bytes", "peak_by_category")
    ranks = [dict(zip(names, (b, p, d, dict(c)))) for b, p, d, c in columns]
    (folder / "plan.json").write_text(dumps(of or plan()))
    (folder / "strategy.json").write_text(
        json.dumps({"format": "Strategy", "version": 1, "params": {"m": 3}})
    )
    (folder / "predicted.json").write_text(json.dumps(made.summary() | {"ranks": ranks}))
    (folder / "spans-predicted.json").write_text(dumps(made.trace))


def write_simulation_by_role(folder: Path, plan: Plan) -> None:
    """A simulation of many ranks: those that are alike once, as `piper simulate` writes them."""
    made = simulate(plan, "h100x8*2048")
    columns = ("bubble_s", "peak_bytes", "device_bytes")
    roles = [
        {"ranks": ranks, **{name: getattr(made, name)[ranks[0]] for name in columns}}
        for ranks in made.role_trace.alike
    ]
    (folder / "plan.json").write_text(dumps(plan))
    (folder / "predicted.json").write_text(json.dumps(made.summary() | {"roles": roles}))
    (folder / "spans-predicted.json").write_text(dumps(made.role_trace))


def write_run(folder: Path, steps: int = 6) -> None:
    made = simulation()
    step_s = [made.period_s * SLOWER * (3 if i == 0 else 1 + 0.01 * i) for i in range(steps)]
    losses = [3.0 / (i + 1) for i in range(steps)]
    period = sorted(step_s[3:])[len(step_s[3:]) // 2]
    peaks = {str(r): b for r, b in enumerate(made.peak_bytes)}
    numbers = {
        "losses": losses,
        "step_s": step_s,
        "period_s": period,
        "tokens_per_s": 1e5,
        "peak_bytes": peaks,
    }
    (folder / "measured.json").write_text(json.dumps(numbers))
    (folder / "spans-measured.json").write_text(dumps(executed(made.trace)))
    rates = {"tokens_per_s": 1e5, "time": 1e9}
    lines = [
        {"step": i, "loss": x, "step_s": s} | rates for i, x, s in zip(range(steps), losses, step_s)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_tuning(folder: Path, document: Mapping[str, Any] | None = None) -> None:
    (folder / "study.json").write_text(json.dumps(document or study()))


def write_costs(folder: Path) -> None:
    compute = {"stage0": {"F": Duration(1e-3), "W": Duration(2e-3, "given")}}
    (folder / "costs.json").write_text(
        dumps(Costs(compute, (CommDuration("p2p", 4096, 2, Duration(5e-5)),), rows=4))
    )


def whole_folder(folder: Path) -> Path:
    """A simulation, a run, a tuning and a profile in one."""
    folder.mkdir(parents=True, exist_ok=True)
    write_simulation(folder)
    write_run(folder)
    write_tuning(folder)
    write_costs(folder)
    return folder


def span(rank: int, stream: str, instr: int, name: str, start: float, end: float) -> Span:
    return Span(rank, stream, instr, name, start, end)
