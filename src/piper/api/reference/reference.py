"""Train a job by plain PyTorch on one device.

The reference is the user's unmodified module under autograd, in one process, with the whole batch in one forward and
one backward. A model that depends on microbatches by the job's own word (`batch_norm`, `loss_over`), or because forward
changes buffers, runs in a loop over them. The reference shares no code with Piper: the rows of a microbatch, random
numbers and the casts of mixed precision are restated here from their written rules.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from piper.api.reference.reference_casts import MixedCasts
from piper.api.reference.reference_float8 import quantise_layers
from piper.api.reference.reference_random import RandomState
from piper.api.reference.reference_scale import ReferenceScale
from piper.api.reference.reference_weights import cast_tensors, constructed, load_weights

COUNTS = "expert_tokens"
"""The end of the names of buffers that count tokens, which are no part of a model's results."""
STEPS = 3

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """Hold the results of one device.

    Attributes:
        losses: Per step, the loss over the global batch.
        gradients: Per step, the gradients that the optimizer saw, of the parameters that have one.
        parameters: After the last step, under their first names.
        buffers: After the last step, under their first names, without the counts of experts' tokens.
        state_dict: The module's, after the last step.
        by_parts: Whether the model ran on one microbatch after the other.
    """

    losses: list[float]
    gradients: list[Tensors]
    parameters: Tensors
    buffers: Tensors
    state_dict: Tensors
    by_parts: bool = False

    @property
    def trained(self) -> set[str]:
        """Return the parameters that were updated."""
        return {name for gradients in self.gradients for name in gradients}


def reference(
    job: Any,
    *,
    replicas: int = 1,
    microbatches: int = 1,
    steps: int = STEPS,
    whole: bool = True,
) -> Reference:
    """Train a job's model on one device, on the whole batch at once.

    Models whose forward changes buffers, or takes statistics of a batch, run one microbatch after the other; their loss
    is nevertheless computed from the outputs of all, if the job has a `loss`. With Job(loss_over="microbatch"), or
    `whole=False`, a step trains the mean of the losses of microbatches.
    """
    with torch.random.fork_rng(devices=[]), _as_written(), _flex_attention_trained():
        torch.manual_seed(job.seed)
        trainer = _Trainer(job, replicas, microbatches, whole and job.loss_over == "batch")
        results = [trainer.step(step) for step in range(steps)]
    trainer.updated.write(whole=True)
    named = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    buffers = {n: b.clone() for n, b in trainer.model.named_buffers() if not n.endswith(COUNTS)}
    state = {
        n: t.detach().clone()
        for n, t in trainer.model.state_dict().items()
        if isinstance(t, Tensor)
    }
    losses, gradients = [loss for loss, _ in results], [grads for _, grads in results]
    by_parts = trainer.by_parts or not trainer.whole
    return Reference(losses, gradients, named, buffers, state, by_parts)


@contextmanager
def _as_written() -> Iterator[None]:
    """Run parts that torch.compile made as they are written, since Inductor draws numbers of its own.

    Operators that trace functions by themselves, such as flex_attention, still do.
    """
    name = "setup_compilation_env"
    traces = vars(importlib.import_module("torch._higher_order_ops.utils")).get(name)
    if traces is None:
        yield
        return

    @contextmanager
    def tracing() -> Iterator[Any]:
        with torch.compiler.set_stance("default"), traces() as backend:
            yield backend

    users = [
        m
        for m in list(sys.modules.values())
        if isinstance(m, ModuleType) and vars(m).get(name) is traces
    ]
    for module in users:
        setattr(module, name, tracing)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in users:
            setattr(module, name, traces)


@contextmanager
def _flex_attention_trained() -> Iterator[None]:
    """Let flex_attention compute gradients on a CPU: torch has them written out, and refuses to give them."""
    module: Any = sys.modules.get("torch.nn.attention.flex_attention")
    refuse = getattr(module, "_validate_device", None)
    if refuse is None:
        yield
        return
    module._validate_device = lambda *_: None
    try:
        yield
    finally:
        module._validate_device = refuse


