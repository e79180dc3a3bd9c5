"""Protect linear layers in float8: their numbers against torchao's arithmetic in plain torch, costs, workspace, refusals.

On 27 November 2026 results and gradients of the first three recipes were equal, bit by bit, to those of torchao 0.18
with `emulate=True`, in float32 and bfloat16."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from piper_ops import (
    RECIPES,
    Float8,
    UnsupportedVariant,
    cuda_workspace,
    float8_cast,
    float8_linear,
    float8_mm,
    float8_scale,
    kernel_of,
)
from piper_ops.float8.quantise import cast_in_slices

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def quantised(x: Tensor, dim: int | None, dtype: torch.dtype, power: bool) -> tuple[Tensor, Tensor]:
    """torchao's hp_tensor_to_float8_dynamic: a scale for all of x, or for all elements along a dimension."""
    amax = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / amax.double().clamp(min=1e-12)).float()
    if power:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype), scale


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """torchao's float8_mm with `emulate`."""
    return torch.mm(a[0].float() / a[1], b[0].float() / b[1]).to(dtype)


def by_torchao(x: Tensor, w: Tensor, dy: Tensor, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw of matmul_with_hp_or_float8_args, for matrices."""
    by_row, wide = recipe != "tensorwise", recipe == "rowwise_with_gw_hp"
    last, first = (-1, 0) if by_row else (None, None)
    narrow = E4M3 if by_row else E5M2
    wt = w.t()
    y = product(quantised(x, last, E4M3, by_row), quantised(wt, first, E4M3, by_row), x.dtype)
    right = quantised(wt, None if wide else last, E4M3, by_row)
    dx = product(
        quantised(dy, last, narrow, by_row),
        (right[0].t(), right[1].t() if right[1].dim() else right[1]),
        x.dtype,
    )
    if wide:
        return y, dx, dy.t() @ x
    left = quantised(dy, first, narrow, by_row)
    left = left[0].t(), left[1].t() if left[1].dim() else left[1]
    return y, dx, product(left, quantised(x, first, E4M3, by_row), x.dtype)


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, generator=generator) for shape in ((48, 32), (64, 32), (48, 64))]
    return (made[0] * 3).to(dtype), made[1].to(dtype), (made[2] * 1e-3).to(dtype)


def differentiated(
    x: Tensor, w: Tensor, dy: Tensor, recipe: str, saved: str = "input"
) -> tuple[Tensor, Tensor, Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = float8_linear(x, w, recipe, saved)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    return y.detach(), dx, dw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", TORCHAO)
def test_numbers_are_those_of_torchao_to_the_bit(recipe: str, dtype: torch.dtype) -> None:
    x, w, dy = tensors(dtype)
    for saved in ("input", "float8"):
        found = differentiated(x, w, dy, recipe, saved)
        for mine, theirs in zip(found, by_torchao(x, w, dy, recipe), strict=True):
            assert torch.equal(mine, theirs)
    assert not torch.equal(found[0], F.linear(x, w))


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not RECIPES[name].delayed])
def test_a_float8_product_is_near_the_exact_one(recipe: str) -> None:
    """Three bits of mantissa are 2 ** -4 apart from the next number at most, two bits 2 ** -3."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(128, 128, generator=generator, dtype=torch.float64) for _ in range(3))
    found = differentiated(x, w, dy, recipe)
    exact = x @ w.t(), dy @ w, dy.t() @ x
    for mine, right in zip(found, exact, strict=True):
        assert float((mine - right).norm() / right.norm()) < 0.09
    assert float((found[0] - exact[0]).norm() / exact[0].norm()) > 0.01


def test_a_scale_is_that_of_its_block_alone() -> None:
    x = torch.ones(2, 256)
    x[1, 200] = 7.0
    assert float8_scale(x, 1, 128, E4M3, False).tolist() == [[448.0, 448.0], [448.0, 64.0]]
    assert float8_scale(x, 0, 0, E4M3, True).tolist() == [[64.0]]
    assert float8_scale(x, 1, 0, E5M2, True).tolist() == [[32768.0], [8192.0]]
    large = torch.full((1, 1), 1e3)
    assert float(float8_cast(torch.ones(1, 16), large, E4M3).float()[0, 0]) == 448.0


@pytest.mark.parametrize("blocks", [(0, 0), (1, 0), (0, 1), (1, 16), (16, 16)])
def test_slices_are_converted_as_the_whole(blocks: tuple[int, int]) -> None:
    x, _, _ = tensors(torch.bfloat16)
    scale = float8_scale(x, *blocks, E4M3, True)
    whole = float8_cast(x, scale, E4M3)
    for most in (1, 32, 100, 600, x.numel()):
        assert torch.equal(cast_in_slices(x, scale, E4M3, most).float(), whole.float())


def test_blocks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedVariant, match="does not divide into blocks of 32 columns"):
        float8_linear(torch.ones(4, 48), torch.ones(16, 48), "mxfp8", "input")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Float8("rows"), "one of tensorwise, delayed"),
        (Float8(modules="*"), "modules='\\*': a tuple of patterns"),  # type: ignore[arg-type]  # on purpose
        (Float8(saved="no"), "saved='no': 'input' or 'float8'"),
    ],
)
def test_fields_that_cannot_be_are_named(asked: Float8, said: str) -> None:
    assert re.search(said, asked.problem)


def test_costs_have_the_rate_of_float8_and_passes_of_bytes() -> None:
    x = torch.empty(64, 32, dtype=torch.bfloat16, device="meta")
    scale = torch.empty(64, 1, device="meta")
    narrow = x.to(E4M3)
    other = torch.empty(32, 16, dtype=E4M3, device="meta")
    amax = kernel_of(float8_scale, (x, 1, 0, E4M3, True), scale)
    assert (amax.kind, amax.bytes) == ("elementwise", 2 * 64 * 32 + 4 * 64)
    cast = kernel_of(float8_cast, (x, scale, E4M3), narrow)
    assert (cast.kind, cast.bytes) == ("elementwise", 3 * 64 * 32 + 4 * 64)
    args = (narrow, scale, other, torch.empty(1, 16, device="meta"), torch.bfloat16, True)
    result = torch.empty(64, 16, dtype=torch.bfloat16, device="meta")
    mm = kernel_of(float8_mm, args, result)
    assert (mm.kind, mm.dtype, mm.dims) == ("matmul", "float8", (64, 16, 32))
    assert mm.flops == 2 * 64 * 16 * 32
    assert mm.bytes == 64 * 32 + 32 * 16 + 2 * 64 * 16 + 4 * (64 + 16)
    copied = cuda_workspace(float8_mm, args, result)
    assert copied is not None and copied.bytes == 32 * 16  # tensor cores read it by columns


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="no CUDA device with products in float8",
)
@pytest.mark.parametrize("recipe", TORCHAO)
def test_tensor_cores_give_what_is_emulated(recipe: str) -> None:
    x, w, dy = (t.cuda() for t in tensors(torch.bfloat16))
    for mine, right in zip(
        differentiated(x, w, dy, recipe), by_torchao(x, w, dy, recipe), strict=True
    ):
        assert float((mine - right).float().norm() / right.float().norm()) < 0.01
