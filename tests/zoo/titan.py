"""List models of torchtitan; its mixtures count tokens by `histc` of integers, which a CPU does not have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tests.zoo.entries import Entry, Rows
from tests.zoo.vision import prepare

VOCAB, LENGTH = 64, 12
SIZES: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "vocab_size": VOCAB,
    "max_seq_len": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Transformer", {**SIZES, "n_kv_heads": 2, "multiple_of": 16}),
    "qwen3": ("Qwen3Model", {**SIZES, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 48}),
}
"""Name -> the class, the arguments of its sizes."""


def entries() -> Iterator[Entry]:
    for name in MODELS:
        yield Entry("torchtitan", name, partial(made, name), tokens())


def tokens() -> Rows:
    """Return rows that are words."""
    return lambda generator: torch.randint(0, VOCAB, (LENGTH,), generator=generator)


def made(name: str) -> nn.Module:
    """Return a model with weights as torchtitan makes them."""
    prepare()
    # The kernels that sort tokens for several devices are written in Triton, which there is for CUDA only.
    kernels = sys.modules.setdefault(
        "torchtitan.models.moe.kernels", ModuleType("torchtitan.models.moe.kernels")
    )
    kernels.__dict__.setdefault("generate_permute_indices", None)
    family = import_module(f"torchtitan.models.{name}")
    kind, sizes = MODELS[name]
    arguments: Any = next(getattr(family, n) for n in vars(family) if n.endswith("ModelArgs"))
    model: Any = getattr(family, kind)(arguments(**sizes))
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    result: nn.Module = model.train()
    return result
