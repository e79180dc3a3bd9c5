"""Let linear layers of a module multiply in float8, emulated in plain PyTorch.

This restates the rules of docs/precision.md (float8) and torchao's arithmetic, and shares no code with Piper.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Block = tuple[int | None, int | None]
"""The elements of a block along the result and along the sum; None for all."""
_TENSOR, _ROW, _LINE, _SQUARE, _GROUP = (None, None), (1, None), (1, 128), (128, 128), (1, 32)
BLOCKS: dict[str, tuple[tuple[Block, Block], tuple[Block, Block], tuple[Block, Block] | None]] = {
    # x and w, dy and w, dy and x
    "tensorwise": ((_TENSOR, _TENSOR), (_TENSOR, _TENSOR), (_TENSOR, _TENSOR)),
    "rowwise": ((_ROW, _ROW), (_ROW, _ROW), (_ROW, _ROW)),
    "rowwise_with_gw_hp": ((_ROW, _ROW), (_ROW, _TENSOR), None),
    "blockwise": ((_LINE, _SQUARE), (_LINE, _SQUARE), (_LINE, _LINE)),
    "mxfp8": ((_GROUP, _GROUP), (_GROUP, _GROUP), (_GROUP, _GROUP)),
}
"""The recipes, restated from the table in docs/precision.md."""


def quantise_layers(model: nn.Module, precision: Any) -> None:
    """Change the forward of the linear layers that multiply in float8."""
    asked = precision.float8
    if asked is None:
        return
    compute = getattr(torch, precision.compute or precision.params)
    for name, module in model.named_modules():
        plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if not plain or any(size % 16 for size in module.weight.shape):
            continue
        kept = [d for p, d in precision.keep.items() if fnmatchcase(f"{name}.weight", p)]
        other = bool(kept) and getattr(torch, kept[0]) != compute
        named = any(fnmatchcase(name, p) for p in asked.modules)
        if named and not other and not any(fnmatchcase(name, p) for p in asked.keep):
            module.forward = _forward(module, asked.recipe)


def _forward(module: nn.Linear, recipe: str) -> Any:
    def forward(x: Tensor) -> Tensor:
        y: Tensor = _Product.apply(x.to(module.weight.dtype), module.weight, recipe)  # type: ignore[no-untyped-call]  # torch's
        return y if module.bias is None else y + module.bias

    return forward


class _Product(torch.autograd.Function):
    """Multiply x [..., K] by w [N, K], transposed, with rounded operands; its gradients round theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.recipe = recipe
        of_x, of_w = BLOCKS[recipe][0]
        power = recipe != "tensorwise"
        y = _rounded(x.flatten(0, -2), of_x, E4M3, power) @ _rounded(w, of_w, E4M3, power).T
        return y.to(x.dtype).view(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        _, (of_dy, of_w), last = BLOCKS[ctx.recipe]
        power = ctx.recipe != "tensorwise"
        narrow = E4M3 if power else E5M2
        rows, inputs = dy.flatten(0, -2), x.flatten(0, -2)
        dx = _rounded(rows, of_dy, narrow, power) @ _rounded(w.T, of_w, E4M3, power).T
        if last is None:
            dw = rows.T @ inputs
        else:
            dw = (
                _rounded(rows.T, last[0], narrow, power)
                @ _rounded(inputs.T, last[1], E4M3, power).T
            )
        return dx.to(dy.dtype).view(x.shape), dw.to(dy.dtype), None


def _rounded(x: Tensor, block: Block, dtype: torch.dtype, power: bool) -> Tensor:
    """Return x as float8 has it, in float32 or more; each block has a scale."""
    rows, columns = block[0] or x.shape[0], block[1] or x.shape[1]
    largest = F.max_pool2d(x.detach().abs().double()[None], (rows, columns), (rows, columns))[0]
    most = torch.finfo(dtype).max
    scale = (most / largest.clamp(min=1e-12)).float()
    if power:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    each = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * each).clamp(-most, most).to(dtype).to(wide.dtype) / each
