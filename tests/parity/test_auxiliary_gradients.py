"""Backwards that are not linear in the gradient that comes in: what the whole batch trains, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import Job, Mesh, Strategy, recipes
from piper_ir.ground.errors import CompileError
from tests.helpers import parity
from tests.helpers.cases import each_case

ROWS, WIDTH, STEPS = 8, 6, 2


class WithLoss(torch.autograd.Function):
    """Hand on a tensor, and give a second loss the gradient 1, whatever comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: Tensor) -> Tensor:
        ctx.save_for_backward(extra)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # torch has any arguments
        (extra,) = ctx.saved_tensors
        return grad, torch.ones_like(extra)


class Bounded(torch.autograd.Function):
    """Hand on a tensor, and bound each element of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # torch has any arguments
        return grad.clamp(-1e-3, 1e-3)


class BoundedNorm(torch.autograd.Function):
    """Hand on a tensor, and bound the norm of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]  # torch has any arguments
        return grad * (1e-3 / grad.norm()).clamp(max=1.0)


def mean_square(z: Tensor) -> Tensor:
    return WithLoss.apply(z, 0.2 * z.square().mean())


def sum_of_squares(z: Tensor) -> Tensor:
    return WithLoss.apply(z, 0.01 * z.square().sum())


def balanced(z: Tensor) -> Tensor:
    shares = z.softmax(-1)
    chosen = F.one_hot(shares.argmax(-1), WIDTH).to(z.dtype)
    return WithLoss.apply(z, WIDTH * (shares.mean(0) * chosen.mean(0)).sum())


def masked_mean(z: Tensor) -> Tensor:
    kept = (z[:, :1] > 0).to(z.dtype)
    return WithLoss.apply(z, (z.square() * kept).sum() / kept.sum().clamp(min=1))


def hook_that_adds(z: Tensor) -> Tensor:
    z.register_hook(lambda grad: grad + 0.01)
    return z


def hook_that_scales(z: Tensor) -> Tensor:
    z.register_hook(lambda grad: -0.5 * grad)
    return z


