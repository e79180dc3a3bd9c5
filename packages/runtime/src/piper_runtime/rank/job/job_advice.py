"""Advise users on unsuitable fields of a Job, with a sentence and lines to copy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from piper_runtime.rank.job.by_name import by_name_problem
from piper_runtime.rank.job.job_evaluation import LOGGED, arguments_of, signature_of
from piper_runtime.rank.job.job_evaluation import NEEDED as METRICS

BATCH = (
    "a function of (step, rows) is needed that returns (inputs, targets) for these rows of the step's global "
    "batch. piper.from_dataset(dataset) makes one of a dataset of torch.utils.data; by hand, every rank asks for "
    "its own:\n    def batch(step, rows):  # rows: a range in 0..global_batch\n        index = [(step * "
    "GLOBAL_BATCH + row) % len(x) for row in rows]\n        return x[index], y[index]"
)
NEEDED = {
    "model": "a function that makes the model is needed, such as `lambda: Model(config)`",
    "batch": BATCH,
    "loss": (
        "a function of (output, targets) is needed, such as torch.nn.functional.mse_loss; for a model that "
        "computes its loss itself: `lambda out, _: out.loss`"
    ),
    "optimizer": (
        "a function of the named parameters is needed, which every rank calls with its own: `lambda named: "
        "torch.optim.AdamW([p for _, p in named], lr=1e-3)`; or a mapping from patterns of names to such functions"
    ),
    "scheduler": "a function of the optimizer is needed, such as `lambda o: torch.optim.lr_scheduler.StepLR(o, 10)`",
}
ARGUMENTS = {
    "model": (),
    "batch": ("step", "rows"),
    "loss": ("output", "targets"),
    "optimizer": ("named",),
    "scheduler": ("o",),
}
"""The arguments of each function of a Job."""
ALIASES = {
    "bf16": "bfloat16", "fp32": "float32", "float": "float32", "single": "float32", "fp64": "float64", "double": "float64",
}  # fmt: skip
"""The other names of dtypes that are accepted."""


def callable_problem(name: str, value: object) -> str | None:
    """Return the problem with a function of a Job, or None."""
    if isinstance(value, Mapping) and name == "optimizer":
        return by_name_problem(value)
    if isinstance(value, nn.Module) and name == "model":
        return "Job(model=...) got a module: give a function that makes it, such as `lambda: Model(config)`"
    if isinstance(value, type) and issubclass(value, nn.Module) and name == "loss":
        return f"Job(loss={value.__name__}) is a class: give an instance, {value.__name__}()"
    if not callable(value):
        return f"Job({name}=...) got {_article(value)}: {NEEDED[name]}"
    return _call_problem(name, value)


def _call_problem(name: str, value: Callable[..., object]) -> str | None:
    """Return the problem with the arguments that a function of a Job accepts, or None."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # a function in C: it will say so itself
        return None
    try:
        signature.bind(*ARGUMENTS[name])
    except TypeError:
        call = f"{name}({', '.join(ARGUMENTS[name])})"
        return f"Job({name}=...) is called as {call}, which {_name(value)}{signature} does not accept: {NEEDED[name]}"
    return None


def number_problem(job: Mapping[str, Any]) -> str | None:
    """Return the problem with the numbers among the fields of a Job, or None."""
    least = {
        "global_batch": 1,
        "seed": 0,
        **({} if job["tokens_per_row"] is None else {"tokens_per_row": 1}),
    }
    for name, bound in least.items():
        value = job[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < bound:
            return f"Job({name}={value!r}): an integer of at least {bound} is needed"
    clip = job["clip_norm"]
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        return f"Job(clip_norm={clip!r}): a positive number is needed, or None for no clipping"
    return None


def word_problem(job: Mapping[str, Any]) -> str | None:
    """Return the problem with the names and words among the fields of a Job, or None."""
    names = (job["shared"],) if isinstance(job["shared"], str) else job["shared"]
    if not isinstance(names, tuple) or not all(isinstance(n, str) and n for n in names):
        return f"Job(shared={job['shared']!r}): the name of a tensor of the batch is needed, or a tuple of names"
    if job["batch_norm"] not in (None, "microbatch"):
        return f'Job(batch_norm={job["batch_norm"]!r}): "microbatch" is needed, or None to refuse batch statistics'
    if job["loss_over"] not in ("batch", "microbatch"):
        return f'Job(loss_over={job["loss_over"]!r}): "batch" is needed, or "microbatch" for the mean of their losses'
    if job["draws"] not in ("rows", "microbatches"):
        return f'Job(draws={job["draws"]!r}): "rows" is needed, or "microbatches" for numbers of torch\'s own generator'
    return None


def metrics_problem(metrics: object) -> str | None:
    """Return the problem with Job.metrics, or None."""
    if not isinstance(metrics, Mapping):
        return f"Job(metrics=...) got {_article(metrics)}: {METRICS}"
    for name, function in metrics.items():
        if not isinstance(name, str) or not name or not callable(function):
            return f"Job(metrics=...) has {name!r} with {_article(function)}: {METRICS}"
        if name in LOGGED:
            return (
                f"Job(metrics=...) has {name!r}, the name of something that is logged of every "
                f"step; choose another one"
            )
        if arguments_of(function) is None:
            return (
                f"Job(metrics=...) calls {name!r} as {name}(loss) or {name}(output, targets), of which "
                f"{_name(function)}{signature_of(function)} accepts neither: {METRICS}"
            )
    return None


def precision_problem(value: object, accepted: Mapping[str, torch.dtype]) -> str:
    """Return the message for a value that is no Precision, with a suggestion."""
    if isinstance(value, str) and "mixed" in value:
        mixed = "Precision(params='float32', compute='bfloat16') computes in bfloat16 and updates in float32"
        return f"Job(precision={value!r}): {mixed}; a name, one of {', '.join(accepted)}, is one dtype for all"
    meant = dtype_meant(value, accepted)
    hint = f"did you mean {meant!r}? " if meant else ""
    return f"Job(precision={value!r}): {hint}One of {', '.join(accepted)} for all, or a piper.Precision, is accepted"


def dtype_problem(field: str, value: object, accepted: Iterable[str]) -> str:
    """Return the message for a dtype that a field of Precision does not accept, with a suggestion."""
    accepted = list(accepted)
    setting = field.replace("...", repr(value)) if "..." in field else f"{field}={value!r}"
    meant = dtype_meant(value, accepted)
    hint = f"; did you mean {meant!r}?" if meant else ""
    return f"Precision({setting}): one of {', '.join(accepted)} is needed{hint}"


def dtype_meant(value: object, accepted: Iterable[str]) -> str | None:
    """Return the accepted dtype that a name or a dtype of torch means."""
    text = str(value).removeprefix("torch.")
    text = ALIASES.get(text, text)
    return next(iter(get_close_matches(text, list(accepted), 1, 0.85)), None)


def _article(value: object) -> str:
    kind = type(value).__name__
    return (
        "None"
        if value is None
        else f"the text {value!r}"
        if isinstance(value, str)
        else f"an object of type {kind}"
    )


def _name(value: object) -> str:
    return getattr(value, "__name__", None) or type(value).__name__
