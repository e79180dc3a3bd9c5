"""Measure what the search for zero-bubble orders gains over the named schedules on uneven stages, and its seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from statistics import median
from typing import Any

import piper
from benchmarks.measure import Goal, Row
from piper_compiler import Directive
from piper_compiler.recipes import v_frontier

CASES = 20
Schedule = tuple[Directive, ...]


@dataclass(frozen=True)
class Case:
    """Hold integer times per stage; at most `units` activations per device, two chunks in V placement."""

    pp: int
    microbatches: int
    chunks: int
    units: int
    hop: int
    F: tuple[int, ...]
    I: tuple[int, ...]  # noqa: E741 - the field's name
    W: tuple[int, ...]

    def found(self) -> Schedule:
        """By the search."""
        return piper.recipes.zero_bubble(
            pp=self.pp,
            microbatches=self.microbatches,
            chunks=self.chunks,
            F=self.F,
            I=self.I,
            W=self.W,
            hop=self.hop,
            memory_limit=self.units,
        )

    def bound(self) -> float:
        """Return a lower bound of the makespan of every schedule of the case, whatever its order.

        Before the first I reaches a device, which takes a microbatch through all stages and back to it, the device can
        only run forwards: those that have arrived, which the stages before it pass on no faster than one at a time, and
        no more than memory holds, since no W has run. Its other work comes after.
        """
        stages, p = self.pp * self.chunks, self.pp
        hop = [
            self.hop * (0 < s != p) for s in range(stages)
        ]  # from the stage before; stages p - 1 and p are on one device
        arrivals = [[0.0] * self.microbatches]
        for s in range(stages):
            ends = list(
                accumulate(arrivals[s], lambda end, at, s=s: max(end, at) + self.F[s], initial=0.0)
            )[1:]
            arrivals.append([end + hop[s + 1] for end in ends] if s + 1 < stages else ends)
        back = [arrivals[-1][0]]  # when the first I can start, from the last stage on
        for s in range(stages - 1, 0, -1):
            back.append(back[-1] + self.I[s] + hop[s])
        bound = 0.0
        for r in range(p):
            mine = [r] if self.chunks == 1 else [r, stages - 1 - r]
            first = back[stages - 1 - mine[-1]]
            busy = self.microbatches * sum(self.F[s] + self.I[s] + self.W[s] for s in mine)
            bound = max(
                bound,
                first
                + busy
                - self._forwards_before(first, [(self.F[s], arrivals[s]) for s in mine]),
            )
        return bound

    def _forwards_before(self, time: float, stages: Sequence[tuple[int, Sequence[float]]]) -> float:
        """Return the most seconds of forwards that a device has done by then.

        Given are the seconds and the arrivals of those of its stages; the device runs them without a pause, for every
        way to divide the memory among the stages.
        """
        most = 0.0
        for first in range(min(self.units, self.microbatches) + 1):
            counts = (first, self.units - first)
            jobs = sorted(
                (at, f)
                for n, (f, arrivals) in zip(counts, stages, strict=False)
                for at in arrivals[:n]
            )
            end = done = 0.0
            for at, seconds in jobs:
                start = max(end, at)
                end = start + seconds
                done += max(0.0, min(end, time) - start)
            most = max(most, done)
        return most

    def measured(self, schedule: Schedule) -> tuple[float, int]:
        """Return the makespan, and the peak of the fullest device in units."""
        program = piper.synthetic(
            stages=self.pp * self.chunks, F=self.F, I=self.I, W=self.W, hop=self.hop
        )
        simulation = piper.simulate(
            piper.compile(program, piper.Strategy(piper.Mesh(pp=self.pp), schedule)).plan
        )
        return simulation.step_s, max(simulation.peak_bytes)


def case(number: int) -> Case:
    """Return one of the 20 cases; the sequence of `Random.random` is the same in every version of Python."""
    draw = Random(number).random

    def between(low: int, high: int) -> int:
        return low + int(draw() * (high - low + 1))

    pp, chunks = between(3, 6), 1 + number % 2
    microbatches = between(2 * pp, 3 * pp)
    units = (pp, 2 * pp - 1, 2 * pp)[between(0, 2)] if chunks == 1 else between(pp, 2 * pp + 1)
    times = [tuple([between(2, 9) for _ in range(pp * chunks)]) for _ in range(3)]
    return Case(pp, microbatches, chunks, units, between(0, 2), *times)


def named(one: Case) -> dict[str, tuple[float, int]]:
    """Return makespan and peak of the named schedules with the case's placement that stay within its limit."""
    r = piper.recipes
    makes: Sequence[Callable[..., Schedule]] = (
        (r.gpipe, r.one_f_one_b, r.zb_h1, r.zb_h2)
        if one.chunks == 1
        else (r.zbv, r.dualpipe_v, r.v_half, r.v_min)
    )
    results = {
        make.__name__: one.measured(make(pp=one.pp, microbatches=one.microbatches))
        for make in makes
    }
    return {name: result for name, result in results.items() if result[1] <= one.units}


