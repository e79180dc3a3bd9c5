"""Protect that operands of bfloat16 and float32 meet in the dtype that a plan says, in numbers and bytes.

Targets of a batch stay float32 beside a model in bfloat16, and so do the parameters of a norm that is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import piper
from piper_capture.graphs import rewrites
from piper_ir.ground.errors import RankError
from tests.helpers import memory_judge

Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)[:, :, None]).flatten(1)).sigmoid()


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    drawn = torch.rand(16, 2, 8, generator=torch.Generator().manual_seed(step))
    return drawn[rows.start : rows.stop, 0], drawn[rows.start : rows.stop, 1]


def run(loss: Loss, kernels: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the gradients of a step of two microbatches, and the differences of its memory from the plan."""
    precision = piper.Precision(params="float32", compute="bfloat16", keep={"norm*": "float32"})
    job = piper.Job(Model, batch, loss, adam, global_batch=16, precision=precision)
    halves = piper.Strategy(piper.Mesh(pp=1), (piper.split(piper.where(), microbatches=2),))
    compiled = piper.compile(job, halves, options=piper.Options(kernels=kernels))  # type: ignore[arg-type]  # one of two
    ran = piper.execute(compiled, steps=1, launcher="inline", gradients=True, memory=True)
    return ran.gradients[0], memory_judge.lies(compiled.plan, dict(ran.memory))


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named])


def plain(loss: Loss) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Model().double()
    x, y = batch(0, range(16))
    loss(model(x.double()), y.double()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


LOSSES: dict[str, Loss] = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": F.binary_cross_entropy,
    "soft_margin": F.soft_margin_loss,
}


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the judge of memory no tolerance."""
    monkeypatch.setattr(memory_judge, "WORKSPACE", 0)
    monkeypatch.setattr(memory_judge, "PEAK", 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "kernels"), [(n, k) for n in LOSSES for k in ("eager", "inductor")]
)
def test_a_loss_of_two_dtypes_and_a_kept_norm_train_as_in_float64(name: str, kernels: str) -> None:
    found, lies = run(LOSSES[name], kernels)
    expected = plain(LOSSES[name])
    off = sum((found[n].double() - g).square().sum() for n, g in expected.items())
    assert off < 4e-4 * sum(g.square().sum() for g in expected.values())
    assert found.keys() == expected.keys() and not lies


def test_a_kernel_that_gives_another_dtype_than_it_says_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the rule the compiled kernels would read past the end of a gradient of bfloat16."""
    rules = tuple(rule for rule in rewrites.JOINT if rule.__name__ != "one_dtype")
    monkeypatch.setattr(rewrites, "JOINT", rules)
    with pytest.raises(RankError, match=r"compiled for .* gives another dtype than torch says"):
        run(lambda x, y: F.mse_loss(x + 0, y), "inductor")
