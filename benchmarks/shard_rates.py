"""Measure what it takes to share a captured preset among devices, and what its plans take beside those of whole layers.

python -m benchmarks.shard_rates [PRESET ...]      (default: gpt3-175b, llama3-8b and llama3-405b)

Nothing is captured again: each variant rewrites the graphs of the capture. The seconds are CPU time of one thread.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import piper
from benchmarks.measure import Goal, Row
from piper import models
from piper.api.captures.capturing import captured_job
from piper.api.compiling.compiling import Compiled
from piper_capture import with_shardings
from piper_ir.program.layout import Sharding

NAMES = ("gpt3-175b", "llama3-8b", "llama3-405b")
SHARE_GOAL, VARIANTS_GOAL, COMPILE_GOAL = (
    Goal("below", 3.0),
    Goal("below", 12.0),
    Goal("below", 1.1),
)
DEGREE, STAGES, MICROBATCHES, REPEATS = 8, 8, 32, 5
VARIANTS = [(degree, stream) for degree in (2, 4, 8, 16) for stream in ("", "tokens")]
"""The degrees and streams that one search may ask for."""


def rows(quick: bool) -> Iterator[Row]:
    """Return the rows of the presets (`quick`: of the first)."""
    for name in NAMES[: 1 if quick else None]:
        yield from shared_rows(name)
        yield from compiled_rows(name, 1 if quick else REPEATS)


def shared_rows(name: str) -> Iterator[Row]:
    """Measure one variant, and the eight of a search together."""
    captured = captured_job(models.job(name, global_batch=2))
    for stream in ("", "tokens"):
        seconds = _seconds(
            lambda stream=stream: with_shardings(captured, [Sharding("tp", DEGREE, (), stream)])
        )
        title = f"{name}: share among {DEGREE}{', with tokens' if stream else ''}"
        yield Row("shard", title, seconds, "CPU s", goal=SHARE_GOAL, note="the chunks are captured")
    captured.shared.clear()
    seconds = _seconds(
        lambda: [with_shardings(captured, [Sharding("tp", n, (), s)]) for n, s in VARIANTS]
    )
    yield Row("shard", f"{name}: {len(VARIANTS)} variants", seconds, "CPU s", goal=VARIANTS_GOAL)


def compiled_rows(name: str, repeats: int) -> Iterator[Row]:
    """Compare plans of the same stages whose layers devices share with those of whole layers."""
    plain = _compiler(name, 1, "")
    for stream in ("", "tokens"):
        shared = _compiler(name, DEGREE, stream)
        counts = [sum(len(role.program) for role in make().plan.roles) for make in (shared, plain)]
        ratios = [_seconds(shared) / _seconds(plain) for _ in range(repeats)]
        title = f"{name}: compile, tp={DEGREE}{' with tokens' if stream else ''} over tp=1"
        note = f"{counts[0]:,} instructions for {counts[1]:,}; low and high: of {repeats} pairs"
        yield Row("shard", title, median(ratios), "x", min(ratios), max(ratios), COMPILE_GOAL, note)


def _compiler(name: str, degree: int, stream: str) -> Callable[[], Compiled]:
    job = models.job(name, global_batch=MICROBATCHES)
    directives: list[Any] = [piper.shard(piper.where(), stream=stream)] if degree > 1 else []
    directives += piper.recipes.one_f_one_b(pp=STAGES, microbatches=MICROBATCHES)
    strategy = piper.Strategy(piper.Mesh(pp=STAGES, tp=degree), directives)
    return lambda: piper.compile(job, strategy)


def _seconds(call: Callable[[], object]) -> float:
    gc.collect()
    begin = time.process_time()
    call()
    return time.process_time() - begin


def main(names: Sequence[str]) -> None:
    """Print the rows."""
    for name in names or NAMES:
        for row in (*shared_rows(name), *compiled_rows(name, REPEATS)):
            verdict = "" if row.met is None else f"{row.goal} {'met' if row.met else 'MISSED'}"
            print(
                f"{row.name:<60} {row.value:>8.2f} {row.unit:<6} {verdict:<14} {row.note}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
