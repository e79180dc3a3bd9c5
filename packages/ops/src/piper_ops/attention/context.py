"""Define the ops between the blocks of an attention whose tokens several devices share (context parallelism).

Each of n devices has the queries of its tokens, and meets the keys of one other device in each of n - 1 steps: in step
j the device at `place` meets the keys of the device at (place - j) mod n. In step 0 it meets its own.

If each device had one block of tokens ("blocks"), the causal queries of the first device would meet few keys and the
queries of the last device all. In the order "zigzag" the sequence has 2 n blocks, and device r has the blocks r and
2 n - 1 - r. Then in each step from 1 on exactly two of the four pairs of blocks are met, and each of them whole: if the
keys come from an earlier device, both blocks of queries meet its first block of keys, else the second block of queries
meets both. So all devices run the same attention of two stacked pairs, and only the choice of blocks depends on the
place. An empty order means that queries meet all keys.

The ops take tensors [batch, tokens, ...], with the tokens in dimension `dim`. `degree` is the number of devices whose
tokens a tensor has, in the order of the sequence: 1 for a tensor with the tokens of one device alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from piper_ops.ground.library import LIBRARY, contiguous_empty, define

ZIGZAG, BLOCKS = "zigzag", "blocks"
"""The orders of the tokens of causal queries on devices; the order of queries that meet all keys is empty."""


def chosen(place: int, step: int, keys: bool) -> tuple[int, int]:
    """Return which of the two blocks of a device take part in the two pairs of a step."""
    first = 0 if place >= step else 1
    return (0, first) if keys else (first, 1)


class ContextStep(NamedTuple):
    """Say which tokens of a tensor take part in a step.

    Attributes:
        dim: the dimension of the tokens.
        place: the device's number.
        step: from 0.
        order: of the tokens on devices.
        keys: whether the tensor is laid out as keys, and not as queries.
        degree: the number of devices whose tokens the tensor has.
    """

    dim: int
    place: int
    step: int
    order: str
    keys: bool
    degree: int

    @property
    def source(self) -> int:
        """Return the device whose tokens the step meets, among the ones of the tensor."""
        return (self.place - self.step) % self.degree

    def tokens(self, tensor: Tensor) -> Tensor:
        """Return the tokens of the device that the step meets, as a view."""
        return _split(tensor, self.dim, self.degree).select(self.dim, self.source)

    def blocks(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two blocks of a tensor in zigzag order that take part in the step, as views."""
        split, last = _split(tensor, self.dim, 2 * self.degree), 2 * self.degree - 1
        pair = chosen(self.place, self.step, self.keys) if self.step else (0, 1)
        first, second = (
            split.select(self.dim, last - self.source if block else self.source) for block in pair
        )
        return first, second


def _of_step(tensors: int, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an op's kernel that gives `kernel` the arguments behind its tensors as a ContextStep."""
    return lambda *args: kernel(*args[:tensors], ContextStep(*args[tensors:]))


def _split(tensor: Tensor, dim: int, count: int) -> Tensor:
    shape = tensor.shape
    return tensor.view(*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])


def _take_fake(x: Tensor, at: ContextStep) -> Tensor:
    shape = list(x.shape)
    shape[at.dim] = shape[at.dim] // at.degree
    if at.order == ZIGZAG and at.step:
        shape[0], shape[at.dim] = shape[0] * 2, shape[at.dim] // 2
    return contiguous_empty(x, shape)


def _take_kernel(x: Tensor, at: ContextStep) -> Tensor:
    if at.order != ZIGZAG:
        return at.tokens(x).clone(memory_format=torch.contiguous_format)
    pair = at.blocks(x)
    return torch.stack(pair, 1).flatten(0, 1) if at.step else torch.cat(pair, at.dim)


def _add_fake(total: Tensor, more: Tensor, at: ContextStep) -> Tensor:
    return contiguous_empty(total, total.shape)


def _add_kernel(total: Tensor, more: Tensor, at: ContextStep) -> Tensor:
    return _add_into(total.clone(memory_format=torch.contiguous_format), more, at)


