"""Compare the speed of this tree with that of another commit, by pairs in turn.

git worktree add ../before COMMIT
python benchmarks/compare_trees.py ../before                      all cases, nine pairs each
python benchmarks/compare_trees.py ../before --pairs 5 compile     some cases

One process per tree serves both sides of every pair, so a machine that changes its speed slows both. Times are CPU
seconds of the process, without garbage of the call before. A ratio above 1 means that this tree is faster.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def _timed(call: Callable[[], object]) -> float:
    gc.collect()
    begin = time.process_time()
    call()
    return time.process_time() - begin


@cache
def _layers(microbatches: int) -> tuple[Any, Any]:
    """Return 24 layers of 30 parameters each on 8 stages, and 1F1B for them."""
    from benchmarks.compile_rates import layered
    from piper_compiler import Strategy, recipes
    from piper_ir.ground.mesh import Mesh

    return layered(24), Strategy(Mesh(pp=8), recipes.one_f_one_b(pp=8, microbatches=microbatches))


@cache
def _preset(name: str, dp: int) -> tuple[Any, Any]:
    """Return a preset and 1F1B on 16 stages times dp replicas, with 128 microbatches."""
    import piper
    from piper import models
    from piper_compiler import Strategy, recipes
    from piper_ir.ground.mesh import Mesh

    job = models.job(name, global_batch=128 * dp)
    directives = [
        *recipes.one_f_one_b(pp=16, microbatches=128),
        *recipes.data_parallel(over=("dp",)),
    ]
    strategy = Strategy(Mesh(pp=16, dp=dp), directives)
    piper.compile(job, strategy)  # later calls find the capture
    return job, strategy


@cache
def _score_cases() -> list[Any]:
    from benchmarks import score_rates

    return list(score_rates.cases(24, 112))


def _score(case: int) -> float:
    from benchmarks import score_rates

    return sum(score_rates.score(_score_cases()[case])[0])


def _compile(microbatches: int) -> float:
    from piper_compiler import compile_program

    return _timed(partial(compile_program, *_layers(microbatches)))


def _verify(microbatches: int) -> float:
    from piper_compiler import compile_program
    from piper_ir.verify import verify

    return _timed(partial(verify, compile_program(*_layers(microbatches)).plan))


def _compile_preset(name: str, dp: int) -> float:
    import piper

    return _timed(partial(piper.compile, *_preset(name, dp)))


def _verify_preset(name: str, dp: int) -> float:
    import piper
    from piper_ir.verify import verify

    return _timed(partial(verify, piper.compile(*_preset(name, dp)).plan))


CASES: dict[str, Callable[[], float]] = {
    "score a plan of 8 stages": partial(_score, 0),
    "score a plan of a GPT of 24 layers": partial(_score, 1),
    "compile 24 layers, m=32": partial(_compile, 32),
    "compile 24 layers, m=128": partial(_compile, 128),
    "verify 24 layers, m=128": partial(_verify, 128),
    "compile GPT-3 175B on 1,024": partial(_compile_preset, "gpt3-175b", 64),
    "verify GPT-3 175B on 1,024": partial(_verify_preset, "gpt3-175b", 64),
    "compile Llama 405B on 16,384": partial(_compile_preset, "llama3-405b", 1024),
}
"""The cases by name; each returns the CPU seconds of one run."""


class Side:
    """Hold a process that runs cases in a tree."""

    def __init__(self, tree: Path) -> None:
        sources = [tree, tree / "src", *sorted((tree / "packages").glob("*/src"))]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, sources)),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--serve"]
        self._process = subprocess.Popen(
            command, cwd=tree, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, case: str) -> float:
        """Run a case once and return its CPU seconds; EOFError if the process died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(case, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return float(line.removeprefix("seconds "))
        raise EOFError(f"the process that ran {case!r} has ended")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """Run the cases that are named on standard input, and print their seconds."""
    sys.path[0] = os.getcwd()  # the tree's own benchmarks, not those beside this file
    for line in sys.stdin:
        print(f"seconds {CASES[line.strip()]()!r}", flush=True)


def compare(before: Side, now: Side, case: str, pairs: int) -> str:
    """Return a line with the medians of a case, and the median and extremes of the ratios of its pairs."""
    before.seconds(case), now.seconds(case)
    found = []
    for k in range(pairs):
        first, second = (before, now) if k % 2 else (now, before)
        a, b = first.seconds(case), second.seconds(case)
        found.append((a, b) if first is before else (b, a))
    ratios = sorted(a / b for a, b in found)
    times = " ".join(f"{1e3 * median(side):8.1f} ms" for side in zip(*found, strict=True))
    return f"{case:36} {times}  ratio {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def main(argv: list[str] | None = None) -> int:
    """Print a line per case."""
    parser = argparse.ArgumentParser(
        description="Compare the speed of this tree with that of another commit."
    )
    parser.add_argument("before", type=Path, nargs="?", help="a tree of the other commit")
    parser.add_argument(
        "cases", nargs="*", help="the beginnings of the cases' names; all by default"
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.serve:
        serve()
        return 0
    if given.before is None or not (given.before / "packages").is_dir():
        parser.error("give a tree of the other commit: git worktree add ../before COMMIT")
    sides = Side(given.before.resolve()), Side(ROOT)
    try:
        for case in CASES:
            if not given.cases or case.startswith(tuple(given.cases)):
                print(compare(*sides, case, given.pairs), flush=True)
    finally:
        for side in sides:
            side.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
