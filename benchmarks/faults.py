"""Measure the seconds from the instant at which a worker is killed or raises until the launcher knows of it.

The worker itself writes down that instant.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks import noop
from benchmarks.measure import Goal, Row, extremes_row
from piper_ir.ground.errors import ExecutionError
from piper_runtime.launch import Failure, execute, open_pool

KINDS = ("kill", "raise")
STEP = 3
"""In which a rank fails, while it loads a microbatch."""
TIMEOUT_S = 60.0
"""Of the watch; only a hang may take as long."""
NOTICED = Goal("below", 1.0)


@dataclass(frozen=True)
class Poll:
    """Hold one wait of the watch for its workers: from and to, for at most `seconds`.

    Times are by the clock that all processes of this machine share.
    """

    begin: float
    end: float
    seconds: float

    @property
    def ran_out(self) -> bool:
        return self.end - self.begin >= self.seconds


@dataclass(frozen=True)
class Notice:
    """Say when a rank failed, and which polls ended afterwards; the last brought the news.

    `text` is what the user was told.
    """

    rank: int
    fault: float
    polls: tuple[Poll, ...]
    text: str

    @property
    def seconds(self) -> float:
        return self.polls[-1].end - self.fault


def rows(quick: bool) -> Iterator[Row]:
    """Return the rows of both launchers, on this machine; the goal is for the slowest."""
    repeats = 2 if quick else 10
    for launcher in ("processes",) if quick else ("processes", "ray"):
        with open_pool(launcher, 2) as pool:
            for kind in KINDS:
                seconds = [notice(pool, kind).seconds for _ in range(repeats)]
                note = f"{repeats} runs; low and high are the extremes; the goal is for the highest"
                row = extremes_row("faults", f"{launcher}, {kind}", seconds, "s", NOTICED, note)
                yield replace(row, judged=max(seconds))


def notice(pool: Any, kind: str) -> Notice:
    """Run a plan of two ranks in which one fails; it must end with an ExecutionError."""
    plan = noop.plan(2, 2, 4)
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder, "mark")
        team, polls = pool.start(), list[tuple[Poll, list[tuple[int, Any]]]]()
        pids, team.wait = pool.pids, _recorded(team.wait, polls)
        try:
            job = replace(noop.job(plan), batch=_failing(kind, str(mark)))
            execute(
                plan,
                noop.CODE,
                job,
                steps=1000,
                launcher="processes",
                pool=pool,
                timeout_s=TIMEOUT_S,
            )
        except ExecutionError as e:
            text = str(e)
        else:
            raise AssertionError("a rank failed, and nobody noticed")
        pid, instant = mark.read_text().split()
    rank, fault = pids.index(int(pid)), float(instant)
    last = next(
        i
        for i, (_, said) in enumerate(polls)
        if any(r == rank and _is_end(message) for r, message in said)
    )
    return Notice(rank, fault, tuple(p for p, _ in polls[: last + 1] if p.end > fault), text)


def _is_end(message: Any) -> bool:
    return message is None or isinstance(message, Failure)


def _recorded(
    wait: Callable[..., Any], polls: list[tuple[Poll, list[tuple[int, Any]]]]
) -> Callable[..., Any]:
    def recorded(ranks: Collection[int], seconds: float) -> list[tuple[int, Any]]:
        begin = time.monotonic()
        said: list[tuple[int, Any]] = wait(ranks, seconds)
        polls.append((Poll(begin, time.monotonic(), seconds), said))
        return said

    return recorded


def _failing(kind: str, mark: str) -> Callable[[int, range], tuple[Tensor, Tensor]]:
    """Return a batch function that fails in one process, which notes its id and the time before."""

    def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
        if step == STEP and _first(mark):
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a fault")
        return noop.batch(step, rows)

    return batch


def _first(mark: str) -> bool:
    """Return whether no other process has been here; then its id and the time are in the file."""
    try:
        with open(mark, "x", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {time.monotonic()!r}")
    except FileExistsError:
        return False
    return True
