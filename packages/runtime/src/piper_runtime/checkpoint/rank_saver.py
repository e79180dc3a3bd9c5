"""Save a rank's share of checkpoints while it trains: copy at the end of a step, write in a thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue

import torch

from piper_runtime.checkpoint.host_copies import HostCopies
from piper_runtime.checkpoint.rank_file import Contents, SaveDone, rank_file, write_boxes
from piper_runtime.checkpoint.rank_tensors import (
    group_settings,
    optimizer_numbers,
    plain_settings,
    rank_tensors,
    saved_portion,
    step_counters,
)
from piper_runtime.checkpoint.settings import Checkpoints, partial_folder
from piper_runtime.rank.binding.rank_state import RankState

NICENESS = 10
"""The niceness of the thread that writes, which takes the processor from training as little as can be."""
LOOK_S = 0.05
"""The seconds between two looks at how far a write is, while a rank waits for it."""


class RankSaver:
    """Save the share of one rank; no rank waits for another.

    `tell` takes a `SaveDone` for each checkpoint, from another thread. `beat` is called with the number of boxes that
    are written, whenever the rank waits for a write, so that a watch sees progress.
    """

    def __init__(
        self,
        rank: RankState,
        checkpoint: Checkpoints,
        tell: Callable[[SaveDone], object],
        beat: Callable[[int], None] | None = None,
    ):
        self._rank, self._checkpoint, self._tell = rank, checkpoint, tell
        self._beat = beat
        self._portion = saved_portion(rank.plan, rank.rank)
        self._copies = HostCopies(rank.device)
        if rank.device.type == "cuda":
            rank.before_update = self._copies.hold
        self._work: SimpleQueue[tuple[SaveDone, Contents] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(
            target=self._write_all, name="piper checkpoint", daemon=True
        )
        self._thread.start()
        self._written = 0
        self._last = -1
        self._error: BaseException | None = None

    def step_done(self, done: int) -> None:
        """Save if a checkpoint is due now that so many steps are done."""
        if self._checkpoint.due(done):
            self._save(done)

    def finish(self, done: int) -> None:
        """Save the end of the run, unless that is done, and wait until everything is written."""
        if self._last != done:
            self._save(done)
        self._wait()
        self.close()

    def close(self) -> None:
        """Wait until nothing is written any more, and ignore errors of writes: the run has failed already."""
        self._work.put(None)
        self._thread.join()

    def _save(self, done: int) -> None:
        self._wait()  # its copies are still being written
        rank, portion, began = self._rank, self._portion, time.perf_counter()
        with torch.no_grad():
            states = list(rank_tensors(rank, portion))
            copying = time.perf_counter()
            copies = self._copies.copy(states)
        copied_s = time.perf_counter() - copying
        report = SaveDone(
            rank.rank, done, numbers=optimizer_numbers(rank, portion), counters=step_counters(rank, portion),
            optimizer=rank.optimizer.kinds, groups=group_settings(rank.optimizer.groups),
            schedule=plain_settings(rank.optimizer.schedule_state), copied_s=copied_s,
            loss_scale=rank.scale_state,
        )  # fmt: skip
        contents = [(copy, state.ranges) for copy, state in zip(copies, states, strict=True)]
        self._last = done
        self._idle.clear()
        self._work.put((replace(report, blocked_s=time.perf_counter() - began), contents))
        if not self._checkpoint.asynchronous:
            self._wait()

    def _write_all(self) -> None:
        with suppress(
            OSError
        ):  # on Linux a thread has a priority of its own; elsewhere it stays as it is
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (task := self._work.get()) is not None:
            try:
                self._write(*task)
            except BaseException as e:  # a mistake, which the rank raises as its own
                self._error = e
            self._idle.set()

    def _write(self, report: SaveDone, contents: Contents) -> None:
        try:
            self._copies.settle()
            folder = self._checkpoint.path / partial_folder(report.step)
            folder.mkdir(exist_ok=True)
            boxes, size = write_boxes(folder / rank_file(report.rank), contents, self._count)
            report = replace(report, boxes=boxes, nbytes=size)
        except (OSError, RuntimeError) as e:  # torch has its own class for a disk that is full
            report = replace(report, problem=f"rank {report.rank}: {e}")
        self._tell(report)

    def _count(self) -> None:
        self._written += 1

    def _wait(self) -> None:
        """Block until the write that goes on, if there is one, has ended; raise its error."""
        while not self._idle.wait(LOOK_S):
            if self._beat is not None:
                self._beat(self._written)
        if self._error is not None:
            raise self._error
