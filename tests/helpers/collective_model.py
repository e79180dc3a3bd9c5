"""The model that the plans of `tests.helpers.collective_plans` train: as a module, as a job, and as the code of their
chunks."""

from __future__ import annotations

import torch
from torch import nn

from packages.runtime.tests.handmade import batch, mean_loss
from piper_runtime.rank.job.job import Job
from piper_runtime.rank.job.precision import Precision
from piper_runtime.rank.values.code import ShippedCode
from tests.helpers.collective_plans import MICROBATCHES, ROWS, WIDTH


class Branches(nn.Module):
    """The model: a stem and n branches whose results are added."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.stem = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.5)
        self.branches = nn.ParameterList(
            [nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.5) for _ in range(n)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ self.stem)
        first, *others = (torch.tanh(h @ w) for w in self.branches)
        for other in others:
            first = first + other
        return first


def plain_sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, foreach=False)


def job(n: int) -> Job:
    """The training of `Branches(n)` in float64."""
    return Job(
        model=lambda: Branches(n), batch=batch, loss=mean_loss, optimizer=plain_sgd, global_batch=MICROBATCHES * ROWS,
        precision=Precision(params="float64"), seed=3,
    )  # fmt: skip


def code(n: int) -> dict[str, dict[str, ShippedCode]]:
    """The steps of `plan(n)`'s chunks."""
    forward = (
        "def step(args):\n    x, w = args\n    args.clear()\n    return (torch.mm(x, w).tanh_(),)"
    )
    texts = {
        "stem": {
            "F": forward,
            "W": """
def step(args):
    x, y, g, acc = args
    args.clear()
    dz = torch.ops.aten.tanh_backward(g, y); del g, y
    acc.addmm_(x.t(), dz)
    return ()
""",
        },
        "branch": {
            "F": forward,
            "I": """
def step(args):
    w, y, g = args
    args.clear()
    dz = torch.ops.aten.tanh_backward(g, y)
    return (torch.mm(dz, w.t()), dz)
""",
            "W": "def step(args):\n    x, dz, acc = args\n    args.clear()\n    acc.addmm_(x.t(), "
            "dz)\n    return ()",
        },
        f"loss{n}": {
            "F": """
def step(args):
    *ys, t = args
    args.clear()
    diff = ys[0] - t
    for y in ys[1:]:
        diff += y
    return (torch.dot(diff.view(-1), diff.view(-1)).div_(diff.numel()), diff)
""",
            "I": f"""
def step(args):
    diff, g = args
    args.clear()
    d = diff.mul(g).mul_(2 / diff.numel())
    return (d, *(d.clone() for _ in range({n - 1})))
""",
        },
    }
    return {
        chunk: {step: ShippedCode(text) for step, text in steps.items()}
        for chunk, steps in texts.items()
    }
