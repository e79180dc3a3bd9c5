"""Kill workers of a run at chosen or random instants: before their first step, in a step, or while they save."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from packages.runtime.tests.handmade import adamw, batch
from piper_runtime.checkpoint import host_snapshots, rank_saver
from piper_runtime.checkpoint.restoring import read_range
from piper_runtime.checkpoint.saved_run import open_checkpoint
from piper_runtime.checkpoint.settings import complete_checkpoints

Instant = Literal["start", "step", "save", "copy"]


@dataclass(frozen=True)
class Kill:
    """One kill of a rank.

    It comes at its start, some seconds after its first step began, or in its n-th write of a checkpoint or copy of its
    state to memory.
    """

    rank: int
    instant: Instant
    after: float = 0.0


SAVING: tuple[Instant, ...] = ("save", "step", "step", "save", "step", "start")
COPYING: tuple[Instant, ...] = ("copy", "step", "copy", "step", "save", "copy", "step", "start")


def random_kills(
    seed: int, count: int, world: int, most_s: float, instants: Sequence[Instant] = SAVING
) -> list[Kill]:
    """Kills at random instants: a third of them in a save, or in a copy, a few at the start."""
    chance = random.Random(seed)
    kinds = [instants[n % len(instants)] for n in range(count)]
    return [
        Kill(
            chance.randrange(world),
            k,
            chance.randrange(3) if k in ("save", "copy") else chance.uniform(0, most_s),
        )
        for k in kinds
    ]


class Killer:
    """Batch function and optimizer of a job whose workers are killed: the n-th attempt of a run by the n-th kill.

    `attempt`, to be called when an attempt has failed, says in `folder` which one comes next. `log` there gets a line
    for every kill, with its time.
    """

    def __init__(self, folder: Path, kills: Sequence[Kill], pause_s: float = 0.0) -> None:
        self.folder, self.kills, self.pause_s = folder, list(kills), pause_s
        self._launcher = os.getpid()
        self._number = folder / "attempt"
        self.attempts = 0
        self._armed = False
        folder.mkdir(exist_ok=True)
        self._number.write_text("0")

    def attempt(self, *_: Any) -> None:
        self.attempts += 1
        self._number.write_text(str(self.attempts))

    def done(self) -> list[tuple[Kill, float]]:
        """The kills that were done, each with its instant on the machine's clock."""
        lines = (
            (self.folder / "log").read_text().splitlines() if (self.folder / "log").exists() else []
        )
        return [(self.kills[int(n)], float(at)) for n, at in (line.split() for line in lines)]

    def batch(self, step: int, rows: range) -> Any:
        if not self._armed:
            self._armed = True
            self._arm()
        time.sleep(self.pause_s)
        return batch(step, rows)

    def optimizer(self, named: Any) -> torch.optim.Optimizer:
        kill = self._mine()
        if kill is not None and kill.instant == "start":
            self._die()
        return adamw(named)

    def _mine(self) -> Kill | None:
        """The kill of this attempt if it is meant for this process."""
        if os.getpid() == self._launcher or not sys.argv[1:] or not sys.argv[1].startswith("{"):
            return None
        number, rank = int(self._number.read_text()), json.loads(sys.argv[1])["rank"]
        return (
            self.kills[number]
            if number < len(self.kills) and self.kills[number].rank == rank
            else None
        )

    def _arm(self) -> None:
        kill = self._mine()
        if kill is None:
            return
        if kill.instant == "step":
            threading.Timer(kill.after, self._die).start()
        if kill.instant == "save":
            rank_saver.write_boxes = _dying(int(kill.after), self._die)
        if kill.instant == "copy":
            host_snapshots.copy_states = _dying_in_copy(int(kill.after), self._die)

    def _die(self) -> None:
        with (self.folder / "log").open("a") as log:
            log.write(f"{self._number.read_text()} {time.monotonic()!r}\n")
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def _dying(skipped: int, die: Callable[[], None]) -> Any:
    """The function that writes a rank's share, which dies in its middle, after it was called a few times."""
    write, calls = rank_saver.write_boxes, list[int]()

    def dying(path: Path, contents: Any, wrote: Callable[[], None] = lambda: None) -> Any:
        calls.append(1)
        if len(calls) > skipped and not any(ranges for _, ranges in contents):
            die()  # another rank writes all that it has
        return write(path, contents, wrote if len(calls) <= skipped else die)

    return dying


def _dying_in_copy(skipped: int, die: Callable[[], None]) -> Any:
    """The function that copies a rank's state to memory, which dies in its middle, after it was called a few times."""
    copy, calls = host_snapshots.copy_states, list[int]()

    def dying(slots: Any, states: Any) -> None:
        calls.append(1)
        half = len(slots) // 2 if len(calls) > skipped else len(slots)
        copy(slots[:half], states[:half])
        if len(calls) > skipped:
            die()

    return dying


def read_all(folder: Path) -> int:
    """Read every tensor of every complete checkpoint of a folder; return how many checkpoints there are."""
    found = complete_checkpoints(folder)
    for path in found.values():
        for tensor in open_checkpoint(path).tensors.values():
            numel = torch.Size(tensor.shape).numel()
            assert read_range(path, tensor, 0, numel).numel() == numel
    return len(found)
