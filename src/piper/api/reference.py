"""Train a job by plain PyTorch on one device, and compare a run of a plan with it.

The reference is the user's unmodified module under autograd, in one process, with the whole batch in one forward and one
backward. What depends on microbatches by the job's own word (`batch_norm`, `loss_over`), or because forward changes
buffers, runs in a loop over them. It shares no code with Piper: the rows of a microbatch, the seed of random operations
and the casts of mixed precision are restated here from their written rules.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from piper.api.reference_random import RandomState
from piper.api.reference_weights import cast_tensors, constructed, load_weights

FLOAT64 = 1e-9
"""The tolerance of float64; a correct run is at 1e-13, the mildest wrong one seen at 3e-4."""
FLOAT32 = 2e-5
"""The tolerance of float32: for losses and for gradients under SGD only."""
FLOOR = 1e-3
"""The share of the typical norm below which a tensor's own norm is ignored.

A key bias, for example, has true gradient zero, and the rest is rounding.
"""
COUNTS = "expert_tokens"
"""The end of the names of buffers that count tokens, which are no part of what a model computes."""
STEPS = 3

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """Hold the results of one device.

    Attributes:
        losses: Per step, the loss over the global batch.
        gradients: Per step, the gradients that the optimizer saw, of the parameters that have one.
        parameters: After the last step, under their first names.
        buffers: After the last step, under their first names, without those that count the tokens of experts.
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
    with torch.random.fork_rng(devices=[]), _flex_attention_trained():
        torch.manual_seed(job.seed)
        trainer = _Trainer(job, replicas, microbatches, whole and job.loss_over == "batch")
        results = [trainer.step(step) for step in range(steps)]
    trainer.updated.write(whole=True)
    named = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    buffers = {n: b.clone() for n, b in trainer.model.named_buffers() if not n.endswith(COUNTS)}
    state = {n: t.detach().clone() for n, t in trainer.model.state_dict().items() if isinstance(t, Tensor)}
    losses, gradients = [loss for loss, _ in results], [grads for _, grads in results]
    by_parts = trainer.by_parts or not trainer.whole
    return Reference(losses, gradients, named, buffers, state, by_parts)


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
        load_weights(self.model, job)  # last: a file in float64 is not to go through the dtype of the constructor
        self.random = RandomState(self.model, job.seed, job.draws)
        self.updated = _Updated(self.model, job.precision)
        made = job.optimizer(self.updated.named())
        self.optimizers = [*made] if isinstance(made, list | tuple) else [made]
        self.schedulers = [job.scheduler(optimizer) for optimizer in self.optimizers if job.scheduler]
        self.by_parts = job.batch_norm is not None or job.draws != "rows"

    def step(self, step: int) -> tuple[float, Tensors]:
        """Run one optimizer step; return the loss and the gradients that the optimizer saw."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss = self._whole_batch(step) if self.whole else self._accumulated(step)
        self.updated.take_sums()
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
            with self.random.during(step, rows):  # what forward draws, a backward that recomputes draws again
                loss = self._loss(*self._called(step, rows))
                if len(self._microbatches) == 1 or not _changed(self.model, before):
                    return self._ended(loss)
            self.by_parts = True  # forward changes buffers, once for each microbatch
            _restore(self.model, before)
        return self._in_parts(step)

    def _ended(self, loss: Tensor) -> float:
        loss.backward()
        self.updated.add()
        return float(loss.detach())

    def _loss(self, output: Any, targets: Any) -> Tensor:
        return _scalar(_own_loss(output) if self.loss is None else self.loss(output, targets))

    def _in_parts(self, step: int) -> float:
        """Compute the gradients of the whole batch's loss, where the model runs on one microbatch after the other.

        The first pass gives the outputs of all, and the gradients of the loss with respect to them. The second runs each
        microbatch again, on the buffers that it had, for the gradients of parameters.
        """
        before = _copies(self.model)
        with torch.no_grad():
            made = list(self._outputs(step))
        output, targets = _joined([o for o, _ in made]), _joined([t for _, t in made])
        leaves, structure = pytree.tree_flatten(output)
        leaves = [leaf.detach().requires_grad_() if _number(leaf) else leaf for leaf in leaves]
        loss = self._loss(pytree.tree_unflatten(leaves, structure), targets)
        loss.backward()
        _restore(self.model, before)
        taken = [0] * len(leaves)
        for part, _ in self._outputs(step):
            ends, tangents = [], []
            for k, (leaf, whole) in enumerate(zip(pytree.tree_leaves(part), leaves, strict=True)):
                if not _number(leaf) or not leaf.requires_grad or whole.grad is None:
                    continue
                rows = leaf.shape[0] if leaf.dim() else 0
                ends.append(leaf)
                tangents.append(whole.grad[taken[k] : taken[k] + rows] if leaf.dim() else whole.grad / len(self._microbatches))
                taken[k] += rows
            torch.autograd.backward(ends, tangents)
            self.updated.add()
        return float(loss.detach())

    def _outputs(self, step: int) -> Iterator[tuple[Any, Any]]:
        """Yield the output of the model for each microbatch, with its targets; every replica starts from equal buffers."""
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
        """Sum the gradients of all microbatches; return the mean of their losses, or the sum over that of weights."""
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
                value.backward(None if weight else torch.full_like(value, 1.0 / len(self._microbatches)))
            self.updated.add()
            losses.append(float(value.detach()))
            weights += [float(w) for w in weight]
        if first:
            _restore(self.model, first)
        # A pair (sum, weight): the sums' gradients are scaled once. The mean of microbatch means would be another number.
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
        inputs = pytree.tree_map(self._cast, inputs)
        targets = pytree.tree_map(lambda leaf: self._cast(leaf, self.wide), targets)
        if isinstance(inputs, tuple):
            output = self.model(*inputs)
        elif isinstance(inputs, Mapping):
            output = self.model(**inputs)
        else:
            output = self.model(inputs)
        if any(isinstance(t, Tensor) and t.is_floating_point() for t in pytree.tree_leaves(targets)):
            output = pytree.tree_map(lambda leaf: self._cast(leaf, self.wide), output)  # of two dtypes a loss takes one
        return output, targets

    def _cast(self, leaf: Any, dtype: torch.dtype | None = None) -> Any:
        """Return a leaf in this dtype, or that of computing: a loss gets its targets as they are."""
        if isinstance(leaf, Mapping):
            return {key: pytree.tree_map(lambda part: self._cast(part, dtype), item) for key, item in leaf.items()}
        return leaf.to(dtype or self.compute) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


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
    """Return whether buffers have changed, apart from those that count tokens."""
    return any(not torch.equal(b, before[n]) for n, b in model.named_buffers() if n in before and not n.endswith(COUNTS))


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
    """Hold what the optimizer updates, and sums of gradients; the module has copies where it computes otherwise."""

    def __init__(self, model: nn.Module, precision: Any):
        compute, self._sums_in = (getattr(torch, d or precision.params) for d in (precision.compute, precision.reduce))
        self._model, self._sums, self.scale = model, dict[str, Tensor](), 1.0
        self._masters: dict[str, nn.Parameter] = {}
        for name, p in model.named_parameters():
            kept = [getattr(torch, d) for pattern, d in precision.keep.items() if fnmatchcase(name, pattern)]
            if p.is_floating_point() and p.dtype != (dtype := [*kept, compute][0]):
                self._masters[name] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
                p.data = p.detach().to(dtype)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that are updated, under their first names."""
        return [(n, self._masters.get(n, p)) for n, p in self._model.named_parameters()]

    def add(self) -> None:
        """Add the gradients of a microbatch to the sums; where the dtypes are equal, autograd does that."""
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
                p.grad = (total.to(torch.promote_types(total.dtype, p.dtype)) * self.scale).to(p.dtype)

    def write(self, *, whole: bool = False) -> None:
        """Write the module's copies, or in the end let it have what they are copies of (`whole`)."""
        for name, p in self._model.named_parameters():
            if name in self._masters:
                master, p.grad = self._masters[name], None
                p.data, master.grad = master.detach() if whole else master.detach().to(p.dtype), None


