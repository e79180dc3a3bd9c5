"""Share what all benchmarks need: rows of the result table, the machine they were taken on, and statistics."""

from __future__ import annotations

import gc
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar

os.environ["PIPER_CACHE"] = ""  # who measures a capture must not get one from a file
T = TypeVar("T")
RESAMPLES = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Goal:
    """Hold a number that the project has set itself; `kind` says whether the value must stay above or below it."""

    kind: Literal["above", "below"]
    number: float

    def met(self, value: float) -> bool:
        """Return whether the goal is met; None without one."""
        return value > self.number if self.kind == "above" else value < self.number

    def __str__(self) -> str:
        return f"{'>' if self.kind == 'above' else '<'} {self.number:g}"


@dataclass(frozen=True)
class Row:
    """Hold one number.

    `low` and `high` are what `note` says (extremes of the repetitions when it says nothing). `judged` is the number
    that the goal is for, when it is not `value`.
    """

    section: str
    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    goal: Goal | None = None
    note: str = ""
    judged: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        return self.goal.met(self.value if self.judged is None else self.judged)


@dataclass(frozen=True)
class Machine:
    """Say where and when the numbers were taken; `load` is the load average before the first of them."""

    cpu: str
    cores: int
    threads: int
    memory_gib: float
    system: str
    python: str
    torch: str
    load: float
    date: str

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gib:.0f} GiB, {self.system}; {self.threads} thread per "
            f"process; Python {self.python}, torch {self.torch}; load {self.load:.2f} before; {self.date}"
        )


def machine(threads: int = 1) -> Machine:
    """Return this machine, now."""
    pages = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    )
    return Machine(
        cpu=_cpu_model(),
        cores=os.cpu_count() or 1,
        threads=threads,
        memory_gib=pages / 2**30,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=version("torch"),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def cpu_seconds(call: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a call and its CPU seconds, for work of one thread that waits for nothing.

    Garbage of what came before is collected first; time that other processes take is not in it.
    """
    gc.collect()
    begin = time.process_time()
    result = call()
    return result, time.process_time() - begin


def median_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return the median with a 95 % interval by the percentile bootstrap (Efron 1979).

    It assumes nothing about the distribution; the resampling is seeded, so that equal values give equal intervals.
    """
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = int((1 - CONFIDENCE) / 2 * RESAMPLES)
    return median(values), medians[tail], medians[-1 - tail]


def extremes_row(
    section: str,
    name: str,
    values: Sequence[float],
    unit: str,
    goal: Goal | None = None,
    note: str = "",
) -> Row:
    """Return the median of some numbers with their extremes; a goal is for the median."""
    return Row(section, name, median(values), unit, min(values), max(values), goal, note)


def pairs_row(
    section: str,
    name: str,
    above: Sequence[float],
    below: Sequence[float],
    goal: Goal | None = None,
    note: str = "",
) -> Row:
    """Return the median ratio of interleaved pairs with its 95 % interval.

    A goal is for the end of the interval that is nearer to it: the lower one where the ratio must be above a number.
    """
    middle, low, high = median_interval([a / b for a, b in zip(above, below, strict=True)])
    judged = None if goal is None else low if goal.kind == "above" else high
    note = f"{len(above)} interleaved pairs; median and its 95 % interval{note and '; ' + note}"
    return Row(section, name, middle, "ratio", low, high, goal, note, judged)
