"""Define the messages between the launcher and the process of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from piper_runtime.checkpoint.host_snapshots import SnapshotOptions
from piper_runtime.checkpoint.restoring import Restore
from piper_runtime.launch.ground.run_options import RunOptions
from piper_runtime.rank.job.loss_scale import LossScale
from piper_runtime.rank.values import device
from piper_runtime.rank.values.code import ShippedCode
from piper_runtime.rank.values.rng import Draws


@dataclass(frozen=True)
class Setup:
    """Hold the command-line settings of a worker; descriptors are inherited."""

    rank: int
    world: int
    pipe: int
    lifeline: int
    heart: str
    store: str
    threads: int


@dataclass(frozen=True)
class EvaluationRequest:
    """Describe the evaluation of one rank: the fields of an `Evaluation`, but for its batch function.

    Attributes:
        plan: the plan, pickled once for all ranks.
        code: the code of the role's chunks, by chunk code and step.
    """

    plan: bytes
    code: dict[str, dict[str, ShippedCode]]
    every: int
    batches: int


@dataclass(frozen=True)
class Request:
    """Describe one training run of one rank; ranks of one role share one object.

    Attributes:
        plan: the plan, pickled once for all ranks.
        callables: the job's callables, packed once for all ranks.
        code: the code of the role's chunks, by chunk code and step.
        params: initial parameters that the role holds, or how a rank makes or reads them (`LazyTensors`).
        buffers: initial buffers that the role holds, likewise.
        seed: seed of random operations.
        options: the options of the attempt, without the objects that stay in the caller's process.
        reports_steps: whether to report every finished step.
        snapshots: the folder and frequency of the ranks' copies of their state in memory of the machine; None: never.
        restore: the state from which the run goes on; None: it begins with `params` and `buffers`.
        device: the kind of device of runs in the process that makes the request.
        evaluation: how the model is evaluated; None: not at all.
        draws: the way of drawing random numbers, "rows" or "microbatches".
        loss_scale: how the loss is scaled; None: it is not.
    """

    plan: bytes
    callables: bytes
    code: dict[str, dict[str, ShippedCode]]
    params: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    seed: int
    options: RunOptions
    reports_steps: bool = False
    snapshots: SnapshotOptions | None = None
    restore: Restore | None = None
    device: str = field(default_factory=lambda: device.default)
    evaluation: EvaluationRequest | None = None
    draws: Draws = "rows"
    loss_scale: LossScale | None = None


@dataclass(frozen=True)
class Failure:
    """Say why a rank gave up: the error's class as `kind`, and the `peers` of which it only saw that one has failed."""

    kind: str
    message: str
    details: str
    peers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Notice:
    """Tell the launcher a warning for its caller."""

    text: str


def first_step(requests: Mapping[int, Any]) -> int:
    """Return the number of the first step of the runs that are requested; 0 for requests without training."""
    return next((r.options.first for r in requests.values() if isinstance(r, Request)), 0)