def rows(quick: bool) -> Iterator[Row]:
    """Return the cases, the V frontier, and the CPU seconds of large searches."""
    yield from _case_rows(3 if quick else CASES)
    yield from _frontier_rows((4,) if quick else (4, 6))
    yield from _large_rows(((1, 16),) if quick else ((1, 16), (1, 31), (2, 12), (2, 18), (2, 32)))


def _case_rows(count: int) -> Iterator[Row]:
    found: list[float] = []
    proven = 0
    for number in range(count):
        one = case(number)
        makespan, peak = one.measured(one.found())
        bound = one.bound()
        proven += makespan == bound
        best, name = min(
            ((s, n) for n, (s, _) in named(one).items()),
            default=(makespan, "none, which does not fit"),
        )
        found.append(best / makespan)
        note = (
            f"p={one.pp}, m={one.microbatches}, {one.chunks} per device, at most {one.units} "
            f"activations, hop "
            f"{one.hop}: "
            f"searched {makespan:g} with a peak of {peak}; best named {best:g}, {name}; "
            f"no schedule ends before {bound:g}"
        )
        yield Row(
            "search", f"uneven case {number}: best named / searched", found[-1], "ratio", note=note
        )
    better = (
        f"{sum(x > 1 for x in found)} of {count} strictly better, {proven} of {count} proven to be "
        f"the best there is"
    )
    goal = Goal("above", 1 - 1e-9)
    yield Row(
        "search",
        "uneven cases: best named / searched",
        median(found),
        "ratio",
        min(found),
        max(found),
        goal,
        better,
        min(found),
    )


def _frontier_rows(devices: Sequence[int]) -> Iterator[Row]:
    for pp in devices:
        found, seconds = [], []
        for units in range(pp, 2 * pp + 1):
            schedule, spent = _timed(pp, 2 * pp, chunks=2, memory_limit=units)
            program = piper.synthetic(stages=2 * pp, F=1, I=1, W=1)
            simulated = piper.simulate(
                piper.compile(program, piper.Strategy(piper.Mesh(pp=pp), schedule)).plan
            )
            found.append(simulated.span_bubble_s - v_frontier(pp, units))
            seconds.append(spent)
        note = (
            f"span bubble for limits of {pp} to {2 * pp}; CPU seconds per search "
            f"{min(seconds):.2f} to {max(seconds):.2f}"
        )
        yield Row(
            "search",
            f"V frontier, p={pp}: found - formula",
            max(found),
            "F",
            min(found),
            max(found),
            Goal("below", 0.5),
            note,
        )


def _large_rows(shapes: Sequence[tuple[int, int]]) -> Iterator[Row]:
    draw = Random(0).random
    for chunks, units in shapes:
        seconds = []
        for uneven in (False, True):
            times = {phase: [1 + uneven * draw() for _ in range(16 * chunks)] for phase in "FIW"}
            seconds.append(_timed(16, 64, chunks=chunks, memory_limit=units, **times)[1])
        note = "equal stages, and uneven ones"
        name = f"p=16, m=64, {chunks} per device, at most {units} activations"
        yield Row(
            "search",
            name,
            max(seconds),
            "CPU s",
            min(seconds),
            max(seconds),
            Goal("below", 5.0),
            note,
        )


def _timed(pp: int, microbatches: int, **options: Any) -> tuple[Schedule, float]:
    """Return a searched schedule and its CPU seconds."""
    begin = time.process_time()
    schedule = piper.recipes.zero_bubble(pp=pp, microbatches=microbatches, **options)
    return schedule, time.process_time() - begin
