"""Jobs with metrics of outputs and an evaluation, and plain PyTorch's values for them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper

ROWS, BATCHES, CLASSES = 8, 3, 5
TWO = torch.tensor([0, 1])  # a constant of the capture, as tensors of a loss are


class Net(nn.Module):
    """A residual net with dropout and a batch norm, whose modes differ."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(4)
        )
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.drop(layer(x))
        out: Tensor = self.head(self.norm(x))
        return out


def rows_of(seed: int, rows: range) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x, y = torch.randn(ROWS, 16, generator=made), torch.randint(CLASSES, (ROWS,), generator=made)
    return x[rows.start : rows.stop], y[rows.start : rows.stop]


def training_rows(step: int, rows: range) -> tuple[Tensor, Tensor]:
    return rows_of(step, rows)


def other_rows(step: int, rows: range) -> tuple[Tensor, Tensor]:
    return rows_of(1000 + step, rows)


def accuracy(output: Tensor, targets: Tensor) -> Tensor:
    return (output.argmax(-1) == targets).double().mean()


def of_two_classes(output: Tensor, targets: Tensor) -> dict[str, Any]:
    """Return means over the rows of two classes alone: sums with weights."""
    right = output.argmax(-1) == targets
    return {
        str(k): ((right & (targets == TWO[k])).sum(), (targets == TWO[k]).sum()) for k in range(2)
    }


def mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets)


def summed_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    kept = targets != 0
    return (F.cross_entropy(output, targets, reduction="none") * kept).sum(), kept.sum()


def net(norm: bool = False) -> Net:
    return Net(norm)


def normed() -> Net:
    return Net(True)


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


METRICS = {"accuracy": accuracy, "class": of_two_classes, "perplexity": math.exp}


def job(**more: Any) -> piper.Job:
    given: dict[str, Any] = dict(
        model=net,
        batch=training_rows,
        loss=mean_loss,
        optimizer=adamw,
        global_batch=ROWS,
        precision=piper.Precision("float64"),
        metrics=METRICS,
        eval_data=other_rows,
        eval_every=2,
        eval_batches=BATCHES,
    )
    return piper.Job(**{**given, **more})


def plain(one: piper.Job, state: dict[str, Any], batches: int = BATCHES) -> dict[str, float]:
    """Return the loss and the metrics that plain PyTorch finds for a state, over all rows of the evaluation at once."""
    model = one.model().double()
    model.load_state_dict(state)
    model.eval()
    assert callable(one.eval_data) and one.loss is not None
    parts = [one.eval_data(k, range(ROWS)) for k in range(batches)]
    x, y = torch.cat([p[0] for p in parts]).double(), torch.cat([p[1] for p in parts])
    with torch.no_grad():
        output = model(x)
        loss = one.loss(output, y)
    total = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    found = {"loss": float(total)}
    found |= {"accuracy": float(accuracy(output, y)), "perplexity": math.exp(float(total))}
    return found | {
        f"class/{k}": float(a) / float(b) for k, (a, b) in of_two_classes(output, y).items()
    }
