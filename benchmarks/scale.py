"""Measure what planning costs: GPT-3 175B on 1,024 devices, Llama-3 405B on 16,384, and the growth with each size."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import piper
from benchmarks.measure import Goal, Row, cpu_seconds, extremes_row
from benchmarks.scale_cell import PHASES
from packages.compiler.tests.compile_cases import layered
from piper import models
from piper.api.captures.capturing import captured_job
from piper.api.problems.tuning_problem import Conditions, problem_of
from piper_autotune import Wanted
from piper_autotune.scoring.scoring import Needs, Scored, score
from piper_compiler import Strategy, compile_program, recipes
from piper_ir.ground.mesh import Mesh
from piper_ir.program.program import Program
from piper_ir.verify import verify
from piper_simulator import load_cluster

GOALS = Goal("below", 20.0), Goal("below", 2.0)
SHARED_GOALS = Goal("below", 20.0), Goal("below", 1.5)
CUT_GOALS = Goal("below", 6.0), Goal("below", 2.0)
"""CPU seconds and GiB of a cell: layers whole, states shared, layers and tokens cut."""
UNCOUNTED = ("import", "verify")
"""The phases that are no part of the sum: `piper simulate` does not verify a plan that it compiled itself."""
VERIFY_GOAL = Goal("above", 30_000)
DEADLINE_S = 600.0
LLAMA = "Llama-3 405B on 16,384 devices"
CELLS = (
    ("GPT-3 175B on 1,024 devices", ("gpt3-175b", 16, 64, 128, "h100x8*128"), GOALS),
    (LLAMA, ("llama3-405b", 16, 1024, 128, "h100x8*2048"), GOALS),
    (
        f"{LLAMA}, tp=8, cp=2",
        ("llama3-405b", 16, 64, 128, "h100x8*2048", 0, 25, 8, 2),
        CUT_GOALS,
    ),
    (
        f"{LLAMA}, zero=3, buckets of 25 MiB",
        ("llama3-405b", 16, 1024, 128, "h100x8*2048", 3),
        SHARED_GOALS,
    ),
)
"""Title; arguments of `benchmarks.scale_cell`; goals."""

LAYERS, DEVICES, REPLICAS, MICROBATCHES = 32, 8, 16, 64
"""Where the series cross: each varies one of the four and leaves the others."""
SERIES = {
    "microbatches": (32, 64, 128, 256),
    "stages": (4, 8, 16, 32),
    "layers": (16, 32, 64, 128),
    "replicas": (4, 16, 64, 256, 1024),
}
PARTS = ("compile", "verify", "simulate")
WORST_GOAL = Goal("below", 1.0)
"""Seconds to compile 24 layers on 8 devices in 1F1B, where the published prototype took 204 s."""
GROWTH_GOAL = Goal("below", 2.3)
"""Times as long for twice as much."""


def rows(quick: bool) -> Iterator[Row]:
    """Return the worst case of compiling, the cells (`quick`: none), and the growth along each size."""
    yield worst_row(2 if quick else 9)
    for title, arguments, goals in () if quick else CELLS:
        yield from cell_rows(title, cell(arguments), *goals)
    yield from candidate_rows(1 if quick else 16)
    for name, sizes in SERIES.items():
        yield from growth_rows(name, sizes[:2] if quick else sizes, 1 if quick else 5)


def worst_row(repeats: int) -> Row:
    """Return the CPU seconds from directives to plan of the published prototype's worst case."""
    strategy = Strategy(Mesh(pp=8), recipes.one_f_one_b(pp=8, microbatches=32))
    program = layered(24)
    seconds = [cpu_seconds(lambda: compile_program(program, strategy))[1] for _ in range(repeats)]
    title = "compile 24 layers, pp=8, m=32, 1F1B"
    return extremes_row("scale", title, seconds, "CPU s", WORST_GOAL, "the prototype took 204 s")


