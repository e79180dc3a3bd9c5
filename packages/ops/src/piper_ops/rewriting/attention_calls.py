"""Rewrite calls of F.scaled_dot_product_attention: into piper::attention, or written out with matmul and softmax.

Written out are calls that no kernel computes alike on every device: with dropout inside, whose mask each kernel draws
in another way, with a mask that gets a gradient, and with tensors that are broadcast against each other. The
probabilities [..., T_q, T_k] are then kept for the backward. Dropout is `F.dropout` of them, as in torch's own
attention on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from piper_ops.attention.sdpa import attention
from piper_ops.ground.library import accumulate_dtype
from piper_ops.rewriting.builder import Bound, Builder, constant, is_swap

ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
"""The parameters of F.scaled_dot_product_attention, by position."""


@dataclass(frozen=True, slots=True)
class _Attention:
    """Hold the arguments of a call; tensors are nodes of [..., heads, T, head_dim]."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    mask: fx.Node | None
    dropout: float
    causal: bool
    scale: float | None
    gqa: bool

    @property
    def tensors(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        return self.q, self.k, self.v


def rewrite_attention(build: Builder, bound: Bound) -> fx.Node:
    """Return the node that replaces a call of F.scaled_dot_product_attention."""
    call = _Attention(
        bound["query"],
        bound["key"],
        bound["value"],
        mask=bound.get("attn_mask"),
        dropout=constant(build, bound, "dropout_p", 0.0),
        causal=constant(build, bound, "is_causal", False),
        scale=constant(build, bound, "scale", None),
        gqa=constant(build, bound, "enable_gqa", False),
    )
    if call.mask is not None and call.causal:
        raise build.refuse(
            "attn_mask together with is_causal", "Put the causal part into the mask."
        )
    if call.dropout or _mask_trained(build, call):
        return written_out(build, call)
    shapes = [build.example(t).shape for t in call.tensors]
    if [len(s) for s in shapes] == [4, 4, 4] and not call.gqa:
        heads = [shape[1] for shape in shapes]
        if heads[1:] == [1, 1] and heads[0] != 1:
            call = replace(
                call, gqa=True
            )  # keys of one head are broadcast: all heads of queries are one group
        elif heads != [heads[0]] * 3:
            return written_out(build, call)
    if [len(s) for s in shapes] == [4, 4, 4] and not _broadcast(shapes):
        return _fused(build, call)
    if [len(s) for s in shapes] == [3, 3, 3] and not _broadcast(shapes) and not call.gqa:
        return _one_head(build, call)
    return written_out(build, call)


def _mask_trained(build: Builder, call: _Attention) -> bool:
    """Return whether the mask gets a gradient: without one around the call, none is asked for."""
    return call.mask is not None and build.trained and bool(build.example(call.mask).requires_grad)


def _broadcast(shapes: Sequence[Sequence[Any]]) -> bool:
    """Return whether one tensor has batch size 1 and another a symbolic one, which counts as larger than 1."""
    first = [shape[0] for shape in shapes]
    return any(isinstance(size, int) and size == 1 for size in first) and not all(
        isinstance(size, int) for size in first
    )


def _fused(build: Builder, call: _Attention) -> fx.Node:
    swapped = [build.swap(t) for t in call.tensors]
    attended = build.first(
        build.call(attention, *swapped, call.mask, call.causal, call.scale, call.gqa)
    )
    _undo_swaps(build.graph, build.old, attended)
    return build.method("transpose", attended, 1, 2)


def _undo_swaps(graph: fx.Graph, old: fx.Node, out: fx.Node) -> None:
    """Use the op's own output if the model swaps heads and positions of the result back."""
    for user in list(old.users):
        if is_swap(user):
            user.replace_all_uses_with(out)
            graph.erase_node(user)


def _one_head(build: Builder, call: _Attention) -> fx.Node:
    """Compute attention of [batch, T, head_dim] as attention with one head."""
    heads = [build.method("unsqueeze", t, 2) for t in call.tensors]
    mask = call.mask
    if mask is not None and build.example(mask).dim() == 3:
        mask = build.method("unsqueeze", mask, 1)
    attended = build.first(build.call(attention, *heads, mask, call.causal, call.scale, False))
    return build.method("squeeze", attended, 2)


def written_out(build: Builder, call: _Attention) -> fx.Node:
    """Return softmax(q k^T scale + mask) v, with dropout of the probabilities, as torch computes it on a CPU."""
    q, k, v = repeated(build, *call.tensors) if call.gqa else call.tensors
    scores = scores_of(build, q, k, call.scale)
    if call.causal:
        full = build.method(
            "new_full", scores, tuple(size_of(build, scores, d) for d in (-2, -1)), float("-inf")
        )
        scores = build.call(torch.add, scores, build.method("triu", full, 1))
    if call.mask is not None:
        scores = build.call(torch.add, scores, _added(build, call.mask, scores))
    return weighted(build, scores, v, call.dropout, masked=call.mask is not None)


def scores_of(build: Builder, q: fx.Node, k: fx.Node, scale: float | None) -> fx.Node:
    """Return q k^T scale, like torch in float32 if the inputs are in half precision."""
    example = build.example(q)
    inside = accumulate_dtype(example.dtype)
    if inside != example.dtype:
        q, k = (build.method("to", t, inside) for t in (q, k))
    scaled = build.call(torch.mul, q, float(example.shape[-1]) ** -0.5 if scale is None else scale)
    return build.call(torch.matmul, scaled, build.method("transpose", k, -2, -1))


def weighted(
    build: Builder, scores: fx.Node, v: fx.Node, dropout: float, *, masked: bool
) -> fx.Node:
    """Return softmax(scores) v in the dtype of v; if `masked`, 0 for a query that attends to nothing."""
    shares = build.call(torch._safe_softmax if masked else torch.softmax, scores, -1)
    if dropout:
        shares = build.call(F.dropout, shares, dropout, True)
    inside, dtype = build.example(shares).dtype, build.example(v).dtype
    if inside == dtype:
        return build.call(torch.matmul, shares, v)
    return build.method(
        "to", build.call(torch.matmul, shares, build.method("to", v, inside)), dtype
    )


def _added(build: Builder, mask: fx.Node, scores: fx.Node) -> fx.Node:
    """Return the addend of scores: a mask in their dtype, or -inf at the places where a mask of bools is False."""
    example = build.example(mask)
    if example.dtype != torch.bool:
        return build.method("to", mask, build.example(scores).dtype)
    zeros = build.method(
        "new_zeros", scores, tuple(size_of(build, mask, d) for d in range(example.dim()))
    )
    return build.method("masked_fill", zeros, build.call(torch.logical_not, mask), float("-inf"))


def repeated(
    build: Builder, q: fx.Node, k: fx.Node, v: fx.Node
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return q, and keys and values with an entry for each head of queries."""
    heads, own = (build.example(t).shape[-3] for t in (q, k))
    if heads % own:
        raise build.refuse(
            f"{heads} query heads are no multiple of {own} key heads",
            "Give a whole ratio of heads.",
        )
    if heads != own:
        k, v = (build.method("repeat_interleave", t, heads // own, -3) for t in (k, v))
    return q, k, v


def size_of(build: Builder, tensor: fx.Node, dim: int) -> Any:
    """Return a size of a tensor: a number, or a node if it depends on the rows."""
    size = build.example(tensor).shape[dim]
    return size if isinstance(size, int) else build.method("size", tensor, dim)
