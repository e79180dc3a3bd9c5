"""Define the spaces in which the search of `piper plan` is judged, all of them made by `piper.space`.

Three are large: Llama 3 70B on 128 devices, Mixtral 8x22B on 64 and DeepSeek-V3 on 256. The others are small enough
for all their strategies to be bounded or scored. There buckets have one of a few sizes, so that the space is finite.
python -m benchmarks.planned.spaces counts the strategies of each finite space
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import piper
from benchmarks.measure import cpu_seconds
from piper import models
from piper.api.problems.space_sizes import AXES
from piper.api.problems.spaces import StrategySpace
from piper.api.problems.tuning_problem import Conditions, problem_of
from piper_autotune.space.problem import Programs, TuningProblem
from piper_autotune.space.space import SkippedError
from piper_compiler import Strategy
from piper_simulator import load_cluster

BUCKET_MB = (25.0, 50.0, 100.0, 200.0, 400.0, 800.0)
"""The sizes of buckets in a finite space."""


@dataclass(frozen=True)
class Case:
    """Say which model is planned on which cluster.

    Attributes:
        name: of the space, and of its table of scores.
        model: a preset, or sizes.
        cluster: its name.
        rows: of a step.
        length: tokens of a row.
        finite: whether buckets have one of `BUCKET_MB`.
        fixed: the choices that are not tried.
    """

    name: str
    model: str | models.DecoderConfig
    cluster: str
    rows: int
    length: int
    finite: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def job(self) -> piper.Job:
        """Return the job, whose batch is never used."""
        return models.job(self.model, global_batch=self.rows, length=self.length)


LLAMA = Case("llama3-70b", "llama3-70b", "h100x8*16", 512, 8192)
MIXTRAL = Case("mixtral-8x22b", "mixtral-8x22b", "h100x8*8", 256, 8192)
DEEPSEEK = Case("deepseek-v3", "deepseek-v3", "h100x8*32", 1024, 4096)
DENSE = Case(
    "dense",
    models.LlamaConfig(
        layers=16, width=4096, heads=32, kv_heads=8, hidden=14_336, vocab=32_000, length=4096
    ),
    "a100x8",
    32,
    4096,
    finite=True,
)
MIXTURE = Case(
    "mixture",
    models.MoEConfig(
        layers=3,
        width=8192,
        heads=64,
        kv_heads=8,
        hidden=32_768,
        vocab=32_000,
        length=4096,
        experts=16,
        top_k=2,
        capacity_factor=None,
    ),
    "h100x4*4",
    32,
    4096,
    finite=True,
    fixed={"hybrid": False},  # the table of all scores is older than this choice
)
LONG = Case(
    "long",
    models.LlamaConfig(
        layers=10, width=4096, heads=32, kv_heads=8, hidden=14_336, vocab=32_000, length=65_536
    ),
    "h100x8",
    16,
    65_536,
    finite=True,
)
SMALL = Case(
    "small",
    models.LlamaConfig(
        layers=12, width=6144, heads=48, kv_heads=8, hidden=21_504, vocab=128_256, length=32_768
    ),
    "a100-40gx8",
    16,
    32_768,
    finite=True,
)
LARGER = Case(
    "larger",
    models.LlamaConfig(
        layers=16, width=8192, heads=64, kv_heads=8, hidden=28_672, vocab=32_000, length=4096
    ),
    "h100x8*2",
    32,
    4096,
    finite=True,
    fixed={"sequence": True, "hybrid": False},
)
TINY = Case(
    "tiny",
    models.LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, hidden=48, vocab=64, length=64),
    "h100x8",
    8,
    64,
    finite=True,
)
"""A space for the smoke test."""
FINITE = (DENSE, MIXTURE, LONG, SMALL, LARGER)
"""Dense on one node; experts over nodes; long rows; little memory; several nodes."""
CASES = {case.name: case for case in (LLAMA, MIXTRAL, DEEPSEEK, *FINITE, TINY)}


@dataclass(frozen=True)
class FiniteSpace:
    """Make the strategies of a space whose buckets have one of a few sizes."""

    space: StrategySpace

    def __call__(self, trial: Any) -> Strategy:
        return self.space(_Stepped(trial))

    def recipes(self, trial: Any) -> object:
        """Return the recipes that a trial chooses, which takes less time than to make the strategy."""
        return self.space.chosen(_Stepped(trial))

    @property
    def starts(self) -> Sequence[Mapping[str, Any]]:
        return self.space.starts

    def kind(self, start: Mapping[str, Any]) -> object:
        """Return the sizes by which starts are alike."""
        return self.space.kind(start)


@dataclass(frozen=True)
class _Stepped:
    """Choose a number without steps from `BUCKET_MB`; everything else is the trial's."""

    trial: Any

    def suggest_float(self, name: str, low: float, high: float, **_: Any) -> float:
        chosen: float = self.trial.suggest_categorical(name, BUCKET_MB)
        return chosen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trial, name)


