"""Predict steps and memory of Megatron-LM's functional tests on H100, and compare them with the values stored beside them.

python -m tests.interop.megatron_steps CHECKOUT [WORD ...]

With words the jobs count whose folders have one of them in their path. Most are small models, whose steps wait for the host
that starts kernels: they say what one kernel of a plan costs it (`launch_s` of the stacks of Megatron). The stored memory is the
most that torch allocated on the last rank, which writes the log. Jobs of release tests are left out, since nothing says on
how many devices they ran.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import Any

import piper
from piper.cli.loading import load_file
from piper_interop import Imported, python
from piper_ir.ground.errors import PiperError
from piper_simulator import load_cluster
from tests.interop.megatron_census import attempt, cases, devices

GOLDEN = "golden_values_dev_dgx_h100.json"
FEWEST = 3
"""The steps that a job needs, of which the second half counts: the first ones allocate."""
STACKS = {True: "hopper-megatron-deterministic", False: "hopper-megatron"}


@dataclass(frozen=True)
class Measured:
    """Hold the values of a job: seconds of a step, and the most bytes that are allocated on the last rank, NaN if unknown."""

    seconds: float
    allocated: float


def _values(golden: Mapping[str, Any], name: str) -> list[float]:
    """Return the values of the steps that have one."""
    of_steps = golden.get(name, {}).get("values", {})
    return [v for value in of_steps.values() if not isnan(v := float(value))]


def measured(case: Path) -> Measured | None:
    """Return the median seconds of the later steps of a job, and its memory; None without enough steps."""
    file = case.parent / GOLDEN
    golden = json.loads(file.read_text()) if file.exists() else {}
    steps = _values(golden, "iteration-time")
    if len(steps) < FEWEST:
        return None
    allocated = max(_values(golden, "mem-max-allocated-bytes"), default=nan)
    return Measured(statistics.median(steps[len(steps) // 2 :]), allocated)


def predicted(imported: Imported, cluster: str, grouped: bool = True) -> Measured:
    """Return the same values of an imported job, predicted; raise PiperError if it cannot be planned.

    Its experts' products are `grouped`, or one by one, without the workspaces of grouped ones.
    """
    of = load_cluster(cluster)
    if not grouped:
        alone = partial(replace, grouped_workspaces=0.0)
        of = of.each_device(lambda d: d if d.stack is None else replace(d, stack=alone(d.stack)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.py"
        file.write_text(python(imported.described, "A job"), encoding="utf-8")
        written = load_file(file)
    simulation = piper.simulate(piper.compile(written.job, written.strategy).plan, of)
    return Measured(simulation.period_s, simulation.held_bytes[-1])


def jobs(
    checkout: Path, words: Sequence[str]
) -> Iterator[tuple[str, Measured, Measured | PiperError]]:
    """Yield name, measured values, and predicted ones or the reason why there are none."""
    for case, arguments in cases(checkout):
        if "release" in str(case.parent) or not any(word in str(case) for word in words or [""]):
            continue
        known, number = measured(case), devices(arguments)
        if known is None:
            continue
        imported = attempt(case, number, ())
        if not isinstance(imported, Imported):
            continue
        stack = STACKS["--deterministic-mode" in arguments]
        nodes = f"8*{number // 8}" if number > 8 else str(number)
        try:
            yield (
                case.parent.name,
                known,
                predicted(imported, f"h100x{nodes}@{stack}", "--moe-grouped-gemm" in arguments),
            )
        except PiperError as error:
            yield case.parent.name, known, error


def spread(quotients: Sequence[float]) -> str:
    """Return the median of numbers, their middle half, and the factor of 1 within which four in five of them are.

    Of fewer than two numbers it says that there are too few.
    """
    if len(quotients) < 2:
        return "too few for a spread"
    low, middle, high = statistics.quantiles(quotients, n=4)
    within = statistics.quantiles([max(q, 1 / q) for q in quotients], n=5)[-1]
    half = f"half of them x {low:.2f} to {high:.2f}"
    return f"median x {middle:.2f}, {half}, four in five within a factor of {within:.2f}"


def main(checkout: Path, words: Sequence[str]) -> None:
    """Print a line for each job, and how the quotients of predicted and measured values are spread."""
    steps, memory = [], []
    for name, known, here in jobs(checkout, words):
        if isinstance(here, PiperError):
            print(f"{name}: {str(here).splitlines()[0][:150]}", flush=True)
            continue
        steps.append(here.seconds / known.seconds)
        line = f"{name}: measured {known.seconds:.4f} s, predicted x {steps[-1]:.2f}"
        if not isnan(known.allocated):
            memory.append(here.allocated / known.allocated)
            line += f"; {known.allocated / 2**30:.2f} GiB, x {memory[-1]:.2f}"
        print(line, flush=True)
    print(f"steps of {len(steps)} jobs: {spread(steps)}")
    print(f"allocated memory of {len(memory)} jobs: {spread(memory)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