class _Trainer:
    """Hold the module and its optimizer, under a job's rules."""

    def __init__(self, job: Any, replicas: int, microbatches: int, whole: bool = True):
        self.job, self.replicas, self.microbatches, self.whole = job, replicas, microbatches, whole
        params = getattr(torch, job.precision.params)
        self.wide = torch.promote_types(params, torch.float32)
        self.compute: torch.dtype = getattr(torch, job.precision.compute or job.precision.params)
        self.model = constructed(job)
        cast_tensors(self.model, params, self.compute)
        self.loss = copy.deepcopy(job.loss) if isinstance(job.loss, nn.Module) else job.loss
        if isinstance(self.loss, nn.Module):
            cast_tensors(self.loss, params, self.compute)
        load_weights(
            self.model, job
        )  # last: a file in float64 is not to go through the dtype of the constructor
        self.random = RandomState(self.model, job.seed, job.draws)
        self.updated = _Updated(self.model, job.precision)
        quantise_layers(self.model, job.precision)
        returned = job.optimizer(self.updated.named())
        self.optimizers = [*returned] if isinstance(returned, list | tuple) else [returned]
        self.schedulers = [
            job.scheduler(optimizer) for optimizer in self.optimizers if job.scheduler
        ]
        # one scale for several rows makes float8 depend on the microbatch
        self.by_parts = (
            job.batch_norm is not None or job.draws != "rows" or job.precision.float8 is not None
        )
        self.scaling = ReferenceScale(job.precision)

    def step(self, step: int) -> tuple[float, Tensors]:
        """Run one optimizer step; return the loss and the gradients that the optimizer saw."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        with MixedCasts() if self.compute != self.wide else nullcontext():
            loss = self._whole_batch(step) if self.whole else self._accumulated(step)
        self.updated.take_sums()
        if not self.scaling.unscaled(self.optimizers):
            for scheduler in self.schedulers:
                scheduler.step()
            return loss, {}
        if self.job.clip_norm is not None:
            nn.utils.clip_grad_norm_([p for _, p in self.updated.named()], self.job.clip_norm)
        gradients = {n: p.grad.clone() for n, p in self.updated.named() if p.grad is not None}
        for optimizer in self.optimizers:
            optimizer.step()
        self.updated.write()
        for scheduler in self.schedulers:
            scheduler.step()
        return loss, gradients

    def _whole_batch(self, step: int) -> float:
        """Compute the gradients of the whole batch's loss; return the loss."""
        before, rows = _copies(self.model), range(self.job.global_batch)
        if not self.by_parts:
            with self.random.during(
                step, rows
            ):  # what forward draws, a backward that recomputes draws again
                loss = self._loss(*self._called(step, rows))
                if len(self._microbatches) == 1 or not _changed(self.model, before):
                    return self._ended(loss)
            self.by_parts = True  # forward changes buffers, once for each microbatch
            _restore(self.model, before)
        return self._in_parts(step)

    def _ended(self, loss: Tensor) -> float:
        self.scaling.of(loss).backward()
        self.updated.add()
        return float(loss.detach())

    def _loss(self, output: Any, targets: Any) -> Tensor:
        return _scalar(_own_loss(output) if self.loss is None else self.loss(output, targets))

    def _in_parts(self, step: int) -> float:
        """Compute the gradients of the whole batch's loss, if the model runs on one microbatch after the other.

        The first pass gives the outputs of all, and the gradients of the loss with respect to them. The second runs
        each microbatch again, on the buffers that it had, for the gradients of parameters.
        """
        before = _copies(self.model)
        with torch.no_grad():
            pairs = list(self._outputs(step))
        output, targets = _joined([o for o, _ in pairs]), _joined([t for _, t in pairs])
        leaves, structure = pytree.tree_flatten(output)
        leaves = [leaf.detach().requires_grad_() if _number(leaf) else leaf for leaf in leaves]
        loss = self._loss(pytree.tree_unflatten(leaves, structure), targets)
        self.scaling.of(loss).backward()
        _restore(self.model, before)
        taken = [0] * len(leaves)
        for part, _ in self._outputs(step):
            ends, tangents = [], []
            for k, (leaf, whole) in enumerate(zip(pytree.tree_leaves(part), leaves, strict=True)):
                if not _number(leaf) or not leaf.requires_grad or whole.grad is None:
                    continue
                rows = leaf.shape[0] if leaf.dim() else 0
                ends.append(leaf)
                tangents.append(
                    whole.grad[taken[k] : taken[k] + rows]
                    if leaf.dim()
                    else whole.grad / len(self._microbatches)
                )
                taken[k] += rows
            torch.autograd.backward(ends, tangents)
            self.updated.add()
        return float(loss.detach())

    def _outputs(self, step: int) -> Iterator[tuple[Any, Any]]:
        """Yield the output of the model for each microbatch, with its targets; replicas start from equal buffers."""
        before = _copies(self.model)
        first: dict[str, Tensor] = {}
        for number, rows in enumerate(self._microbatches):
            if number and not number % self.microbatches:
                first = first or _copies(self.model)
                _restore(self.model, before)
            with self.random.during(step, rows):
                output, target = self._called(step, rows)
                yield (_own_loss(output) if self.loss is None else output), target
        if first:
            _restore(self.model, first)  # the first replica's copy counts

    def _accumulated(self, step: int) -> float:
        """Sum the gradients of all microbatches; return the mean of their losses, or their sum over the weights'."""
        losses, weights = [], []
        before = _copies(self.model)
        first: dict[str, Tensor] = {}
        for number, rows in enumerate(self._microbatches):
            if number and not number % self.microbatches:
                first = first or _copies(self.model)
                _restore(self.model, before)
            with self.random.during(step, rows):
                output, targets = self._called(step, rows)
                loss = _own_loss(output) if self.loss is None else self.loss(output, targets)
                value, *weight = loss if isinstance(loss, tuple) else (loss,)
                # A mean: each microbatch has its share before its backward, which need not be linear in it.
                self.scaling.of(value).backward(
                    None if weight else torch.full_like(value, 1.0 / len(self._microbatches))
                )
            self.updated.add()
            losses.append(float(value.detach()))
            weights += [float(w) for w in weight]
        if first:
            _restore(self.model, first)
        # A pair (sum, weight): the sums' gradients are scaled once. The mean of microbatch means would be another
        # number.
        scale = 1.0 / (sum(weights) if weights else len(losses))
        self.updated.scale = scale if weights else 1.0
        return sum(losses) * scale

    @property
    def _microbatches(self) -> list[range]:
        """Return the rows of each microbatch of each replica."""
        count = self.replicas * self.microbatches
        rows = self.job.global_batch // count
        return [range(k * rows, (k + 1) * rows) for k in range(count)]

    def _called(self, step: int, rows: range) -> tuple[Any, Any]:
        """Return the output of the model for some rows, and their targets, as a loss gets them."""
        inputs, targets = _pair(self.job.batch(step, rows))
        inputs, targets = pytree.tree_map(self._widened, (inputs, targets))
        if isinstance(inputs, tuple):
            output = self.model(*inputs)
        elif isinstance(inputs, Mapping):
            output = self.model(**inputs)
        else:
            output = self.model(inputs)
        if any(_number(leaf) for leaf in pytree.tree_leaves(targets)):
            output = pytree.tree_map(self._widened, output)  # of two dtypes a loss takes one
        return output, targets

    def _widened(self, leaf: Any) -> Any:
        """Return a leaf of a batch in the wide dtype, in which a loss reads it."""
        if isinstance(leaf, Mapping):
            return {key: pytree.tree_map(self._widened, item) for key, item in leaf.items()}
        return leaf.to(self.wide) if _number(leaf) else leaf


