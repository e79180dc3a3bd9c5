"""Simulate mixtures of experts in pipelines: schedules side by side, larger meshes, and what the tuner finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import piper
from piper import models
from piper_compiler import Directive, Options, Strategy, place
from piper_ir.plan.plan import Plan
from piper_ir.program.ops import Compute
from piper_simulator import (
    Cluster,
    Device,
    GivenLoad,
    Simulation,
    Why,
    kernel_seconds,
    load_cluster,
    step_seconds,
    why,
)

POINTS, STEP = 5.0, 10.0
"""How far a ratio may be from the published one, in points, and a rate, in percent."""
STACKS = ("eager", "inductor", "")
"""The kernels of schedules side by side, then those beside them; "" is one fraction of the peak for all."""
MESHES = "inductor"
"""The kernels of larger meshes."""
COUNTING = "cumsum"
"""The operator that counts choices up."""
RECIPES = {"1F1B": "one_f_one_b", "interleaved": "interleaved", "DualPipeV": "dualpipe_v"}


@dataclass(frozen=True)
class Setup:
    """Say which model is trained where.

    Attributes:
        model: a preset, with experts whose places are as many as the tokens that they get on average, unless `bound`.
        pp: stages; there are twice as many microbatches.
        width: ranks that have rows of their own, and share the experts where `shared`.
        rows: of a microbatch.
        shared: whether each of these ranks has a part of the experts; else all have all.
        load: of the experts, as in `simulate`.
        sizes: other ones than the preset's.
        precision: of parameters, gradients and states, where it is one for all; see `models.job`.
        whole: whether a node has all stages of one replica; else it has stages with all of their replicas.
        nic: bytes/s of a device to other nodes, where they are not those of the cluster.
        bound: of dropless experts, the places of a device for received rows over their mean; None for experts with
            places.
    """

    model: str
    pp: int
    width: int = 4
    rows: int = 4
    length: int = 512
    shared: bool = False
    load: GivenLoad | None = None
    sizes: models.MoEConfig | None = None
    precision: str | None = None
    whole: bool = False
    nic: float | None = None
    bound: float | None = None

    @property
    def config(self) -> models.MoEConfig:
        """Return the model's sizes."""
        config = self.sizes or models.preset(self.model)
        assert isinstance(config, models.MoEConfig)
        return replace(config, capacity_factor=1.0 if self.bound is None else None)

    @cached_property
    def job(self) -> piper.Job:
        return models.job(
            self.config, global_batch=self.batch, length=self.length, precision=self.precision
        )

    @property
    def microbatches(self) -> int:
        return 2 * self.pp

    @property
    def batch(self) -> int:
        return self.rows * self.microbatches * self.width

    @property
    def place(self) -> str:
        """Return the devices: as many on a node as there are stages."""
        return f"a100-40gx{self.pp}*{self.width}"

    def cluster(self, stack: str = STACKS[0]) -> Cluster:
        """Return the devices with a kernel stack."""
        found = load_cluster(f"{self.place}@{stack}" if stack else self.place)
        if self.nic is None:
            return found
        links = tuple(
            [replace(x, inter_bandwidth=self.nic, messages=()) for x in found.network.links]
        )
        return replace(found, network=replace(found.network, links=links))

    def strategy(self, stages: Sequence[Any], **windows: Any) -> Strategy:
        """Return a strategy: directives of a schedule, and of what the ranks beside each other share."""
        axis, along = "ep" if self.shared else "dp", "tp" if self.whole else "pp"
        mesh = piper.Mesh(**{axis: self.width, along: self.pp})
        replicas = piper.recipes.data_parallel(over=(axis,), **windows)
        return Strategy(mesh, (*self._experts(), *[_placed(d, along) for d in stages], *replicas))

    def _experts(self) -> tuple[Any, ...]:
        if not self.shared:
            return ()
        return (
            piper.recipes.expert_parallel()
            if self.bound is None
            else piper.recipes.expert_parallel(bound=self.bound)
        )

    def schedule(self, name: str, **more: Any) -> Strategy:
        """Return the strategy of a schedule by its name here."""
        recipe = getattr(piper.recipes, RECIPES.get(name, name))
        return self.strategy(recipe(pp=self.pp, microbatches=self.microbatches, **more))

    def plan(self, strategy: Strategy) -> Plan:
        return piper.compile(self.job, strategy, options=Options(device="cuda")).plan

    def simulated(self, strategy: Strategy, stack: str = STACKS[0]) -> Simulation:
        plan = self.plan(strategy)
        return piper.simulate(plan, self.cluster(stack), load=self.load)


