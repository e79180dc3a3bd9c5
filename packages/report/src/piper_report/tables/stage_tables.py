"""Make the tables of a strategy: its directives, and the memory and time of each stage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from piper_ir.ground.sizes import bind
from piper_ir.ground.trace import Trace
from piper_ir.plan.plan import COMPUTE, Plan, RolePlan
from piper_ir.program.ops import KEEP_ALL, Compute
from piper_ir.program.program import Chunk
from piper_ir.tools import ranks_text, size_text, time_text
from piper_report.facts.results import Results
from piper_report.tables.tables import Column, Sheet, sheet, signed_percent

MOST_WORDS = 160
"""The most characters of a directive's arguments on the page."""
NAMES = 3
"""The most modules that are named of a stage beside its layers."""


def strategy_sheet(results: Results) -> Sheet | None:
    """Return the directives of a strategy, in one row per kind if there are many; None without any."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for directive in results.directives:
        kinds.setdefault(_called(str(directive.get("is", "?"))), []).append(directive)
    rows = []
    for kind, members in kinds.items():
        same = [_arguments(d) for d in members]
        words = dict.fromkeys(same)
        shown = (
            next(iter(words))
            if len(words) == 1
            else f"{same[0]}; ...; {same[-1]}"
            if len(same) > 2
            else "; ".join(same)
        )
        rows.append(
            (kind, len(members), shown if len(shown) <= MOST_WORDS else f"{shown[:MOST_WORDS]} ...")
        )
    columns = [
        Column("directive", "directive"),
        Column("count", "how many"),
        Column("arguments", "arguments"),
    ]
    return sheet("strategy", "Strategy", columns, rows) if rows else None


def _called(kind: str) -> str:
    """Return the name of a directive in a strategy: "SplitBackward" is split_backward there."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()


def _arguments(directive: Mapping[str, Any]) -> str:
    """Return a directive's arguments as text, with selections as pairs."""
    return ", ".join(
        f"{name}={_value(value)}"
        for name, value in directive.items()
        if name != "is" and value not in ({}, [])
    )


def _value(value: Any) -> str:
    if isinstance(value, Mapping) and "terms" in value:
        return "where(" + ", ".join(f"{name}={_value(own)}" for name, own in value["terms"]) + ")"
    if (
        isinstance(value, list)
        and value
        and all(isinstance(v, list) and len(v) == 2 and isinstance(v[0], str) for v in value)
    ):
        return ", ".join(f"{name}={_value(own)}" for name, own in value)
    if isinstance(value, list):
        shown = value if len(value) <= NAMES else value[:1]
        return f"({', '.join(map(_value, shown))}{f', ..., {len(value)} in all' if len(value) > NAMES else ''})"
    return str(value)


def stage_sheet(results: Results) -> Sheet | None:
    """Return a row per stage and role: its ranks, layers, parameters, policies, and the peak of its devices."""
    plan = results.plan
    if plan is None:
        return None
    columns = [
        Column("stage", "stage"), Column("role", "role"), Column("ranks", "ranks"), Column("layers", "layers"),
        Column("others", "also"), Column("parameters", "parameters", lambda v: f"{v:,}"),
        Column("parameter_bytes", "their size", size_text), Column("keep", "keeps for backward"),
        Column("peak_bytes", "peak of the rank", size_text),
        *(Column(f"compute_{kind}_s", f"compute, {kind}", time_text) for kind in ("predicted", "measured")),
        Column("over_mean", "over the mean stage", signed_percent),
    ]  # fmt: skip
    times = [_compute_s(plan, trace) for trace in (results.predicted_trace, results.measured_trace)]
    counted = times[1] or times[0]
    mean = sum(counted.values()) / len(counted) if counted else 0.0
    counts = {p.name: (bind(p.spec.numel, 0), bind(p.spec.nbytes, 0)) for p in plan.params}
    rows: list[tuple[Any, ...]] = []
    for role in plan.roles:
        for stage, chunks in _stages(plan, role).items():
            params = {i.ref for c in chunks for i in c.inputs if i.kind == "param"} & counts.keys()
            keeps = dict.fromkeys(c.keep for c in chunks if c.keep != KEEP_ALL)
            sizes = [sum(counts[name][k] for name in params) for k in (0, 1)]
            layers, others = _layers(chunks), _modules(chunks)
            ranks = ranks_text(role.ranks)
            kept = ", ".join(keeps) or None
            here = [seconds.get((role.role, stage)) for seconds in times]
            share = (
                counted[role.role, stage] / mean - 1
                if mean and (role.role, stage) in counted
                else None
            )
            rows.append(
                (
                    stage,
                    role.role,
                    ranks,
                    layers,
                    others,
                    *sizes,
                    kept,
                    role.peak_bytes,
                    *here,
                    share,
                )
            )
    rows.sort(key=lambda row: (row[0] is None, row[0] or 0))
    return (
        sheet("stages", "Stages", columns, rows) if any(row[3] or row[4] for row in rows) else None
    )


def _stages(plan: Plan, role: RolePlan) -> dict[int | None, list[Chunk]]:
    """Return the chunks that a role computes by their stage, each under the policy that it runs under."""
    used = dict.fromkeys(
        p.op.variant for i in role.program for p in i.parts if isinstance(p.op, Compute)
    )
    by_id = {plan.chunk(name).id: plan.chunk(name) for name in used}
    chunks_by_stage: dict[int | None, list[Chunk]] = {}
    for chunk in by_id.values():
        chunks_by_stage.setdefault(chunk.coords.get("stage"), []).append(chunk)
    return chunks_by_stage


def _compute_s(plan: Plan, trace: Trace | None) -> dict[tuple[str, int | None], float]:
    """Return by role and stage the seconds that its slowest rank computes in a step.

    It is empty without a trace, and if one instruction belongs to two stages, as an overlapped pair may.
    """
    stage_of: dict[tuple[str, int], int | None] = {}
    for role, index, instr in plan.instructions():
        stages = {
            plan.chunk(p.op.variant).coords.get("stage")
            for p in instr.parts
            if isinstance(p.op, Compute)
        }
        if len(stages) > 1:
            return {}
        if stages:
            stage_of[role.role, index] = stages.pop()
    role_of = {rank: role.role for role in plan.roles for rank in role.ranks}
    sums: dict[tuple[str, int | None, int], float] = {}
    for span in trace.spans if trace is not None else ():
        if span.stream == COMPUTE and (role_of[span.rank], span.instr) in stage_of:
            key = role_of[span.rank], stage_of[role_of[span.rank], span.instr], span.rank
            sums[key] = sums.get(key, 0.0) + span.end - span.start
    slowest: dict[tuple[str, int | None], float] = {}
    for (name, stage, _), seconds in sums.items():
        slowest[name, stage] = max(slowest.get((name, stage), 0.0), seconds)
    return slowest


def _layers(chunks: Iterable[Chunk]) -> str | None:
    layers = sorted({layer for c in chunks if isinstance(layer := c.coords.get("layer"), int)})
    return _runs(layers) or None


def _runs(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text such as "0-3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def _modules(chunks: Iterable[Chunk]) -> str | None:
    """Return the modules of chunks that belong to no layer, by their parameters; else the chunks' ids."""
    modules: dict[str, None] = {}
    for c in chunks:
        if "layer" not in c.coords:
            names = [i.ref.rpartition(".")[0] or i.ref for i in c.inputs if i.kind == "param"]
            modules |= dict.fromkeys(names or [c.id])
    listed = list(modules)
    return (
        ", ".join(listed[:NAMES])
        + (f" and {len(listed) - NAMES} more" if len(listed) > NAMES else "")
        or None
    )
