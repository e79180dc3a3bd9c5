"""Equal layers are traced once, and the program is the one that a plain trace gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, fx, nn

from piper_compiler.capture import _torch, capture, dynamo, region, repeated, tag
from piper_compiler.capture.repeated import Modules, as_regions, flatten, repeated_layers

WIDTH = 8
LAYERS = 4
"""Fewer than are worth it, so that the tests take little."""


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "FEWEST", LAYERS)


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


class Counted(Layer):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        self.calls.add_(1.0)
        return super().forward(x, bias) / self.calls


class Noted(Layer):
    """Keeps a number on the Python side."""

    seen = 0

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return super().forward(x, bias)


class Derived(Layer):
    """Its forward is another class's."""


class Dropping(Layer):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x, bias), 0.5)


class Model(nn.Module):
    """`staged`: the second half of the layers stands in a region of its own."""

    def __init__(self, layers: list[nn.Module], staged: bool = False) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(4, WIDTH), nn.ModuleList(layers), nn.Linear(WIDTH, 2)
        self.bias, self.staged = nn.Parameter(torch.ones(WIDTH)), staged

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.first(x), self.bias.exp()
        for k, layer in enumerate(self.layers):
            with region(stage=1) if self.staged and k >= LAYERS // 2 else nullcontext():
                x = layer(x, bias)
        return self.last(x)


def batch(rows: range) -> tuple[Tensor, Tensor]:
    return torch.zeros(len(rows), 4), torch.zeros(len(rows), 2)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def frozen() -> list[nn.Module]:
    made: list[nn.Module] = [Layer() for _ in range(LAYERS)]
    made[3].requires_grad_(False)
    return made


def tagged() -> list[nn.Module]:
    return [tag(Layer(), {"part": {"half": k % 2}}) for k in range(LAYERS)]


def shared() -> list[nn.Module]:
    made = [Layer() for _ in range(LAYERS)]
    made[2].part.linear.weight = made[1].part.linear.weight
    return list(made)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "equal": (lambda: Model([Layer() for _ in range(LAYERS)]), (4, 1)),
    "other numbers": (lambda: Model([Layer(scale=0.5 + k % 2) for k in range(LAYERS)]), (4, 2)),
    "other operations": (lambda: Model([Layer(power=1 + (k == 2)) for k in range(LAYERS)]), (3, 1)),
    "a frozen layer": (lambda: Model(frozen()), (3, 1)),
    "tagged parts": (lambda: Model(tagged()), (4, 1)),
    "a shared weight": (lambda: Model(shared()), (4, 1)),
    "random numbers": (lambda: Model([Dropping() for _ in range(LAYERS)]), (4, 1)),
    "too many kinds": (lambda: Model([Layer(scale=0.5 + k) for k in range(10)]), (0, 0)),
    "one module many times": (lambda: Model([Layer()] * LAYERS), (0, 0)),
    "written regions": (lambda: Model([Layer() for _ in range(LAYERS)], staged=True), (0, 0)),
    "buffers that change": (lambda: Model([Counted() for _ in range(LAYERS)]), (4, 1)),
    "numbers that change": (lambda: Model([Noted() for _ in range(LAYERS)]), (4, 1)),
}
"""Model; how many calls of regions are replaced, and of how many different ones. 0: it is traced plainly."""


@pytest.mark.parametrize("name", CASES)
def test_the_program_is_that_of_a_plain_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = CASES[name]
    replaced: list[tuple[int, int]] = []

    def counting(module: fx.GraphModule, modules: Modules) -> None:
        calls = module.graph.find_nodes(op="call_function", target=_torch.INVOKE)
        flatten(module, modules)
        replaced.append((len(calls), len({str(call.args[1]) for call in calls})))

    monkeypatch.setattr(dynamo, "flatten", counting)
    found = capture(model, batch, loss).program
    assert replaced[0] == expected
    monkeypatch.setattr(dynamo, "repeated_layers", lambda model: [])
    assert found == capture(model, batch, loss).program


def test_classes_of_layers() -> None:
    assert repeated_layers(Model([Layer() for _ in range(LAYERS)])) == [Layer]
    assert repeated_layers(Model([Layer() for _ in range(LAYERS - 1)])) == []
    assert repeated_layers(Model([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])) == []
    elsewhere = Model([Layer() for _ in range(LAYERS)])
    elsewhere.first = Layer()
    assert repeated_layers(elsewhere) == []


def test_classes_are_left_as_they_were() -> None:
    own, inherited = Layer.forward, "forward" in vars(Derived)
    with as_regions([Layer, Derived]):
        assert Layer.forward is not own and "forward" in vars(Derived)
    assert Layer.forward is own and ("forward" in vars(Derived)) == inherited
