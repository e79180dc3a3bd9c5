"""Losses as people write them, for a model of sequences whose targets are partly ignored.

Each has the form in which it adds up over microbatches (`Plan.loss_kind`), or "refused". docs/your_model.md has them as
a table, under the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

CLASSES, TOKENS, WIDTH, ROWS = 7, 4, 6, 8
Loss = Callable[[Any, Any], Any]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return self.head(hidden)


def batch(step: int, rows: range) -> tuple[Tensor, dict[str, Tensor]]:
    """Return tokens; classes `y`, of which 0 to 3 of 4 are -100; all classes; a mask; numbers from 0 to 1 and signs."""
    generator = torch.Generator().manual_seed(step)
    tokens, classes = (
        torch.randint(CLASSES, (ROWS, TOKENS), generator=generator) for _ in range(2)
    )
    numbers = torch.rand(ROWS, TOKENS, CLASSES, generator=generator)
    mask = torch.arange(TOKENS) >= torch.randint(
        TOKENS, (ROWS, 1), generator=generator
    )  # each step has another total
    named = {
        "y": torch.where(mask, classes, -100),
        "all": classes,
        "mask": mask,
        "f": numbers,
        "sign": (classes % 2) * 2.0 - 1,
    }
    named["length"] = mask.sum(1)
    return tokens[rows.start : rows.stop], {
        name: tensor[rows.start : rows.stop] for name, tensor in named.items()
    }


def ce(output: Tensor, classes: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), classes.flatten(), **how)


def each(output: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), classes, reduction="none")


def shifted(output: Tensor, t: Any) -> Tensor:
    """Predict the next token, as causal models of transformers do."""
    labels = F.pad(t["y"], (0, 1), value=-100)[..., 1:]
    return ce(output.float() if output.dtype == torch.bfloat16 else output, labels)


def relabelled(output: Tensor, t: Any) -> Tensor:
    classes = t["all"].clone()
    classes[classes == 3] = -100
    return ce(output, classes)


def added(output: Tensor, t: Any) -> Tensor:
    total = torch.zeros((), dtype=output.dtype)
    total += ce(output, t["y"])
    total += 0.5 * ce(output, t["all"])
    return total


def focal(output: Tensor, t: Any) -> Tensor:
    loss = each(output, t["all"])
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def divergence(output: Tensor, t: Any) -> Tensor:
    return kl_divergence(Normal(output, 1.0), Normal(t["f"].to(output.dtype), 2.0)).mean()


def dice(output: Tensor, t: Any) -> Tensor:
    p = output.sigmoid()
    return 1 - 2 * (p * t["f"]).sum() / (p.sum() + t["f"].sum())


def distilled(output: Tensor, t: Any) -> Tensor:
    """Divide by the sum of weights that the model makes, without a gradient."""
    trust = output.detach().amax(-1).sigmoid()
    return (each(output, t["all"]) * trust).sum() / trust.sum()


def trusting(output: Tensor, t: Any) -> tuple[Tensor, Tensor]:
    trust = output.detach().amax(-1).sigmoid()
    return (each(output, t["all"]) * trust).sum(), trust.sum().clamp(min=1)


def rare(output: Tensor, t: Any) -> tuple[Tensor, Tensor]:
    """Count what many microbatches have none of."""
    chosen = t["y"] == 3
    return (each(output, t["all"]) * chosen).sum(), chosen.sum().clamp(min=1)


def chosen_pair(output: Tensor, t: Any) -> tuple[Tensor, int]:
    chosen = t["mask"]
    classes = t["all"][chosen]
    return F.cross_entropy(output[chosen], classes, reduction="sum"), len(classes)


def balanced(output: Tensor, t: Any) -> Tensor:
    """Weigh classes by how often the whole batch has them."""
    counts = F.one_hot(t["all"], CLASSES).sum((0, 1)).clamp(min=1)
    weights = (counts.sum() / counts).to(output.dtype)
    return (each(output, t["all"]) * weights[t["all"]]).sum() / t["mask"].sum()


def by_class(output: Tensor, t: Any) -> Tensor:
    """Average each class by itself, and then the classes."""
    loss, classes = each(output, t["all"]).flatten(), t["all"].flatten()
    sums = torch.zeros(CLASSES, dtype=loss.dtype).index_add(0, classes, loss)
    counts = loss.new_zeros(CLASSES)
    counts.scatter_add_(0, classes, torch.ones_like(loss))
    return (sums / counts.clamp(min=1)).mean()


def by_class_products(output: Tensor, t: Any) -> Tensor:
    chosen = F.one_hot(t["all"].flatten(), CLASSES).to(output.dtype)
    return (each(output, t["all"]).flatten() @ chosen / (chosen.sum(0) + 1)).mean()


def contrastive(output: Tensor, t: Any) -> Tensor:
    pooled = output.mean(1)
    return (pooled.logsumexp(0) - pooled.mean(0)).sum()


def viewed(output: Tensor, t: Any) -> Tensor:
    """Ignore a class by a change of a view of the targets."""
    classes = t["all"].clone()
    flat = classes.view(-1)
    flat[flat == 3] = -100
    return F.cross_entropy(output.transpose(1, 2), classes) + 0.1 * output.pow(2).mean()


def halved(output: Tensor, t: Any) -> Tensor:
    loss = ce(output, t["y"])
    loss.mul_(0.5)
    return loss


def counted(output: Tensor, t: Any) -> Tensor:
    """Give 0 where no target counts."""
    count = t["mask"].sum()
    return torch.where(count > 0, masked(output, t) / count.clamp(min=1), 0.0)


def masked(output: Tensor, t: Any) -> Tensor:
    return (each(output, t["all"]) * t["mask"]).sum()


def selected(output: Tensor, t: Any) -> Tensor:
    """Take the distance of tokens that have numbers; the others have NaN."""
    mask = t["mask"]
    return (
        (output[mask] - torch.where(mask[..., None], t["f"], torch.nan)[mask]).norm(dim=-1).mean()
    )


LOSSES: dict[str, tuple[str, Loss]] = {
    "cross_entropy with ignore_index": ("sum", lambda o, t: ce(o, t["y"])),
    "cross_entropy, all targets count": ("sum", lambda o, t: ce(o, t["all"])),
    "cross_entropy of shifted labels": ("sum", shifted),
    "cross_entropy with another ignore_index": (
        "sum",
        lambda o, t: ce(o, t["all"], ignore_index=2),
    ),
    "cross_entropy with class weights": (
        "sum",
        lambda o, t: ce(o, t["all"], weight=torch.arange(1.0, 8.0, dtype=o.dtype)),
    ),
    "the same with label smoothing": (
        "sum",
        lambda o, t: ce(
            o, t["y"], weight=torch.arange(1.0, 8.0, dtype=o.dtype), label_smoothing=0.1
        ),
    ),
    "cross_entropy with label smoothing": ("sum", lambda o, t: ce(o, t["y"], label_smoothing=0.1)),
    "cross_entropy of [rows, classes, tokens]": (
        "sum",
        lambda o, t: F.cross_entropy(o.transpose(1, 2), t["y"]),
    ),
    "cross_entropy with probabilities as targets": (
        "mean",
        lambda o, t: F.cross_entropy(o.transpose(1, 2), t["f"].softmax(-1).transpose(1, 2)),
    ),
    'cross_entropy, reduction="sum"': ("total", lambda o, t: ce(o, t["y"], reduction="sum")),
    'cross_entropy, reduction="sum", / 64': (
        "total",
        lambda o, t: ce(o, t["y"], reduction="sum") / 64,
    ),
    "nn.CrossEntropyLoss()": (
        "sum",
        lambda o, t: nn.CrossEntropyLoss()(o.flatten(0, 1), t["y"].flatten()),
    ),
    "nll_loss": ("sum", lambda o, t: F.nll_loss(o.log_softmax(-1).flatten(0, 1), t["y"].flatten())),
    "nll_loss with class weights": (
        "sum",
        lambda o, t: F.nll_loss(
            o.log_softmax(-1).flatten(0, 1),
            t["y"].flatten(),
            weight=torch.arange(1.0, 8.0, dtype=o.dtype),
        ),
    ),
    "labels set to -100 in the loss": ("sum", relabelled),
    "where(mask, loss, nan).nanmean()": (
        "sum",
        lambda o, t: torch.where(t["mask"], each(o, t["all"]), torch.nan).nanmean(),
    ),
    "cross_entropy(x[mask], y[mask])": (
        "sum",
        lambda o, t: F.cross_entropy(o[t["mask"]], t["all"][t["mask"]]),
    ),
    "a norm of x[mask] - y[mask]": ("sum", selected),
    "mse_loss(x[mask], y[mask])": (
        "sum",
        lambda o, t: F.mse_loss(o[t["mask"]][:, 1:], t["f"][t["mask"]][:, 1:]),
    ),
    "loss[mask].mean()": ("sum", lambda o, t: each(o, t["all"])[t["mask"]].mean()),
    "(loss * mask).sum() / mask.sum()": ("sum", lambda o, t: masked(o, t) / t["mask"].sum()),
    "(loss * mask).mean() / mask.mean()": (
        "sum",
        lambda o, t: (each(o, t["all"]) * t["mask"]).mean() / t["mask"].to(o.dtype).mean(),
    ),
    "divided by weights of the model, detached": ("sum", distilled),
    "(sum, weight)": ("sum", lambda o, t: (masked(o, t), t["mask"].sum())),
    "(mean * count, count)": (
        "sum",
        lambda o, t: (ce(o, t["y"]) * (t["y"] >= 0).sum(), (t["y"] >= 0).sum()),
    ),
    "(x[mask].sum(), len(x[mask]))": ("sum", chosen_pair),
    "(mean, 1)": ("sum", lambda o, t: (F.mse_loss(o, t["f"]), 1)),
    "(sum, count.clamp(min=1))": ("total", rare),
    "(sum, 64)": ("total", lambda o, t: (masked(o, t), 64)),
    "(sum + mean, weight)": (
        "total",
        lambda o, t: (masked(o, t) + o.pow(2).mean(), t["mask"].sum()),
    ),
    "(loss * mask).sum() / mask.sum().clamp(min=1)": (
        "total",
        lambda o, t: masked(o, t) / t["mask"].sum().clamp(min=1),
    ),
    "(loss * mask).sum() / (mask.sum() + eps)": (
        "total",
        lambda o, t: masked(o, t) / (t["mask"].sum() + 1e-3),
    ),
    "(loss * (mask / mask.sum())).sum()": (
        "total",
        lambda o, t: (each(o, t["all"]) * (t["mask"].to(o.dtype) / t["mask"].sum())).sum(),
    ),
    "cross_entropy plus a mean over all": (
        "total",
        lambda o, t: ce(o, t["y"]) + 0.1 * o.pow(2).mean(),
    ),
    "several cross_entropies with their own targets": (
        "total",
        lambda o, t: ce(o, t["y"]) + 0.3 * ce(o[:, 1:], t["all"][:, 1:]),
    ),
    "`loss += more`": ("total", added),
    "x[mask].sum() / max(len(x[mask]), 1)": (
        "total",
        lambda o, t: o[t["mask"]].pow(2).sum() / max(len(o[t["mask"]]), 1),
    ),
    "a list of pairs": (
        "total",
        lambda o, t: [(masked(o, t), t["mask"].sum()), (o.pow(2).sum(), (t["length"] + 1).sum())],
    ),
    "a dict of pairs": (
        "total",
        lambda o, t: {
            "seen": (masked(o, t), t["mask"].sum()),
            "all": (each(o, t["all"]).sum(), t["all"].numel()),
        },
    ),
    "a sum plus a mean": (
        "total",
        lambda o, t: F.mse_loss(o, t["f"], reduction="sum") + o.abs().mean(),
    ),
    "classes weighed by their share of the batch": ("total", balanced),
    "each class averaged by itself: index_add, scatter_add": ("total", by_class),
    "the same as a product, loss @ one_hot": ("total", by_class_products),
    "two means of one count, / n and / (2 * n)": (
        "total",
        lambda o, t: (
            masked(o, t) / t["mask"].sum().clamp(min=1) + o.pow(2).sum() / (2 * t["mask"].sum())
        ),
    ),
    "targets changed through a view": ("total", viewed),
    "loss.mul_(0.5)": ("sum", halved),
    "where(count > 0, loss / count, 0)": ("total", counted),
    "mse_loss": ("mean", lambda o, t: F.mse_loss(o, t["f"])),
    'mse_loss, reduction="sum"': ("total", lambda o, t: F.mse_loss(o, t["f"], reduction="sum")),
    "l1_loss": ("mean", lambda o, t: F.l1_loss(o, t["f"])),
    "smooth_l1_loss": ("mean", lambda o, t: F.smooth_l1_loss(o, t["f"], beta=0.5)),
    "huber_loss": ("mean", lambda o, t: F.huber_loss(o, t["f"])),
    "binary_cross_entropy_with_logits": (
        "mean",
        lambda o, t: F.binary_cross_entropy_with_logits(
            o, t["f"], pos_weight=torch.tensor(2.0, dtype=o.dtype)
        ),
    ),
    "binary_cross_entropy": ("mean", lambda o, t: F.binary_cross_entropy(o.sigmoid(), t["f"])),
    'kl_div, reduction="batchmean"': (
        "mean",
        lambda o, t: F.kl_div(o.log_softmax(-1), t["f"].softmax(-1), reduction="batchmean"),
    ),
    "kl_divergence of two distributions": ("mean", divergence),
    "focal loss": ("mean", focal),
    "poisson_nll_loss": ("mean", lambda o, t: F.poisson_nll_loss(o, t["f"])),
    "gaussian_nll_loss": ("mean", lambda o, t: F.gaussian_nll_loss(o, t["f"], torch.ones_like(o))),
    "cosine_embedding_loss": (
        "mean",
        lambda o, t: F.cosine_embedding_loss(
            o.flatten(0, 1), t["f"].flatten(0, 1), t["sign"].flatten()
        ),
    ),
    "hinge: relu(1 - sign * score).mean()": (
        "mean",
        lambda o, t: (1 - t["sign"] * o[..., 0]).relu().mean(),
    ),
    "mean over each row's own tokens, then over rows": (
        "mean",
        lambda o, t: ((each(o, t["all"]) * t["mask"]).sum(1) / t["length"].clamp(min=1)).mean(),
    ),
    "x.sum() / x.numel()": ("mean", lambda o, t: o.pow(2).sum() / o.numel()),
    "x.sum() / len(x)": ("mean", lambda o, t: each(o, t["all"]).sum() / len(o)),
    "x.sum() / torch.full((), len(x))": (
        "sum",
        lambda o, t: each(o, t["all"]).sum() / torch.full((), len(o)),
    ),
    "(sum, weights of the model.clamp(min=1))": ("refused", trusting),
    "sqrt(mse_loss)": ("refused", lambda o, t: F.mse_loss(o, t["f"]).sqrt()),
    "dice": ("refused", dice),
    "rows compared with each other": ("refused", contrastive),
    "variance over the batch": ("refused", lambda o, t: ce(o, t["y"]) + o.var()),
    "softmax over the rows": ("refused", lambda o, t: (o.softmax(0) * t["f"]).mean()),
    "the first row alone": ("refused", lambda o, t: each(o, t["all"])[0].mean()),
    "the largest of the batch": ("refused", lambda o, t: each(o, t["all"]).max()),
    "(loss - b).abs() + b": ("refused", lambda o, t: (F.mse_loss(o, t["f"]) - 0.5).abs() + 0.5),
    "loss.clamp(max=10)": ("refused", lambda o, t: F.mse_loss(o, t["f"]).clamp(max=10.0)),
    "x.mean(0).abs()": ("refused", lambda o, t: o.mean(0).abs().sum()),
    "class weights of the batch, as cross_entropy's weight": (
        "refused",
        lambda o, t: ce(
            o,
            t["all"],
            weight=1.0 / F.one_hot(t["all"], CLASSES).sum((0, 1)).clamp(min=1).to(o.dtype),
        ),
    ),
    "divided by the longest row": (
        "refused",
        lambda o, t: each(o, t["all"]).sum() / t["length"].max(),
    ),
}
