"""Functions of many kinds as chunks, shared by the tests of capture's joint steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packages.capture.tests.joint_harness import Case


def rand(*shape: int) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


@torch.library.custom_op("pipertest::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


@cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _cube_setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


cube.register_autograd(lambda ctx, g: 3 * g * ctx.saved_tensors[0] ** 2, setup_context=_cube_setup)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return x + F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def norm_block(x: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return x + F.linear(F.layer_norm(x, (8,), g, b), w)


def expanded_gradient(x: Tensor, w: Tensor) -> Tensor:
    """The gradient of the sum is expanded, and the assignment's backward clones it."""
    y = (x @ w).view(-1, 4, 2).clone()
    y[:, 0] = 0
    return y.sum(1)


def bags(x: Tensor, w: Tensor) -> Tensor:
    return F.embedding_bag(x, w, mode="mean")


def slice_assignment(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    h[:, 1:3] = h[:, 2:4] * 2
    h[0] = 0.5
    return h.sin()


def relu_in_place(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    F.relu_(h)
    return h * 2


def activations(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    parts = [
        F.gelu(h),
        F.gelu(h - x, approximate="tanh"),
        F.silu(h / 2),
        torch.tanh(h + 1),
        torch.sigmoid(-h),
        F.relu(h * x),
    ]
    return x * torch.stack([p.exp() * p for p in parts]).sum(0)


def changes_input(x: Tensor, w: Tensor) -> Tensor:
    y = (x * 2) @ w
    x.add_(y).mul_(3)
    return x @ w


def updates_buffer(x: Tensor, w: Tensor, mean: Tensor) -> Tensor:
    y = (x @ w) + mean
    mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return y


def overwrites_buffer(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    y = (x @ w) + counts
    counts.copy_((y.detach() > 0).sum(0))
    return y + counts


def overwrites_value(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    old = y + 1
    y.copy_(x * 3)
    return y * old


def overwrites_viewed(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    row = y[0]
    y.copy_(x * 3)
    return y * row


def aliased(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    h = x @ w
    return h, h.view(-1), h.t(), h[0], h


def identity(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return x, x, x * w


def embedding(idx: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    return F.embedding(idx, table) + positions[torch.arange(idx.shape[1])]


def no_gradient(x: Tensor, idx: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, idx + 1


def many(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    a, b = (x @ w).chunk(2, -1)
    return a.softmax(-1), b + y.sum(), (x > 0).long()


def twice(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w) @ w


def dropout(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(x @ w, 0.4, True) @ w


def custom(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.pipertest.cube(x @ w)


def constants(x: Tensor, w: Tensor) -> Tensor:
    x = torch.where(x > 0.1, x, 0.25).clamp(min=float("-inf"), max=1e30)
    return (x[[2, 0]] @ w) * torch.tensor([1.0, 2.0] * 4, dtype=torch.float64)


def strided(x: Tensor, w: Tensor) -> Tensor:
    h = torch.exp((x @ w).t())
    return h @ h.sin().t()


def qkv(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x @ w).view(3, 3, -1).unbind(1)
    return q * k + v


def parts(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    q, k, v = h[:, :3], h[:, 3:6], h[:, 6:]
    s = h.view(3, 3, 3)
    return (q * k + v) * s[0] * s[-1] + s[1].sin()


def tangent_through(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
    return x + y + b


def old_buffer(x: Tensor, w: Tensor, mean: Tensor) -> Tensor:
    y = (x @ w) * mean.clone()
    mean.mul_(0.9)
    return y


def cast(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float(), w.float()).exp().double()


def gpt_block(x: Tensor, *p: Tensor) -> Tensor:
    n, t, d = x.shape
    q, k, v = F.linear(F.layer_norm(x, (d,), p[0], p[1]), p[2], p[3]).split(d, dim=2)
    q, k, v = (h.view(n, t, 2, d // 2).transpose(1, 2) for h in (q, k, v))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(a.transpose(1, 2).reshape(n, t, d), p[4], p[5])
    return x + F.linear(
        F.gelu(F.linear(F.layer_norm(x, (d,), p[6], p[7]), p[8], p[9])), p[10], p[11]
    )


def fused_projection(x: Tensor, w: Tensor) -> Tensor:
    n, t, d = x.shape
    qkv = (x @ w).view(n, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
    return (qkv[0] * qkv[1].sin() + qkv[2]).transpose(1, 2).reshape(n, t, d)


class ScaledGradient(torch.autograd.Function):
    """Identity with a gradient of its own; keeps a tensor that nothing of the forward needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.sigmoid())
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0] * 3 * ctx.saved_tensors[0]


def own_gradient(x: Tensor, w: Tensor) -> Tensor:
    return ScaledGradient.apply(x @ w)


def block_tensors(n: int, t: int, d: int) -> tuple[Tensor, ...]:
    shapes = (
        (d,),
        (d,),
        (3 * d, d),
        (3 * d,),
        (d, d),
        (d,),
        (d,),
        (d,),
        (4 * d, d),
        (4 * d,),
        (d, 4 * d),
        (d,),
    )
    return (rand(n, t, d), *(rand(*s) for s in shapes))


CASES = {
    "linear": Case(linear, ("value", "param", "param"), (rand(4, 8), rand(6, 8), rand(6))),
    "linear3d": Case(linear, ("value", "param", "param"), (rand(2, 4, 8), rand(6, 8), rand(6))),
    "mlp": Case(
        mlp, ("value", *["param"] * 4), (rand(4, 8), rand(16, 8), rand(16), rand(8, 16), rand(8))
    ),
    "norm": Case(norm_block, ("value", *["param"] * 3), (rand(4, 8), rand(8), rand(8), rand(8, 8))),
    "norm without input gradient": Case(
        norm_block, ("batch", *["param"] * 3), (rand(4, 8), rand(8), rand(8), rand(8, 8))
    ),
    "slice assignment": Case(slice_assignment, ("value", "param"), (rand(4, 8), rand(8, 8))),
    "expanded gradient": Case(expanded_gradient, ("value", "param"), (rand(4, 8), rand(8, 8))),
    "bags": Case(bags, ("batch", "param"), (torch.arange(6).view(2, 3) % 5, rand(5, 8))),
    "in-place relu": Case(relu_in_place, ("value", "param"), (rand(4, 8), rand(8, 8))),
    "activations": Case(activations, ("value", "param"), (rand(4, 8), rand(8, 8) / 8)),
    "changed input": Case(
        changes_input, ("value", "param"), (rand(4, 8), rand(8, 8)), mutated=(0,)
    ),
    "buffer": Case(
        updates_buffer,
        ("value", "param", "buffer"),
        (rand(4, 8), rand(8, 8), rand(8)),
        mutated=(2,),
    ),
    "overwritten buffer": Case(
        overwrites_buffer,
        ("value", "param", "buffer"),
        (rand(4, 8), rand(8, 8), rand(8)),
        mutated=(2,),
    ),
    "overwritten value": Case(overwrites_value, ("value", "param"), (rand(4, 8), rand(8, 8))),
    "overwritten viewed": Case(overwrites_viewed, ("value", "param"), (rand(4, 8), rand(8, 8))),
    "aliased outputs": Case(aliased, ("value", "param"), (rand(4, 8), rand(8, 8)), symbolic=True),
    "identity": Case(identity, ("value", "param"), (rand(4, 8), rand(4, 8)), symbolic=True),
    "embedding": Case(
        embedding,
        ("batch", "param", "param"),
        (torch.arange(6).view(2, 3) % 5, rand(5, 8), rand(3, 8)),
    ),
    "frozen": Case(
        mlp,
        ("value", "param", "frozen", "frozen", "param"),
        (rand(4, 8), rand(16, 8), rand(16), rand(8, 16), rand(8)),
    ),
    "no gradient": Case(no_gradient, ("dead", "batch"), (rand(4, 8), torch.arange(3))),
    "many outputs": Case(many, ("value", "value", "param"), (rand(4, 8), rand(5), rand(8, 8))),
    "used twice": Case(twice, ("value", "param"), (rand(4, 8), rand(8, 8))),
    "dropout": Case(dropout, ("value", "param"), (rand(4, 8), rand(8, 8))),
    "custom op": Case(custom, ("value", "param"), (rand(4, 8), rand(8, 8))),
    "constants": Case(constants, ("value", "param"), (rand(4, 8), rand(8, 8))),
    "strided": Case(strided, ("value", "param"), (rand(4, 8), rand(8, 8))),
    "qkv": Case(qkv, ("value", "param"), (rand(3, 8), rand(8, 9))),
    "parts": Case(parts, ("value", "param"), (rand(3, 8), rand(8, 9))),
    "old buffer": Case(
        old_buffer, ("value", "param", "buffer"), (rand(4, 8), rand(8, 8), rand(8)), mutated=(2,)
    ),
    "gpt block": Case(gpt_block, ("value", *["param"] * 12), block_tensors(2, 6, 8), portable=True),
    "fused projection": Case(fused_projection, ("value", "param"), (rand(2, 6, 8), rand(8, 24))),
    "own gradient": Case(own_gradient, ("value", "param"), (rand(4, 8), rand(8, 8))),
    "cast": Case(cast, ("value", "param"), (rand(4, 8), rand(8, 8) / 8)),
    "tangent through": Case(
        tangent_through, ("value", "value", "param"), (rand(4, 8), rand(4, 8), rand(4, 8))
    ),
}
