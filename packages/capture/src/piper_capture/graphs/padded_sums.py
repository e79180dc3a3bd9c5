"""Fold sums of padded gradients of slices into one concatenation.

If a tensor is split into parts (`q, k, v = qkv`), autograd pads the gradient of each part with zeros to the whole
tensor's size and adds these up: n zero fills, n copies and n - 1 additions in place of one stack.

    select_backward(g0, shape, d, 0) + ... + select_backward(gn, shape, d, n)   -> stack([g0, ..., gn], d)
    slice_backward(g0, shape, d, 0, e0) + slice_backward(g1, shape, d, e0, e1)  -> cat([g0, g1], d)

The rule applies only if the parts cover the tensor exactly once and the (inner) sum has at most one other term. Every
element is then that term's plus one part's, and adding zeros is exact, so that no result is rounded differently.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from piper_capture.graphs.rewriting import new_node

aten = torch.ops.aten


def join_padded_parts(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Join the padded parts of a sum that cover their tensor."""
    if not _is_sum(node):
        return None
    terms = _terms(node)
    parts = sorted((p for t in terms if (p := _part(t)) is not None), key=lambda p: p[1])
    others = [t for t in terms if _part(t) is None]
    if not parts or len(others) > 1 or len({p[0] for p in parts}) != 1:
        return None
    target, shape, dim = parts[0][0]
    edges = [edge for _, span, _ in parts for edge in span]
    if edges[0] != 0 or edges[-1] != shape[dim] or edges[1:-1:2] != edges[2:-1:2]:
        return None
    join = aten.stack.default if target is aten.select_backward.default else aten.cat.default
    joined = new_node(graph, node, join, ([gradient for _, _, gradient in parts], dim))
    for other in others:
        joined = new_node(graph, node, aten.add.Tensor, (other, joined))
    return joined


def _is_sum(node: fx.Node) -> bool:
    return (
        node.target is aten.add.Tensor
        and not node.kwargs
        and all(isinstance(a, fx.Node) for a in node.args)
    )


def _terms(node: fx.Node) -> list[fx.Node]:
    """Return the terms of a sum; inner sums that hold parts and have no other user are flattened."""
    terms: list[fx.Node] = []
    for term in node.args:
        assert isinstance(term, fx.Node)
        inner = _terms(term) if _is_sum(term) and len(term.users) == 1 else []
        terms += inner if any(_part(t) is not None for t in inner) else [term]
    return terms


def _part(
    term: fx.Node,
) -> tuple[tuple[Any, tuple[int, ...], int], tuple[int, int], fx.Node] | None:
    """Return the description of a padded gradient of a part, or None for another term.

    It has the (op, shape, dimension) that must agree among the parts, the part's span in it, and the gradient.
    """
    if (
        term.target not in (aten.select_backward.default, aten.slice_backward.default)
        or len(term.users) != 1
    ):
        return None
    gradient, shape, dim, start, *rest = cast(tuple[Any, ...], term.args)
    whole = tuple(int(s) for s in shape)
    dim = int(dim) % len(whole)
    first = (
        int(start) if int(start) >= 0 else int(start) + whole[dim]
    )  # x[8:] of eight elements is empty, and begins at 8
    if term.target is aten.select_backward.default:
        return (term.target, whole, dim), (first, first + 1), gradient
    end, step = rest
    last = min(int(end), whole[dim])
    return (
        ((term.target, whole, dim), (first, last), gradient) if step == 1 and last > first else None
    )
