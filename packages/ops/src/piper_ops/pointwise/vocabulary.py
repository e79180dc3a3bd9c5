"""Define ops on one device's part of a vocabulary: of an embedding's rows, or of the classes of a cross-entropy.

Devices share a dimension of the vocabulary's size along one or more axes. Along each it is [outer, degree, rest], as
the axes before have left it, and the device at `place` has [outer, place, rest]. So `place`, `degree` and `rest` have
one number for each axis. They map each index of the whole vocabulary to its device and its place there.

An embedding's part is zero in the rows of other devices: it is a partial sum, and all devices' parts add up to the
result. A cross-entropy needs two numbers per token from each device, its logsumexp and the target's logit, or 0 if
another device has it. From the statistics of all devices each computes the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from piper_ops.ground.errors import UnsupportedVariant
from piper_ops.ground.library import accumulate_dtype, contiguous_empty, define
from piper_ops.pointwise import losses

aten = torch.ops.aten
STATISTICS = 2
"""The numbers per token that devices exchange."""


class VocabularyPart(NamedTuple):
    """Hold the place of a device's part in the whole vocabulary.

    Attributes:
        size: the numbers of the part.
        place: the device's place along each axis.
        degree: the number of devices along each axis.
        rest: how many of the vocabulary's numbers lie inside of each axis.
    """

    size: int
    place: Sequence[int]
    degree: Sequence[int]
    rest: Sequence[int]

    def own(self, numbers: Tensor, ignored: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the places of numbers in the part, 0 if another device has them, and a mask of the ones in it.

        `numbers` are of the whole vocabulary; `ignored` is a mask of numbers that mean nothing, and that no device has.
        Raises IndexError for a number that is not in the vocabulary (a CPU says so; a GPU stops at its next
        synchronisation).
        """
        whole = self.size * prod(self.degree)
        outside = (numbers < 0) | (numbers >= whole)
        _refuse(outside if ignored is None else outside & ~ignored, whole)
        mine = ~outside if ignored is None else ~(outside | ignored)
        for at, count, inner in zip(self.place, self.degree, self.rest, strict=True):
            block = numbers // inner
            mine &= block % count == at
            numbers = block // count * inner + numbers % inner
        return numbers.masked_fill_(~mine, 0), mine


def _refuse(wrong: Tensor, size: int) -> None:
    """Raise IndexError if any number is wrong; a GPU is not waited for."""
    if wrong.device.type == "cpu":
        if bool(wrong.any()):
            raise IndexError(
                f"an index is out of range: the vocabulary has {size} numbers, from 0 on"
            )
    else:
        torch._assert_async(~wrong.any())


def _embedding_fake(weight: Tensor, indices: Tensor, *_: object) -> Tensor:
    return contiguous_empty(weight, (*indices.shape, weight.shape[1]))


def _embedding_kernel(
    weight: Tensor,
    indices: Tensor,
    place: Sequence[int],
    degree: Sequence[int],
    rest: Sequence[int],
) -> Tensor:
    local, mine = VocabularyPart(weight.shape[0], place, degree, rest).own(indices)
    return torch.embedding(weight, local).masked_fill_(mine.logical_not_().unsqueeze(-1), 0)


def _embedding_dgrad_fake(grad: Tensor, indices: Tensor, rows: int, *_: object) -> Tensor:
    return contiguous_empty(grad, (rows, grad.shape[-1]))


def _embedding_dgrad_kernel(
    grad: Tensor,
    indices: Tensor,
    rows: int,
    place: Sequence[int],
    degree: Sequence[int],
    rest: Sequence[int],
    padding_idx: int = -1,
) -> Tensor:
    """Return the gradient of a device's rows. Torch's kernel skips the rows of other devices as padding."""
    padding = (indices == padding_idx) if padding_idx >= 0 else None
    local, mine = VocabularyPart(rows, place, degree, rest).own(indices, padding)
    local.masked_fill_(mine.logical_not_(), rows)
    del mine, padding
    result: Tensor = aten.embedding_dense_backward(grad, local, rows, rows, False)
    return result


def _part_check(logits: Tensor, target: Tensor) -> None:
    if logits.dim() != 2 or tuple(target.shape) != tuple(logits.shape[:1]):
        raise UnsupportedVariant(
            f"cross_entropy_part: logits {tuple(logits.shape)} and target {tuple(target.shape)} "
            f"are not (N, C) and (N,)"
        )


def _part_fake(logits: Tensor, target: Tensor, *_: object) -> Tensor:
    _part_check(logits, target)
    return contiguous_empty(logits, (STATISTICS, logits.shape[0]), accumulate_dtype(logits.dtype))


def _part_kernel(
    logits: Tensor,
    target: Tensor,
    place: Sequence[int],
    degree: Sequence[int],
    rest: Sequence[int],
    ignore_index: int = -100,
) -> Tensor:
    """Return each row's logsumexp over the own classes, -inf if all of these are, and its target's logit or 0."""
    result = logits.new_empty((STATISTICS, logits.shape[0]), dtype=accumulate_dtype(logits.dtype))
    part = VocabularyPart(logits.shape[1], place, degree, rest)
    local, mine = part.own(target, target == ignore_index)
    result[1] = logits.gather(1, local.unsqueeze(1)).squeeze(1)
    result[1].masked_fill_(mine.logical_not_(), 0)
    del local, mine
    for rows in losses.slices_of(logits):
        _logsumexp(logits[rows], result[0, rows])
    return result


