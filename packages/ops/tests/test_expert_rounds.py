"""Rows go to the devices of their experts and come back, in as many rounds as they need, and lose nothing on the
way."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from piper_ops import (
    DIRECT,
    OP_KERNELS,
    TRADES,
    Cuts,
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
from piper_ops.experts import rounds, trades
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
        came = exchanged([rounds._send(r, table, k, slot, number) for k, r in enumerate(rows)])
        taken = [rounds._take(c, table, k, number) for k, c in enumerate(came)]
        seen += torch.cat([counts for _, counts in taken])
        for k, (mine, counts) in enumerate(taken):
            for local, own in enumerate(mine[: counts.sum()].split(counts.tolist())):
                assert all(is_of(rows, table, row, 2 * k + local) for row in own)
        home = exchanged(
            [rounds._give(mine, table, k, number) for k, (mine, _) in enumerate(taken)]
        )
        for k, total in enumerate(back):
            total += rounds._home(home[k], table, k, len(total), number)
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
    came = exchanged([rounds._send(r, table, k, 20, 0) for k, r in enumerate(rows)])
    taken = [rounds._take(c, wrong, k, 0)[0] for k, c in enumerate(came)]
    home = exchanged([rounds._give(mine, table, k, 0) for k, mine in enumerate(taken)])
    assert not all(
        torch.equal(rounds._home(h, table, k, len(r), 0), r)
        for k, (h, r) in enumerate(zip(home, rows, strict=True))
    )


def filled(messages: Tensor, table: Tensor, place: int, came: bool = False) -> Tensor:
    """The rows of messages that somebody reads: those that a device sends, or those that come in."""
    totals = table.view(DEVICES, DEVICES, -1).sum(2)
    counts = (totals[:, place] if came else totals[place]).clamp(max=messages.shape[1])
    return torch.cat([m[:count] for m, count in zip(messages, counts.tolist(), strict=True)])


@each_case("slot", [2, 9])
def test_gradients_go_the_way_back(slot: int) -> None:
    """Those of round 0, by finite inner products: <send x, y> = <x, its gradient of y> where places are filled."""
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


@each_case("slot", [1, 3, 7, 20])
def test_blocks_are_what_picked_rows_are(slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU picks rows by their numbers, a CPU copies blocks; in further rounds with fewer places, too."""
    rows, table, number_of = drawn(slot)
    for number, places in [
        (number, places) for number in range(number_of) for places in {slot, max(1, slot - 2)}
    ]:
        for place, own in enumerate(rows):
            found = []
            for counted in (True, False):
                monkeypatch.setattr(trades, "counted", lambda _, counted=counted: counted)
                sent = trades.send(own, table, place, slot, number, places)
                full = torch.randn(
                    sent.shape, dtype=sent.dtype, generator=torch.Generator().manual_seed(number)
                )
                taken, counts = trades.take(full, table, place, number, slot)
                given = trades.give(taken, table, place, number, slot, places)
                found.append(
                    (
                        taken[: counts.sum()],
                        counts,
                        trades.home(sent, table, place, len(own), number, slot),
                    )
                )
                again = trades.take(given, table, place, number, slot)[0]
                assert torch.equal(again[: counts.sum()], taken[: counts.sum()])
            if places == slot:
                assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def traded(slot: int, lost: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return what each device has in round 0, how many rows each expert has, and what comes back, in messages cut to
    the rows."""
    rows, table, _ = drawn(slot)
    all_given: dict[int, tuple[Tensor, Cuts]] = {}
    there, found = threading.Barrier(DEVICES), dict[int, tuple[Tensor, Tensor, Tensor]]()

    def run(place: int) -> None:
        def exchange(kind: str, axis: str, given: Tensor, cuts: Cuts) -> Tensor:
            all_given[place] = given, cuts
            there.wait()
            parts = [
                g[: sum(c.sent)].split(list(c.sent))[place]
                for g, c in (all_given[k] for k in range(DEVICES))
            ]
            assert [len(part) for part in parts] == list(cuts.got)
            cuts.into[: sum(cuts.got)] = torch.cat(parts)
            there.wait()
            return cuts.into

        mine, counts = TRADES["there"](exchange, "ep", rows[place], table, place, slot)
        box = [mine.roll(lost, 0)]
        found[place] = (
            mine,
            counts,
            TRADES["back"](exchange, "ep", box, table, place, len(rows[place])),
        )
        assert not box

    threads = [threading.Thread(target=run, args=(place,)) for place in range(DEVICES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[place] for place in range(DEVICES)]


@each_case("slot", [1, 3, 7, 20])
def test_messages_cut_to_the_rows_bring_what_whole_ones_bring(slot: int) -> None:
    """Also where some rows must wait for a further round; the control puts rows into other places before they go
    back."""
    rows, table, _ = drawn(slot)
    came = exchanged([trades.send(r, table, k, slot, 0) for k, r in enumerate(rows)])
    taken = [trades.take(c, table, k, 0) for k, c in enumerate(came)]
    back = exchanged([trades.give(mine, table, k, 0) for k, (mine, _) in enumerate(taken)])
    home = [trades.home(b, table, k, len(rows[k]), 0) for k, b in enumerate(back)]
    for (mine, counts, came_back), (wanted, of), at_home in zip(
        traded(slot), taken, home, strict=True
    ):
        assert (
            torch.equal(mine, wanted)
            and torch.equal(counts, of)
            and torch.equal(came_back, at_home)
        )
    assert not all(
        torch.equal(wrong[2], right)
        for wrong, right in zip(traded(slot, lost=1), home, strict=True)
    )


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
            torch.ones(1, 1, 1), torch.ones(1, 1), torch.ones(1, 1), [], "", "ep", 1, 0, [0, 0, 0]
        )
