"""`piper explain` on what the costs assume and on how backward splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from piper.api.compiling.compiling import Compiled, compile
from piper.views.explained.explain import explain
from piper_compiler import Strategy, recipes
from piper_ir.ground.mesh import Mesh
from piper_ir.program.program import Cost
from piper_runtime import Job, LossScale, Precision
from tests.helpers.cases import each_case
from tests.helpers.models import CASES, D, feature_batch, squared_error


@torch.library.custom_op("piper_tests::product", mutates_args=())
def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@product.register_fake
def _product_shape(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[1]))


@torch.library.custom_op("piper_tests::product_backward", mutates_args=())
def product_backward(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Both gradients in one kernel."""
    return grad @ w.T, x.flatten(0, -2).T @ grad.flatten(0, -2)


@product_backward.register_fake
def _product_backward_shape(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grads(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    dx, dw = product_backward(grad, *ctx.saved_tensors)
    return dx, dw


product.register_autograd(_grads, setup_context=_save)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / D**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return product(torch.tanh(x), self.weight)


class Products(nn.Module):
    """Layers whose backward is one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Product() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compiled(
    model: Callable[[], nn.Module], batch: Any, loss: Any, precision: Precision | None = None
) -> Compiled:
    job = Job(
        model,
        batch,
        loss,
        lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        global_batch=4,
        precision=precision or Precision(),
    )
    return compile(job, Strategy(Mesh(pp=2), recipes.one_f_one_b(pp=2, microbatches=2)))


def test_lowerings_and_the_share_of_weight_gradients() -> None:
    case = CASES["gpt"]
    found = compiled(case.model, case.batch, case.loss)
    text = explain(found)
    assert "costs assume the lowerings: attention flash" in text
    flops = {s: sum(c.steps[s].cost.flops for c in found.plan.chunks) for s in ("I", "W")}
    assert (
        f"weight gradient: {100 * flops['W'] / (flops['I'] + flops['W']):.0f} % of backward FLOPs"
        in text
    )
    assert flops["W"] > 0.3 * (flops["I"] + flops["W"]) and "warning" not in text


def test_an_operator_that_returns_both_gradients_is_a_warning_that_names_its_chunks() -> None:
    """The first layer's input needs no gradient: there the operator runs in W."""
    text = explain(compiled(Products, feature_batch, squared_error))
    assert "warning: W is empty" in text and "parameters: layer1, layer2;" in text
    assert "lowerings" not in text


def test_little_in_w_is_a_warning() -> None:
    found = compiled(Products, feature_batch, squared_error)
    bare = [
        replace(c, steps={**c.steps, "W": replace(c.steps["W"], cost=Cost())})
        for c in found.plan.chunks
    ]
    text = explain(replace(found, plan=replace(found.plan, chunks=tuple(bare))))
    assert "weight gradient: 0 % of backward FLOPs\nwarning: under 30 %" in text


def test_small_sizes_have_a_unit_that_shows_them() -> None:
    text = explain(compiled(Products, feature_batch, squared_error))  # 16 x 16 floats each
    assert "3 KiB of parameters" in text and "param 1 KiB" in text


@each_case("scale", [LossScale(1024.0), 512.0])
def test_stages_and_the_scale_of_the_loss_are_said(scale: LossScale | float) -> None:
    case = CASES["gpt"]
    half = Precision(compute="float16", loss_scale=scale)
    text = explain(compiled(case.model, case.batch, case.loss, half))
    assert "    0 pp0        root, layer0, layer1\n    1 pp1        layer2" in text
    how = (
        "which stays"
        if scale == 512.0
        else "times 2 after 2,000 steps without an overflow, times 0.5"
    )
    assert f"scaled by {512 if scale == 512.0 else 1024}, {how}" in text
    assert "scaled by" not in explain(compiled(case.model, case.batch, case.loss))