def _logsumexp(logits: Tensor, out: Tensor) -> None:
    """Write the logsumexp of each row, with one copy of the logits alive, in the dtype of `out`."""
    most = logits.amax(1).to(out.dtype)
    most.masked_fill_(most == -torch.inf, 0)
    powers = torch.sub(logits, most.unsqueeze(1)).exp_()
    torch.sum(powers, 1, out=out)
    out.log_().add_(most)


def _joined_fake(
    statistics: Tensor, target: Tensor, reduction: str = "mean", *_: object
) -> tuple[Tensor, Tensor]:
    rows = statistics.shape[-1:]
    return contiguous_empty(statistics, rows if reduction == "none" else ()), contiguous_empty(
        statistics, rows
    )


def _joined_kernel(
    statistics: Tensor, target: Tensor, reduction: str = "mean", ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    lse = statistics[:, 0].logsumexp(0)
    counted = target != ignore_index
    row_losses = (lse - statistics[:, 1].sum(0)).masked_fill_(~counted, 0)
    if reduction == "none":
        return row_losses, lse
    total = row_losses.sum()
    return total / counted.sum() if reduction == "mean" else total, lse


def _part_dgrad_fake(grad_loss: Tensor, logits: Tensor, *_: object) -> Tensor:
    return contiguous_empty(logits, logits.shape)


def _part_dgrad_kernel(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    place: Sequence[int],
    degree: Sequence[int],
    rest: Sequence[int],
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """Return (exp(logits - logsumexp) - onehot(target)) * row_scale on the own classes; the logsumexp is over all."""
    part = VocabularyPart(logits.shape[1], place, degree, rest)
    index, mine = part.own(target, target == ignore_index)
    index, less = index.unsqueeze(1), mine.to(logsumexp.dtype).neg_().unsqueeze(1)
    del mine
    scale = _row_scale(grad_loss, target, logsumexp.dtype, reduction, ignore_index)
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    for rows in losses.slices_of(logits):
        _write_part_dgrad(
            grad[rows],
            logits[rows],
            logsumexp[rows].unsqueeze(1),
            scale[rows],
            index[rows],
            less[rows],
        )
    return grad


def _write_part_dgrad(
    grad: Tensor, logits: Tensor, logsumexp: Tensor, scale: Tensor, index: Tensor, less: Tensor
) -> None:
    """Write the gradient of a slice; if its dtype allows, the powers are computed in the same memory."""
    powers = torch.sub(
        logits, logsumexp, out=grad if grad.dtype == logsumexp.dtype else None
    ).exp_()
    torch.mul(powers.scatter_add_(1, index, less), scale, out=grad)


def _row_scale(
    grad_loss: Tensor, target: Tensor, dtype: torch.dtype, reduction: str, ignore_index: int
) -> Tensor:
    """Return the factor of each row in the gradient of the loss, as a column: 0 if the target is ignored."""
    counted = target != ignore_index
    scale = grad_loss.to(dtype)
    return torch.where(
        counted, scale / counted.sum() if reduction == "mean" else scale, 0.0
    ).unsqueeze(1)


embedding_part = define(
    "embedding_part",
    "(Tensor weight, Tensor indices, int[] place, int[] degree, int[] rest) -> Tensor",
    _embedding_fake,
    _embedding_kernel,
)
"""An op that looks up the rows that a device has, with zeros for the rows of other devices."""

embedding_part_dgrad = define(
    "embedding_part_dgrad",
    "(Tensor grad, Tensor indices, int rows, int[] place, int[] degree, int[] rest, int padding_idx=-1) -> Tensor",
    _embedding_dgrad_fake,
    _embedding_dgrad_kernel,
)
"""An op that returns the gradient of a device's rows; `padding_idx` is a number of the whole table."""

cross_entropy_part_dgrad = define(
    "cross_entropy_part_dgrad",
    "(Tensor grad_loss, Tensor logits, Tensor target, Tensor logsumexp, int[] place, int[] degree, int[] rest, "
    'str reduction="mean", int ignore_index=-100) -> Tensor',
    _part_dgrad_fake,
    _part_dgrad_kernel,
)
"""An op that returns the gradient of a device's logits, given the logsumexp over the classes of all devices."""

cross_entropy_part = define(
    "cross_entropy_part",
    "(Tensor logits, Tensor target, int[] place, int[] degree, int[] rest, int ignore_index=-100) -> Tensor",
    _part_fake,
    _part_kernel,
)
"""An op that takes a device's logits (N, C), and returns (2, N) in float32 or wider, for `cross_entropy_joined`."""

cross_entropy_joined = define(
    "cross_entropy_joined",
    '(Tensor statistics, Tensor target, str reduction="mean", int ignore_index=-100) -> (Tensor, '
    "Tensor)",
    _joined_fake,
    _joined_kernel,
)
"""An op that takes the statistics of n devices, (n, 2, N), and returns the results of `cross_entropy`."""
