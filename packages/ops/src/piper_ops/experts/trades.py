"""Bring rows to the devices of their experts and back, in one round.

`table` has the counts of all devices. A device has `slot` places for each other one in a round; a further round may use
fewer of them: `places`. If the host has the counts, passes copy blocks, else they pick rows by their numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piper_ops.experts import blocks


def totals(table: Tensor) -> Tensor:
    """Return how many rows each device has for each other one [n, n]."""
    return table.view(table.shape[0], table.shape[0], -1).sum(2)


def counted(table: Tensor) -> bool:
    """Return whether the host has the counts, so that rows are copied as blocks."""
    return table.device.type == "cpu"


def send(
    rows: Tensor, table: Tensor, place: int, slot: int, number: int, places: int = 0
) -> Tensor:
    """Return the rows for each device in a round; nobody reads the places behind a device's rows.

    `places` is the number of places for a device in this round, `slot` unless there are fewer.
    """
    places = places or slot
    if counted(table):
        return blocks.send(rows, blocks.sent_sizes(table, place, number * slot, places), places)
    total = totals(table)[place]
    first = (total.cumsum(0) - total).unsqueeze(1) + number * slot
    found = (first + torch.arange(places, device=rows.device)).clamp_(max=rows.shape[0] - 1)
    return rows.index_select(0, found.view(-1)).view(table.shape[0], places, rows.shape[1])


def home(back: Tensor, table: Tensor, place: int, rows: int, number: int, slot: int = 0) -> Tensor:
    """Return a round's rows at the places that they were sent from, zeros elsewhere; round 0 has `slot` places."""
    devices, places, width = back.shape
    slot = slot or places
    if counted(table):
        return blocks.home(back, blocks.sent_sizes(table, place, number * slot, places), rows)
    total = totals(table)[place]
    ends = total.cumsum(0)
    number_of = torch.arange(rows, device=back.device)
    device = torch.searchsorted(ends, number_of, right=True).clamp_(max=devices - 1)
    turn = number_of - (ends - total).index_select(0, device)
    other = (turn.div(slot, rounding_mode="floor") != number) | (number_of >= ends[-1])
    found = device.mul_(places).add_(turn.remainder_(slot).clamp_(max=places - 1))
    return (
        back.view(devices * places, width)
        .index_select(0, found)
        .masked_fill_(other.unsqueeze(1), 0)
    )


def add_home(
    back: Tensor, table: Tensor, place: int, total: Tensor, number: int, slot: int
) -> None:
    """Add the rows of a round to `total` at the places that they were sent from; round 0 has `slot` places."""
    if counted(table):
        blocks.add_home(back, blocks.sent_sizes(table, place, number * slot, back.shape[1]), total)
    else:
        total += home(back, table, place, total.shape[0], number, slot)


def by_expert(
    table: Tensor, place: int, slot: int, number: int, places: int
) -> tuple[Tensor, Tensor]:
    """Return the order by own expert of the rows received in a round, and how many rows each expert has.

    Rows of one expert are in the order of the devices that they come from. Places that nobody filled are last.
    """
    devices, experts = table.shape[0], table.shape[1] // table.shape[0]
    ends = table[:, place * experts : (place + 1) * experts].cumsum(1)
    turn = torch.arange(number * slot, number * slot + places, device=table.device).repeat(
        devices, 1
    )
    expert, order = torch.sort(torch.searchsorted(ends, turn, right=True).view(-1), stable=True)
    return order, torch.searchsorted(expert, torch.arange(experts + 1, device=table.device)).diff()


def take(
    came: Tensor, table: Tensor, place: int, number: int, slot: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the rows received in a round sorted by own expert, and how many rows each expert has."""
    places = came.shape[1]
    slot = slot or places
    if counted(table):
        sizes = blocks.taken_sizes(table, place, number * slot, places)
        return blocks.take(came, sizes), torch.tensor([sum(of) for of in zip(*sizes, strict=True)])
    order, counts = by_expert(table, place, slot, number, places)
    return came.view(-1, came.shape[2]).index_select(0, order), counts


def give(
    made: Tensor, table: Tensor, place: int, number: int, slot: int = 0, places: int = 0
) -> Tensor:
    """Return rows that are sorted by expert as they came in."""
    devices = table.shape[0]
    slot = slot or made.shape[0] // devices
    places = places or slot
    if counted(table):
        return blocks.give(made, blocks.taken_sizes(table, place, number * slot, places), places)
    order, _ = by_expert(table, place, slot, number, places)
    return torch.empty_like(made).index_copy_(0, order, made).view(devices, -1, made.shape[1])
