"""Simulate mixtures of experts in pipelines: schedules side by side, larger meshes, and the best that the tuner finds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import piper
from piper import models
from piper_compiler import Options, Strategy
from piper_ir.plan.plan import Plan
from piper_simulator import Cluster, Simulation, load_cluster

POINTS, STEP = 5.0, 10.0
"""How far a ratio may be from the published one, in points, and a rate, in percent."""
EAGER, MESHES = "eager", "inductor"
"""The kernels of schedules side by side, and those of larger meshes."""
RECIPES = {"1F1B": "one_f_one_b", "interleaved": "interleaved", "DualPipeV": "dualpipe_v"}


@dataclass(frozen=True)
class Setup:
    """Say which model is trained where; there are twice as many microbatches as stages.

    Attributes:
        model: a preset, with experts whose places are as many as the tokens that they get on average.
        pp: stages.
        width: ranks that have rows of their own, and share the experts where `shared`.
        rows: of a microbatch.
        shared: whether each of these ranks has a part of the experts; else all have all.
        sizes: other ones than the preset's.
    """

    model: str
    pp: int
    width: int = 4
    rows: int = 4
    length: int = 512
    shared: bool = False
    sizes: models.DecoderConfig | None = None

    @cached_property
    def job(self) -> piper.Job:
        config = self.sizes or models.preset(self.model)
        batch = self.rows * self.microbatches * self.width
        balanced = config.with_experts(capacity_factor=1.0)
        return models.job(balanced, global_batch=batch, length=self.length)

    @property
    def microbatches(self) -> int:
        return 2 * self.pp

    def cluster(self, stack: str = EAGER) -> Cluster:
        """Return the devices with a kernel stack: as many on a node as there are stages."""
        return load_cluster(f"a100-40gx{self.pp}*{self.width}@{stack}")

    def strategy(self, stages: Sequence[Any], **windows: Any) -> Strategy:
        """Return a strategy: directives of a schedule, and of what the ranks beside each other share."""
        axis = "ep" if self.shared else "dp"
        experts = piper.recipes.expert_parallel() if self.shared else ()
        replicas = piper.recipes.data_parallel(over=(axis,), **windows)
        mesh = piper.Mesh(**{axis: self.width, "pp": self.pp})
        return Strategy(mesh, (*experts, *stages, *replicas))

    def schedule(self, name: str) -> Strategy:
        """Return the strategy of a schedule by its name here."""
        recipe = getattr(piper.recipes, RECIPES[name])
        return self.strategy(recipe(pp=self.pp, microbatches=self.microbatches))

    def plan(self, strategy: Strategy) -> Plan:
        return piper.compile(self.job, strategy, options=Options(device="cuda")).plan

    def simulated(self, strategy: Strategy, stack: str = EAGER) -> Simulation:
        return piper.simulate(self.plan(strategy), self.cluster(stack))


@dataclass(frozen=True)
class Published:
    """Hold what the paper says of two schedules: how much faster one is, in percent."""

    model: str
    faster: str
    than: str
    percent: float


RATIOS = (
    Published("qwen3-moe-1b", "interleaved", "1F1B", 5.0),
    Published("qwen3-moe-1b", "DualPipeV", "1F1B", 13.0),
    Published("qwen3-moe-9b", "DualPipeV", "interleaved", 10.0),
)
RATE = (8, 4, 390_000.0)
"""Stages, replicas and tokens per second that the paper names."""


@dataclass(frozen=True)
class Line:
    """Hold a simulated schedule of a setup."""

    setup: Setup
    schedule: str
    found: Simulation

    @property
    def tokens_per_s(self) -> float:
        return self.found.tokens_per_s or 0.0


def setups(shared: bool) -> tuple[Setup, Setup]:
    """Return the paper's two models on 32 and on 16 devices."""
    return Setup("qwen3-moe-1b", 8, shared=shared), Setup("qwen3-moe-9b", 4, shared=shared)


def lines(of: Sequence[Setup]) -> Iterator[Line]:
    """Yield the schedules of each setup."""
    for setup in of:
        for name in RECIPES:
            yield Line(setup, name, setup.simulated(setup.schedule(name)))


def ratio(found: Sequence[Line], published: Published) -> float:
    """Return by how much one schedule is faster than another here, in percent."""
    rates = {x.schedule: x.tokens_per_s for x in found if x.setup.model == published.model}
    return 100 * (rates[published.faster] / rates[published.than] - 1)


def grid(
    shared: bool, stages: Sequence[int] = (2, 4, 8), widths: Sequence[int] = (2, 4)
) -> Iterator[Line]:
    """Yield DualPipeV with the small model on meshes of each size."""
    for pp in stages:
        for width in widths:
            setup = Setup("qwen3-moe-1b", pp, width, shared=shared)
            yield Line(setup, "DualPipeV", setup.simulated(setup.schedule("DualPipeV"), MESHES))


SPACE: Mapping[str, Sequence[Any]] = {
    "schedule": ("one_f_one_b", "interleaved", "zbv", "dualpipe_v", "interleaved_zb"),
    "at": ("even", "cost"),
    "zero": (0, 1),
    "bucket_mb": (25, 100, 400),
}
"""The parameters of the search; rows, microbatches and the mesh stay as they are."""


def tuned(setup: Setup, trials: int = 60, seed: int = 0) -> Line:
    """Search a strategy for a setup."""

    def strategy(trial: Any) -> Strategy:
        p = {name: trial.suggest_categorical(name, list(values)) for name, values in SPACE.items()}
        stages = getattr(piper.recipes, p["schedule"])(
            pp=setup.pp, microbatches=setup.microbatches, at=p["at"]
        )
        return setup.strategy(stages, zero=p["zero"], bucket_mb=p["bucket_mb"])

    study = piper.tune(
        setup.job, strategy, cluster=setup.cluster(), trials=trials, seed=seed, workers=0
    )
    best, row = study.best, study.best_row
    if best is None or row is None:
        raise RuntimeError(f"{setup}: no candidate fits: {study.rejected()[:3]}")
    words = ", ".join(f"{name} {value}" for name, value in row.params.items())
    return Line(setup, words, setup.simulated(best))
