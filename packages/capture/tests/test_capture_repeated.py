"""Equal layers are traced once, and the program is the one that a plain trace gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from packages.capture.tests.repeated_cases import (
    LAYERS,
    WIDTH,
    Layer,
    Model,
    Work,
    captured,
    plainly,
    program,
)
from piper_capture import region, tag
from piper_capture.trace import repeated
from piper_capture.trace.repeated import as_regions, repeated_layers


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "FEWEST", LAYERS)


class Counted(Layer):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        self.calls.add_(1.0)
        return super().forward(x, bias) / self.calls


class Counting(Layer):
    """Counts large numbers in a buffer, inside of a region; may read the count of another layer."""

    large: Tensor

    def __init__(self, before: Counting | None = None) -> None:
        super().__init__()
        self.before = [] if before is None else [before]
        self.register_buffer("large", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        with region(part=1):
            self.large.copy_((x > 0.5).sum())
        for layer in self.before:
            x = x * (1 + layer.large)
        return super().forward(x, bias)


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


class Staged(Model):
    """The second half of the layers stands in a region of its own."""

    def call(self, k: int, layer: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
        with region(stage=1) if k >= LAYERS // 2 else nullcontext():
            return super().call(k, layer, x, bias)


def frozen() -> list[nn.Module]:
    made: list[nn.Module] = [Layer() for _ in range(LAYERS)]
    made[3].requires_grad_(False)
    return made


def tagged() -> list[nn.Module]:
    return [tag(Layer(), {"part": {"half": k % 2}}) for k in range(LAYERS)]


def chained() -> list[nn.Module]:
    """Every layer reads the count of the first one, which is an argument of none but the first."""
    first = Counting()
    return [first, *(Counting(first) for _ in range(LAYERS - 1))]


def shared() -> list[nn.Module]:
    made = [Layer() for _ in range(LAYERS)]
    made[2].part.linear.weight = made[1].part.linear.weight
    return list(made)


CASES: dict[str, tuple[Callable[[], nn.Module], Work]] = {
    "equal": (lambda: Model([Layer() for _ in range(LAYERS)]), (4, 1, 3)),
    "other numbers": (lambda: Model([Layer(scale=0.5 + k % 2) for k in range(LAYERS)]), (4, 2, 2)),
    "other operations": (
        lambda: Model([Layer(power=1 + (k == 2)) for k in range(LAYERS)]),
        (3, 1, 2),
    ),
    "a frozen layer": (lambda: Model(frozen()), (3, 1, 2)),
    "tagged parts": (lambda: Model(tagged()), (4, 1, 3)),
    "a shared weight": (lambda: Model(shared()), (4, 1, 3)),
    "random numbers": (lambda: Model([Dropping() for _ in range(LAYERS)]), (4, 1, 3)),
    "too many kinds": (lambda: Model([Layer(scale=0.5 + k) for k in range(10)]), (0, 0, 0)),
    "one module many times": (lambda: Model([Layer()] * LAYERS), (0, 0, 0)),
    "written regions": (lambda: Staged([Layer() for _ in range(LAYERS)]), (4, 2, 2)),
    "counts": (lambda: Model([Counting() for _ in range(LAYERS)]), (4, 1, 3)),
    "counts that the next layer reads": (lambda: Model(chained()), (3, 1, 2)),
    "buffers that change": (lambda: Model([Counted() for _ in range(LAYERS)]), (4, 1, 3)),
    "numbers that change": (lambda: Model([Noted() for _ in range(LAYERS)]), (0, 0, 0)),
}
"""Model, and how much of it is traced once."""


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n == "too many kinds")) for n in CASES]
)
def test_the_program_is_that_of_a_plain_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = CASES[name]
    found, work = captured(model, monkeypatch, program)
    assert work == expected
    assert found == plainly(model, monkeypatch, program)


def test_classes_of_layers() -> None:
    assert repeated_layers(Model([Layer() for _ in range(LAYERS)])) == [Layer]
    assert repeated_layers(Model([Layer() for _ in range(LAYERS - 1)])) == []
    assert repeated_layers(Model([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])) == []
    elsewhere = Model([Layer() for _ in range(LAYERS)])
    elsewhere.first = Layer()
    assert repeated_layers(elsewhere) == []


def test_classes_are_left_as_they_were() -> None:
    own, inherited, marks = Layer.forward, "forward" in vars(Derived), dict(vars(Layer.forward))
    with as_regions(Model([]), [Layer, Derived]):
        assert Layer.forward is not own and "forward" in vars(Derived)
    assert Layer.forward is own and ("forward" in vars(Derived)) == inherited and vars(own) == marks
