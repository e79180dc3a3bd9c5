"""Models of equal layers that are called in different ways, or that change while their layers are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from packages.capture.tests.alike_layers import layers
from packages.capture.tests.repeated_cases import WIDTH, Layer, Model, Work


class Given(Layer):
    def forward(self, x: Tensor, bias: Tensor, number: float = 1.0) -> Tensor:
        return super().forward(x, bias) * number


class WithIndex(Model):
    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        return layer(x, bias, float(k % 2))


class WithNumber(Model):
    """The number comes from the layer, and is another one for one of them."""

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        return layer(x, bias, layer.scale)


class Keywords(Model):
    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        return layer(x, bias=bias)


class Both(Layer):
    def forward(self, x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
        return super().forward(x, bias) + 2 * y


class OneTensorTwice(Model):
    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        return layer(x, x if k < 2 else x.exp(), bias)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * self.weight + weight.exp()


class FirstWeight(Model):
    """Every layer is given the weight of the first."""

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        return layer(x, self.layers[0].weight)


class Doubled(Model):
    """Later layers see more rows."""

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        y = layer(x, bias)
        return torch.cat([y, y]) if k == 1 else y[: y.shape[0] // 2] if k == 3 else y


class ByRows(Layer):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return super().forward(x, bias) / x.shape[0]


class InGradMode(Layer):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = super().forward(x, bias)
        return y * 2 if torch.is_grad_enabled() else y


class NoGrad(Model):
    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        if k != 2:
            return layer(x, bias)
        with torch.no_grad():
            y = layer(x, bias)
        return x + y


CALLS_DIFFER: dict[str, tuple[Callable[[], nn.Module], Work]] = {
    "a number": (lambda: WithIndex(layers(Given)), (4, 2, 2)),
    "a number of the layer's": (
        lambda: WithNumber(layers(Given, lambda k: (1.0 + (k == 2),))),
        (0, 0, 0),
    ),
    "in nothing, with keywords": (lambda: Keywords(layers()), (4, 1, 3)),
    "the same tensor or two": (lambda: OneTensorTwice(layers(Both)), (4, 2, 2)),
    "whose weight is given": (lambda: FirstWeight(layers(Weighted)), (3, 1, 2)),
    "a size": (lambda: Doubled(layers(ByRows)), (4, 2, 2)),
    "the grad mode": (lambda: NoGrad(layers(InGradMode)), (3, 1, 2)),
}
"""What the calls of equal layers differ in."""

STATE: dict[str, Any] = {"factor": 1.0, "list": ()}


class Global(Layer):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return super().forward(x, bias) * STATE["factor"]


class SetsGlobal(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        STATE["factor"] = 1.0
        return y

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        if k == 2:
            STATE["factor"] = 2.0
        return layer(x, bias)


class SetsGlobalList(Model):
    """The list is new, so that it has no source, and is reached through what was there before."""

    def forward(self, x: Tensor) -> Tensor:
        STATE["list"] = []
        y = super().forward(x)
        STATE["list"] = ()
        return y

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        if k == 2:
            STATE["list"].append(k)
        return layer(x, bias)


class SetsGlobalContext(Model):
    """The dict is new and reached through what was there before, as in transformers; layers only read it."""

    def forward(self, x: Tensor) -> Tensor:
        STATE["list"] = {"kept": 1}
        y = super().forward(x)
        STATE["list"] = ()
        return y

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        counts = {}
        for name in ("x", "bias"):
            counts[name] = k
        return layer(x, bias * counts["x"] / max(counts["bias"], 1))


class GrowsYoungList(Model):
    """A list is made after the first call, and put where layers read it."""

    def forward(self, x: Tensor) -> Tensor:
        STATE["list"] = []
        y = super().forward(x)
        STATE["list"] = ()
        return y

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        if k == 1:
            young = []
            STATE["list"] = young
            young.append(k)
        return layer(x, bias)


class GrowsNestedList(Model):
    """A list that is made after the first call is put into one from before it, and grows then."""

    def forward(self, x: Tensor) -> Tensor:
        STATE["list"] = [[]]
        y = super().forward(x)
        STATE["list"] = ()
        return y

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        if k == 1:
            young = []
            STATE["list"][0] = young
            young.append(k)
        return layer(x, bias)


class Listed(Layer):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return super().forward(x, bias) * (1 + len(STATE["list"]))


class GrowsLater(Model):
    """A list is made after the first trace, and grows after the second, which read it."""

    def forward(self, x: Tensor) -> Tensor:
        STATE["list"] = []
        y = super().forward(x)
        STATE["list"] = ()
        return y

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        if k == 1:
            STATE["list"] = [k]
        if k == 3:
            STATE["list"].append(k)
        return layer(x, bias)


class ListedInside(Layer):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return super().forward(x, bias) * (1 + len(STATE["list"][0]))


class Below(Layer):
    """Reads its model."""

    above: list[Any]

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return super().forward(x, bias) * self.above[0].factor * (1 + len(self.above[0].history))


class Above(Model):
    factor = 1.0

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.history: list[int] = []
        for layer in layers:
            layer.above = [self]


class SetsNumber(Above):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.factor = 1.0
        return y

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        if k == 2:
            self.factor = 2.0
        return layer(x, bias)


class AddsToList(Above):
    """The list is new, so that it has no source, and is reached through the model."""

    def forward(self, x: Tensor) -> Tensor:
        self.history = []
        y = super().forward(x)
        self.history = []
        return y

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        self.history.append(k)
        return layer(x, bias)


class SetsLater(Model):
    """A layer is changed before it is called, and set back."""

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        if k == 2:
            self.layers[3].scale = 7.0
        y = layer(x, bias)
        if k == 3:
            self.layers[3].scale = 1.0
        return y


class SetsBefore(Model):
    """What is set before the layers are called is the same for all."""

    def forward(self, x: Tensor) -> Tensor:
        self.ready = True
        return super().forward(x)


class Collects(Model):
    """A list of the model's own, that nothing else can reach."""

    def forward(self, x: Tensor) -> Tensor:
        found = []
        x, bias = self.first(x), self.bias.exp()
        for layer in self.layers:
            x = layer(x, bias)
            found.append(x)
        return self.last(torch.stack(found).sum(0))