def _placed(item: Directive, axis: str) -> Directive:
    """Return a directive that places stages along another axis: ranks are neighbours along `tp`, and far apart along
    `pp`."""
    return (
        replace(item, on=tuple([(axis, at) for _, at in item.on]))
        if isinstance(item, place)
        else item
    )


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
    """Hold a simulated schedule of a setup.

    Attributes:
        embedding_s: seconds of a step for the gradient of the embedding, a table of the vocabulary.
        counting_s: seconds of a step in which the fullest device counts choices up to give each a place.
    """

    setup: Setup
    schedule: str
    found: Simulation
    embedding_s: float = 0.0
    counting_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.found.tokens_per_s or 0.0

    @property
    def fullest_s(self) -> float:
        """Return the seconds that the fullest device computes: no order of the same work is faster."""
        return self.found.step_s - min(self.found.bubble_s)


def setups(shared: bool) -> tuple[Setup, Setup]:
    """Return the paper's two models on 32 and on 16 devices."""
    return Setup("qwen3-moe-1b", 8, shared=shared), Setup("qwen3-moe-9b", 4, shared=shared)


def lines(found: Sequence[Setup], stack: str = STACKS[0]) -> Iterator[Line]:
    """Yield the schedules of each setup."""
    for setup in found:
        cluster = setup.cluster(stack)
        for name in RECIPES:
            plan = setup.plan(setup.schedule(name))
            each = step_seconds(cluster.device, plan.chunks[0].steps["W"].cost, "W")
            found = piper.simulate(plan, cluster, load=setup.load)
            yield Line(
                setup,
                name,
                found,
                setup.microbatches * each,
                counting_seconds(plan, cluster.device, found),
            )


def counting_seconds(plan: Plan, device: Device, found: Simulation) -> float:
    """Return the seconds of the running sums by which the fullest device gives choices their places."""
    rank = min(range(plan.mesh.world), key=found.bubble_s.__getitem__)
    parts = (part.op for instr in plan.role_of(rank).program for part in instr.parts)
    steps = Counter(
        (op.variant, op.step) for op in parts if isinstance(op, Compute) and op.step != "B"
    )
    return sum(
        n * k.count * kernel_seconds(device, k, backward=False).seconds
        for (chunk, step), n in steps.items()
        for k in plan.chunk(chunk).steps[step].cost.kernels
        if k.op == COUNTING
    )


def ratio(found: Sequence[Line], published: Published) -> float:
    """Return by how much one schedule is faster than another here, in percent."""
    rates = {x.schedule: x.tokens_per_s for x in found if x.setup.model == published.model}
    return 100 * (rates[published.faster] / rates[published.than] - 1)


def missed(found: Sequence[Line]) -> list[str]:
    """Return the ratios that are further from the published ones than they may be."""
    out = []
    for p in RATIOS:
        if (
            any(x.setup.model == p.model for x in found)
            and abs(ratio(found, p) - p.percent) > POINTS
        ):
            out.append(
                f"{p.model}: {p.faster} is {ratio(found, p):+.1f} % faster than {p.than}, and "
                f"{p.percent:+.0f} % in "
                f"the paper"
            )
    return out


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


@dataclass(frozen=True)
class Tuned:
    """Hold what a search found for a setup."""

    setup: Setup
    params: Mapping[str, Any]
    candidates: int
    found: Simulation
    why: Why


def tuned(setup: Setup, trials: int = 60, seed: int = 0) -> Tuned:
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
    plan = setup.plan(best)
    return Tuned(
        setup,
        row.params,
        len(study.rows),
        piper.simulate(plan, setup.cluster()),
        why(plan, setup.cluster()),
    )
