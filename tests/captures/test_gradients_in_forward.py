"""A forward that marks tensors as requiring a gradient, or asks for gradients: as in plain PyTorch, or refused by
name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.api.reference.verification import verify_strategy
from piper_ir.ground.errors import CaptureError
from tests.helpers.capture_jobs import ONE, WIDTH, job
from tests.helpers.cases import each_case

Step = Callable[[nn.Linear, Tensor], Tensor]
BOTH = piper.Strategy(
    piper.Mesh(pp=2, dp=2),
    (*piper.recipes.pipeline(pp=2, microbatches=2), *piper.recipes.data_parallel()),
)


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

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def marked(linear: nn.Linear, x: Tensor) -> Tensor:
    x.requires_grad_()
    made = torch.zeros_like(x).requires_grad_()
    stopped = x.detach().requires_grad_() * 2
    assert stopped.requires_grad
    return x + torch.tanh(linear(x + made)) + stopped.sin()


def energy(linear: nn.Linear, x: Tensor) -> Tensor:
    """The first layer has a batch that requires no gradient, the others what layers made."""
    if x.abs().max() < 1e6:
        x.requires_grad_()
    return x + torch.autograd.grad(torch.tanh(linear(x)).pow(2).sum(), x, create_graph=True)[0]


def adapted(linear: nn.Linear, x: Tensor) -> Tensor:
    """A step of gradient descent inside for each row, as in meta-learning over tasks."""
    weights = linear.weight.expand(len(x), WIDTH, WIDTH)
    inner = torch.autograd.grad(
        torch.bmm(x.unsqueeze(1), weights).pow(2).sum(), [weights], create_graph=True
    )[0]
    return x + torch.tanh(torch.bmm(x.unsqueeze(1), weights - 0.1 * inner).squeeze(1))


def adapted_together(linear: nn.Linear, x: Tensor) -> Tensor:
    inner = torch.autograd.grad(linear(x).pow(2).mean(), [linear.weight], create_graph=True)[0]
    return x + torch.tanh(x @ (linear.weight - 0.1 * inner))


@pytest.mark.filterwarnings("ignore::piper_ir.ground.errors.PiperWarning")
@pytest.mark.parametrize(
    "steps",
    [(marked, marked), pytest.param((energy, energy, adapted, marked), marks=pytest.mark.long)],
    ids=["marked", "asked for"],
)
def test_equal_to_one_device(steps: tuple[Step, ...]) -> None:
    report = verify_strategy(job(lambda: Net(*steps)), BOTH, steps=2)
    assert report.equal, report.text()


@pytest.mark.filterwarnings("ignore::piper_ir.ground.errors.PiperWarning")
def test_a_region_that_runs_as_it_is_may_not_combine_rows() -> None:
    with pytest.raises(
        CaptureError, match=r"test_gradients_in_forward.py:\d+ .*combines rows of the batch"
    ):
        piper.compile(job(lambda: Net(adapted_together)), BOTH)


def frozen(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear.requires_grad_(False)(x)  # type: ignore[no-any-return]  # modules have no types


def attribute(linear: nn.Linear, x: Tensor) -> Tensor:
    linear.weight.requires_grad = False
    return torch.tanh(linear(x))


def created(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.tanh(linear(x + torch.zeros(WIDTH, requires_grad=True)))


def retained(linear: nn.Linear, x: Tensor) -> Tensor:
    made = torch.tanh(linear(x))
    made.retain_grad()
    return made


def backward(linear: nn.Linear, x: Tensor) -> Tensor:
    place = x.detach().requires_grad_()
    linear(place).pow(2).sum().backward()
    assert place.grad is not None
    return torch.tanh(linear(x)) + place.grad


def unmarked(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.autograd.grad(torch.tanh(linear(x)).sum(), x, create_graph=True)[0]


REFUSED: list[tuple[Step, int, str]] = [
    (
        frozen,
        1,
        "tensor of the model is trained is changed in forward.*in the function that makes the model",
    ),
    (attribute, 1, "set as an attribute.*where the model is made"),
    (created, 1, r"made with requires_grad=True.*torch\.zeros\(8\)\.requires_grad_\(\)"),
    (retained, 2, "keeps no gradients of activations.*torch.autograd.grad"),
    (
        backward,
        2,
        r"adds to the gradients of parameters.*torch.autograd.grad\(y\.sum\(\), x, "
        r"create_graph=True\)",
    ),
    (unmarked, 1, r"call x\.requires_grad_\(\) before x is used"),
]


@each_case(("step", "line", "says"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_refused_with_the_line_and_the_way_out(step: Step, line: int, says: str) -> None:
    said = f"(?s)test_gradients_in_forward.py:{step.__code__.co_firstlineno + line} .*{says}"
    with pytest.raises(CaptureError, match=said):
        piper.compile(job(lambda: Net(step, marked)), ONE)
