"""Describe a training job: the user's callables and numbers, and from them each rank's rows and initial state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

import torch
from torch import nn
from torch.utils.data import Dataset

from piper_ir.ground.errors import JobError
from piper_ir.ground.keywords import checked_fields
from piper_ir.tools import user_code
from piper_runtime.data import bind_batch
from piper_runtime.rank.job.by_name import bound_by_name
from piper_runtime.rank.job.job_advice import (
    callable_problem,
    metrics_problem,
    number_problem,
    precision_problem,
    word_problem,
)
from piper_runtime.rank.job.job_evaluation import evaluation_batches, evaluation_data
from piper_runtime.rank.job.job_options import JobOptions
from piper_runtime.rank.job.precision import FOR_ALL, Precision, PrecisionField
from piper_runtime.weights import (
    HeldTensor,
    LazyTensors,
    Renames,
    TensorForm,
    forms_of,
    is_fake,
    is_weight_file,
    matched,
    placed,
    record,
    rename_problem,
    stored_tensors,
)

Inputs = torch.Tensor | tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor]
Batch = Callable[[int, range], tuple[Inputs, Any]]
NamedParameters = list[tuple[str, nn.Parameter]]
MakesOptimizer = Callable[
    [NamedParameters], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
]


class _Required:
    """Stand for the missing value of a required field of `Job`, which follows the optional `loss`."""

    def __repr__(self) -> str:
        return "required"


_MISSING: Any = _Required()


Optimizers = MakesOptimizer | Mapping[str, MakesOptimizer]
LossFunction = Callable[[Any, Any], Any]


@checked_fields(JobError)
@dataclass(frozen=True)
class Job:
    """Describe a training job, independent of how it is distributed; raise JobError for an unusable field.

    Attributes:
        model: () -> nn.Module.
        batch: (step, rows) -> (inputs, targets), the given rows of the global batch of a step; inputs are a tensor, a
            tuple (positional) or a mapping (keyword), targets any nest of tensors. A mapping alone is the inputs.
            Numbers, bools and texts in it are constants of the model. `from_dataset` and `from_stream` make one, which
            is bound to `global_batch` here.
        loss: (output, targets) -> a scalar, the loss of the whole global batch: a sum or a mean over rows, also over
            rows chosen by the batch; a pair (sum, weight); or a list or dict of pairs, whose means are added up. None
            for the model's own loss: its output, the first of several, or `output.loss`.
        optimizer: list of (name, parameter) -> Optimizer, or a list of several; it sees every parameter once, with its
            full shape, on meta. A mapping from patterns of names to such functions makes one for each pattern.
        scheduler: Optimizer -> LRScheduler, stepped once per optimizer step; it is called with each optimizer.
        global_batch: rows per step over all replicas.
        tokens_per_row: tokens in a row, for tokens per second.
        clip_norm: largest global 2-norm of the gradient.
        precision: dtypes (`Precision`), or the name of one for all, such as "bfloat16".
        init: "model" (the constructor's tensors under `seed`, made at once), "seeded" (each parameter by itself, under
            seeds made of `seed`; no process holds the model), or the path of weights: a safetensors file, a folder of
            Hugging Face, a checkpoint (of Piper's, or torch's DCP), or a file that torch.save wrote of a state_dict.
        shared: names of tensors of the batch without rows, beside the ones that `piper.shared` marks; patterns as for
            file names, of the path ("inputs.positions") or its end ("positions").
        batch_norm: "microbatch" takes statistics of each microbatch on its replica, as gradient accumulation does;
            running averages, and other buffers that forward only updates, are taken from replica 0. None refuses them.
        loss_over: "microbatch" trains the mean of the losses of microbatches, as gradient accumulation in plain PyTorch
            does, if a loss combines rows in another way than a sum does. "batch" refuses such a loss.
        metrics: functions by name, whose values are logged: of the loss, such as {"perplexity": math.exp}, or of
            (output, targets), which give a mean over rows, a sum, a pair (sum, weight), or a dict of these.
        eval_data, eval_every: as `batch`, or a dataset: the data of evaluations, and the number of steps between them.
        eval_batches: the global batches of an evaluation, which may be left out for a dataset: then all of it.
        draws: the unit of random numbers: rows of the global batch, or microbatches; see docs/random_numbers.md.
        rename: places in the model by patterns of names in the files of `init`, see docs/running.md.
    """

    model: Callable[[], nn.Module]
    batch: Batch
    loss: LossFunction | None = None
    optimizer: Optimizers = _MISSING
    global_batch: int = _MISSING
    tokens_per_row: int | None = None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip_norm: float | None = None
    precision: PrecisionField = PrecisionField()  # noqa: RUF009 - a descriptor, which gives the default
    seed: int = 0
    init: str | Path = "model"
    rename: Renames = field(default_factory=dict, hash=False)
    shared: str | tuple[str, ...] = ()
    batch_norm: Literal["microbatch"] | None = None
    loss_over: Literal["batch", "microbatch"] = "batch"
    metrics: Mapping[str, Callable[[float], float] | Callable[[Any, Any], Any]] = field(
        default_factory=dict, hash=False
    )
    eval_data: Batch | Dataset[Any] | Sequence[Any] | None = None
    eval_every: int | None = None
    eval_batches: int | None = None
    draws: Literal["rows", "microbatches"] = "rows"

    if TYPE_CHECKING:  # optimizer and global_batch must be given, also if loss is left out

        @overload
        def __init__(
            self,
            model: Callable[[], nn.Module],
            batch: Batch,
            loss: LossFunction | None,
            optimizer: Optimizers,
            global_batch: int,
            **more: Unpack[JobOptions],
        ) -> None: ...
        @overload
        def __init__(
            self,
            model: Callable[[], nn.Module],
            batch: Batch,
            loss: LossFunction | None = None,
            *,
            optimizer: Optimizers,
            global_batch: int,
            **more: Unpack[JobOptions],
        ) -> None: ...
        def __init__(self, *given: Any, **more: Any) -> None: ...

    @property
    def shared_names(self) -> tuple[str, ...]:
        """Return the patterns of the names of batch tensors without rows."""
        return (self.shared,) if isinstance(self.shared, str) else self.shared

    def __post_init__(self) -> None:
        for name in ("optimizer", "global_batch"):
            if getattr(self, name) is _MISSING:
                raise JobError(
                    f"Job({', '.join(f.name for f in fields(self))}): missing a required argument: {name!r}"
                )
        for name in ("model", "batch", "loss", "optimizer", "scheduler"):
            value = getattr(self, name)
            problem = callable_problem(name, value)
            if problem is not None and not (name in ("loss", "scheduler") and value is None):
                raise JobError(problem)
        if (
            problem := number_problem(vars(self))
            or word_problem(vars(self))
            or metrics_problem(self.metrics)
        ) is not None:
            raise JobError(problem)
        if not isinstance(self.precision, Precision):
            raise JobError(precision_problem(self.precision, FOR_ALL))
        if not isinstance(self.init, str | Path):
            raise JobError(
                f"Job(init={self.init!r}): 'model', 'seeded' or the path of weights is needed"
            )
        if (problem := rename_problem(self.rename)) is not None:
            raise JobError(f"Job(rename=...): {problem}")
        if self.rename and self.init in ("model", "seeded"):
            raise JobError(
                f"Job(init={self.init!r}, rename=...): rename is for the names in files; give init "
                f"a path of weights"
            )
        object.__setattr__(self, "batch", bind_batch(self.batch, self.global_batch))
        object.__setattr__(
            self, "eval_data", evaluation_data(self.eval_data, self.eval_every, self.eval_batches)
        )
        object.__setattr__(self, "optimizer", bound_by_name(self.optimizer))

    @property
    def evaluated(self) -> Job:
        """Return the job with the batches of an evaluation; raise JobError if they do not divide the data."""
        batches = evaluation_batches(self.eval_data, self.eval_batches, self.global_batch)
        batch = bind_batch(cast("Batch", self.eval_data), self.global_batch)
        return replace(self, batch=batch, eval_data=batch, eval_batches=batches)

    @property
    def unevaluated(self) -> Job:
        """Return the job without an evaluation."""
        return (
            self
            if self.eval_data is None
            else replace(self, eval_data=None, eval_every=None, eval_batches=None)
        )

    @property
    def make_optimizers(self) -> Callable[[NamedParameters], Any]:
        """Return the function of named parameters that makes the optimizers; a mapping has become one."""
        return cast("Callable[[NamedParameters], Any]", self.optimizer)


@dataclass(frozen=True)
class InitialState:
    """Hold full tensors on CPU under their first names; none without a `model`.

    They are shared with their module, or `LazyTensors`, which are made on access; the tensors of the module are fake
    then. `restored` has tensors of a checkpoint that no rank holds; they count in place of these.
    """

    params: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    model: nn.Module | None = None
    restored: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def real_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the module that have bytes, or are on meta, by their first names; not the fake ones."""
        tensors = _first_tensors(self.model) if self.model is not None else {}
        return {name: tensor for name, tensor in tensors.items() if not is_fake(tensor)}

    @property
    def tied(self) -> dict[str, str]:
        """Return the first name of a tensor for each of its other names."""
        first: dict[int, str] = {}
        names = list(_named_tensors(self.model)) if self.model is not None else []
        return {name: first[id(t)] for name, t in names if first.setdefault(id(t), name) != name}

    @property
    def trainable(self) -> set[str]:
        """Return the names of the parameters with requires_grad."""
        tensors = _first_tensors(self.model) if self.model is not None else {}
        return {n for n, t in tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}

    def state_dict(self, trained: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the module's own state_dict for tensors with the values in `trained`, by first name.

        A rank may have a frozen parameter in a narrower dtype than it was made in: then it is as it was made, unless
        the rank's has other values, which came from a checkpoint.

        The module itself stays as it is, because its owner may hold it, and start another run from it.
        """
        if self.model is None:
            return {}
        initial = {name: kind for kind in (self.params, self.buffers) for name in kind}
        values = {
            name: self._value(kind, name, trained.get(name)) for name, kind in initial.items()
        }
        with _holding(self.model, values):
            state = self.model.state_dict()
            return {
                n: t.detach().clone() if isinstance(t, torch.Tensor) else t
                for n, t in state.items()
            }

    def tensor(self, kind: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        """Return a parameter or a buffer that no rank holds."""
        return self.restored[name] if name in self.restored else kind[name]

    def _value(
        self, kind: Mapping[str, torch.Tensor], name: str, trained: torch.Tensor | None
    ) -> torch.Tensor:
        if trained is None:
            return self.tensor(kind, name)
        original_dtype = forms_of(kind)[name].dtype
        if trained.dtype == original_dtype:
            return trained
        original = kind[name]
        return (
            original
            if torch.equal(original.to(trained.dtype), trained)
            else trained.to(original_dtype)
        )


@contextmanager
def _holding(model: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let the modules of a model hold other tensors under the names that they have."""
    others = {}
    for name, tensor in _first_tensors(model).items():
        value = values[name]
        others[id(tensor)] = (
            nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        )
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for module in model.modules():
            every: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
            for own in every:
                tensors = [
                    (name, tensor)
                    for name, tensor in own.items()
                    if isinstance(tensor, torch.Tensor)
                ]
                before += [(own, name, tensor) for name, tensor in tensors]
                own.update({name: others[id(tensor)] for name, tensor in tensors})
        yield
    finally:
        for own, name, tensor in before:
            own[name] = tensor


def constructed_only(job: Job) -> Job:
    """Return a job with the constructor's weights, "seeded" or "model" as Job.init implies."""
    if job.init in ("model", "seeded"):
        return job
    return replace(job, init="seeded" if is_weight_file(Path(job.init)) else "model", rename={})


def materialize(job: Job) -> InitialState:
    """Return the model's tensors on CPU; parameters have the dtype of `precision.params`.

    With init="seeded" and with files of safetensors, tensors are made when they are asked for.

    The caller's random state stays as it was. Raises JobError when the model cannot be made or the file of `init` does
    not fit it.
    """
    if job.init == "seeded" or (job.init != "model" and is_weight_file(Path(job.init))):
        return _lazy_state(job)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        with user_code("Job.model()", JobError):
            model = job.model()
    if not isinstance(model, nn.Module):
        raise JobError(f"Job.model returned a {type(model).__name__}; an nn.Module is needed")
    state = initial_state(model, job.precision.dtype, job.precision.compute_dtype)
    if (
        job.init != "model"
    ):  # into tensors that have their dtype: a float64 file is not to be rounded to float32
        _load(model, Path(job.init), job.rename)
    return state


def dtype_in_run(
    tensor: torch.Tensor, dtype: torch.dtype, compute: torch.dtype | None = None
) -> torch.dtype:
    """Return the dtype of a model's tensor in a run whose parameters have `dtype`.

    Floating-point buffers stay as the model made them, unless `compute` (the dtype of parameters if it is None) is
    float64, which serves comparisons: everything is then in float64. Complex tensors stay as they are.
    """
    if not tensor.is_floating_point():
        return tensor.dtype
    if isinstance(tensor, nn.Parameter):
        return dtype
    return torch.float64 if (compute or dtype) == torch.float64 else tensor.dtype


def initial_state(
    model: nn.Module, dtype: torch.dtype, compute: torch.dtype | None = None
) -> InitialState:
    """Cast the tensors of a module in place, each to the dtype that `dtype_in_run` says, and return all of them."""
    params: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for name, tensor in _first_tensors(model).items():
        tensor.data = tensor.data.to(dtype_in_run(tensor, dtype, compute))
        kind = params if isinstance(tensor, nn.Parameter) else buffers
        kind[name] = tensor.detach()
    return InitialState(params, buffers, model)


def _lazy_state(job: Job) -> InitialState:
    """Record the constructor, and return tensors that are made by it or read from files when they are asked for."""
    asked = f"Job(init={str(job.init)!r})"
    with _named(asked):
        stored = {} if job.init == "seeded" else placed(stored_tensors(Path(job.init)), job.rename)
    model, recording = record(job.model, job.seed, asked, _first_tensors)
    tensors, precision = _first_tensors(model), job.precision
    forms = {
        n: TensorForm(tuple(t.shape), dtype_in_run(t, precision.dtype, precision.compute_dtype))
        for n, t in tensors.items()
    }
    names, aliases = _saved_names(model)
    with _named(asked):  # checkpoints of Piper's have more tensors than a state_dict, too
        files = (
            {}
            if job.init == "seeded"
            else matched(stored, forms, [*names, *(forms.keys() & stored)], aliases)
        )
    trained = {n: form for n, form in forms.items() if isinstance(tensors[n], nn.Parameter)}
    others = {n: form for n, form in forms.items() if n not in trained}
    return InitialState(
        LazyTensors(trained, recording, files), LazyTensors(others, recording, files), model
    )


@contextmanager
def _named(asked: str) -> Iterator[None]:
    """Put the job's field in front of the messages of errors raised inside."""
    try:
        yield
    except JobError as error:
        raise JobError(f"{asked}: {error}") from error.__cause__


def _saved_names(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Return the first names of tensors that a state_dict has, and the first names of tied ones by their others."""
    first: dict[int, str] = {}
    saved: dict[str, None] = {}
    aliases: dict[str, str] = {}
    temporary = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in (
            *module._non_persistent_buffers_set,
            *(n for n, t in vars(module).items() if isinstance(t, torch.Tensor)),
        )
    }
    for name, tensor in _named_tensors(model):
        known = first.setdefault(id(tensor), name)
        if name not in temporary:
            saved[known] = None
            if known != name:
                aliases[name] = known
    return list(saved), aliases


def _first_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, buffers and plain tensor attributes, each under the first of its names."""
    named_by_id: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in _named_tensors(model):
        named_by_id.setdefault(id(tensor), (name, tensor))
    return dict(named_by_id.values())


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, buffers and plain tensor attributes under every name that they have."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        own = {**module._parameters, **module._buffers, **vars(module)}
        yield from (
            (dot + name, value) for name, value in own.items() if isinstance(value, torch.Tensor)
        )


def _load(model: nn.Module, path: Path, rename: Renames) -> None:
    if not path.is_file():
        raise JobError(
            f"Job(init={str(path)!r}): no such file; give 'model', 'seeded' or the path of weights"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if rename:
            state = {
                name: tensor.whole()
                for name, tensor in placed(
                    {n: HeldTensor(t) for n, t in state.items()}, rename
                ).items()
            }
        model.load_state_dict(state)
    except (
        Exception
    ) as e:  # torch raises several unrelated classes for a file that is not its own or does not fit
        raise JobError(f"Job(init={str(path)!r}) is not a state_dict of this model: {e}") from e