def _scalar(loss: Any) -> Tensor:
    """Return a loss as one number: a pair is a mean, and several pairs are the sum of their means."""
    if isinstance(loss, list | dict):
        means: Any = list(loss.values()) if isinstance(loss, dict) else loss
        return sum((_scalar(pair) for pair in means), torch.zeros(()))
    if isinstance(loss, tuple):
        total, weight = loss
        loss = total / (weight.detach() if isinstance(weight, Tensor) else weight)
    value: Tensor = loss
    return value


def _joined(parts: Sequence[Any]) -> Any:
    """Return nests of tensors with the rows of all parts; a scalar, as a loss of the model's own, is their mean."""
    if len(parts) == 1:
        return parts[0]
    leaves, structures = zip(*(pytree.tree_flatten(part) for part in parts), strict=True)
    joined = [
        torch.cat(same)
        if isinstance(same[0], Tensor) and same[0].dim()
        else sum(same) / len(same)
        if _number(same[0])
        else same[0]
        for same in zip(*leaves, strict=True)
    ]
    return pytree.tree_unflatten(joined, structures[0])


def _number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _restore(model: nn.Module, copies: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.detach().copy_(copies[name])


def _changed(model: nn.Module, before: Mapping[str, Tensor]) -> bool:
    """Return whether buffers have changed, apart from the counts of tokens."""
    return any(
        not torch.equal(b, before[n])
        for n, b in model.named_buffers()
        if n in before and not n.endswith(COUNTS)
    )


def _pair(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets; a mapping or a dataclass alone is the inputs."""
    return (batch, None) if isinstance(batch, Mapping) or is_dataclass(batch) else batch


def _own_loss(output: Any) -> Any:
    """Return the loss that a model computes itself."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list):
        return output[0]
    return output["loss"] if isinstance(output, Mapping) else output.loss


class _Updated:
    """Hold the optimizer's parameters, and sums of gradients; the module has copies if it computes in another dtype."""

    def __init__(self, model: nn.Module, precision: Any):
        compute, self._sums_in = (
            getattr(torch, d or precision.params)
            for d in (precision.compute, precision.accumulate or precision.reduce)
        )
        self._model, self._sums, self.scale = model, dict[str, Tensor](), 1.0
        self._masters: dict[str, nn.Parameter] = {}
        for name, p in model.named_parameters():
            kept = [
                getattr(torch, d)
                for pattern, d in precision.keep.items()
                if fnmatchcase(name, pattern)
            ]
            if p.is_floating_point() and p.dtype != (dtype := [*kept, compute][0]):
                self._masters[name] = nn.Parameter(
                    p.detach().clone(), requires_grad=p.requires_grad
                )
                p.data = p.detach().to(dtype)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that are updated, under their first names."""
        return [(n, self._masters.get(n, p)) for n, p in self._model.named_parameters()]

    def add(self) -> None:
        """Add the gradients of a microbatch to the sums; if the dtypes are equal, autograd does that."""
        for name, p in self._model.named_parameters():
            if p.grad is not None and p.grad.dtype != self._sums_in:
                self._sums.setdefault(name, torch.zeros(p.shape, dtype=self._sums_in)).add_(p.grad)
                p.grad = None

    def take_sums(self) -> None:
        """Give the sums, times `scale`, to the parameters that are updated, as their gradients; begin new sums."""
        own = dict(self._model.named_parameters())
        for name, p in self.named():
            total, own[name].grad = self._sums.pop(name, own[name].grad), None
            if total is not None:
                p.grad = (total.to(torch.promote_types(total.dtype, p.dtype)) * self.scale).to(
                    p.dtype
                )

    def write(self, *, whole: bool = False) -> None:
        """Write the module's copies, or in the end give it the masters themselves (`whole`)."""
        for name, p in self._model.named_parameters():
            if name in self._masters:
                master, p.grad = self._masters[name], None
                p.data, master.grad = (
                    master.detach() if whole else master.detach().to(p.dtype),
                    None,
                )