@dataclass(frozen=True)
class Planned:
    """Hold a case with its model captured, as the search sees it.

    Attributes:
        space: makes a strategy of a trial.
        starts: the choices that a search tries first.
        problem: the job, the cluster and the memory of a device.
        programs: the captures under shardings and policies that were made.
        more: the keywords of `piper_autotune.tune`.
    """

    space: StrategySpace | FiniteSpace
    problem: TuningProblem
    programs: Programs
    more: Mapping[str, Any]


def planned(case: Case) -> Planned:
    """Return a case with its model captured anew."""
    job, cluster = case.job, load_cluster(case.cluster)
    made = piper.space(job, cluster, **case.fixed)
    problem, more = problem_of(job, Conditions(cluster, memory_limit=cluster.device.memory_bytes))
    programs = Programs(problem, more["at_rows"], more["under"])
    return Planned(FiniteSpace(made) if case.finite else made, problem, programs, more)


kept = lru_cache(maxsize=2)(planned)
"""Return the planned search of a case, which is made once (see `planned`)."""


def cell(params: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sizes of tp, cp and pp of a strategy's parameters; experts have any of several sizes of ep there."""
    return tuple(int(params.get(axis, 1)) for axis in AXES if axis != "ep")


class _Odometer:
    """Answer a trial's questions by a list of numbers of choices, and 0 beyond its end."""

    def __init__(self, digits: Sequence[int]) -> None:
        self._digits, self.asked, self.params = digits, list[int](), dict[str, Any]()
        self.chosen: list[int] = []

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        at = self._digits[len(self.asked)] if len(self.asked) < len(self._digits) else 0
        self.asked.append(len(choices))
        self.chosen.append(at)
        self.params[name] = choices[at]
        return choices[at]

    def suggest_int(self, name: str, low: int, high: int) -> Any:
        return self.suggest_categorical(name, range(low, high + 1))

    def skip(self, reason: str) -> None:
        raise SkippedError(reason)


def points(space: FiniteSpace) -> Iterator[tuple[dict[str, Any], Strategy]]:
    """Yield all strategies of a finite space, each with its choices by name."""
    return _every(space)


def count(space: FiniteSpace) -> int:
    """Return the number of strategies of a finite space."""
    return sum(1 for _ in _every(space.recipes))


def _every(made: Callable[[Any], Any]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the choices of each trial that is not skipped, with the result of `made` for it."""
    digits: list[int] | None = []
    while digits is not None:
        trial = _Odometer(digits)
        try:
            of = made(trial)
        except SkippedError:
            pass
        else:
            yield dict(trial.params), of
        digits = _next(trial.chosen, trial.asked)


def _next(chosen: list[int], asked: list[int]) -> list[int] | None:
    """Return the next list of choices, whose last questions may differ; None after the last."""
    while chosen and chosen[-1] + 1 == asked[len(chosen) - 1]:
        chosen = chosen[:-1]
    return [*chosen[:-1], chosen[-1] + 1] if chosen else None


def main() -> None:
    """Count the strategies of each finite space."""
    for case in FINITE:
        size, seconds = cpu_seconds(lambda case=case: count(kept(case).space))
        print(f"{case.name} on {case.cluster}: {size:,} strategies, counted in {seconds:.0f} CPU s")


if __name__ == "__main__":
    main()
