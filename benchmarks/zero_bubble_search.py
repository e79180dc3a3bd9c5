"""Measure what the search for zero-bubble orders gains over the named schedules on uneven stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

import piper
from benchmarks.measure import Goal, Row, extremes_row
from piper_compiler import Directive

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
    """Return the best named schedule of each case over the searched one, and the goal: never worse."""
    ratios: list[float] = []
    proven = 0
    for number in range(3 if quick else CASES):
        one = case(number)
        makespan, peak = one.measured(one.found())
        bound = one.bound()
        proven += makespan == bound
        best, name = min(
            ((s, n) for n, (s, _) in named(one).items()),
            default=(makespan, "none, which does not fit"),
        )
        ratios.append(best / makespan)
        note = (
            f"p={one.pp}, m={one.microbatches}, {one.chunks} per device, at most {one.units} "
            f"activations, hop {one.hop}: searched {makespan:g} with a peak of {peak}; best named "
            f"{best:g}, {name}; no schedule ends before {bound:g}"
        )
        title = f"uneven case {number}: best named / searched"
        yield Row("search", title, ratios[-1], "ratio", note=note)
    note = f"{sum(x > 1 for x in ratios)} strictly better, {proven} proven to be the best there is"
    goal, title = Goal("above", 1 - 1e-9), "uneven cases: best named / searched"
    yield replace(extremes_row("search", title, ratios, "ratio", goal, note), judged=min(ratios))
