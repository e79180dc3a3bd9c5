"""Models of layers that differ in one thing or another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packages.capture.tests.repeated_cases import LAYERS, WIDTH, Layer, Model, Part, Work


def layers(
    kind: Callable[..., nn.Module] = Layer, of: Callable[[int], tuple[Any, ...]] = lambda k: ()
) -> list[nn.Module]:
    """`of`: arguments of layer k."""
    return [kind(*of(k)) for k in range(LAYERS)]


class Held(Layer):
    """Multiplies by what it holds: a number, a tensor, a function, or an object with a number."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = super().forward(x, bias)
        if self.held is None:
            return y
        if isinstance(self.held, Factor):
            return y * self.held.factor
        return self.held(y) if callable(self.held) else (y * self.held).to(y.dtype)


@dataclass
class Factor:
    factor: float


class Buffered(Layer):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(WIDTH, dtype=dtype))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return (super().forward(x, bias) * self.mask).to(x.dtype)


class Indexed(Layer):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = super().forward(x, bias)
        return y * 2 if self.index == 2 else y


class Numbered(Layer):
    """Has an index that forward does not read."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index


class Factored(Layer):
    """Its factor is the class's, unless it has one of its own."""

    factor = 1.0

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return super().forward(x, bias) * self.factor


class Dropped(Layer):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.drop(super().forward(x, bias))


class Hidden(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Other(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Part(), Part()

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.b(self.a(x)) + (1 if self.a is self.b else 2)


class Outer(nn.Module):
    """Reads a parameter of a module that is not its own."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight, self.around = nn.Parameter(torch.ones(WIDTH)), [model]

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x * self.weight + self.around[0].bias


def changed(
    number: int, change: Callable[[Any], object], kind: Callable[..., nn.Module] = Layer
) -> Model:
    """A model of equal layers, but for one that is changed."""
    made = layers(kind)
    change(made[number])
    return Model(made)


def hooked(layer: Layer) -> None:
    layer.part.register_forward_hook(lambda module, inputs, output: output * 2)


def before(layer: Layer) -> None:
    layer.part.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))


def overridden(layer: Layer) -> None:
    layer.part.forward = lambda x: x * 3


def all_overridden() -> Model:
    made = layers()
    for k, layer in enumerate(made):
        layer.part.forward = (torch.relu, torch.tanh)[k % 2]
    return Model(made)


def tied(layer: Hidden) -> None:
    layer.down.weight = layer.up.weight


def tied_outside() -> Model:
    model = Model([])
    made = [Outer(model) for _ in range(LAYERS)]
    made[0].weight = model.bias
    model.layers = nn.ModuleList(made)
    return model


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def square() -> nn.Module:
    return Hidden(WIDTH)


LAYERS_DIFFER: dict[str, tuple[Callable[[], nn.Module], Work]] = {
    "a number": (lambda: Model(layers(Held, lambda k: (1.5 + k % 2,))), (4, 2, 2)),
    "a number in an object": (
        lambda: Model(layers(Held, lambda k: (Factor(1.5 + k % 2),))),
        (4, 2, 2),
    ),
    "an object of equal numbers": (
        lambda: Model(layers(Held, lambda k: (Factor(1.5),))),
        (4, 1, 3),
    ),
    "a function": (lambda: Model(layers(Held, lambda k: ((F.relu, F.gelu)[k % 2],))), (4, 2, 2)),
    "a number in a closure": (
        lambda: Model(layers(Held, lambda k: (times(1.5 + k % 2),))),
        (4, 2, 2),
    ),
    "a tensor or none": (
        lambda: Model(layers(Held, lambda k: (None if k == 2 else torch.ones(WIDTH),))),
        (3, 1, 2),
    ),
    "the shape of a tensor": (
        lambda: Model(layers(Held, lambda k: (torch.ones((1,) * (k % 2) + (WIDTH,)),))),
        (4, 2, 2),
    ),
    "the dtype of a buffer": (
        lambda: Model(layers(Buffered, lambda k: ((torch.float32, torch.float64)[k % 2],))),
        (4, 2, 2),
    ),
    "an index": (lambda: Model(layers(Indexed, lambda k: (k,))), (0, 0, 0)),
    "an index that is not read": (lambda: Model(layers(Numbered, lambda k: (k,))), (4, 1, 3)),
    "dropout": (lambda: Model(layers(Dropped, lambda k: (0.1 + 0.1 * (k % 2),))), (4, 2, 2)),
    "train and eval": (lambda: changed(1, nn.Module.eval, lambda: Dropped(0.5)), (3, 1, 2)),
    "a width": (lambda: Model(layers(Hidden, lambda k: (16 if k == 2 else WIDTH,))), (3, 1, 2)),
    "the class of a part": (
        lambda: changed(2, lambda layer: setattr(layer, "part", Other())),
        (3, 1, 2),
    ),
    "a hook": (lambda: changed(2, hooked), (3, 1, 2)),
    "a hook in the first": (lambda: changed(0, before), (3, 1, 2)),
    "a function of its own": (lambda: changed(2, overridden), (3, 1, 2)),
    "functions of their own": (all_overridden, (4, 2, 2)),
    "a number of its own": (
        lambda: changed(2, lambda layer: setattr(layer, "factor", 2.0), Factored),
        (3, 1, 2),
    ),
    "a frozen parameter": (
        lambda: changed(2, lambda layer: layer.norm.bias.requires_grad_(False)),
        (3, 1, 2),
    ),
    "tied in the first": (lambda: changed(0, tied, square), (3, 1, 2)),
    "tied in the last": (lambda: changed(3, tied, square), (3, 1, 2)),
    "tied with another module": (tied_outside, (3, 1, 2)),
    "a part used twice": (
        lambda: changed(0, lambda layer: setattr(layer, "b", layer.a), Twice),
        (3, 1, 2),
    ),
}
"""What layers differ in: model, and how much of it is traced once."""
