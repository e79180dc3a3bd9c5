"""What is trained: the user's callables and numbers, and the two facts that follow from them on every rank: rows and initial state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from piper_ir.errors import JobError
from piper_ir.plan import Plan
from torch import nn

FLOATS = ("float64", "float32", "bfloat16")
"""Accepted dtypes of parameters, by torch's names."""

Inputs = torch.Tensor | tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor]
Batch = Callable[[int, range], tuple[Inputs, Any]]
NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Precision:
    """Dtypes by torch's names. `params` is the dtype of parameters, of floating-point buffers and of floating-point batch tensors.

    `compute`, `reduce` and `master` name the dtypes of activations, of gradient reductions and of the optimizer's copy; None means
    that of `params`, and nothing else is accepted yet."""

    params: str = "float32"
    compute: str | None = None
    reduce: str | None = None
    master: str | None = None

    def __post_init__(self) -> None:
        if self.params not in FLOATS:
            raise JobError(f"Precision(params={self.params!r}): one of {', '.join(FLOATS)} is needed")
        for name in ("compute", "reduce", "master"):
            if getattr(self, name) not in (None, self.params):
                raise JobError(
                    f"Precision({name}={getattr(self, name)!r}) differs from params={self.params!r}: mixed precision is not "
                    f"supported yet; leave {name} out"
                )

    @property
    def dtype(self) -> torch.dtype:
        """torch's dtype of `params`."""
        return getattr(torch, self.params)


@dataclass(frozen=True)
class Job:
    """A training job, independent of how it is distributed.

    model: () -> nn.Module. batch: (step, rows) -> (inputs, targets), the given rows of the global batch of a step; inputs are a tensor, a tuple
    (positional) or a dict (keyword), targets any nest of tensors. loss: (output, targets) -> a mean over rows, or a pair (sum, weight).
    optimizer: list of (name, parameter) -> Optimizer; it sees every parameter once, with its full shape, on meta. scheduler: Optimizer ->
    LRScheduler, stepped once per optimizer step. global_batch: rows per step over all replicas. tokens_per_row: for tokens per second.
    clip_norm: largest global 2-norm of the gradient. init: "model" (what the model's constructor makes under `seed`) or the path of a file that
    torch.save wrote of a state_dict. JobError when a field is unusable."""

    model: Callable[[], nn.Module]
    batch: Batch
    loss: Callable[[Any, Any], torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
    optimizer: Callable[[NamedParameters], torch.optim.Optimizer]
    global_batch: int
    tokens_per_row: int | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip_norm: float | None = None
    precision: Precision = field(default_factory=Precision)
    seed: int = 0
    init: str | Path = "model"

    def __post_init__(self) -> None:
        for name in ("model", "batch", "loss", "optimizer", "scheduler"):
            value = getattr(self, name)
            if not callable(value) and not (name == "scheduler" and value is None):
                raise JobError(f"Job({name}={value!r}): a callable is needed")
        if isinstance(self.model, nn.Module):
            raise JobError("Job(model=...) got a module: give a function that makes it, such as `lambda: Model(config)`")
        _check_int("global_batch", self.global_batch, 1)
        _check_int("seed", self.seed, 0)
        if self.tokens_per_row is not None:
            _check_int("tokens_per_row", self.tokens_per_row, 1)
        if self.clip_norm is not None and not (isinstance(self.clip_norm, int | float) and self.clip_norm > 0):
            raise JobError(f"Job(clip_norm={self.clip_norm!r}): a positive number is needed, or None for no clipping")
        if not isinstance(self.precision, Precision):
            raise JobError(f"Job(precision={self.precision!r}): a Precision is needed, such as Precision(params='float32')")


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise JobError(f"Job({name}={value!r}): an integer of at least {least} is needed")


def microbatch_rows(plan: Plan, replica: int, microbatch: int) -> range:
    """Rows of the global batch that a data-parallel replica computes in a microbatch: replica i owns rows [i*G/D, (i+1)*G/D), in order."""
    start = (replica * plan.microbatches + microbatch) * plan.rows
    return range(start, start + plan.rows)


def flatten_batch(inputs: Any, targets: Any) -> dict[str, torch.Tensor]:
    """Tensors of a batch by path: "inputs.0" (also for a single tensor), "inputs.mask", "targets", "targets.0.y". JobError for other leaves."""
    found: dict[str, torch.Tensor] = {}
    top = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if not isinstance(top, tuple | list | Mapping):
        raise JobError(f"Job.batch returned inputs of type {type(inputs).__name__}; a tensor, a tuple or a dict is needed")
    for path, leaf in (*_leaves("inputs", top), *_leaves("targets", targets)):
        if not isinstance(leaf, torch.Tensor):
            raise JobError(f"Job.batch returned a {type(leaf).__name__} at {path}; only tensors are accepted there")
        found[path] = leaf
    return found


def _leaves(path: str, nest: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from _leaves(f"{path}.{key}", value)
    elif isinstance(nest, tuple | list):
        names = getattr(nest, "_fields", range(len(nest)))
        for key, value in zip(names, nest, strict=True):
            yield from _leaves(f"{path}.{key}", value)
    elif nest is not None:
        yield path, nest


@dataclass(frozen=True)
class InitialState:
    """Full tensors on CPU under their first names, and every tied name with its first one."""

    params: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    transient: frozenset[str] = frozenset()
    """Names of buffers that a state_dict leaves out (registered with persistent=False)."""


def materialize(job: Job) -> InitialState:
    """The model's parameters and buffers, made on CPU under the job's seed, in the dtype of `precision.params`.

    The caller's random state stays as it was. JobError when the model cannot be made or the file of `init` does not fit it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        model = job.model()
    if not isinstance(model, nn.Module):
        raise JobError(f"Job.model returned a {type(model).__name__}; an nn.Module is needed")
    if job.init != "model":
        _load(model, Path(job.init))
    model.to(job.precision.dtype)
    first: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
    params = {name: p.detach() for name, p in model.named_parameters()}
    tied = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if name != first[id(p)]}
    buffers = {name: b.detach() for name, b in model.named_buffers()}
    transient = frozenset(buffers) - model.state_dict().keys()
    return InitialState(params, buffers, tied, frozenset(transient))


def _load(model: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise JobError(f"Job(init={str(path)!r}): no such file; give 'model' or the path of a saved state_dict")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state)
    except Exception as e:  # torch raises several unrelated classes for a file that is not its own or does not fit
        raise JobError(f"Job(init={str(path)!r}) is not a state_dict of this model: {e}") from e
