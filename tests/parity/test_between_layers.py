"""What stands between layers: where it is computed, how many messages that takes, and that it equals one device."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.api.reference.verification import verify_strategy
from piper_ir.ground.errors import CompileError, PiperWarning

WIDTH, MICROBATCHES = 8, 4
Body = Callable[[Any, nn.Module, Tensor], Tensor]
BODIES: dict[str, Body] = {}


def between(body: Body) -> Body:
    BODIES[body.__name__] = body
    return body


class Model(nn.Module):
    """Four layers; `body` runs one and what stands between it and the next."""

    count: Tensor

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.proj, self.alpha = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.3))
        self.register_buffer("count", torch.zeros(()))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.body(self, layer, x)
        return x


@between
def scaled_residual(model: Any, layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) + 0.5 * x


@between
def projected_residual(model: Any, layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) + model.proj(x)


@between
def centred_residual(model: Any, layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) + (x - x.mean(-1, keepdim=True))


@between
def less_the_mean(model: Any, layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) - x.mean(-1, keepdim=True)


@between
def chain_of_operations(model: Any, layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) + torch.sin(0.5 * x.tanh() - model.alpha)


@between
def gated(model: Any, layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) * torch.sigmoid(model.proj(x)) + x


@between
def interpolated(model: Any, layer: nn.Module, x: Tensor) -> Tensor:
    return torch.lerp(x, layer(x), torch.sigmoid(model.alpha))


@between
def noise_of_no_size(model: Any, layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) + x * (torch.rand_like(x) > -1)


@between
def scattered(model: Any, layer: nn.Module, x: Tensor) -> Tensor:
    y, out = layer(x), torch.zeros_like(x)
    out.scatter_add_(1, torch.arange(WIDTH).flip(0).expand(x.shape[0], WIDTH), y)
    return out


@between
def written_into_a_copy(model: Any, layer: nn.Module, x: Tensor) -> Tensor:
    out = x.clone()
    out[:, ::2] = layer(x)[:, ::2]
    return out


@between
def plain_residual(model: Any, layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) + x


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)[rows.start : rows.stop].sin() + 0.1 * step
    return x, x


def job(model: Callable[[], nn.Module]) -> piper.Job:
    def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    return piper.Job(model, batch, F.mse_loss, sgd, global_batch=8)


def strategy(name: str) -> piper.Strategy:
    recipes = {
        "1f1b": piper.recipes.one_f_one_b(pp=2, microbatches=MICROBATCHES),
        "interleaved": piper.recipes.interleaved(pp=2, microbatches=MICROBATCHES, chunks=2),
        "zbv": piper.recipes.zbv(pp=2, microbatches=MICROBATCHES),
    }
    return piper.Strategy(piper.Mesh(pp=2), recipes[name])


def sends(compiled: piper.Compiled) -> int:
    return sum(i.name.startswith("send") for role in compiled.plan.roles for i in role.program)


@pytest.mark.long
@pytest.mark.parametrize("name", BODIES)
def test_one_tensor_and_its_gradient_cross_for_each_microbatch(name: str) -> None:
    work = job(lambda: Model(BODIES[name]))
    compiled = piper.compile(work, strategy("1f1b"))
    assert not [c.id for c in compiled.plan.chunks if c.id.startswith("layer") and "." in c.id]
    assert sends(compiled) == 2 * MICROBATCHES
    report = verify_strategy(work, strategy("1f1b"), steps=2)
    assert report.equal, report.text()


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["scattered", "projected_residual", "scaled_residual", "written_into_a_copy"],
)
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_schedules_that_come_back_to_a_device(name: str, schedule: str) -> None:
    """As many messages as for the plain residual, whose last sum is behind the last layer."""
    tail = (
        1 if name == "written_into_a_copy" else 0
    )  # x is copied before the first layer: one more block
    plain = piper.compile(job(lambda: Model(plain_residual)), strategy(schedule))
    work = job(lambda: Model(BODIES[name]))
    compiled = piper.compile(work, strategy(schedule))
    assert sends(compiled) <= sends(plain) + tail * MICROBATCHES
    report = verify_strategy(work, strategy(schedule), steps=2)
    assert report.equal, report.text()


class Again(nn.Module):
    """The first layer runs again after all others, under coordinates of its own if `apart`."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.layers, self.apart = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), apart

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.apart:
            with piper.region(layer=4):
                return self.layers[0](x)
        return self.layers[0](x)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_a_block_that_runs_again_is_named_with_its_line_and_the_way_out_is_one(
    schedule: str,
) -> None:
    with pytest.raises(CompileError, match=r"cyclic") as caught:
        piper.compile(job(lambda: Again(False)), strategy(schedule))
    said = str(caught.value)
    line = Again.forward.__code__.co_firstlineno + 6
    assert (
        f"layer0.1 is visit 2 of layer0: {__file__}:{line} (return self.layers[0](x)) runs again, after layer3"
        in said
    )
    assert "`with piper.region(layer=4):`" in said
    assert verify_strategy(job(lambda: Again(True)), strategy(schedule), steps=2).equal
    if schedule == "1f1b":
        ordered = strategy(schedule)
        free = replace(
            ordered,
            directives=tuple(d for d in ordered.directives if not isinstance(d, piper.order)),
        )
        assert verify_strategy(job(lambda: Again(False)), free, steps=2).equal


class Twice(nn.Module):
    """All layers run twice, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x


def test_a_long_cycle_is_told_in_a_few_lines() -> None:
    with pytest.raises(CompileError, match=r"cyclic") as caught:
        piper.compile(job(Twice), strategy("1f1b"))
    first, *waits, left, visit, other, more = str(caught.value).splitlines()
    assert len(waits) == 3 and all("ordered by order(" in wait for wait in waits), first
    assert re.fullmatch(r"  \(and [1-9]\d* more waits\)", left)
    assert visit.startswith("layer0.1 is visit 2 of layer0: ") and other.startswith(
        "layer1.1 is visit 2 of layer1: "
    )
    assert re.fullmatch(r"[1-9] more of these chunks have such a remark", more)


@pytest.mark.long
def test_a_buffer_that_layers_on_two_devices_update_is_named_with_its_lines() -> None:
    def body(model: Any, layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x) * (1 + model.count.clone())
        model.count.add_(0.1)
        return y

    line = body.__code__.co_firstlineno + 2
    with pytest.raises(CompileError, match="buffer 'count' is updated in") as caught:
        piper.compile(job(lambda: Model(body)), strategy("1f1b"))
    said = (
        f"buffer 'count' is updated by layer0, layer1, layer2, root in one microbatch: "
        f"{__file__}:{line} (model.count.add_(0.1))."
    )
    assert str(caught.value).count(said) == 1
    alone = piper.Strategy(piper.Mesh(), (piper.split(piper.where(), microbatches=MICROBATCHES),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PiperWarning)
        assert verify_strategy(job(lambda: Model(body)), alone, steps=2).equal
