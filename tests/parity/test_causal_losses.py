"""Protect that a causal language model which computes its own loss, as those of transformers do, trains the whole
batch's mean over the labels that count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from tests.helpers import losses
from tests.helpers.cases import each_case
from tests.parity.test_losses import check, labelled

ONE_STEP_AHEAD = slice(1, None)


@dataclass
class Output:
    """The loss, and the scores of the next token."""

    scores: Tensor
    loss: Tensor | None = None


class Causal(nn.Module):
    """Mixes each token with those before it, and predicts the next one; labels of -100 do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(losses.CLASSES, losses.WIDTH)
        self.layers = nn.ModuleList(nn.Linear(losses.WIDTH, losses.WIDTH) for _ in range(2))
        self.head = nn.Linear(losses.WIDTH, losses.CLASSES, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden.cumsum(1)).tanh()
        scores = self.head(hidden)
        if labels is None:
            return Output(scores)
        targets = F.pad(labels, (0, 1), value=-100)[..., ONE_STEP_AHEAD].contiguous()
        loss = F.cross_entropy(scores.view(-1, losses.CLASSES), targets.view(-1), ignore_index=-100)
        return Output(scores, loss)


@each_case("way", ["pp", "dp", "tp"])
def test_a_causal_model_with_its_own_loss_trains_the_whole_batch(way: str) -> None:
    """Rows have 0 to 3 labels that count, so that a mean of the means of microbatches is another number."""
    causal = piper.Job(
        Causal,
        labelled,
        None,
        lambda named: torch.optim.SGD([p for _, p in named], 0.1),
        global_batch=losses.ROWS,
        precision=piper.Precision("float64"),
    )
    assert check(causal, way) == "sum"


def test_microbatches_have_different_numbers_of_labels_that_count() -> None:
    """The control: of the batches above."""
    for step in range(2):
        labels = labelled(step, range(losses.ROWS))["labels"][..., ONE_STEP_AHEAD]
        counts = (labels != -100).sum(1).view(4, -1).sum(1)
        assert len(set(counts.tolist())) > 1