LOSSES: list[Tensor] = []


class AddsLoss(Layer):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = super().forward(x, bias)
        LOSSES.append(y.mean())
        return y


class SumsLosses(Model):
    def forward(self, x: Tensor) -> Tensor:
        LOSSES.clear()
        y = super().forward(x) + sum(LOSSES)
        LOSSES.clear()
        return y


class ReadsWeights(Model):
    """The layers' weights are read outside of them, before and after."""

    def forward(self, x: Tensor) -> Tensor:
        first = sum(layer.part.linear.weight.sum() for layer in self.layers)
        return super().forward(x) + first * sum(layer.norm.weight.sum() for layer in self.layers)


MODELS_CHANGE: dict[str, tuple[Callable[[], nn.Module], Work]] = {
    "a global number": (lambda: SetsGlobal(layers(Global)), (4, 2, 2)),
    "a new global list": (lambda: SetsGlobalList(layers(Listed)), (4, 2, 2)),
    "a dict between the layers": (lambda: SetsGlobalContext(layers(Listed)), (4, 1, 3)),
    "a list that is younger than a trace": (lambda: GrowsYoungList(layers(Listed)), (3, 1, 2)),
    "a list in an older one": (lambda: GrowsNestedList(layers(ListedInside)), (3, 1, 2)),
    "a list between two traces": (lambda: GrowsLater(layers(Listed)), (2, 1, 1)),
    "a number that layers reach": (lambda: SetsNumber(layers(Below)), (2, 1, 1)),
    "a new list that layers reach": (lambda: AddsToList(layers(Below)), (0, 0, 0)),
    "a layer": (lambda: SetsLater(layers()), (2, 1, 1)),
    "nothing between the layers": (lambda: SetsBefore(layers()), (4, 1, 3)),
    "nothing that layers reach": (lambda: Collects(layers()), (4, 1, 3)),
    "a list of losses": (lambda: SumsLosses(layers(AddsLoss)), (0, 0, 0)),
    "nothing, but reads weights": (lambda: ReadsWeights(layers()), (4, 1, 3)),
}
"""What changes while layers are called that are equal."""
