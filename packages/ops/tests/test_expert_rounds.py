"""Rows go to the devices of their experts and come back, in as many rounds as they need, and lose nothing on the
way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from piper_ops import (
    DIRECT,
    OP_KERNELS,
    ExpertsOverflow,
    cpu_workspace,
    experts_checked,
    experts_drop,
    experts_give,
    experts_home,
    experts_send,
    experts_take,
    peak_bytes_inside,
    route,
)
from piper_ops.costing.room import room_of_rounds
from piper_ops.costing.workspace import Live
from piper_ops.experts import rounds, trades
from piper_ops.experts.trades import Round
from tests.helpers.cases import each_case

DEVICES, EXPERTS, WIDTH, TOKENS, TOP = 3, 6, 4, 10, 2


def drawn(slot: int) -> tuple[list[Tensor], Tensor, int]:
    """The rows of each device, sorted by expert; the counts of all; and the number of rounds."""
    torch.manual_seed(slot)
    rows, counts = [], []
    for _ in range(DEVICES):
        chosen = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(TOKENS)])
        taken, count = route(torch.randn(TOKENS, WIDTH, dtype=torch.float64), chosen, EXPERTS)
        rows.append(taken)
        counts.append(count)
    table = torch.stack(counts)
    return rows, table, rounds.round_count(table, slot)


def exchanged(given: list[Tensor]) -> list[Tensor]:
    """What an all-to-all gives each device."""
    return [torch.stack([g[k] for g in given]) for k in range(DEVICES)]


@each_case("slot", [1, 3, 7, 20])
def test_rows_come_back_to_where_they_were(slot: int) -> None:
    """On the way each device has all rows of its experts, each once, sorted by expert."""
    rows, table, number_of = drawn(slot)
    back = [torch.zeros_like(r) for r in rows]
    seen = torch.zeros(EXPERTS, dtype=torch.int64)
    for number in range(number_of):
        came = exchanged(
            [rounds._send(r, Round(table, k, slot, number)) for k, r in enumerate(rows)]
        )
        taken = [rounds._take(c, Round(table, k, slot, number)) for k, c in enumerate(came)]
        seen += torch.cat([counts for _, counts in taken])
        for k, (mine, counts) in enumerate(taken):
            for local, own in enumerate(mine[: counts.sum()].split(counts.tolist())):
                assert all(is_of(rows, table, row, 2 * k + local) for row in own)
        home = exchanged(
            [rounds._give(mine, Round(table, k, slot, number)) for k, (mine, _) in enumerate(taken)]
        )
        for k, total in enumerate(back):
            total += rounds._home(home[k], Round(table, k, slot, number), len(total))
    assert torch.equal(seen, table.sum(0))
    assert all(torch.equal(a, b) for a, b in zip(back, rows, strict=True))


def is_of(rows: list[Tensor], table: Tensor, row: Tensor, expert: int) -> bool:
    """Whether a row is one of those for an expert, of any device."""
    blocks = (r.split(counts.tolist())[expert] for r, counts in zip(rows, table, strict=True))
    return any(bool((block == row).all(1).any()) for block in blocks)


def test_a_row_lost_or_doubled_would_be_seen() -> None:
    """The control: with the table of another device, rows do not come back."""
    rows, table, _ = drawn(20)
    wrong = table.flip(0)
    came = exchanged([rounds._send(r, Round(table, k, 20)) for k, r in enumerate(rows)])
    taken = [rounds._take(c, Round(wrong, k, 20))[0] for k, c in enumerate(came)]
    home = exchanged([rounds._give(mine, Round(table, k, 20)) for k, mine in enumerate(taken)])
    assert not all(
        torch.equal(rounds._home(h, Round(table, k, 20), len(r)), r)
        for k, (h, r) in enumerate(zip(home, rows, strict=True))
    )


def filled(messages: Tensor, table: Tensor, place: int, came: bool = False) -> Tensor:
    """The rows of messages that somebody reads: those that a device sends, or those that come in."""
    totals = table.view(DEVICES, DEVICES, -1).sum(2)
    counts = (totals[:, place] if came else totals[place]).clamp(max=messages.shape[1])
    return torch.cat([m[:count] for m, count in zip(messages, counts.tolist(), strict=True)])


@each_case("slot", [2, 9])
def test_gradients_go_the_way_back(slot: int) -> None:
    """Those of round 0, by inner products: <send x, y> = <x, its gradient of y> where places are filled."""
    rows, table, _ = drawn(slot)
    for place, own in enumerate(rows):
        x = own.clone().requires_grad_()
        sent = experts_send(x, table, place, slot)
        tangent = torch.randn_like(sent)
        (grad,) = torch.autograd.grad(sent, x, tangent)
        assert torch.equal(grad, experts_home(tangent, table, place, len(x)))
        assert torch.allclose(
            (grad * own).sum(), (filled(tangent, table, place) * filled(sent, table, place)).sum()
        )
        back = torch.randn_like(sent).requires_grad_()
        (grad,) = torch.autograd.grad(experts_home(back, table, place, len(x)), back, own)
        assert torch.equal(
            filled(grad, table, place), filled(experts_send(own, table, place, slot), table, place)
        )
        mine = experts_take(back, table, place)[0]
        tangent = torch.randn_like(mine)
        (grad,) = torch.autograd.grad(mine, back, tangent)
        grad, given = (
            filled(grad, table, place, True),
            filled(experts_give(tangent, table, place), table, place, True),
        )
        assert torch.equal(grad, given)
        assert torch.allclose(
            (grad * filled(back, table, place, True)).sum(), (tangent * mine).sum()
        )


def message(counts: Tensor, first: int, places: int, dtype: torch.dtype) -> Tensor:
    """A message of rows that all differ, of so many that each device has from its row `first` on; others are NaN."""
    numbers = torch.full((DEVICES, places, WIDTH), torch.nan, dtype=dtype)
    for device, count in enumerate(counts.tolist()):
        filled_places = max(0, min(count - first, places))
        numbers[device, :filled_places] = (
            32 * device + torch.arange(1.0, filled_places + 1)[:, None]
        )
    return numbers


@each_case("slot", [2, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_behind_the_last_group_and_rows_that_were_not_sent_are_zeros(
    slot: int, dtype: torch.dtype
) -> None:
    """Whatever the places of a message hold that nobody filled; in further rounds with fewer places, too."""
    rows, table, number_of = drawn(slot)
    for number, places in [(0, slot), (1, slot), (1, slot - 1)][: 1 + 2 * (number_of > 1)]:
        came = message(table[:, :2].sum(1), number * slot, places, dtype)
        trade = Round(table, 0, slot, number, places)
        taken, counts = trades.take(came, trade)
        own = int(counts.sum())
        assert not taken[own:].any()
        wanted = came[~came[..., 0].isnan()]
        assert torch.equal(taken[:own].sort(0).values, wanted.sort(0).values)
        given = trades.give(taken, trade)
        assert torch.equal(trades.take(given, trade)[0], taken)
        totals = table[0].view(DEVICES, 2).sum(1)
        back = message(totals, number * slot, places, dtype)
        home = trades.home(back, trade, len(rows[0]))
        for device, part in enumerate(home[:, 0].split(totals.tolist())):
            sent_rows = back[device, :, 0][: max(0, len(part) - number * slot)]
            before = min(number * slot, len(part))
            assert not part[:before].any() and not part[before + places :].any()
            assert torch.equal(part[before : before + places], sent_rows)
        all_places = trades.send(rows[0], Round(table, 0, slot, number))
        fewer = trades.send(rows[0], trade)
        assert torch.equal(fewer, all_places[:, :places])


CALLS: dict[str, Any] = {
    "experts_send": lambda rows, table: (rows, table, 1, 4),
    "experts_home": lambda rows, table: (rows.new_ones(DEVICES, 4, WIDTH), table, 1, len(rows)),
    "experts_take": lambda rows, table: (rows.new_ones(DEVICES, 4, WIDTH), table, 1),
    "experts_give": lambda rows, table: (rows.new_ones(DEVICES * 4, WIDTH), table, 1),
    "experts_drop": lambda rows, table: (
        torch.arange(TOKENS * TOP).view(-1, TOP) % EXPERTS,
        EXPERTS,
        DEVICES,
        4,
    ),
    "experts_checked": lambda rows, table: (table, 100, 1.25, 1, 3.0),
}


@each_case("name", CALLS)
def test_fake_results_look_like_real_ones_and_memory_is_counted(name: str) -> None:
    rows, table, _ = drawn(4)
    op, args = getattr(torch.ops.piper, name).default, CALLS[name](rows[1], table)
    real, fake = op(*args), op(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
    direct = DIRECT[op](*args)
    for a, b, c in zip(
        *(made if isinstance(made, tuple) else (made,) for made in (real, fake, direct)),
        strict=True,
    ):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        if name in ("experts_send", "experts_give"):
            a, c = (filled(made, table, 1, name == "experts_give") for made in (a, c))
        assert torch.equal(a, c)
    assert cpu_workspace(op, args, real) == peak_bytes_inside(OP_KERNELS[op], *args)


def test_the_last_tokens_are_dropped_first() -> None:
    """Two devices with two experts each, and places for three choices of each."""
    chosen = torch.tensor([[0, 2], [1, 0], [3, 2], [0, 3]])
    assert experts_drop(chosen, 4, 2, 3).tolist() == [[0, 2], [1, 0], [3, 2], [4, 4]]
    assert torch.equal(experts_drop(chosen, 4, 2, 4), chosen)


def test_too_few_places_say_what_would_do() -> None:
    """Of two rows with four tokens for each of two devices, seven go to one: four in a row at most, so a bound of
    1.34."""
    table = torch.tensor([[5, 2, 1, 0], [2, 2, 2, 2]])
    assert torch.equal(experts_checked(table, 8, 1.25, 2, 3.0), table)
    with pytest.raises(
        ExpertsOverflow, match=r"has 7 rows .* bound=1 has places for 6; bound=1.34 would do"
    ):
        experts_checked(table, 6, 1.0, 2, 3.0)


def test_further_rounds_are_no_ops_of_their_own() -> None:
    with pytest.raises(RuntimeError, match=r"run by the engine"):
        rounds.experts_return(
            torch.ones(1, 1, 1), *[torch.ones(1, 1)] * 3, [], "", "ep", "", 1, 0, [0, 0, 0]
        )


def test_gradients_take_the_room_that_their_runs_hold() -> None:
    """The first gradients are counted from further ones; here they run themselves."""

    def run(given: list[Tensor]) -> tuple[Tensor, ...]:
        return ((given[0] @ given[2].sum(0)).relu(),)

    body = rounds.ExpertBody(run, any_rows=False)
    on_meta = partial(torch.empty, device="meta")
    rows, back = on_meta((24, WIDTH)), on_meta((DEVICES, 5, WIDTH))
    table, weights = on_meta((DEVICES, EXPERTS), dtype=torch.int64), [on_meta((2, WIDTH, WIDTH))]
    grad, how = on_meta((24, WIDTH)), (rows, table, table, weights, body, "ep", "", 5, 0, (0,) * 5)

    def held(run: Callable[..., object], *more: object) -> int:
        live = Live([grad, rows, table, *weights])
        with live, torch.no_grad():
            run(lambda kind, axis, sent: torch.empty_like(sent), grad, *how, *more)
        return live.most

    room = room_of_rounds(rows, back, table, table, weights, body, [True])
    assert room[1] == held(rounds.run_return_dgrad) > room[3] > 0
    assert room[2] == held(rounds.run_return_wgrad, [True]) > room[4] > 0
