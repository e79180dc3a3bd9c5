"""A profile exchanges something between two steps wherever a run does, so that steps take what they take in a run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist

from packages.runtime.tests.chains import chain
from packages.runtime.tests.handmade import CODE
from piper_ir.ground.mesh import Mesh
from piper_ir.plan.plan_bytes import PlanBytes
from piper_ir.program.ops import COMM
from piper_ops.experts import trades
from piper_runtime.launch import rank_job
from piper_runtime.profile import measure_messages, profiler
from piper_runtime.profile.device_clocks import HostClock
from piper_runtime.profile.measure_messages import MOST_BETWEEN, Messages
from piper_runtime.rank import Rank, materialize
from piper_runtime.rank.values.device import CPU
from piper_runtime.transport.gloo import GlooCommunicators
from tests.helpers.cases import each_case

BYTES = (256, 4 * MOST_BETWEEN, 256, MOST_BETWEEN)


def messages(rank: int, world: int, store: Any) -> Messages:
    return Messages(rank, world, GlooCommunicators(store, rank), HostClock(), CPU, lambda: None)


def test_all_ranks_exchange_messages_of_a_size_that_is_bounded() -> None:
    store = dist.HashStore()

    def exchanged(rank: int) -> list[Any]:
        of = messages(rank, 2, store)
        runs = [of.between(nbytes) for nbytes in BYTES]
        for run in runs:
            run()
        return runs

    with ThreadPoolExecutor(2) as threads:
        for runs in threads.map(exchanged, range(2)):
            assert runs[0] is runs[2], "messages of one size share their memory"
            assert runs[1] is runs[3], "none is longer than the longest"
            assert runs[0] is not runs[1]


def test_a_rank_without_others_exchanges_nothing() -> None:
    assert messages(0, 1, dist.HashStore()).between(256) is measure_messages._nothing


def test_passes_exchange_as_many_bytes_as_the_run_wherever_it_communicates() -> None:
    plan, job = chain(pp=1, dp=2, zero=3)
    initial = materialize(job)
    bound, between = Rank(plan, 0, CODE, rank_job(job), initial.params, initial.buffers), Mock()
    clocked = list(profiler._clocked(bound, None, between))
    keys = [key for key, run in clocked if run is between.between.return_value]
    parts = [p for instr in plan.role_of(0).program for p in instr.parts if isinstance(p.op, COMM)]
    traffic = PlanBytes(plan)
    assert parts and keys == [None] * len(parts), "no time of a message counts as a step's"
    assert [call.args[0] for call in between.between.call_args_list] == [
        traffic.message_bytes(p.op, p) for p in parts
    ]
    assert len(list(profiler._clocked(bound, None, None))) == len(clocked) - len(parts), (
        "a device's host runs ahead of it"
    )


@each_case("total", [16, 18, 21])
def test_experts_are_measured_with_as_many_rows_as_on_average(total: int) -> None:
    counts = torch.tensor([total, 0, 0, 0, 0, 0, 0, 0])
    even = profiler._evenly(counts, 4)
    assert (
        even.dtype == counts.dtype
        and int(even.sum()) == total
        and int(even.max() - even.min()) <= 1
    )
    by_device = even.view(4, 2).sum(1)
    assert int(by_device.max() - by_device.min()) <= 1


@each_case("counts", [[20, 0, 0, 0], [0, 0, 0, 20], [5, 4, 1, 10], [0, 0, 10, 10]])
@each_case("further", [False, True])
def test_a_profile_computes_with_numbers_whatever_tokens_choose(
    counts: list[int], further: bool
) -> None:
    """Places that no device fills are no numbers, here as torch fills memory for deterministic algorithms."""
    plan: Any = Mock(chunks=[Mock(experts="ep")], mesh=Mesh(ep=2))
    exchange: Any = partial(profiler._copied, plan)
    slot, rows = 6 if further else 13, torch.ones(20, 3)
    torch.use_deterministic_algorithms(True)
    try:
        table = exchange("all_gather", "ep", torch.tensor(counts))
        trade = trades.Round(table, 0, slot)
        came = exchange("all_to_all", "ep", trades.send(rows, trade))
        there, own = trades.take(came, trade)
        back = exchange("all_to_all", "ep", trades.give(there, trade))
        home = trades.home(back, trade, 20)
    finally:
        torch.use_deterministic_algorithms(False)
    assert table.tolist() == [[5, 5, 5, 5]] * 2 and int(own.sum()) == min(20, 2 * slot)
    assert home.isfinite().all() and int(home.sum()) == 3 * int(own.sum())