@dataclass(frozen=True)
class RunOutcome:
    """Hold the results of a run, in the reference's terms.

    Attributes:
        losses: Per step.
        gradients: By rank, per step, by name.
        states: By rank, by name.
        state_dict: The whole model's.
    """

    losses: Sequence[float]
    gradients: Mapping[int, Sequence[Tensors]]
    states: Mapping[int, Tensors]
    state_dict: Tensors

    @staticmethod
    def of(run: Any) -> RunOutcome:
        """Return the outcome of a run that was made with `gradients=True`."""
        tensors = {n: t for n, t in run.state_dict().items() if isinstance(t, Tensor)}  # without a module's extra state
        return RunOutcome(run.losses, run.rank_gradients, run.rank_states, tensors)


@dataclass(frozen=True)
class Difference:
    """Describe one value that differs from one device.

    Attributes:
        step: From 0; the number of steps for values after the last.
        what: The kind of value that differs.
        rank: -1 where it is not of one rank.
        name: The tensor's name; empty for a loss.
        problem: The difference, in words.
    """

    step: int
    what: str
    rank: int
    name: str
    problem: str

    def __str__(self) -> str:
        name = f" of {self.name}" if self.name else ""
        place = f" on rank {self.rank}" if self.rank >= 0 else ""
        return f"step {self.step}, {self.what}{name}{place}: {self.problem}"


