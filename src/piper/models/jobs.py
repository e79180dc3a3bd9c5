"""Make a training job of any of the models: random tokens, cross-entropy, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.models.decoder import DecoderConfig
from piper.models.presets import preset
from piper_ir.ground.errors import JobError
from piper_runtime.rank import BatchedMuon, Job, Precision

SEED_STRIDE = 1_000_003
"""The distance between the seeds of two steps: more than the rows of a batch, as CPU generators use 32 bits only."""

NO_TARGET = -100
"""The target of a token that has none, which cross-entropy leaves out."""

MASKED = 0.15
"""The share of tokens that an encoder finds (BERT, arXiv 1810.04805, section 3.1)."""


def job(
    model: str | DecoderConfig,
    *,
    global_batch: int,
    length: int | None = None,
    precision: str | Precision | None = None,
    lr: float = 3e-4,
    clip_norm: float | None = None,
    seed: int = 0,
    optimizer: Literal["adamw", "muon"] = "adamw",
) -> Job:
    """Return a job that trains a model to predict the next of random tokens, or, if it is an encoder, masked ones.

    Raises JobError for sizes that do not fit together. AdamW has betas 0.9 and 0.95 and decays matrices by 0.1 (GPT-3,
    arXiv 2005.14165, appendix B). Jobs of equal sizes and precision share one capture.

    Args:
        model: The name of a preset, or sizes.
        global_batch: Rows of a step over all replicas.
        length: Tokens per row, instead of the model's own.
        precision: The dtypes, or the name of one for all. The default computes in bfloat16 and updates in float32
            (`mixed`).
        lr: The learning rate.
        clip_norm: The largest norm of the gradients.
        seed: As in `piper.Job`.
        optimizer: AdamW, or Muon for the matrices of layers and of experts and AdamW for all else (`muon`).
    """
    if optimizer not in OPTIMIZERS:
        raise JobError(
            f"models.job(optimizer={optimizer!r}): {' or '.join(map(repr, OPTIMIZERS))} is needed"
        )
    config = preset(model) if isinstance(model, str) else model
    if not isinstance(config, DecoderConfig):
        raise JobError(f"models.job({model!r}): a preset's name or a DecoderConfig is needed")
    config = config if length is None else replace(config, length=length)
    return Job(
        _build(config),
        _batch(config.vocab, config.length)
        if config.causal
        else _masked_batch(config.vocab, config.length, config.token_types, config.pooled_classes),
        _loss(
            config.experts.balance if config.experts is not None else 0.0,
            config.mtp_weight if config.mtp else 0.0,
            classes=config.pooled_classes > 0,
        ),
        partial(OPTIMIZERS[optimizer], lr=lr),
        global_batch=global_batch,
        tokens_per_row=config.length,
        clip_norm=clip_norm,
        precision=mixed(config)
        if precision is None
        else Precision(precision)
        if isinstance(precision, str)
        else precision,
        seed=seed,
    )


def mixed(config: DecoderConfig) -> Precision:
    """Return bfloat16 for forward and backward, and float32 for parameters, their sums of gradients and AdamW's state.

    The router of a mixture computes in float32: a rounded score sends a token to another expert.
    """
    keep = {"*.router.*": "float32"} if config.experts is not None else {}
    return Precision(params="float32", compute="bfloat16", reduce="float32", keep=keep)


def parameter_count(config: DecoderConfig) -> int:
    """Return the number of parameters of a model, a tied one once, from the module on meta."""
    with torch.device("meta"):
        return sum(p.numel() for p in config.build().parameters())


@cache  # a capture is found by the identity of its callables
def _build(config: DecoderConfig) -> Callable[[], nn.Module]:
    return config.build


@cache  # as above
def _loss(balance: float, further: float, *, classes: bool) -> Callable[[Any, Any], Tensor]:
    if classes:
        return with_classes
    return partial(weighted_losses, balance, further) if balance or further else cross_entropy


@cache  # as above
def _batch(vocab: int, length: int) -> Callable[[int, range], tuple[Tensor, Tensor]]:
    return partial(random_tokens, vocab, length)


@cache  # as above
def _masked_batch(
    vocab: int, length: int, types: int, classes: int
) -> Callable[[int, range], tuple[Any, Any]]:
    return partial(masked_tokens, vocab, length, types, classes)


def random_tokens(vocab: int, length: int, step: int, rows: range) -> tuple[Tensor, Tensor]:
    """Return tokens and the ones after them, int64 [len(rows), length]; a row is the same in every range."""
    tokens = torch.empty(len(rows), length + 1, dtype=torch.int64)
    generator = torch.Generator()
    for k, row in enumerate(rows):
        generator.manual_seed(SEED_STRIDE * step + row)
        tokens[k].random_(0, vocab, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def masked_tokens(
    vocab: int, length: int, types: int, classes: int, step: int, rows: range
) -> tuple[Any, Any]:
    """Return random tokens of which a share `MASKED` is to be found, and these as targets, int64 [len(rows), length].

    A masked token is the last one of the vocabulary; other tokens have the target NO_TARGET. At least one token of a
    row is masked. With `types` the inputs are (tokens, types), where a row is cut into as many equal sentences; with
    `classes` the targets are (tokens, class of each row). Rows are full: nothing is padded.
    """
    drawn, _ = random_tokens(vocab, length, step, rows)
    masked = torch.empty(len(rows), length)
    chosen = torch.empty(len(rows), dtype=torch.int64)
    generator = torch.Generator()
    for k, row in enumerate(rows):
        generator.manual_seed(-1 - SEED_STRIDE * step - row)  # other numbers than the tokens'
        masked[k].uniform_(generator=generator)
        chosen[k].random_(0, max(classes, 1), generator=generator)
    masked[:, -1] = 0
    tokens = drawn.masked_fill(masked < MASKED, vocab - 1)
    targets = drawn.masked_fill(masked >= MASKED, NO_TARGET)
    sentences = (torch.arange(length) * types // length).expand(len(rows), -1).contiguous()
    return (
        (tokens, sentences) if types else tokens,
        (targets, chosen) if classes else targets,
    )


def with_classes(output: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean over all tokens that have a target, plus the mean over rows of the loss of their classes."""
    (logits, classes), (tokens, chosen) = output, targets
    return cross_entropy(logits, tokens) + F.cross_entropy(classes, chosen)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all tokens but the ones of NO_TARGET: logits [rows, T, vocab], targets [rows, T]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def weighted_losses(
    balance: float, further: float, output: tuple[Tensor, ...], targets: Tensor
) -> Tensor:
    """Return the cross-entropy, with a part of weight `further` for further tokens, and `balance` for experts.

    The first is the mean over the tokens ahead of `further_cross_entropy`, the other the mean over rows of the loss
    that balances experts. A part with weight 0 is not in the output.
    """
    loss = cross_entropy(output[0], targets)
    if balance:
        loss = loss + balance * output[-1].mean()
    ahead_of = output[1:-1] if balance else output[1:]
    for ahead, predicted in enumerate(ahead_of, 1):
        loss = loss + further / len(ahead_of) * further_cross_entropy(predicted, targets, ahead)
    return loss


