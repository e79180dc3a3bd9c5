"""Copy the rows that devices trade as blocks, if the host knows how many there are.

Rows for one expert that come from one device are always contiguous, so a pass over rows is a few copies of blocks,
without an index per row. A send buffer has places that nobody fills and nobody reads; they keep their content.
Elsewhere such places are zero. `places` is the number of places that a device has for each other device, from its row
`first` on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

SIZES = "_piper_sizes"
"""The attribute of a table, which is never written again, with the numbers of rows that were counted from it."""
T = TypeVar("T")


def _known(
    table: Tensor, key: tuple[str, int, int, int], count: Callable[[Tensor, int, int, int], T]
) -> T:
    """Return the sizes counted from a table, computed once: forward and gradient passes ask for the same."""
    found: dict[object, T] = table.__dict__.setdefault(SIZES, {})
    if key not in found:
        found[key] = count(table, *key[1:])
    return found[key]


def taken_sizes(table: Tensor, place: int, first: int, places: int) -> list[list[int]]:
    """Return for each device, and each own expert, how many rows come in."""
    return _known(table, ("taken", place, first, places), _taken_sizes)


def _taken_sizes(table: Tensor, place: int, first: int, places: int) -> list[list[int]]:
    own = table.shape[1] // table.shape[0]
    found: list[list[int]] = []
    for counts in table[:, place * own : (place + 1) * own].tolist():
        if not first and sum(counts) <= places:
            found.append(counts)
            continue
        begin, sizes = -first, []
        for count in counts:
            sizes.append(max(0, min(begin + count, places) - max(begin, 0)))
            begin += count
        found.append(sizes)
    return found


def _places_of(sizes: Sequence[Sequence[int]], places: int) -> list[int]:
    """Return the sizes of the received blocks in order: each device's rows by expert, then its unused places."""
    return [size for of in sizes for size in (*of, places - sum(of))]


def _turned(sizes: Sequence[Sequence[int]], rows: int) -> list[int]:
    """Return how many rows lie behind each other when they are sorted by expert, then by device; the rest is last."""
    flat = [size for of in zip(*sizes, strict=True) for size in of]
    return [*flat, rows - sum(flat)]


def _joined(blocks: Sequence[Tensor], into: Tensor, rest: Sequence[Tensor] = ()) -> None:
    """Write blocks behind each other, and zeros into the rest."""
    torch.cat([*blocks], out=into)
    for gap in rest:
        if gap.shape[0]:
            gap.zero_()


def _copied(into: Sequence[Tensor], given: Sequence[Tensor], gaps: Sequence[Tensor]) -> None:
    some = [(a, b) for a, b in zip(into, given, strict=True) if a.shape[0]]
    if some:
        torch._foreach_copy_([a for a, _ in some], [b for _, b in some])
    for gap in gaps:
        if gap.shape[0]:
            gap.zero_()


