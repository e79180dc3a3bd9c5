"""Make a training job of a causal language model of Hugging Face's by its class of transformers.

It needs transformers, and serves the types that no DecoderConfig describes. Their modules are captured as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from piper.models.from_config import read_fields
from piper.models.jobs import adamw, cross_entropy, random_tokens
from piper_ir.ground.errors import JobError
from piper_runtime.rank import Job, Precision

LIBRARY = "transformers"
"""The package, which no package of Piper requires."""
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""The names that files have for the tokens of a row."""


def has_library() -> bool:
    """Return whether transformers can be imported."""
    try:
        importlib.import_module(LIBRARY)
    except ModuleNotFoundError:
        return False
    return True


def library_job(file: str | Path, *, global_batch: int, length: int) -> Job:
    """Return a job that trains the class of transformers that a config.json names, from weights of its own start.

    Tokens, loss and optimizer are as in `models.job`; it computes in bfloat16 and updates in float32.

    Args:
        file: The config.json.
        global_batch: Rows of a step over all replicas.
        length: Tokens per row.

    Raises:
        JobError: transformers has no causal language model of that type.
    """
    vocab = getattr(_config_of(str(file)), "vocab_size", None)
    if vocab is None:  # of a type that holds another config with it
        with torch.device("meta"):
            vocab = library_model(str(file)).get_input_embeddings().num_embeddings
    return Job(
        _build(str(file)),
        _batch(vocab, length),
        logits_cross_entropy,
        partial(adamw, lr=3e-4),
        global_batch=global_batch,
        tokens_per_row=length,
        precision=Precision(params="float32", compute="bfloat16", reduce="float32"),
    )


def library_length(file: str | Path) -> int:
    """Return the tokens of a row that a config.json names; raise JobError if it names none."""
    fields = read_fields(Path(file))
    length = next((fields[name] for name in LENGTHS if isinstance(fields.get(name), int)), None)
    if length is None:
        raise JobError(f"{file} does not say how long a row is; give --length")
    return length


def library_model(file: str) -> Any:
    """Return the module, on the device that is current; raise JobError if transformers cannot make it."""
    fields = read_fields(Path(file))
    # the grouped kernels of experts number the rows of the batch, which no plan can cut
    loops = {"experts_implementation": "eager"} if any("experts" in f for f in fields) else {}
    with _of_library(file) as library:
        config = _config_of(file)
        return library.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **loops)


def _config_of(file: str) -> Any:
    """Return the config of transformers that a config.json describes; raise JobError for a type without one."""
    with _of_library(file) as library:
        return library.AutoConfig.for_model(**{**read_fields(Path(file)), "use_cache": False})


@contextmanager
def _of_library(file: str) -> Iterator[Any]:
    """Give transformers, and raise its errors as a JobError."""
    try:
        yield importlib.import_module(LIBRARY)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise JobError(
            f"{file}: transformers makes no causal language model of it ({' '.join(str(error).split()).partition('. ')[0]})"
        ) from error


def logits_cross_entropy(output: Any, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of an output of transformers."""
    return cross_entropy(output.logits, targets)


def named_tokens(
    vocab: int, length: int, step: int, rows: range
) -> tuple[dict[str, Tensor], Tensor]:
    """Return `random_tokens` by the name that transformers gives them."""
    tokens, targets = random_tokens(vocab, length, step, rows)
    return {"input_ids": tokens}, targets


@cache  # a capture is found by the identity of its callables
def _build(file: str) -> Callable[[], nn.Module]:
    return partial(library_model, file)


@cache  # as above
def _batch(vocab: int, length: int) -> Callable[[int, range], tuple[dict[str, Tensor], Tensor]]:
    return partial(named_tokens, vocab, length)