class Blocks(nn.Module):
    """Layers whose gradients one function treats."""

    def __init__(self, treat: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.treat = treat
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(self.treat(block(x)))
        return x


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    whole = torch.randn(
        2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64
    )
    return whole[0, rows.start : rows.stop], whole[1, rows.start : rows.stop]


def summed(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return F.mse_loss(output, targets, reduction="sum"), torch.tensor(float(targets.numel()))


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def whole_batch(
    treat: Callable[[Tensor], Tensor], loss: Callable[..., object]
) -> dict[str, Tensor]:
    """Return what plain PyTorch trains on the whole batch, in one backward from a gradient of 1."""
    torch.manual_seed(0)
    model = Blocks(treat).double()
    optimizer = sgd(list(model.named_parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, range(ROWS))
        made = loss(model(x), y)
        total, weight = made if isinstance(made, tuple) else (made, 1.0)
        (total / weight).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


STRATEGIES = {
    "microbatches": Strategy(Mesh(), [piper.split(piper.where(), microbatches=4)]),
    "replicas": Strategy(Mesh(dp=2), recipes.data_parallel()),
    "stages": Strategy(
        Mesh(pp=2, dp=2), [*recipes.zb_h1(pp=2, microbatches=2), *recipes.data_parallel(zero=2)]
    ),
}
TRAINED = [
    (mean_square, F.mse_loss),
    (sum_of_squares, F.mse_loss),
    (Bounded.apply, F.mse_loss),
    (hook_that_adds, F.mse_loss),
    (hook_that_scales, summed),
    (mean_square, summed),
    (sum_of_squares, summed),
]


def job(treat: Callable[[Tensor], Tensor], loss: Callable[..., object]) -> Job:
    return Job(
        lambda: Blocks(treat),
        batch,
        loss,
        sgd,
        global_batch=ROWS,
        precision=piper.Precision("float64"),
    )


@pytest.mark.long
@each_case(("treat", "loss"), TRAINED)
def test_what_the_whole_batch_trains(
    treat: Callable[[Tensor], Tensor], loss: Callable[..., object]
) -> None:
    made, expected = job(treat, loss), whole_batch(treat, loss)
    for strategy in STRATEGIES.values():
        run = piper.execute(
            piper.compile(made, strategy), steps=STEPS, launcher="inline", memory=False
        )
        for key, value in expected.items():
            torch.testing.assert_close(run.state_dict()[key], value, rtol=1e-9, atol=1e-12)


REFUSED = [
    (balanced, F.mse_loss, "neither a sum over rows nor a mean"),
    (masked_mean, F.mse_loss, "neither a sum over rows nor a mean"),
    (BoundedNorm.apply, F.mse_loss, "neither a sum over rows nor a mean"),
]


@each_case(("treat", "loss", "said"), REFUSED)
def test_what_parts_do_not_tell_is_refused(
    treat: Callable[[Tensor], Tensor], loss: Callable[..., object], said: str
) -> None:
    made = job(treat, loss)
    for strategy in [*STRATEGIES.values()][: None if treat is balanced else 1]:
        with pytest.raises(
            CompileError,
            match=f"(?s)not linear in the gradient that comes in.*{said}.*to the loss of the job",
        ):
            piper.compile(made, strategy)
    whole = piper.compile(made, Strategy(Mesh(pp=2), recipes.one_f_one_b(pp=2, microbatches=1)))
    run = piper.execute(whole, steps=STEPS, launcher="inline", memory=False)
    for key, value in whole_batch(treat, loss).items():
        torch.testing.assert_close(run.state_dict()[key], value, rtol=1e-9, atol=1e-12)


class TwoKinds(Blocks):
    """A layer that adds a mean, and one that adds a sum."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return x + sum_of_squares(second(x + mean_square(first(x))))


def test_a_sum_and_a_mean_in_one_model_are_refused() -> None:
    both = Job(lambda: TwoKinds(mean_square), batch, F.mse_loss, sgd, global_batch=ROWS)
    with pytest.raises(CompileError, match="beside others that are sums"):
        piper.compile(both, STRATEGIES["microbatches"])


def test_a_gradient_that_a_scale_does_not_reach_is_refused() -> None:
    """A hook that scales is linear and trains the same; what WithLoss adds would be divided by the scale."""
    scaled = piper.Precision("float64", loss_scale=piper.LossScale())
    one = STRATEGIES["microbatches"]
    piper.compile(replace(job(hook_that_scales, F.mse_loss), precision=scaled), one)
    with pytest.raises(CompileError, match=r"return WithLoss.*a scaled loss"):
        piper.compile(replace(job(mean_square, F.mse_loss), precision=scaled), one)


class Attentive(nn.Module):
    """Attention with a bias of keys, whose true gradient is zero, and what is computed differs from that by
    rounding."""

    def __init__(self, treat: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.treat = treat
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for queries, keys, values in self.blocks:
            tokens = x[..., None] * torch.ones(WIDTH, dtype=x.dtype)
            seen = F.scaled_dot_product_attention(queries(tokens), keys(tokens), values(tokens))
            x = x + self.treat(seen.mean(-1))
        return x


@pytest.mark.long
@pytest.mark.parametrize("treat", [mean_square, sum_of_squares])
def test_a_gradient_that_is_nothing_but_rounding_does_not_hide_the_kind(
    treat: Callable[[Tensor], Tensor],
) -> None:
    made = Job(
        lambda: Attentive(treat),
        batch,
        F.mse_loss,
        sgd,
        global_batch=ROWS,
        precision=piper.Precision("float64"),
    )
    compiled = piper.compile(made, STRATEGIES["microbatches"])
    run = piper.execute(compiled, steps=STEPS, launcher="inline", memory=False, gradients=True)
    parity.assert_parity(run, parity.reference(made, microbatches=4, steps=STEPS))
