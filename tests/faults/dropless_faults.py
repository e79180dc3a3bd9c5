"""Faults in how devices trade the rows of a dropless mixture. tests/faults/mutants.py tries them on the case "steered".

Nothing is captured anew for them: all are in what ops do while a step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from piper_ops import DIRECT, grouped_mm_wgrad_, unroute
from piper_ops.experts import rounds, trades
from tests.faults.job_faults import JobFault, Judged
from tests.helpers import compositions
from tests.helpers.compositions import Composition
from tests.helpers.steered import DEVICES


def counts_transposed() -> AbstractContextManager[Any]:
    """What device s has for device d is taken for what d has for s."""
    right = trades._received

    def received(trade: trades.Round, places: int) -> Any:
        swapped = trade.table.view(DEVICES, DEVICES, -1).transpose(0, 1)
        return right(replace(trade, table=swapped.reshape(trade.table.shape)), places)

    return patch.object(trades, "_received", received)


def a_round_lost() -> AbstractContextManager[Any]:
    """The last round is not run."""
    right = rounds.round_count
    return patch.object(rounds, "round_count", lambda table, slot: max(1, right(table, slot) - 1))


def rows_of_the_round_before() -> AbstractContextManager[Any]:
    """In further rounds a device sends the rows of the round before."""
    right = rounds._send

    def sent(rows: Tensor, trade: trades.Round) -> Tensor:
        return right(rows, replace(trade, number=max(0, trade.number - 1)))

    return patch.object(rounds, "_send", sent)


def results_of_another_device() -> AbstractContextManager[Any]:
    """What comes back is taken for that of the device which has the same place from behind."""
    right = rounds._add_home
    return patch.object(rounds, "_add_home", lambda back, *rest: right(back.flip(0), *rest))


def rows_left_by_expert() -> AbstractContextManager[Any]:
    """Results go back sorted by expert, and not in the order in which their rows came."""
    return patch.object(rounds, "_give", lambda made, *_: made.view(DEVICES, -1, made.shape[1]))


def combined_without_shares() -> AbstractContextManager[Any]:
    """The experts of a token count alike."""
    right = DIRECT[unroute]
    return patch.dict(
        DIRECT, {unroute: lambda rows, chosen, share: right(rows, chosen, share * 0 + 0.5)}
    )


def experts_without_tokens_keep_what_was_there() -> AbstractContextManager[Any]:
    """The gradient of an expert without tokens is not zero."""
    right = DIRECT[grouped_mm_wgrad_]

    def wgrad(rows: Tensor, counts: Tensor, grad: Tensor, total: Tensor) -> Tensor:
        total[counts == 0] += 0.5
        return right(rows, counts, grad, total)

    return patch.dict(DIRECT, {grouped_mm_wgrad_: wgrad})


def rows_without_further_gradients() -> AbstractContextManager[Any]:
    """The gradient of rows lacks that of further rounds."""
    return patch.dict(rounds.ROUNDS, {rounds.experts_further_dgrad_: lambda *a: a[-1]})


def matrices_without_further_gradients() -> AbstractContextManager[Any]:
    """The gradients of the experts' matrices lack those of further rounds."""
    return patch.dict(rounds.ROUNDS, {rounds.experts_further_wgrad_: lambda *a: a[-1]})


FAULTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    fault.__name__: fault
    for fault in (
        counts_transposed, a_round_lost, rows_of_the_round_before, results_of_another_device, rows_left_by_expert,
        combined_without_shares, experts_without_tokens_keep_what_was_there, rows_without_further_gradients,
        matrices_without_further_gradients,
    )
}  # fmt: skip


def _of_rows(name: str) -> JobFault:
    def fault(c: Composition) -> Judged | None:
        if c.model != "steered":
            return None
        whole = compositions.expected(c)  # before: one device runs some of the same ops
        with FAULTS[name]():
            return compositions.run(c), whole

    fault.__name__ = name
    fault.__doc__ = FAULTS[name].__doc__
    return fault


DROPLESS: tuple[JobFault, ...] = tuple(map(_of_rows, FAULTS))
