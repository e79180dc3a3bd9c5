"""A profile exchanges something between two steps wherever a run does, so that steps take what they take in a run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import torch.distributed as dist

from packages.runtime.tests.chains import chain
from packages.runtime.tests.handmade import CODE
from piper_ir.ops import COMM
from piper_ir.plan_bytes import PlanBytes
from piper_runtime.launch import rank_job
from piper_runtime.profile import measure_messages, profiler
from piper_runtime.profile.device_clocks import HostClock
from piper_runtime.profile.measure_messages import MOST_BETWEEN, Messages
from piper_runtime.rank import Rank, materialize
from piper_runtime.rank.device import CPU
from piper_runtime.transport.gloo import GlooCommunicators

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
    assert [call.args[0] for call in between.between.call_args_list] == [traffic.message_bytes(p.op, p) for p in parts]
    assert len(list(profiler._clocked(bound, None, None))) == len(clocked) - len(parts), "a device's host runs ahead of it"
