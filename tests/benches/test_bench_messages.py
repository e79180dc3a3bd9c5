"""The measurement of messages ends when one of its processes does."""

from __future__ import annotations

import os
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest

from benchmarks.messages import received


def test_a_rank_that_dies_ends_the_others() -> None:
    context = get_context("fork")
    receive, send = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=time.sleep, args=(60,)),
        context.Process(target=os._exit, args=(3,)),
    ]
    for process in ranks:
        process.start()
    with pytest.raises(RuntimeError, match="before they had measured: rank 1 with exit code 3;"):
        received(receive, ranks)
    send.close()
    ranks[0].join(10)
    assert ranks[0].exitcode is not None and ranks[0].exitcode < 0


def test_a_rank_that_is_done_first_is_no_failure() -> None:
    context = get_context("fork")
    receive, send = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=os._exit, args=(0,)),
        context.Process(target=_send_late, args=(send,)),
    ]
    for process in ranks:
        process.start()
    assert received(receive, ranks) == "measured"
    for process in ranks:
        process.join()


def _send_late(pipe: Connection[Any, Any]) -> None:
    time.sleep(0.2)
    pipe.send("measured")
