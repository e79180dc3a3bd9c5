"""What the launcher and the process of a rank tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from piper_runtime.rank import device
from piper_runtime.rank.code import ShippedCode


@dataclass(frozen=True)
class Setup:
    """What a worker is told on its command line. Descriptors are inherited."""

    rank: int
    world: int
    pipe: int
    lifeline: int
    heart: str
    store: str
    threads: int


@dataclass(frozen=True)
class Request:
    """One training run of one rank; ranks of one role get one object. `plan` and `callables` are pickled once for all ranks.
    `stream`: whether somebody wants to hear of every finished step. `device`: the kind that runs take where the request is
    made."""

    plan: bytes
    callables: bytes
    code: dict[str, dict[str, ShippedCode]]
    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    seed: int
    steps: int
    trace: bool
    memory: bool
    gradients: bool
    stream: bool
    ranges: bool = False
    device: str = field(default_factory=lambda: device.default)


@dataclass(frozen=True)
class Failure:
    """Why a rank gave up. `kind`: the error's class name. `peer`: whether it only saw another rank fail."""

    kind: str
    message: str
    details: str
    peer: bool
