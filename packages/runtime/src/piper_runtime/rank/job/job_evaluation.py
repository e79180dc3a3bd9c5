"""Check the fields of a Job on metrics and evaluation, and tell metrics of the loss from metrics of outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

from piper_ir.ground.errors import JobError
from piper_runtime.data import DatasetBatch, StreamBatch, from_dataset

NEEDED = (
    'a mapping from names to functions is needed: of the loss, such as {"perplexity": math.exp}, '
    "or of (output, targets), such "
    'as {"accuracy": lambda output, targets: (output.argmax(-1) == targets).float().mean()}'
)
LOGGED = frozenset(
    {
        "loss",
        "step",
        "step_s",
        "batch_s",
        "tokens_per_s",
        "gradient_norm",
        "learning_rate",
        "evaluation_s",
    }
)
"""The names of values that are logged of every step, which no metric may have."""


def arguments_of(function: Callable[..., Any]) -> int | None:
    """Return the number of arguments of a metric's calls: 1, the loss, or 2; None if it accepts neither.

    A function that accepts both is a metric of the loss.
    """
    try:
        signature = signature_of(function)
    except ValueError:  # a function in C: it will say so itself
        return 1
    for arguments in ((0.0,), (None, None)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return len(arguments)
    return None


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a metric; for a module its forward's, since its call accepts anything."""
    return inspect.signature(function.forward if isinstance(function, nn.Module) else function)


def of_loss(metrics: Mapping[str, Callable[..., Any]]) -> Mapping[str, Callable[[float], float]]:
    """Return the metrics that are functions of the loss."""
    return {name: function for name, function in metrics.items() if arguments_of(function) == 1}


def of_outputs(
    metrics: Mapping[str, Callable[..., Any]],
) -> Mapping[str, Callable[[Any, Any], Any]]:
    """Return the metrics that are functions of (output, targets)."""
    return {name: function for name, function in metrics.items() if arguments_of(function) == 2}


def evaluation_data(data: Any, every: Any, batches: Any) -> Any:
    """Return the batch function of an evaluation, None without one; raise JobError for fields that do not fit."""
    if data is None:
        for name, value in (("eval_every", every), ("eval_batches", batches)):
            if value is not None:
                raise JobError(
                    f"Job({name}={value!r}): it is for an evaluation; give eval_data, a batch function or a dataset"
                )
        return None
    if every is None:
        raise JobError(
            "Job(eval_data=...): when to evaluate is not known; give eval_every, a number of steps"
        )
    _check_counts(every, batches)
    if isinstance(data, StreamBatch):
        raise JobError(
            "Job(eval_data=from_stream(...)): an evaluation reads the same rows each time; use from_dataset"
        )
    if not callable(data):
        if isinstance(data, IterableDataset) or not (
            hasattr(data, "__getitem__") and hasattr(data, "__len__")
        ):
            raise JobError(
                f"Job(eval_data=...) got a {type(data).__name__}, which has no samples by number; give a dataset "
                f"with len(dataset) and dataset[i], or a batch function, as Job.batch"
            )
        data = from_dataset(data, shuffle=False)
    if batches is None and not isinstance(data, DatasetBatch):
        raise JobError(
            "Job(eval_data=...): the length of a batch function is not known; give eval_batches, or a dataset"
        )
    return data


def _check_counts(every: Any, batches: Any) -> None:
    """Raise JobError for numbers of steps and batches that are none."""
    for name, value in (("eval_every", every), ("eval_batches", batches)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise JobError(f"Job({name}={value!r}): an integer of at least 1 is needed")


def evaluation_batches(data: Any, batches: int | None, global_batch: int) -> int:
    """Return how many global batches an evaluation has; raise JobError if a dataset does not consist of them."""
    if isinstance(data, DatasetBatch):
        return _batches_of(data, batches, global_batch)
    assert batches is not None, "evaluation_data asks for it"
    return batches


def _batches_of(data: DatasetBatch, batches: int | None, global_batch: int) -> int:
    """Return how many global batches of a dataset are evaluated; each sample counts at most once."""
    whole, rest = divmod(data.samples, global_batch)
    if not whole:
        raise JobError(
            f"Job(eval_data=...): the dataset has {data.samples} samples, fewer than one global batch of "
            f"{global_batch} rows; an evaluation has batches of this size"
        )
    if batches is None and rest:
        raise JobError(
            f"Job(eval_data=...): the dataset has {data.samples} samples, which is no multiple of the global batch "
            f"of {global_batch} rows; leave {rest} of them out with eval_batches={whole}, or give a dataset of "
            f"{whole * global_batch} or {(whole + 1) * global_batch}"
        )
    if batches is not None and batches > whole:
        raise JobError(
            f"Job(eval_batches={batches}): the dataset has {whole} global batches of {global_batch} rows"
        )
    return whole if batches is None else batches
