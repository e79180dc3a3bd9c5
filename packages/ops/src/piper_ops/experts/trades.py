"""Bring rows to the devices of their experts and back, in one round.

`table` [n, E] has the counts of all devices. Where m devices cut each expert, `take` and `give` pass the rows of all
m x n of them, and their table is [m, n, E]. A device has `slot` places for each other one in a round; a further round
may use fewer of them. Rows for one expert that come from one device always lie behind each other, so each
pass gathers blocks of rows whose sizes the table says. No pass asks the host for a count.

Rows behind the last group are zeros, and so are rows that were not sent in a round. Nobody reads the places of a
message behind a device's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ZEROS = -1
"""The first row of a block of zeros."""
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of as many bytes as an element."""


def totals(table: Tensor) -> Tensor:
    """Return how many rows each device has for the experts of each other one [n, n], or [m, n, n]."""
    return table.view(*table.shape[:-1], table.shape[-2], -1).sum(-1)


def senders(table: Tensor) -> int:
    """Return the number of devices whose rows a device computes."""
    return table.numel() // table.shape[-1]


def _gather_blocks(rows: Tensor, first: Tensor, sizes: Tensor, count: int) -> Tensor:
    """Return [count, W]: one block after another, block k with `sizes[k]` rows from row `first[k]` on, or of zeros.

    The sizes add up to `count`.
    """
    block = torch.repeat_interleave(sizes, output_size=count)
    picked = (first - sizes.cumsum(0).sub_(sizes)).index_select(0, block)
    bits = BITS[rows.element_size()]
    kept = (first != ZEROS).to(bits).neg_().index_select(0, block)  # all bits of a row, or none
    del block
    picked.add_(torch.arange(count, device=rows.device)).clamp_(0, rows.shape[0] - 1)
    blocks = rows.index_select(0, picked)
    # A CPU takes seven times as long to fill by a mask.
    blocks.view(bits).bitwise_and_(kept.unsqueeze(1))
    return blocks


@dataclass(frozen=True, slots=True)
class Round:
    """Describe one round of a device's trades.

    Attributes:
        table: the counts of all devices [n, E], or [m, n, E].
        place: the place of the device among the n with different experts.
        slot: the places for each other device in a round.
        number: the number of the round, from 0.
        fewer: the places in this round, if they are fewer than `slot`.
    """

    table: Tensor
    place: int
    slot: int
    number: int = 0
    fewer: int | None = None

    @property
    def places(self) -> int:
        return self.slot if self.fewer is None else self.fewer

    @property
    def first(self) -> int:
        """Return the number of the rows for a device that went in earlier rounds."""
        return self.number * self.slot


def _sent(trade: Round, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each device how many of its rows are before the sent ones, are sent, and are behind them [n]."""
    total = totals(trade.table)[trade.place]
    before = total.clamp(max=trade.first)
    sent = (total - before).clamp_(max=places)
    return before, sent, total - before - sent


def _received(trade: Round, places: int) -> tuple[Tensor, Tensor]:
    """Return where in each device's message the rows for each own expert begin, and how many there are [n, E / n]."""
    own = trade.table.shape[-1] // trade.table.shape[-2]
    counts = trade.table.view(-1, trade.table.shape[-1])
    counts = counts[:, trade.place * own : (trade.place + 1) * own]
    ends = counts.cumsum(1).sub_(trade.first)
    begin = (ends - counts).clamp_(0, places)
    return begin, ends.clamp_(0, places).sub_(begin)


def send(rows: Tensor, trade: Round) -> Tensor:
    """Return the rows for each device in a round [n, places, W]."""
    total = totals(trade.table)[trade.place]
    first = (total.cumsum(0) - total).unsqueeze(1) + trade.first
    picked = (first + torch.arange(trade.places, device=rows.device)).clamp_(max=rows.shape[0] - 1)
    return rows.index_select(0, picked.view(-1)).view(
        trade.table.shape[0], trade.places, rows.shape[1]
    )


def home(back: Tensor, trade: Round, rows: int) -> Tensor:
    """Return a round's rows at the places that they were sent from, zeros elsewhere."""
    devices, places, width = back.shape
    before, sent, behind = _sent(trade, places)
    begin = torch.arange(0, devices * places, places, device=back.device)
    gap = torch.full_like(begin, ZEROS)
    sizes = torch.stack((before, sent, behind), 1).view(-1)
    first = torch.stack((gap, begin, gap), 1).view(-1)
    return _gather_blocks(back.view(-1, width), *_filled(first, sizes, rows), rows)


def _filled(first: Tensor, sizes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return blocks with one of zeros behind them, so that they have `count` rows together."""
    rest = count - sizes.sum(0, keepdim=True)
    return torch.cat((first, first.new_full((1,), ZEROS))), torch.cat((sizes, rest))


def add_home(back: Tensor, trade: Round, total: Tensor) -> None:
    """Add the rows of a round to `total` at the places that they were sent from."""
    total += home(back, trade, total.shape[0])


def take(came: Tensor, trade: Round) -> tuple[Tensor, Tensor]:
    """Return the rows received in a round sorted by own expert, zeros behind them, and how many rows each has.

    Rows of one expert are in the order of the devices that they come from.
    """
    devices, places, width = came.shape
    begin, sizes = _received(trade, places)
    messages = torch.arange(0, devices * places, places, device=came.device)
    first = begin.add_(messages.unsqueeze(1))
    blocks = _filled(first.t().reshape(-1), sizes.t().reshape(-1), devices * places)
    return _gather_blocks(came.view(-1, width), *blocks, devices * places), sizes.sum(0)


def give(made: Tensor, trade: Round) -> Tensor:
    """Return rows that are sorted by expert as they came in [n, places, W]."""
    devices, places = senders(trade.table), trade.places
    _, sizes = _received(trade, places)
    by_expert = sizes.t().reshape(-1)
    first = by_expert.cumsum(0).sub_(by_expert).view(-1, devices).t()
    unused = places - sizes.sum(1, keepdim=True)
    first = torch.cat((first, torch.full_like(unused, ZEROS)), 1).view(-1)
    sizes = torch.cat((sizes, unused), 1).view(-1)
    return _gather_blocks(made, first, sizes, devices * places).view(devices, places, -1)
