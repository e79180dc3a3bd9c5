"""A model of many layers that may differ in this or that, and how much of its capture is traced once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, fx, nn

from piper_capture import capture
from piper_capture.chunks.cut import cut
from piper_capture.torch_api import _torch
from piper_capture.trace import tracing
from piper_capture.trace.dynamo import capture_forward
from piper_capture.trace.repeated import complete, flatten
from piper_ir.program.program import Program

T = TypeVar("T")

WIDTH = 8
LAYERS = 4
"""Fewer than are worth it, so that the tests take little."""


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class Layer(nn.Module):
    """`scale` and `power`: what layers may differ in."""

    def __init__(self, scale: float = 1.0, power: int = 1) -> None:
        super().__init__()
        self.norm, self.part, self.scale, self.power = nn.LayerNorm(WIDTH), Part(), scale, power

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.part(self.norm(x)) * self.scale
        for _ in range(self.power - 1):
            y = y * bias
        return x + y


class Model(nn.Module):
    """`call`: how layer `k` is called."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first, self.layers, self.last = (
            nn.Linear(4, WIDTH),
            nn.ModuleList(layers),
            nn.Linear(WIDTH, 2),
        )
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        found: Tensor = layer(x, bias)
        return found

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.first(x), self.bias.exp()
        for k, layer in enumerate(self.layers):
            x = self.call(k, layer, x, bias)
        found: Tensor = self.last(x)
        return found


def batch(rows: range) -> tuple[Tensor, Tensor]:
    return torch.zeros(len(rows), 4), torch.zeros(len(rows), 2)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


Work = tuple[int, int, int]
"""Calls of regions that are replaced, how many different ones, and how many calls needed no tracing. 0: traced
plainly."""


def program(model: Callable[[], nn.Module]) -> Program:
    """All of a capture."""
    return capture(model, batch, loss).program


def pieces(model: Callable[[], nn.Module]) -> list[Any]:
    """Of the chunks what their joint traces are made from, in a fraction of the time."""
    found = cut(capture_forward(model, batch, loss))
    return [
        (
            piece.region.id,
            piece.region.coords,
            found.text(piece),
            [(slot.kind, slot.name, slot.source) for slot in piece.slots],
            [(result.kind, result.name, result.varies, result.changed) for result in piece.results],
        )
        for piece in found.pieces
    ]


def captured(
    model: Callable[[], nn.Module],
    patch: pytest.MonkeyPatch,
    make: Callable[[Callable[[], nn.Module]], T],
) -> tuple[T, Work]:
    """What `make` makes of a model, and what the first trace took."""
    work: list[Work] = []
    served: list[int] = []

    def completing(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        calls = module.graph.find_nodes(op="call_function", target=_torch.INVOKE)
        served.append(sum(_torch.CAPTURED in call.meta for call in calls))
        return complete(module, inputs)

    def counting(module: fx.GraphModule) -> None:
        calls = module.graph.find_nodes(op="call_function", target=_torch.INVOKE)
        flatten(module)
        work.append((len(calls), len({str(call.args[1]) for call in calls}), served[-1]))

    with patch.context() as inner:
        inner.setattr(tracing, "complete", completing)
        inner.setattr(tracing, "flatten", counting)
        return make(model), work[0]


def plainly(
    model: Callable[[], nn.Module],
    patch: pytest.MonkeyPatch,
    make: Callable[[Callable[[], nn.Module]], T],
) -> T:
    """The same of a plain trace."""
    with patch.context() as inner:
        inner.setattr(tracing, "repeated_layers", lambda model: [])
        return make(model)
