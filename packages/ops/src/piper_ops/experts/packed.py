"""Trade the rows of round 0 in messages without unused places, if the host knows the counts.

A step's code calls these in place of the ops `experts_send`, all-to-all and `experts_take`, or `experts_give`,
all-to-all and the ops behind it. They return the same results, and hold as many bytes at most: so a plan knows nothing
of them. Rows that are sorted by expert are sorted by device, too: unless some must wait for a further round, they are
sent from their own tensor and received at their final places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piper_ops.experts import blocks, reserved, rounds, trades


@dataclass(frozen=True, slots=True)
class Cuts:
    """Hold the numbers of rows sent to and received from each device; received rows go `into` a tensor without gaps."""

    into: Tensor
    sent: Sequence[int]
    got: Sequence[int]


def there(
    exchange: Callable[..., Tensor], axis: str, rows: Tensor, table: Tensor, place: int, slot: int
) -> tuple[Tensor, Tensor]:
    """Return the rows of all devices for the own experts, sorted by expert, and how many each expert has."""
    if not trades.counted(table):
        return trades.take(
            exchange("all_to_all", axis, trades.send(rows, table, place, slot, 0)), table, place, 0
        )
    sizes, of = blocks.taken_sizes(table, place, 0, slot), blocks.sent_sizes(table, place, 0, slot)
    came = rows.new_empty((len(sizes) * slot, rows.shape[1]))
    parts = blocks.sent_blocks(rows, of)
    sent, got = [size for _, size, _ in of], [sum(size) for size in sizes]
    own = (
        parts[place] if place in (0, len(parts) - 1) else None
    )  # the rows of other devices are contiguous without it
    if own is not None:
        sent[place] = got[place] = 0
    if any(behind for _, _, behind in of):
        given = blocks.packed(
            [part[:size] for part, size in zip(parts, sent, strict=True)], came.shape
        )
    else:
        given = rows if own is None or place else rows[own.shape[0] :]
    exchange("all_to_all", axis, given, Cuts(came, sent, got))
    del given
    return blocks.take_packed(came, sizes, own, place), torch.tensor(
        [sum(size) for size in zip(*sizes, strict=True)]
    )


def back(
    exchange: Callable[..., Tensor],
    axis: str,
    box: list[Tensor],
    table: Tensor,
    place: int,
    rows: int,
) -> Tensor:
    """Return rows sorted by own expert at the places that they were sent from, zeros elsewhere; `box` is emptied."""
    if not trades.counted(table):
        came = exchange("all_to_all", axis, trades.give(box.pop(), table, place, 0))
        return trades.home(came, table, place, rows, 0)
    return _home(exchange, axis, box, _give(box, table, place), table, place, rows)


def returned(
    exchange: Callable[..., Tensor], axis: str, box: list[Tensor], rows: Tensor, table: Tensor, weights: Sequence[Tensor],
    body: str, _: str, slot: int, place: int, room: Sequence[int],
) -> Tensor:  # fmt: skip
    """Return the result of `back` with the rows of further rounds."""
    rest = rows, table, weights, body, axis, slot, place
    if not trades.counted(table):
        came = exchange("all_to_all", axis, trades.give(box.pop(), table, place, 0))
        return rounds.run_return(exchange, came, *rest, room)
    sizes = _give(box, table, place)
    reserved.reserve(room[0], rows.device)
    return rounds.add_further(
        exchange, _home(exchange, axis, box, sizes, table, place, rows.shape[0]), *rest
    )


def _give(box: list[Tensor], table: Tensor, place: int) -> list[list[int]]:
    """Put the rows in a box into the order of their arrival, without gaps, and return their sizes."""
    made = box.pop()
    sizes = blocks.taken_sizes(table, place, 0, made.shape[0] // table.shape[0])
    box.append(blocks.give_packed(made, sizes))
    return sizes


def _home(
    exchange: Callable[..., Tensor], axis: str, box: list[Tensor], sizes: Sequence[Sequence[int]], table: Tensor, place: int,
    rows: int,
) -> Tensor:  # fmt: skip
    given = box.pop()
    of = blocks.sent_sizes(table, place, 0, given.shape[0] // len(sizes))
    sent, got = [sum(size) for size in sizes], [size for _, size, _ in of]
    came = torch.empty_like(
        given
    )  # asked for in any case, so that a step holds as much whatever is chosen
    if any(behind for _, _, behind in of):
        exchange("all_to_all", axis, given, Cuts(came, sent, got))
        del given
        return blocks.home_packed(came, of, rows)
    del came
    out = given.new_empty((rows, given.shape[1]))
    exchange("all_to_all", axis, given, Cuts(out, sent, got))
    if sum(got) < rows:
        out[sum(got) :].zero_()
    return out


TRADES: dict[str, Any] = {"there": there, "back": back, "return": returned}
"""The functions that a step's code calls with the function that runs its collectives."""
