"""Simulate four figures of the paper that Piper follows (arXiv 2606.11169), beside its published numbers.

docs/paper.md has them with what is assumed, its sources, and more. No GPU is needed: nothing runs but compiler,
simulator and tuner. `rows` is a section of benchmarks/run.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.measure import Goal, Row
from benchmarks.paper import schedule_lines, zero_batches
from benchmarks.paper.stage import MIB, OPTIONS, Setting, pair, step
from piper_ir.ground.errors import ClusterError
from piper_simulator import load_cluster

PAPER = 1.46
"""How many times as long an all-to-all beside a data-parallel all-reduce takes, by the paper."""
CLUSTERS = ("h100x2*2", "a100x2*2", "h100x4")
PIECES_MB = (25, 4)
REACHED = ((16, 0.52), (32, 0.63), (64, 0.72))
"""The part of the NICs' rate that an all-to-all of 16 GPUs on two nodes reached, by MiB.

Source: SimAI, inputs/ratio/ata_ratio.csv at commit cef83f9ddd (MIT).
"""
TRIALS = 60


def rows(quick: bool) -> Iterator[Row]:
    """Return interference, largest batches, schedules and meshes; `quick`: interference on one cluster."""
    for cluster in CLUSTERS[: 1 if quick else None]:
        yield from interference(cluster)
    for name, part, slower in reached(CLUSTERS[0]):
        note = f"it reaches {part:.2f} of its link alone; {PAPER} in the paper"
        yield Row("paper", f"all-to-all beside a reduction, {name}", slower, "x alone", note=note)
    if not quick:
        yield from largest_batches()
        yield from schedules()
        yield from meshes()


# --- interference


def setting(cluster: str) -> Setting:
    """Return two ranks of a cluster: of two nodes, one on each; of one node, its first and the one half a node on.

    ClusterError for a cluster without two devices, and for one of CPUs.
    """
    loaded = load_cluster(cluster)
    if loaded.devices < 2 or loaded.synchronous:
        raise ClusterError(
            f"{loaded.name} has no two devices with links between them; give one such as {CLUSTERS[0]}"
        )
    apart = loaded.per_node if loaded.node_count > 1 else max(1, loaded.devices // 2)
    return Setting(loaded, (0, apart))


def interference(cluster: str) -> Iterator[Row]:
    """Yield by option how many times as long as alone an all-to-all takes beside one reduction, and in a step."""
    plain = setting(cluster)
    last = f"B{plain.microbatches - 1}."
    alone = pair(plain, "alone").exchange_s("B"), step(plain, "alone").exchange_s(last)
    for option in OPTIONS[1:]:
        pieces = option.startswith("partitioned")
        for mb in PIECES_MB if pieces else (plain.bucket_mb,):
            s = replace(plain, bucket_mb=mb)
            times = pair(s, option).exchange_s("B"), step(s, option).exchange_s(last)
            one, whole = (t / a for t, a in zip(times, alone, strict=True))
            name = f"{s.cluster.name}, {option}{f' of {mb} MiB' if pieces else ''}: all-to-all"
            note = f"in a step {whole:.2f} x" + f"; {PAPER} in the paper" * (
                option == "separate streams"
            )
            yield Row("paper", name, one, "x alone", note=note)


def reached(cluster: str) -> Iterator[tuple[str, float, float]]:
    """Return how many times as long an all-to-all takes beside the reduction, by what it reaches of its link alone."""
    s = setting(cluster)
    nbytes = s.exchanged
    wire = nbytes / 2 / s.cluster.links.inter_bandwidth
    yield f"by formula, {nbytes / MIB:.0f} MiB", wire / s.seconds("all_to_all", nbytes), _slower(s)
    for mib, part in REACHED:
        yield f"SimAI, {mib} MiB", part, _slower(replace(s, reached=part))
    yield "that gives the paper's number", PAPER / 2, _slower(replace(s, reached=PAPER / 2))


def _slower(s: Setting) -> float:
    return pair(s, "separate streams").exchange_s("B") / pair(s, "alone").exchange_s("B")


# --- pipelines with ZeRO


def largest_batches() -> Iterator[Row]:
    """Yield the largest batch of each system under its policy, and how many of its claims are not as published."""
    lines = list(zero_batches.lines(zero_batches.Setting()))
    for x in lines:
        others = ", ".join(f"{keep} {found.batch:.1f}" for keep, found in x.batches.items())
        note = f"{x.system.published or zero_batches.OOM} in the paper; by policy {others}"
        yield Row("paper", f"largest batch, {x.system.name}", x.reached, "rows", note=note)
    missed = zero_batches.missed(lines)
    yield _missed("largest batches: order, and ours as large as published", missed)


def _missed(name: str, missed: list[str]) -> Row:
    goal = Goal("below", 1)
    return Row("paper", name, len(missed), "missed", goal=goal, note="; ".join(missed))


# --- schedules and meshes of mixtures


def schedules() -> Iterator[Row]:
    """Yield how much faster schedules are than others, and the best that the tuner finds over DualPipeV."""
    setups = schedule_lines.setups(shared=True)
    lines = list(schedule_lines.lines(setups))
    for p in schedule_lines.RATIOS:
        percent = schedule_lines.ratio(lines, p)
        name = f"{p.model}: {p.faster} faster than {p.than} by"
        goal, apart = Goal("below", schedule_lines.POINTS), abs(percent - p.percent)
        note = f"{p.percent:g} in the paper; the goal is for the points between them"
        yield Row("paper", name, percent, "%", goal=goal, note=note, judged=apart)
    for setup in setups:
        dual = next(x for x in lines if x.setup == setup and x.schedule == "DualPipeV")
        best = schedule_lines.tuned(setup, TRIALS)
        name, over = f"{setup.model}: tuned over DualPipeV", best.tokens_per_s / dual.tokens_per_s
        note = f"{best.schedule}; {TRIALS} trials"
        yield Row("paper", name, over, "ratio", goal=Goal("above", 1 - 1e-9), note=note)


def meshes() -> Iterator[Row]:
    """Yield tokens per second of the small mixture under DualPipeV, on meshes of each size."""
    pp, width, published = schedule_lines.RATE
    for x in schedule_lines.grid(shared=True):
        name = f"qwen3-moe-1b, {x.setup.pp} stages x {x.setup.width} replicas"
        if (x.setup.pp, x.setup.width) != (pp, width):
            yield Row("paper", name, x.tokens_per_s, "tokens/s")
            continue
        error = 100 * abs(x.tokens_per_s / published - 1)
        goal, note = Goal("below", schedule_lines.STEP), f"{published:,.0f} in the paper"
        note += f"; the goal is for the error, {error:.1f} %"
        yield Row("paper", name, x.tokens_per_s, "tokens/s", goal=goal, note=note, judged=error)
