"""Protect that traced results lie in memory as torch's kernels lay them out: the plan counts copies by their strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from piper_capture.torch_api._torch_joint import export_joint
from tests.helpers.cases import each_case

Step = Callable[[Tensor, Tensor], Tensor]
CASES: dict[str, Step] = {
    "dropout": lambda x, y: F.dropout(x, 0.3),
    "hardswish": lambda x, y: F.hardswish(x),
    "hardtanh": lambda x, y: F.hardtanh(x),
    "logit": lambda x, y: torch.logit(x.sigmoid(), 0.1),
    "xlogy": lambda x, y: torch.xlogy(x, y.abs() + 1),
    "xlog1py": torch.special.xlog1py,
    "divide": lambda x, y: x + torch.div(x.detach(), y, rounding_mode="trunc"),
    "floor_divide": lambda x, y: x + torch.floor_divide(x.detach(), y),
    "log_softmax": lambda x, y: F.log_softmax(x, 1),
    "log_sigmoid": lambda x, y: F.logsigmoid(x),
    "layer_norm": lambda x, y: F.layer_norm(x, x.shape[-1:]),
    "mse": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "mse of the mean": lambda x, y: F.mse_loss(x, y),
}


class _Step(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (self.step(x, y).contiguous(),)


@each_case("name", CASES)
@pytest.mark.parametrize("dims", [(0, 1, 2), (0, 2, 1), (1, 0, 2)])
def test_traced_results_lie_in_memory_as_those_of_kernels(name: str, dims: tuple[int, ...]) -> None:
    with FakeTensorMode():
        x = torch.rand(2, 3, 4).permute(dims).requires_grad_()
        raw = export_joint(_Step(CASES[name]), (x, torch.rand(x.shape)))
    values: dict[Any, Any] = {}
    for node in (*raw.primals.values(), *raw.tangents.values()):
        like = node.meta["val"]
        values[node] = torch.empty_strided(like.shape, like.stride()).uniform_()
    for node in raw.graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
        if isinstance(node.meta["val"], Tensor):
            assert values[node].stride() == node.meta["val"].stride(), node.target
