"""Count the memory that further rounds of experts take, for which their ops ask when they begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from piper_ops.costing.workspace import Live
from piper_ops.experts import rounds


def _met(devices: int, kind: str, axis: str, sent: Tensor) -> Tensor:
    """Return a tensor like the result of a collective of further rounds; so many devices gather and scatter."""
    if kind == "all_gather":
        return sent.new_empty((devices, *sent.shape))
    return torch.empty_like(sent[0] if kind == "reduce_scatter" else sent)


def room_of_rounds(
    rows: Tensor,
    back: Tensor,
    table: Tensor,
    every: Tensor,
    weights: Sequence[Tensor],
    body: rounds.ExpertBody,
    wanted: Sequence[bool],
) -> list[int]:
    """Return the most bytes that each op of further rounds holds at once; tensors are on meta.

    `every` is `table`, or [m, n, E] if m devices cut each expert.
    """
    within = "within" if every.dim() > table.dim() else ""
    common = (
        rows,
        table,
        every,
        weights,
        body,
        "",
        within,
        back.shape[1],
        0,
        (0,) * len(rounds.ROUNDS),
    )
    grad = back.new_empty((rows.shape[0], back.shape[2]))
    totals = [torch.empty_like(w) for w, mine in zip(weights, wanted, strict=True) if mine]
    met = partial(_met, every.shape[0])
    returned = _most(partial(rounds.run_return, met), back, *common)
    of_rows = _most(partial(rounds.run_further_dgrad, met), grad, *common, torch.empty_like(rows))
    of_weights = 0
    if totals:
        more = list(wanted), totals[1:], totals[0]
        of_weights = _most(partial(rounds.run_further_wgrad, met), grad, *common, *more)
    # The first gradients are computed like further ones, beside sums that are made before.
    summed = sum(t.nbytes for t in totals)
    return [returned, rows.nbytes + of_rows, summed + of_weights, of_rows, of_weights]


def _most(run: Callable[..., Any], *args: Any) -> int:
    """Return the most bytes that a run on meta tensors holds at once beside its arguments."""
    live = Live(tree_leaves(args))
    with live, torch.no_grad():
        run(*args)
    return live.most
