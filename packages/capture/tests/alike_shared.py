"""Models whose layers hold one object together, which Dynamo guards only where it meets it first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from packages.capture.tests.repeated_cases import LAYERS, Layer, Model, Work


class Holds(Layer):
    """`use`: what it does with its output and what it holds."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], held: Any, scale: float) -> None:
        super().__init__(scale)
        self.use, self.held = use, held

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.use(self, super().forward(x, bias))


@dataclass
class Config:
    factor: float
    inner: Any = None


class Slots:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Callee:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


class Factor(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Kind(Enum):
    PLAIN = 1
    DOUBLED = 2


class Named(StrEnum):
    PLAIN = "plain"
    DOUBLED = "doubled"


class Times(IntEnum):
    ONE = 1
    TWO = 2


class Halves:
    factor = staticmethod(lambda x: x / 2)


class Doubles:
    factor = staticmethod(lambda x: x * 2)


class Signed(float):
    """A number that Dynamo compares by ==."""


class MeetsKinds(Model):
    """Meets the kinds as globals before a layer is called, and reads what layers hold in lists."""

    def forward(self, x: Tensor) -> Tensor:
        doubled = sum(layer.held[0] is Kind.DOUBLED for layer in self.layers) + (
            Kind.PLAIN is Kind.DOUBLED
        )
        return super().forward(x) * doubled


Make = Callable[[list[nn.Module]], nn.Module]
Use = Callable[[Any, Tensor], Tensor]


def shared(first: Any, other: Any, use: Use, make: Make = Model) -> Callable[[], nn.Module]:
    """Layers that hold `first`, and the third `other`; a trace of the very first one serves none of them."""
    return lambda: make(
        [Holds(use, other if k == 2 else first, 1.0 + (k == 0)) for k in range(LAYERS)]
    )


def factor(layer: Any, y: Tensor) -> Tensor:
    return y * layer.held.factor


def called(layer: Any, y: Tensor) -> Tensor:
    found: Tensor = layer.held(y)
    return found


def first_item(layer: Any, y: Tensor) -> Tensor:
    return y * layer.held[0]


def doubled_first(layer: Any, y: Tensor) -> Tensor:
    return y * 2 if layer.held[0] is Kind.DOUBLED else y


def own(use: Use, of: Callable[[int], Any]) -> Callable[[], nn.Module]:
    return lambda: Model([Holds(use, of(k), 1.0 + (k == 0)) for k in range(LAYERS)])


def one_for_all() -> nn.Module:
    config = Config(2.0, Config(3.0))
    return Model(
        [
            Holds(lambda layer, y: y * layer.held.factor * layer.held.inner.factor, config, 1.0)
            for _ in range(LAYERS)
        ]
    )


def in_another() -> nn.Module:
    first, other = Config(1.0), Config(2.0)
    return own(
        lambda layer, y: y * layer.held.inner.factor,
        lambda k: Config(0.0, other if k == 2 else first),
    )()


SHARED: dict[str, tuple[Callable[[], nn.Module], Work]] = {
    "a config": (shared(Config(1.0), Config(2.0), factor), (2, 1, 1)),
    "a config in a config": (in_another, (2, 1, 1)),
    "slots": (shared(Slots(1.0), Slots(2.0), factor), (2, 1, 1)),
    "a dict": (
        shared({"factor": 1.0}, {"factor": 2.0}, lambda layer, y: y * layer.held["factor"]),
        (2, 1, 1),
    ),
    "a list": (shared([1.0], [2.0], first_item), (2, 1, 1)),
    "an object that is called": (shared(Callee(1.0), Callee(2.0), called), (2, 1, 1)),
    "a module": (shared(Factor(1.0), Factor(2.0), called), (2, 1, 1)),
    "a class": (shared(Halves, Doubles, lambda layer, y: layer.held.factor(y)), (2, 1, 1)),
    "a kind": (
        shared(
            Kind.PLAIN, Kind.DOUBLED, lambda layer, y: y * 2 if layer.held is Kind.DOUBLED else y
        ),
        (2, 1, 1),
    ),
    "a kind that is met as a global": (
        shared(
            Kind.PLAIN, Kind.DOUBLED, lambda layer, y: y * 2 if Kind.PLAIN is not layer.held else y
        ),
        (2, 1, 1),
    ),
    "a kind in a list that is read before": (
        lambda: MeetsKinds(
            [Holds(doubled_first, [list(Kind)[k == 2]], 1.0 + (k == 0)) for k in range(LAYERS)]
        ),
        (2, 1, 1),
    ),
    "a named kind": (
        shared(
            Named.PLAIN, Named.DOUBLED, lambda layer, y: y * 2 if layer.held == "doubled" else y
        ),
        (2, 1, 1),
    ),
    "a numbered kind": (shared(Times.ONE, Times.TWO, lambda layer, y: y * layer.held), (2, 1, 1)),
    "an object without a name": (
        shared(
            SimpleNamespace(),
            SimpleNamespace(a=1),
            lambda layer, y: y * 2 if hasattr(layer.held, "a") else y,
        ),
        (2, 1, 1),
    ),
    "the sign of a zero of the user's own type": (
        own(
            lambda layer, y: y + math.copysign(1.0, layer.held),
            lambda k: Signed(-0.0 if k == 2 else 0.0),
        ),
        (2, 1, 1),
    ),
    "one config for all": (one_for_all, (4, 1, 3)),
    "one config for all but a scale": (shared(*[Config(2.0)] * 2, factor), (3, 1, 2)),
}
"""The cases of layers that share objects: a model, and how much of it is traced once."""