def _add_into(total: Tensor, more: Tensor, at: ContextStep) -> Tensor:
    if at.order == ZIGZAG:
        parts = more.unflatten(0, (-1, 2)).unbind(1) if at.step else more.chunk(2, at.dim)
        for part, into in zip(parts, at.blocks(total), strict=True):
            into.add_(part)
    elif counts(at.place, at.step, at.order):
        at.tokens(total).add_(more)
    return total


def counts(place: int, step: int, order: str) -> bool:
    """Return whether a device's queries meet the keys of a step at all; in zigzag order some always do."""
    return order != BLOCKS or place >= step


def _merge_fake(
    out: Tensor,
    logsumexp: Tensor,
    more: Tensor,
    more_logsumexp: Tensor,
    place: int,
    step: int,
    order: str,
    last: bool,
) -> tuple[Tensor, Tensor]:
    dtype = more.dtype if last else logsumexp.dtype
    return contiguous_empty(out, out.shape, dtype), contiguous_empty(logsumexp, logsumexp.shape)


def _merge_kernel(
    out: Tensor,
    logsumexp: Tensor,
    more: Tensor,
    more_logsumexp: Tensor,
    place: int,
    step: int,
    order: str,
    last: bool,
) -> tuple[Tensor, Tensor]:
    """Return the attention output over the keys of both results, and the logsumexp over both."""
    total = out.to(logsumexp.dtype, copy=True, memory_format=torch.contiguous_format)
    both = logsumexp.clone(memory_format=torch.contiguous_format)
    if order == ZIGZAG:
        outs, logsumexps = (
            more.unflatten(0, (-1, 2)).unbind(1),
            more_logsumexp.unflatten(0, (-1, 2)).unbind(1),
        )
        for block, part, lse in zip(chosen(place, step, keys=False), outs, logsumexps, strict=True):
            _merge_into(
                _split(total, 1, 2).select(1, block), _split(both, 2, 2).select(2, block), part, lse
            )
    elif counts(place, step, order):
        _merge_into(total, both, more, more_logsumexp)
    return total.to(more.dtype) if last else total, both


def _merge_into(out: Tensor, logsumexp: Tensor, more: Tensor, more_logsumexp: Tensor) -> None:
    """Weigh two results by their shares of the softmax's denominator (Milakov and Gimelshein, arXiv 1805.02867)."""
    both = torch.logaddexp(logsumexp, more_logsumexp)
    logsumexp.copy_(both)
    weight = torch.sub(more_logsumexp, both, out=both).exp_().transpose(1, 2).unsqueeze(-1)
    out.lerp_(more.to(out.dtype), weight)


_STEP = "int dim, int place, int step, str order, bool keys, int degree"

context_take = define(
    "context_take",
    f"(Tensor x, {_STEP}) -> Tensor",
    _of_step(1, _take_fake),
    _of_step(1, _take_kernel),
)
"""An op that returns the tokens that take part in a step: of queries and tensors laid out as these, or of keys.

In zigzag order these are two blocks, stacked in the batch, but for step 0, which has all tokens of the device.
"""

context_add = define(
    "context_add",
    f"(Tensor total, Tensor more, {_STEP}) -> Tensor",
    _of_step(2, _add_fake),
    _of_step(2, _add_kernel),
)
"""An op that returns `total` with `more` added to the tokens that `context_take` has taken."""

LIBRARY.define(f"context_add_(Tensor(a!) total, Tensor more, {_STEP}) -> Tensor(a!)")
for _key in ("CPU", "CUDA"):
    LIBRARY.impl("context_add_", _of_step(2, _add_into), _key)
context_add_ = torch.ops.piper.context_add_.default
"""The in-place variant of `context_add`; steps call it if nothing else needs `total` any more."""

context_merge = define(
    "context_merge",
    "(Tensor out, Tensor logsumexp, Tensor more, Tensor more_logsumexp, int place, int step, str order, bool last) "
    "-> (Tensor, Tensor)",
    _merge_fake,
    _merge_kernel,
)
"""An op that returns the attention output over the keys of the steps so far and the keys of one more step.

The result is in float32 or wider, except in the last step: then it has the dtype of `more`. The op takes out
[batch, tokens, heads, head_dim] and logsumexp [batch, heads, tokens], as `attention` returns them, and `more` of the
stacked pairs.
"""
