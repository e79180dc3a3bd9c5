"""Name the fields of a job that may be left out, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch.utils.data import Dataset

from piper_runtime.rank.job.precision import Precision
from piper_runtime.weights import Renames


class JobOptions(TypedDict, total=False):
    """The fields of `Job` that may be left out behind the first five."""

    tokens_per_row: int | None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None
    clip_norm: float | None
    precision: Precision | str
    seed: int
    init: str | Path
    rename: Renames
    shared: str | tuple[str, ...]
    batch_norm: Literal["microbatch"] | None
    loss_over: Literal["batch", "microbatch"]
    metrics: Mapping[str, Callable[[float], float] | Callable[[Any, Any], Any]]
    eval_data: Callable[[int, range], Any] | Dataset[Any] | Sequence[Any] | None
    eval_every: int | None
    eval_batches: int | None
    draws: Literal["rows", "microbatches"]