def take(came: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Return the received rows, [n, places, W], sorted by expert and then by device."""
    devices, places, width = came.shape
    made = came.new_empty((devices * places, width))
    each = len(sizes[0]) + 1
    given = came.view(-1, width).split_with_sizes(_places_of(sizes, places))
    *into, rest = made.split_with_sizes(_turned(sizes, made.shape[0]))
    _copied(into, [given[s * each + e] for e in range(each - 1) for s in range(devices)], [rest])
    return made


def give(made: Tensor, sizes: Sequence[Sequence[int]], places: int) -> Tensor:
    """Return rows that are sorted by expert as they came in, [n, places, W]."""
    devices, each = len(sizes), len(sizes[0]) + 1
    out = made.new_empty((devices, places, made.shape[1]))
    into = out.view(-1, made.shape[1]).split_with_sizes(_places_of(sizes, places))
    *given, _ = made.split_with_sizes(_turned(sizes, made.shape[0]))
    _copied([into[s * each + e] for e in range(each - 1) for s in range(devices)], given, ())
    return out


def sent_sizes(table: Tensor, place: int, first: int, places: int) -> list[tuple[int, int, int]]:
    """Return for each device how many of its rows are before the sent ones, are sent, and are behind them."""
    return _known(table, ("sent", place, first, places), _sent_sizes)


def _sent_sizes(table: Tensor, place: int, first: int, places: int) -> list[tuple[int, int, int]]:
    found = []
    counts, own = table[place].tolist(), table.shape[1] // table.shape[0]
    for total in (sum(counts[k : k + own]) for k in range(0, len(counts), own)):
        before = min(total, first)
        size = min(total - before, places)
        found.append((before, size, total - before - size))
    return found


def _at_home(sizes: Sequence[tuple[int, int, int]], rows: int) -> list[int]:
    flat = [size for of in sizes for size in of]
    return [*flat, rows - sum(flat)]


def take_packed(
    came: Tensor, sizes: Sequence[Sequence[int]], own: Tensor | None = None, place: int = -1
) -> Tensor:
    """Return rows that came in behind each other, sorted by expert and then by device.

    The rows of the device at `place` are in `own` if they were not sent.
    """
    apart = place if own is not None else -1
    given = iter(came.split_with_sizes(_behind(sizes, came.shape[0], apart)))
    blocks: list[Sequence[Tensor]] = []
    for device, of in enumerate(sizes):
        mine = own if device == apart else None
        blocks.append(mine.split_with_sizes(of) if mine is not None else [next(given) for _ in of])
    made, filled = torch.empty_like(came), sum(map(sum, sizes))
    _joined(
        [block for of_expert in zip(*blocks, strict=True) for block in of_expert],
        made[:filled],
        [made[filled:]],
    )
    return made


def _behind(sizes: Sequence[Sequence[int]], rows: int, without: int) -> list[int]:
    """Return the sizes of all devices' blocks but one device's, and how many of the rows are left behind them."""
    flat = [size for device, of in enumerate(sizes) if device != without for size in of]
    return [*flat, rows - sum(flat)]


def give_packed(made: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Return rows that are sorted by expert as they came in, behind each other."""
    out = torch.empty_like(made)
    given = made.split_with_sizes(_turned(sizes, made.shape[0]))
    devices, each = len(sizes), len(sizes[0])
    _joined(
        [given[e * devices + d] for d in range(devices) for e in range(each)],
        out[: sum(map(sum, sizes))],
    )
    return out


def packed(blocks: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return blocks of rows behind each other, in a tensor of this shape."""
    out = blocks[0].new_empty(shape)
    _joined(blocks, out[: sum(block.shape[0] for block in blocks)])
    return out


def sent_blocks(rows: Tensor, sizes: Sequence[tuple[int, int, int]]) -> Sequence[Tensor]:
    """Return the blocks of sorted rows that go to each device."""
    return rows.split_with_sizes(_at_home(sizes, rows.shape[0]))[1::3]


def home_packed(back: Tensor, sizes: Sequence[tuple[int, int, int]], rows: int) -> Tensor:
    """Return rows that were received without gaps at the places that they were sent from, and zeros elsewhere."""
    out = back.new_empty((rows, back.shape[1]))
    into = out.split_with_sizes(_at_home(sizes, rows))
    kept = [size for _, size, _ in sizes]
    *given, _ = back.split_with_sizes([*kept, back.shape[0] - sum(kept)])
    _copied(into[1::3], given, [gap for k, gap in enumerate(into) if k % 3 != 1])
    return out


def send(rows: Tensor, sizes: Sequence[tuple[int, int, int]], places: int) -> Tensor:
    """Return the send buffer of all devices, [n, places, W]."""
    out = rows.new_empty((len(sizes), places, rows.shape[1]))
    into = out.view(-1, rows.shape[1]).split_with_sizes(
        [k for _, size, _ in sizes for k in (size, places - size)]
    )
    _copied(into[::2], rows.split_with_sizes(_at_home(sizes, rows.shape[0]))[1::3], ())
    return out


def home(back: Tensor, sizes: Sequence[tuple[int, int, int]], rows: int) -> Tensor:
    """Return rows at the places that they were sent from, and zeros elsewhere."""
    out = back.new_empty((rows, back.shape[2]))
    into = out.split_with_sizes(_at_home(sizes, rows))
    given = back.view(-1, back.shape[2]).split_with_sizes(
        [k for _, size, _ in sizes for k in (size, back.shape[1] - size)]
    )
    _copied(into[1::3], given[::2], [gap for k, gap in enumerate(into) if k % 3 != 1])
    return out


def add_home(back: Tensor, sizes: Sequence[tuple[int, int, int]], total: Tensor) -> None:
    """Add rows to `total`, at the places that they were sent from."""
    into = total.split_with_sizes(_at_home(sizes, total.shape[0]))[1::3]
    for part, came, (_, size, _) in zip(into, back, sizes, strict=True):
        if size:
            part += came[:size]