def further_cross_entropy(logits: Tensor, targets: Tensor, ahead: int) -> Tensor:
    """Return the cross-entropy of the targets that stand `ahead` tokens behind, over all tokens of the rows.

    The last tokens of a row have no such target and count as 0 (arXiv 2412.19437, eq. 24).
    """
    none = targets.new_full((targets.shape[0], ahead), NO_TARGET)
    later = torch.cat([targets[:, ahead:], none], 1)
    total = F.cross_entropy(
        logits.flatten(0, 1), later.flatten(), ignore_index=NO_TARGET, reduction="sum"
    )
    return total / targets.numel()


def adamw(named: list[tuple[str, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
    """Return AdamW for named parameters; norms and biases do not decay."""
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.95))


def muon(named: list[tuple[str, nn.Parameter]], lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of layers, also in stacks of experts, and AdamW for all other parameters.

    Steps are scaled to be as long as AdamW's (arXiv 2502.16982, section 2.2).
    """

    def of_layers(name: str, p: nn.Parameter) -> bool:
        return name.startswith(("layers.", "mtp.")) and p.ndim >= 2 and not name.endswith("bias")

    matrices = [p for name, p in named if of_layers(name, p)]
    rest = [(name, p) for name, p in named if not of_layers(name, p)]
    own = BatchedMuon(matrices, lr=lr, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    return [own, adamw(rest, lr)]


OPTIMIZERS: Mapping[str, Callable[..., Any]] = {"adamw": adamw, "muon": muon}
"""The optimizers of `job` by name."""
