"""Time how long it takes to make a captured preset into what one of the devices that share it runs.

python -m benchmarks.shard_rates                             llama3-8b, gpt3-175b, llama3-70b at tp=8
python -m benchmarks.shard_rates llama3-8b                   one of them

All layers, with the stream shared, too. Goals for each: at most 3 seconds of processor time, and no model is captured or
traced again. It prints one line per preset, and ends with 1 where a goal is missed.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from piper import models
from piper.api.capturing import captured_job, shared_by
from piper_compiler.capture import codestore
from piper_ir.layout import Sharding

MODELS = ("llama3-8b", "gpt3-175b", "llama3-70b")
DEGREE, MOST_S = 8, 3.0


@dataclass(frozen=True)
class Rate:
    """Hold the processor seconds of one preset, and how many joint graphs were traced for it."""

    model: str
    captured_s: float
    seconds: float
    traced: int
    chunks: int

    @property
    def good(self) -> bool:
        """Return whether the goals are met."""
        return self.seconds <= MOST_S and not self.traced

    def __str__(self) -> str:
        verdict = "met" if self.good else "missed"
        return (
            f"{self.model:<12} tp={DEGREE}: {self.seconds:5.2f} s for {self.chunks} chunks, {self.traced} graphs traced again "
            f"(captured in {self.captured_s:.2f} s)   goal {MOST_S:g} s: {verdict}"
        )


def measure(name: str) -> Rate:
    """Capture a preset, and share its chunks among devices."""
    begun = time.process_time()
    captured = captured_job(models.job(name, global_batch=1))
    middle = time.process_time()
    count, trace = 0, codestore.trace_joint

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal count
        count += 1
        return trace(*args, **kwargs)  # type: ignore[arg-type]  # those it was called with

    codestore.trace_joint = counted  # type: ignore[assignment]  # it calls the other
    try:
        made = shared_by(captured, (Sharding("tp", DEGREE, stream="tokens"),))
    finally:
        codestore.trace_joint = trace
    return Rate(name, middle - begun, time.process_time() - middle, count, len(made.program.chunks))


def main(arguments: list[str]) -> int:
    """Print a line per preset; return the exit code."""
    rates = []
    for name in arguments or MODELS:
        rates.append(measure(name))
        print(rates[-1], flush=True)
    return 0 if all(rate.good for rate in rates) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
