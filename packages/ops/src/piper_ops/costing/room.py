"""Count the memory that further rounds of experts take, for which their ops ask when they begin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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
    runs = list(rounds.ROUNDS.values())
    grad = back.new_empty((rows.shape[0], back.shape[2]))
    totals = [torch.empty_like(w) for w, mine in zip(weights, wanted, strict=True) if mine]
    calls = [
        (back, *common),
        (grad, *common),
        (grad, *common, list(wanted)),
        (grad, *common, torch.empty_like(rows)),
    ]
    peaks = []
    for run, args in zip(
        runs, [*calls, (grad, *common, list(wanted), totals[1:], *totals[:1])], strict=True
    ):
        if run is rounds.run_further_wgrad and not totals:
            peaks.append(0)
            continue
        live = Live(tree_leaves(args))
        with live, torch.no_grad():
            run(partial(_met, every.shape[0]), *args)
        peaks.append(live.most)
    return peaks
