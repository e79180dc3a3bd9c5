"""Functions under functools.lru_cache: Dynamo traces through the cache, so what it would keep must be constant."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piper_capture import capture
from piper_ir.ground.errors import CaptureError
from tests.helpers.cases import each_case

Body = Callable[[Any, Tensor], Tensor]

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")


class Layer(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(4, 4), body
        self.register_buffer("constant", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)

    @lru_cache(None)  # noqa: B019 - on purpose
    def cached_sum(self) -> Tensor:
        return self.linear.weight.sum()


def batch(rows: range) -> tuple[Tensor, Tensor]:
    return torch.ones(len(rows), 4), torch.ones(len(rows), 4)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@cache
def cached_norm(layer: Any) -> Tensor:
    return layer.linear.weight.detach().norm()


@lru_cache(maxsize=4)
def cached_noise(width: int) -> tuple[Tensor, int]:
    return torch.randn(width), width


@lru_cache
def cached_positions(width: int) -> Tensor:
    return torch.arange(width) / 2


@lru_cache
def cached_cosine(layer: Any) -> Tensor:
    return layer.constant.cos()


@each_case(
    ("body", "name"),
    [
        (lambda layer, x: layer.linear(x) * cached_norm(layer), "cached_norm"),
        (lambda layer, x: layer.linear(x) + cached_noise(4)[0], "cached_noise"),
        (lambda layer, x: layer.linear(x) * layer.cached_sum(), "Layer.cached_sum"),
    ],
)
def test_a_function_that_caches_what_changes_is_refused(body: Body, name: str) -> None:
    with pytest.raises(
        CaptureError,
        match=rf"{__file__}:\d+ .*{name} is under functools.lru_cache.*Take lru_cache away",
    ):
        capture(lambda: Layer(body), batch, squared)


def test_a_function_that_caches_constants_is_taken() -> None:
    def body(layer: Any, x: Tensor) -> Tensor:
        return layer.linear(x) * cached_positions(4) + cached_cosine(layer)

    assert capture(lambda: Layer(body), batch, squared).program.chunks