def cell(arguments: Sequence[Any]) -> dict[str, Any]:
    """Return what `benchmarks.scale_cell` prints when it runs alone; RuntimeError with its output when it fails."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "benchmarks.scale_cell", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr}"
        )
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def cell_rows(
    title: str, facts: dict[str, Any], seconds_goal: Goal, memory_goal: Goal
) -> list[Row]:
    """Return the CPU seconds from capture to simulation and of each phase, and the memory.

    All of this is one thread that waits for nothing.
    """
    size = (
        f"{facts['roles']} roles, {facts['nodes']:,} nodes, {facts['instructions']:,} instructions"
    )
    total, wall = (
        sum(of[p] for p in PHASES if p not in UNCOUNTED) for of in (facts["cpu_s"], facts["wall_s"])
    )
    note = f"{size}; {wall:.1f} s of wall time; step of {facts['step_s']:.1f} s, MFU {facts['mfu'] or 0:.1%}"
    return [
        Row(
            "scale",
            f"{title}: model to simulated step",
            total,
            "CPU s",
            goal=seconds_goal,
            note=note,
        ),
        *(Row("scale", f"{title}: {phase}", facts["cpu_s"][phase], "CPU s") for phase in PHASES),
        Row(
            "scale",
            f"{title}: verify, instructions per CPU second",
            facts["instructions"] / facts["cpu_s"]["verify"],
            "1/s",
            goal=VERIFY_GOAL,
        ),
        Row(
            "scale",
            f"{title}: peak memory",
            facts["peak_gib"],
            "GiB",
            goal=memory_goal,
            note="of the process, torch included",
        ),
    ]


CANDIDATE_GOAL = Goal("below", 0.1)


def candidate_rows(repeats: int) -> Iterator[Row]:
    """Return the CPU seconds of a tuner's candidate, for Llama 3 8B on 16 devices, whose degrees are captured.

    The search compiles each candidate and sweeps its step; those of its table are verified and simulated with
    contention, too. The least of the repetitions counts.
    """
    job = models.job("llama3-8b", global_batch=16)
    problem, programs = problem_of(job, Conditions(load_cluster("h100x8*2")))
    split = (
        piper.shard(piper.where(), stream="tokens"),
        *recipes.one_f_one_b(pp=4, microbatches=8),
    )
    sharded = *recipes.data_parallel(over=("dp",), zero=1), piper.recompute(piper.where())
    for title, items in (
        ("", (*split, *recipes.data_parallel(over=("dp",)))),
        (", zero=1, recompute", (*split, *sharded)),
    ):
        strategy = Strategy(Mesh(pp=4, dp=2, tp=2), items)
        variants: dict[Wanted, Program | str | None] = {}
        while isinstance(found := score(problem, strategy, variants), Needs):
            variants[found.wanted] = programs["under"](found.wanted)
        assert isinstance(found, Scored), found
        for engine, goal in ((False, CANDIDATE_GOAL), (True, None)):
            once = partial(score, problem, strategy, variants, engine)
            yield Row(
                "scale",
                f"a tuner's candidate of known degrees: Llama 3 8B, pp=4, 8 microbatches, tp=2, dp=2{title}"
                + (": verified, by events" if engine else ""),
                min([cpu_seconds(once)[1] for _ in range(repeats)]),
                "CPU s",
                goal=goal,
                note=f"least of {repeats}",
            )


@dataclass(frozen=True)
class Size:
    """Hold the sizes of a GPT of small layers in rows of 64 tokens.

    What is planned is the same, and a capture takes little.
    """

    layers: int = LAYERS
    stages: int = DEVICES
    replicas: int = REPLICAS
    microbatches: int = MICROBATCHES

    def config(self) -> models.DecoderConfig:
        return models.GPTConfig(layers=self.layers, width=64, heads=4, vocab=256, length=64)

    def seconds(self) -> tuple[int, dict[str, float]]:
        """Return instructions, and CPU seconds by part, with contention; capture is done before."""
        job = models.job(self.config(), global_batch=self.microbatches * self.replicas)
        captured_job(job)
        directives = (
            *recipes.one_f_one_b(pp=self.stages, microbatches=self.microbatches),
            *recipes.data_parallel(over=("dp",)),
        )
        strategy = Strategy(Mesh(pp=self.stages, dp=self.replicas), directives)
        nodes = -(-self.stages * self.replicas // 8)
        took = {}
        compiled, took["compile"] = cpu_seconds(lambda: piper.compile(job, strategy))
        _, took["verify"] = cpu_seconds(lambda: verify(compiled.plan))
        _, took["simulate"] = cpu_seconds(lambda: piper.simulate(compiled.plan, f"h100x8*{nodes}"))
        return sum(len(role.program) for role in compiled.plan.roles), took


def growth_rows(
    name: str, sizes: Sequence[int], repeats: int, base: Size = Size()
) -> Iterator[Row]:
    """Return the worst growth per doubling of one size.

    The fastest of the repetitions counts: what else ran is not in it.
    """
    best: dict[int, dict[str, float]] = {}
    counts: dict[int, int] = {}
    for _ in range(repeats):  # in turn: a machine that is slow for a while is so for all of them
        for size in sizes:
            counts[size], took = replace(base, **{name: size}).seconds()
            best[size] = {p: min(s, best.get(size, took)[p]) for p, s in took.items()}
    for part in PARTS:
        ratios = [per_doubling(a, b, best[a][part], best[b][part]) for a, b in pairwise(sizes)]
        seconds = ", ".join(f"{best[size][part]:.2f}" for size in sizes)
        note = (
            f"{seconds} s; {counts[sizes[0]]:,} to {counts[sizes[-1]]:,} instructions; low and "
            f"high: of the doublings"
        )
        title = f"{part}, worst growth per doubling of {name}, {sizes[0]} to {sizes[-1]}"
        yield Row("scale", title, max(ratios), "x", min(ratios), max(ratios), GROWTH_GOAL, note)


def per_doubling(size: float, larger: float, seconds: float, more: float) -> float:
    """Return the growth of the time as if it were a power of the size, where sizes are not just doubled."""
    return float(2 ** (log(more / seconds) / log(larger / size)))
