"""Predict the steps of Megatron-LM's functional tests on H100, and compare them with the steps that are stored beside them.

python -m tests.interop.megatron_steps CHECKOUT [WORD ...]

With words the jobs count whose folders have one of them in their path. Most are small models, whose steps wait for the host
that starts kernels: they say what one kernel of a plan costs it (`launch_s` of the stacks of Megatron). Jobs of release tests
are left out, since nothing says on how many devices they ran.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from math import isnan
from pathlib import Path

import piper
from piper.cli.loading import load_file
from piper_interop import Imported, python
from piper_ir.ground.errors import PiperError
from tests.interop.megatron_census import attempt, cases, devices

GOLDEN = "golden_values_dev_dgx_h100.json"
FEWEST = 3
"""The steps that a job needs, of which the second half counts: the first ones allocate."""
STACKS = {True: "hopper-megatron-deterministic", False: "hopper-megatron"}


def measured(case: Path) -> float | None:
    """Return the median seconds of the later steps of a job; None without enough of them."""
    file = case.parent / GOLDEN
    if not file.exists():
        return None
    values = json.loads(file.read_text()).get("iteration-time", {}).get("values", {})
    steps = [s for value in values.values() if not isnan(s := float(value))]
    return statistics.median(steps[len(steps) // 2 :]) if len(steps) >= FEWEST else None


def predicted(imported: Imported, cluster: str) -> float:
    """Return the seconds of a step of an imported job; raise PiperError if it cannot be planned."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.py"
        file.write_text(python(imported.described, "A job"), encoding="utf-8")
        written = load_file(file)
    return piper.simulate(piper.compile(written.job, written.strategy).plan, cluster).period_s


def ratios(checkout: Path, words: Sequence[str]) -> Iterator[tuple[str, float, float | PiperError]]:
    """Yield name, measured seconds, and predicted ones or the reason why there are none."""
    for case, arguments in cases(checkout):
        if "release" in str(case.parent) or not any(word in str(case) for word in words or [""]):
            continue
        seconds, number = measured(case), devices(arguments)
        if seconds is None:
            continue
        imported = attempt(case, number, ())
        if not isinstance(imported, Imported):
            continue
        stack = STACKS["--deterministic-mode" in arguments]
        nodes = f"8*{number // 8}" if number > 8 else str(number)
        try:
            yield case.parent.name, seconds, predicted(imported, f"h100x{nodes}@{stack}")
        except PiperError as error:
            yield case.parent.name, seconds, error


def main(checkout: Path, words: Sequence[str]) -> None:
    """Print a line for each job, and how the quotients of predicted and measured steps are spread."""
    found = []
    for name, seconds, step in ratios(checkout, words):
        if isinstance(step, PiperError):
            print(f"{name}: {str(step).splitlines()[0][:150]}", flush=True)
            continue
        found.append(step / seconds)
        print(f"{name}: measured {seconds:.4f} s, predicted x {step / seconds:.2f}", flush=True)
    low, middle, high = statistics.quantiles(found, n=4)
    print(f"{len(found)} jobs: median x {middle:.2f}, half of them x {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
