"""Models whose constructors are hard to record, and jobs of them and of tests.helpers.models with init="seeded"."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.init import (
    orthogonal_,
    sparse_,
    trunc_normal_,
)  # names of their own, as timm has them

from piper_runtime import Job, Precision
from tests.helpers import models

WIDTH = 8


class Unusual(nn.Module):
    """Rejection loops, factorisations, draws through views, copies between parameters, tied weights, constants, no
    values."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.tail, self.turned = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        trunc_normal_(self.cut.weight, std=0.5, a=-0.4, b=0.6)
        nn.init.trunc_normal_(
            self.tail.weight, mean=0.0, std=0.3, a=0.4, b=2.0
        )  # rarely within: another algorithm
        orthogonal_(self.turned.weight, gain=1.5)
        self.sparse = nn.Parameter(sparse_(torch.empty(WIDTH, WIDTH), sparsity=0.3))
        self.copied, self.halved = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.copied.weight.copy_(self.cut.weight)
            self.cut.weight[1].mul_(3.0)  # after the copy
            self.halved.weight.copy_(0.5 * self.copied.weight.t() + self.turned.weight)
            self.halved.bias[2:5].normal_()
            self.halved.bias.sub_(self.copied.bias.flip(0))
        self.first, *_ = self.layers = nn.ModuleList(copy.deepcopy(self.copied) for _ in range(2))
        nn.init.uniform_(self.layers[1].bias, -1, 1)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.turned.weight
        both = torch.randn(2, WIDTH)
        self.one, self.two = nn.Parameter(both[0]), nn.Parameter(both[1].clone())
        self.counted = nn.Parameter(
            torch.from_numpy(numpy.linspace(0, 1, WIDTH, dtype=numpy.float32))
        )
        self.given = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * torch.rand(()))
        self.bare = nn.Parameter(torch.empty(3))
        self.register_buffer("mask", torch.rand(WIDTH) < 0.5)
        self.register_buffer("order", torch.randperm(WIDTH), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)).conj())
        self.scale = torch.full((2,), 0.25)
        self.narrow = nn.Parameter(torch.randn(4).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cut(x) + self.two
        return out


def squared(output: Any, targets: Any) -> Tensor:
    loss: Tensor = (output - targets).square().mean()
    return loss


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def no_batch(step: int, rows: range) -> Any:
    raise AssertionError("nothing is trained")


def unusual_job(model: Callable[[], nn.Module] = Unusual, **fields: Any) -> Job:
    return Job(
        model, no_batch, squared, sgd, global_batch=4, **{"init": "seeded", "seed": 5, **fields}
    )


def seeded_job(name: str, **fields: Any) -> Job:
    """A case of tests.helpers.models."""
    case = models.CASES[name]
    more = {"init": "seeded", "seed": 5, "precision": Precision(params="float64"), **fields}
    return Job(case.model, case.batch, case.loss, sgd, global_batch=8, **more)


class Foreign(nn.Module):
    """Tensors of numpy arrays that the constructor changes in place, also through views, and numbers of another
    dtype."""

    def __init__(self) -> None:
        super().__init__()
        array = torch.from_numpy(numpy.arange(WIDTH, dtype=numpy.float32))
        self.direct = nn.Parameter(array)
        with torch.no_grad():
            self.direct.mul_(2.0)
            array.view(2, -1)[1].add_(torch.rand(WIDTH // 2))
            self.direct[0].normal_()
        self.tail = nn.Parameter(array[2:].clone())
        nn.init.trunc_normal_(
            late := torch.from_numpy(numpy.zeros((2, WIDTH), dtype=numpy.float32))
        )
        self.late = nn.Parameter(late[1])
        self.narrow = nn.Parameter(torch.randn(WIDTH).bfloat16() * 0.1 + 1e-3)
        self.register_buffer("steps", torch.arange(4) * 0.5)
        self.register_buffer("names", torch.tensor([3, 1, 2]).sort().values)
        self.register_buffer(
            "first", torch.stack([torch.rand(3), torch.zeros(3)], dim=1)[:, 0], persistent=False
        )


class Shuffled(nn.Module):
    """Statements in random order that draw, fill, copy and combine tensors and views of them."""

    def __init__(self, program: int) -> None:
        super().__init__()
        choice = random.Random(program)
        tensors = [torch.empty(4, 4) for _ in range(5)]
        with torch.no_grad():
            for _ in range(40):
                a, b, c = (choice.randrange(5) for _ in range(3))
                if choice.random() < 0.15:
                    tensors[a] = choice.choice([torch.rand, torch.zeros, torch.empty])(4, 4)
                    continue
                if choice.random() < 0.1:
                    tensors[a] = tensors[b] + tensors[c].t()
                    continue
                target = choice.choice(
                    [
                        tensors[a],
                        tensors[a].t(),
                        tensors[a][1:3],
                        tensors[a].view(-1)[5:9],
                        tensors[a][:, 2],
                    ]
                )
                source = (
                    (tensors[b].clone() if a == b else tensors[b])
                    .reshape(-1)[: target.numel()]
                    .reshape(target.shape)
                )
                match choice.randrange(7):
                    case 0:
                        nn.init.normal_(target)
                    case 1:
                        nn.init.trunc_normal_(target, std=0.5, a=-0.3, b=0.3)
                    case 2:
                        target.copy_(source)
                    case 3:
                        target.add_(source)
                    case 4:
                        target.fill_(choice.random())
                    case 5:
                        torch.lerp(target, source, 0.25, out=target.clone())
                    case _:
                        torch.mul(target.clone(), source, out=target)
        for k, tensor in enumerate(tensors):
            self.register_parameter(
                f"p{k}", nn.Parameter(tensor.clone() if choice.random() < 0.3 else tensor)
            )
