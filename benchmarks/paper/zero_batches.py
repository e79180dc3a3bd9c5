"""Find the largest batch that fits for pipelines with ZeRO; a system is a plan of ours that keeps what the system
keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import piper
from piper import models
from piper_compiler import Options
from piper_ir.plan.plan import Plan
from piper_simulator import Cluster, Simulation, load_cluster

POLICIES = ("all", "products", "inputs")
"""The policies of recomputation: nothing is made again, all but matrix products and attention, all."""
MOST = 128
"""The largest batch that is tried."""
OOM = "out of memory"
SMALLEST = 4
"""The smallest batch that the paper names."""
STEP = "step"


@dataclass(frozen=True)
class System:
    """Say what a system keeps.

    Attributes:
        zero: the level of our plan that stands for it.
        windows: arguments of `replicate`: how long whole buckets are kept.
        policy: of recomputation, where its largest batch is compared with the published one.
        published: the largest batch by the paper; 0: none fits.
        more: bytes per parameter that it keeps beside what our plan keeps; negative if that keeps more.
        keeps: the same in words.
    """

    name: str
    zero: int
    windows: Mapping[str, Any]
    policy: str
    published: int
    more: float
    keeps: str


SYSTEMS = (
    System(
        "pipeline x ZeRO-1", 1, {}, "all", 0, 2.0,
        "bf16 parameters, float32 sums of gradients and bf16 gradients whole; master and AdamW's states shared",
    ),
    System(
        "best other, ZeRO-2", 3, {"resident_mb": STEP, "reduced_mb": STEP}, "products", 4, -1.5,
        "FSDP2, reshard never: bf16 parameters gathered and float32 gradients whole all step long; masters, "
        "AdamW's shared",
    ),
    System(
        "best other, ZeRO-3", 3, {"reduced_mb": STEP}, "products", 12, -1.5,
        "FSDP2, reshard always: a bucket of parameters gathered at a time; float32 gradients whole all step long",
    ),
    System(
        "Piper, ZeRO-2", 2, {}, "inputs", 32, 0.0,
        "bf16 parameters whole; gradients shared, in buffers from a backward to its reduce-scatter",
    ),
    System(
        "Piper, ZeRO-3", 3, {}, "inputs", 40, 0.0,
        "everything shared; a bucket of parameters gathered at a time; gradients as with ZeRO-2",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Say which model is trained where.

    Attributes:
        model: with room for every token in every expert that it chooses.
        length: tokens per row.
    """

    model: models.DecoderConfig = field(default_factory=lambda: dropless("qwen3-moe-9b"))
    length: int = 512
    pp: int = 8
    dp: int = 4
    microbatches: int = 16
    place: str = "a100-40gx8*4"

    @cached_property
    def cluster(self) -> Cluster:
        return load_cluster(self.place)

    def plan(self, system: System, rows: int, keep: str) -> Plan:
        """Return the plan of a system with microbatches of so many rows."""
        job = models.job(
            self.model, global_batch=rows * self.microbatches * self.dp, length=self.length
        )
        directives = (
            *piper.recipes.one_f_one_b(pp=self.pp, microbatches=self.microbatches),
            *piper.recipes.data_parallel(zero=system.zero, **system.windows),
            *(() if keep == "all" else (piper.recompute(piper.where(), keep=keep),)),
        )
        strategy = piper.Strategy(piper.Mesh(pp=self.pp, dp=self.dp), directives)
        return piper.compile(job, strategy, options=Options(device="cuda")).plan


def dropless(model: str) -> models.DecoderConfig:
    """Return a mixture in which no expert is ever full."""
    config = models.preset(model)
    assert config.experts is not None
    return config.with_experts(capacity_factor=config.experts.number / config.experts.top_k)


@dataclass(frozen=True)
class Point:
    """Hold what a simulation says of one batch.

    Attributes:
        device: bytes in use on the fullest device.
        lines: the same by line; `more` is what the system keeps beside our plan.
        limit: bytes of the device.
    """

    rows: int
    device: int
    lines: Mapping[str, int]
    limit: int
    tokens_per_s: float

    @property
    def fits(self) -> bool:
        return self.device <= self.limit


def point(setting: Setting, system: System, rows: int, keep: str) -> Point:
    """Return what is simulated of a batch."""
    plan = setting.plan(system, rows, keep)
    found = piper.simulate(plan, setting.cluster)
    device = setting.cluster.device
    beside = {
        r.role: round(system.more * device.allocator_factor * _parameters(plan, r.role))
        for r in plan.roles
    }
    fullest = max(plan.roles, key=lambda r: found.device_bytes[r.ranks[0]] + beside[r.role])
    return _point(found, fullest.ranks[0], rows, beside[fullest.role], device.memory_bytes)


def _point(found: Simulation, rank: int, rows: int, beside: int, limit: int) -> Point:
    lines = {name: nbytes for name, nbytes in found.memory(rank).items() if nbytes} | {
        "more": beside
    }
    return Point(rows, found.device_bytes[rank] + beside, lines, limit, found.tokens_per_s or 0.0)


def _parameters(plan: Plan, role: str) -> int:
    return sum(b.numel for b in plan.buckets if role in b.roles)


@dataclass(frozen=True)
class Largest:
    """Hold the largest batch that fits, and the next one, which does not."""

    fits: Point | None
    over: Point

    @property
    def batch(self) -> float:
        """Return the rows at which the device is full, between these two; 0 if one row does not fit."""
        if self.fits is None:
            return 0.0
        return self.fits.rows + (self.fits.limit - self.fits.device) / (
            self.over.device - self.fits.device
        )


def largest(setting: Setting, system: System, keep: str, most: int = MOST) -> Largest:
    """Return the largest batch that fits, in rows of a microbatch; `most` must not fit."""
    best, over = None, point(setting, system, most, keep)
    if over.fits:
        raise ValueError(f"{system.name}: {most} rows fit under {keep!r}; try more")
    while (rows := best.rows if best else 0) + 1 < over.rows:
        found = point(setting, system, (rows + over.rows) // 2, keep)
        if found.fits:
            best = found
        else:
            over = found
    return Largest(best, over)


@dataclass(frozen=True)
class Line:
    """Hold the largest batches of a system, by policy."""

    system: System
    batches: Mapping[str, Largest]

    @property
    def reached(self) -> float:
        """Return the largest batch under the system's policy; 0 if it is below those of the paper."""
        batch = self.batches[self.system.policy].batch
        return batch if batch >= SMALLEST else 0.0


def lines(
    setting: Setting, systems: Sequence[System] = SYSTEMS, most: int = MOST
) -> Iterator[Line]:
    """Yield the largest batches of each system."""
    for system in systems:
        yield Line(system, {keep: largest(setting, system, keep, most) for keep in POLICIES})


def missed(found: Sequence[Line]) -> list[str]:
    """Return what is not as published: the order of the systems, and at least the batches of ours."""
    out = [
        f"{b.system.name} reaches {b.reached:.1f} rows, {a.system.name} {a.reached:.1f}"
        for a, b in pairwise(found)
        if b.reached <= a.reached
    ]
    ours = (
        x for x in found if x.system.name.startswith("Piper") and x.reached < x.system.published
    )
    return out + [
        f"{x.system.name} reaches {x.reached:.1f} rows, published {x.system.published}"
        for x in ours
    ]
