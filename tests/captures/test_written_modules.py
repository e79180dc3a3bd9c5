"""Layers left out at random, fake quantization and transforms: in a module of their own as in plain PyTorch, else
refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.reference.verification import verify_strategy
from piper_ir.ground.errors import CaptureError
from tests.helpers.capture_jobs import ONE, WIDTH, job
from tests.helpers.cases import each_case

BOTH = piper.Strategy(
    piper.Mesh(pp=2, dp=2),
    (*piper.recipes.pipeline(pp=2, microbatches=2), *piper.recipes.data_parallel()),
)
Step = Callable[[nn.Linear, Tensor], Tensor]


def dropped(linear: nn.Linear, x: Tensor) -> Tensor:
    return x + torch.tanh(linear(x)) if torch.rand(()) < 0.5 else x


def quantized(linear: nn.Linear, x: Tensor) -> Tensor:
    weight = torch.fake_quantize_per_tensor_affine(linear.weight, 0.05, 0, -128, 127)
    return x + torch.tanh(F.linear(x, weight, linear.bias))


def mapped(linear: nn.Linear, x: Tensor) -> Tensor:
    return x + torch.func.vmap(linear)(x).tanh()


def differentiated(linear: nn.Linear, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda y: linear(y).sin().sum())(x)


class Layer(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(WIDTH, WIDTH), step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.linear, x)


class Net(nn.Module):
    def __init__(self, *steps: Step) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, steps))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]  # modules have no types


@pytest.mark.filterwarnings("ignore::piper_ir.ground.errors.PiperWarning")
def test_equal_to_one_device() -> None:
    report = verify_strategy(job(lambda: Net(quantized, mapped)), BOTH, steps=2)
    assert report.equal, report.text()


@pytest.mark.filterwarnings("ignore::piper_ir.ground.errors.PiperWarning")
def test_layers_that_are_left_out_at_random_need_torchs_own_numbers() -> None:
    left_out = job(lambda: Net(dropped, quantized))
    with pytest.raises(
        CaptureError, match="draws numbers for as many elements as values of tensors say"
    ):
        piper.compile(left_out, BOTH)
    run = piper.execute(
        piper.compile(replace(left_out, draws="microbatches"), BOTH), steps=2, launcher="inline"
    )
    assert len(run.losses) == 2


class Flat(nn.Module):
    """The same in the model itself."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(WIDTH, WIDTH), step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.linear, x)


class Observed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.quantize = torch.ao.quantization.FakeQuantize()  # type: ignore[no-untyped-call]  # torch has no types there

    def forward(self, x: Tensor) -> Tensor:
        return self.quantize(self.linear(x))  # type: ignore[no-any-return]  # modules have no types


@each_case(
    ("model", "says"),
    [
        (
            lambda: Flat(dropped),
            r"a branch depends on values.*torch\.rand\(\(\)\) >= p\) \* layer\(x\).*Put it into a "
            r"small nn.Module",
        ),
        (
            lambda: Flat(quantized),
            r"fake quantization has kernels for real numbers alone.*Put it into a small nn.Module",
        ),
        (
            lambda: Flat(differentiated),
            r"a transform of torch\.func.*with torch\.autograd\.grad in the place of",
        ),
        (
            lambda: Net(differentiated),
            r"gradients by torch\.func.*torch\.autograd\.grad\(y\.sum\(\), x, create_graph=True\)",
        ),
        (
            Observed,
            r"keep ranges of values from call to call.*torch\.fake_quantize_per_tensor_affine",
        ),
    ],
    ids=["drop", "quantization", "transform", "transform in a module", "observer"],
)
def test_refused_with_the_line_and_the_way_out(model: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(CaptureError, match=rf"(?s)test_written_modules.py:\d+ .*{says}"):
        piper.compile(job(model), ONE)
