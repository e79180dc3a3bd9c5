"""Measure how fast strategies become plans: the worst case, and growth per doubling of microbatches and of devices.

`python benchmarks/compile_rates.py` prints a table with machine and date; `make bench` shows the same rows.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

if __name__ == "__main__":  # run as a file, sys.path begins with this folder and not with the root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import score_rates, shared_rates
from benchmarks.measure import Goal, Row, machine
from packages.compiler.tests.compile_cases import users_place
from piper_compiler import Strategy, compile_program, place, recipes, synthetic
from piper_ir.ground.mesh import Mesh
from piper_ir.program.program import Program

WORST_GOAL = Goal("below", 1.0)
"""Seconds, where the prototype took 204 s on one core."""
OWN_GOAL = Goal("below", 1.1)
"""Times as long with a directive of a user's file."""
GROWTH_GOAL = Goal("below", 2.3)
"""Times as long for twice as much."""
BY_MICROBATCHES = (40, 80, 160, 320, 640)
"""With 24 layers on 8 devices: 3,048 to 48,648 nodes."""
BY_DEVICES = (4, 8, 16, 32, 64)
"""With 3 layers per device and 64 microbatches: 2,308 to 40,768 nodes."""


def layered(layers: int) -> Program:
    """Return a chain of one chunk per layer; the strategy chooses the stages."""
    program = synthetic(stages=layers, F=3, I=4, W=2, params=100)
    chunks = (replace(c, coords={"layer": k}) for k, c in enumerate(program.chunks))
    return replace(program, chunks=tuple(chunks))


Case = tuple[int, int, int]
"""Layers, devices, microbatches."""


def timed(cases: Sequence[Case], repeats: int) -> list[tuple[int, list[float]]]:
    """Return for each case the nodes of the graph, and the CPU seconds of each compilation to a plan (1F1B).

    Cases take turns: a machine that is slow for a while is so for all of them.
    """
    inputs = [
        (layered(n), Strategy(Mesh(pp=pp), recipes.one_f_one_b(pp=pp, microbatches=m)))
        for n, pp, m in cases
    ]
    nodes = [len(compile_program(*i).graph.nodes) for i in inputs]
    rounds = [[_cpu_seconds(*i) for i in inputs] for _ in range(repeats)]
    return list(zip(nodes, map(list, zip(*rounds, strict=True)), strict=True))


def _cpu_seconds(program: Program, strategy: Strategy) -> float:
    """Compile once, and return the CPU seconds.

    A compilation is one thread and waits for nothing, so CPU time leaves out what else runs.
    """
    gc.collect()
    begin = time.process_time()
    compile_program(program, strategy)
    return time.process_time() - begin


def rows(quick: bool) -> list[Row]:
    """Return the worst case, then every size of the two series with its growth, then shared states and scoring."""
    repeats = 2 if quick else 5
    ((nodes, seconds),) = timed([(24, 8, 32)], repeats)
    note = f"{nodes:,} nodes; the prototype made 8,584 of it and took 204 s"
    worst = Row(
        "compile",
        "24 layers, pp=8, m=32, 1F1B",
        median(seconds),
        "s",
        min(seconds),
        max(seconds),
        WORST_GOAL,
        note,
    )
    by_m, by_p = (BY_MICROBATCHES[:3], BY_DEVICES[:3]) if quick else (BY_MICROBATCHES, BY_DEVICES)
    return [
        worst,
        _own_directive(repeats),
        *_series("24 layers, pp=8, m={}", by_m, timed([(24, 8, m) for m in by_m], repeats)),
        *_series(
            "3 layers per device, pp={}, m=64", by_p, timed([(3 * p, p, 64) for p in by_p], repeats)
        ),
        *shared_rates.rows(quick),
        *score_rates.rows(quick),
    ]


def _own_directive(repeats: int) -> Row:
    """Compile the worst case with a copy of `place` from a user's file, in turn with ours."""
    program, ours = layered(24), recipes.one_f_one_b(pp=8, microbatches=32)
    theirs = [
        users_place()(d.selection, d.on, d.send, d.recv) if isinstance(d, place) else d
        for d in ours
    ]
    ratios = []
    for _ in range(2 * repeats):
        own, plain = (_cpu_seconds(program, Strategy(Mesh(pp=8), made)) for made in (theirs, ours))
        ratios.append(own / plain)
    note = "a copy of place.py over ours; low and high: of the pairs"
    return Row(
        "compile",
        "place in a user's file",
        median(ratios),
        "x",
        min(ratios),
        max(ratios),
        OWN_GOAL,
        note,
    )


def _series(
    title: str, sizes: Sequence[int], measured: Sequence[tuple[int, list[float]]]
) -> list[Row]:
    """Return a rate per size, and a growth per doubling.

    Growth compares the fastest repetitions: what else ran is not in them.
    """
    out = []
    for size, (nodes, seconds) in zip(sizes, measured, strict=True):
        rates = [nodes / s for s in seconds]
        note = f"{nodes:,} nodes in {median(seconds):.2f} s"
        out.append(
            Row(
                "compile",
                title.format(size),
                median(rates),
                "nodes/s",
                min(rates),
                max(rates),
                note=note,
            )
        )
    for (size, (_, seconds)), (larger, (_, more)) in pairwise(zip(sizes, measured, strict=True)):
        name = f"growth, {title.format(f'{size} to {larger}')}"
        out.append(Row("compile", name, min(more) / min(seconds), "x", goal=GROWTH_GOAL))
    return out


def main(quick: bool = False) -> list[Row]:
    """Print the table, and return its rows."""
    print(machine())
    found = rows(quick)
    for row in found:
        verdict = "" if row.met is None else f"  {row.goal} {'met' if row.met else 'MISSED'}"
        print(f"{row.name:<86} {row.value:>10,.2f} {row.unit:<8} {row.note}{verdict}")
    return found


if __name__ == "__main__":
    main("--quick" in sys.argv)
