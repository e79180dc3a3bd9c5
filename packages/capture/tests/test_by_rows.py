"""Which bodies of experts take any number of rows: those that leave the first dimension alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from piper_capture.steps.by_rows import takes_any_rows
from piper_ops import grouped_mm
from tests.helpers.cases import each_case


def gated(rows: Tensor, counts: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
    """Compute experts as Hugging Face's mixtures keep them: gate and up in one matrix, outputs before inputs."""
    gate, up = grouped_mm(rows, counts, wide.transpose(1, 2)).chunk(2, dim=-1)
    return grouped_mm(F.silu(gate) * up, counts, narrow.transpose(1, 2))


def every_other(rows: Tensor, counts: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
    both = grouped_mm(rows, counts, wide.transpose(-1, -2))
    return grouped_mm(both[..., ::2] * both[..., 1::2].sigmoid(), counts, narrow.transpose(-2, -1))


def joined(rows: Tensor, counts: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
    gate, up = wide.transpose(1, 2).split([6, 6], 2)
    return grouped_mm(
        F.silu(grouped_mm(rows, counts, torch.cat([up, gate], 2))[:, :6]),
        counts,
        narrow.transpose(1, 2),
    )


def halves(rows: Tensor, counts: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
    first, second = rows.chunk(2)
    return gated(torch.cat([second, first]), counts, wide, narrow)


def later(rows: Tensor, counts: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
    return gated(rows[2:], counts, wide, narrow)


def turned(rows: Tensor, counts: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
    return gated(rows.t().contiguous().t(), counts, wide, narrow)


def over_rows(rows: Tensor, counts: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
    return gated(rows.softmax(0), counts, wide, narrow)


def of_a_fixed_size(rows: Tensor, counts: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
    return gated(rows.view(10, 2, 4).flatten(1), counts, wide, narrow)


@each_case(
    ("body", "any_rows"),
    [(gated, True), (every_other, True), (joined, True)]
    + [(body, False) for body in (halves, later, turned, over_rows, of_a_fixed_size)],
)
def test_a_body_takes_any_rows_where_it_leaves_the_first_dimension_alone(
    body: Callable[..., Tensor], any_rows: bool
) -> None:
    sizes = ((10, 8), (2,), (2, 12, 8), (2, 8, 6))
    given = [torch.empty(s, dtype=torch.int64 if len(s) == 1 else torch.float64) for s in sizes]
    assert takes_any_rows(make_fx(body, tracing_mode="fake")(*given).graph) == any_rows
