"""Describe a model that is to be tried: how it is made, what it is fed, what its loss is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Rows = Callable[[torch.Generator], Any]
"""A function that draws one row of a batch: a tensor, or a dict of them."""


@dataclass(frozen=True)
class Entry:
    """Name a model of a library.

    Attributes:
        family: the name in the library's registry.
        make: () -> the module, shrunken.
        row: draws one row of the inputs; a dict is passed by keyword.
        own_loss: the model computes its loss itself, from labels among the inputs.
        params: the dtype of its parameters; float32 where plain PyTorch fails in float64.
    """

    library: str
    family: str
    make: Callable[[], nn.Module]
    row: Rows
    own_loss: bool = False
    params: str = "float64"

    @property
    def name(self) -> str:
        return f"{self.library}/{self.family}"


def without_dropout(model: nn.Module) -> nn.Module:
    """Return the model with dropout of probability zero: plain PyTorch draws other numbers for another number of
    rows."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def batch_of(entry: Entry, global_batch: int) -> Callable[[int, range], Any]:
    """Return the batch function of a job."""

    def batch(step: int, rows: range) -> Any:
        drawn = [entry.row(torch.Generator().manual_seed(1000 * (step + 1) + row)) for row in rows]
        if isinstance(drawn[0], dict):
            stacked: Any = {name: torch.stack([row[name] for row in drawn]) for name in drawn[0]}
        elif isinstance(drawn[0], tuple):
            stacked = tuple(torch.stack([row[k] for row in drawn]) for k in range(len(drawn[0])))
        else:
            stacked = torch.stack(drawn)
        return stacked if entry.own_loss else (stacked, torch.zeros(len(rows), 1))

    return batch


def first_tensor(output: Any) -> Tensor:
    """Return the first floating-point tensor of a model's output."""
    if isinstance(output, Tensor):
        return output
    values = (
        output.values()
        if isinstance(output, dict)
        else output
        if isinstance(output, tuple | list)
        else vars(output).values()
    )
    return next(
        first_tensor(value) for value in values if isinstance(value, Tensor | tuple | list | dict)
    )


def distance(output: Any, targets: Tensor) -> Tensor:
    """Return a loss that any output has: its first tensor's distance from a wave, which has gradients behind norms,
    too."""
    found = first_tensor(output).flatten(1)
    wave = torch.arange(found.shape[1], dtype=found.dtype).mul(1.7).cos()
    return ((found - wave).square().mean(1) - targets[:, 0]).mean()


def images(size: int, channels: int = 3) -> Rows:
    """Return rows that are images."""
    return lambda generator: torch.randn(channels, size, size, generator=generator)


def features(*shape: int) -> Rows:
    """Return rows of numbers."""
    return lambda generator: torch.randn(*shape, generator=generator)