def differences(
    found: RunOutcome, expected: Reference, tolerance: float = FLOAT64, *, parameters: bool = True
) -> list[Difference]:
    """Return all differences of a run from one device, earliest step first.

    `parameters=False` leaves out values after the last step, as float32 needs it.
    """
    result = _losses(found.losses, expected.losses, tolerance)
    norms = [_norms(want) for want in expected.gradients]
    for rank, steps in found.gradients.items():
        if len(steps) != len(expected.gradients):
            result.append(Difference(0, "gradients", rank, "", f"{len(steps)} steps, expected {len(expected.gradients)}"))
        for step, (got, want) in enumerate(zip(steps, expected.gradients, strict=False)):
            reached = _reached(got, want, expected.parameters)
            result += _tensors(step, "gradient", rank, reached, want, norms[step], tolerance)
    for step, want in enumerate(expected.gradients):
        seen = {n for steps in found.gradients.values() if step < len(steps) for n in steps[step]}
        result += [Difference(step, "gradient", -1, n, "no rank has one") for n in want if n not in seen]
    if parameters:
        result += _final(found, expected, tolerance)
    return sorted(result, key=lambda d: d.step)


def _losses(got: Sequence[float], want: Sequence[float], tolerance: float) -> list[Difference]:
    if len(got) != len(want):
        return [Difference(0, "loss", -1, "", f"{len(got)} losses, expected {len(want)}")]
    pairs = enumerate(zip(got, want, strict=True))
    return [
        Difference(step, "loss", -1, "", f"{a!r}, one device has {b!r}")
        for step, (a, b) in pairs
        if not abs(a - b) <= tolerance * abs(b)
    ]


def _final(found: RunOutcome, expected: Reference, tolerance: float) -> list[Difference]:
    last = len(expected.losses)
    result: list[Difference] = []
    kinds = [(what, want, _norms(want)) for what, want in (("parameter", expected.parameters), ("buffer", expected.buffers))]
    for rank, states in found.states.items():
        for what, want, norms in kinds:
            result += _tensors(last, what, rank, {n: t for n, t in states.items() if n in want}, want, norms, tolerance)
        # What is trained must be somewhere; its holders are compared one by one above.
    held_names = {n for states in found.states.values() for n in states}
    result += [Difference(last, "parameter", -1, n, "no rank holds it") for n in sorted(expected.trained - held_names)]
    if found.state_dict.keys() != expected.state_dict.keys():
        wrong = sorted(found.state_dict.keys() ^ expected.state_dict.keys())
        result.append(Difference(last, "state_dict", -1, "", f"names differ: {', '.join(wrong)}"))
    want = expected.state_dict
    return result + _tensors(last, "state_dict", -1, found.state_dict, want, _norms(want), tolerance)


def _reached(got: Tensors, want: Tensors, parameters: Tensors) -> dict[str, Tensor]:
    """Return gradients without the zeros of parameters that no row reached, of which autograd makes none."""
    return {n: g for n, g in got.items() if n in want or n not in parameters or bool(g.count_nonzero())}


def typical_norm(norms: Mapping[str, float]) -> float:
    """Return the quadratic mean of norms; 0 for none.

    The median is no measure: where branches begin with weights of zero, most gradients may be zero but for rounding.
    """
    return math.sqrt(sum(norm * norm for norm in norms.values()) / max(1, len(norms)))


def _norms(tensors: Tensors) -> dict[str, float]:
    return {name: _norm(tensor) for name, tensor in tensors.items()}


def _tensors(
    step: int, what: str, rank: int, got: Tensors, want: Tensors, norms: Mapping[str, float], tolerance: float
) -> list[Difference]:
    """Return the differences between tensors of the same names in `got` and `want`, whose norms are given.

    An error counts relative to the tensor's norm and to the typical norm of all of `want`.
    """
    typical = typical_norm(norms)
    result = []
    for name, a in got.items():
        if name not in want:
            if what == "gradient":
                result.append(Difference(step, what, rank, name, "one device has none"))
            continue
        b = want[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            result.append(
                Difference(step, what, rank, name, f"{a.dtype} {tuple(a.shape)}, one device has {b.dtype} {tuple(b.shape)}")
            )
            continue
        error, allowed = _norm(_wide(a) - _wide(b)), tolerance * (norms[name] + FLOOR * typical)
        if not error <= allowed:
            result.append(
                Difference(step, what, rank, name, f"|a - b| = {error:.3g}, |b| = {norms[name]:.3g}, allowed {allowed:.1g}")
            )
    return result


def _wide(tensor: Tensor) -> Tensor:
    """Return real numbers in float64; `Tensor.double` would drop the imaginary parts of complex ones."""
    return torch.view_as_real(tensor.detach().resolve_conj()).double() if tensor.is_complex() else tensor.detach().double()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(tensor)))
