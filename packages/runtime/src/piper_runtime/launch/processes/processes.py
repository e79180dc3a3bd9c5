"""Run one process per rank on this machine, communicating with gloo over loopback, and watch over them."""

from __future__ import annotations

import mmap
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing import connection as mp
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from piper_ir.ground.errors import ExecutionError
from piper_runtime.engine.streams import HEART_SLOTS, LAST_STEP, STEP
from piper_runtime.launch.ground.protocol import Setup
from piper_runtime.launch.ground.watch import LOADING_HEART, STARTUP_S
from piper_runtime.launch.processes.forking import HOW_UNKNOWN, ForkedProcess, fork_worker
from piper_runtime.launch.processes.pool import TeamPool


@dataclass
class _Worker:
    process: ForkedProcess
    pipe: Connection[Any, Any]
    lifeline: int


@dataclass
class _Team:
    """Hold running workers with the files that they share; they end with `end`, at the latest when Python exits."""

    folder: str
    hearts: Any
    workers: list[_Worker] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        return [w.process.pid for w in self.workers]

    def send(self, requests: Mapping[int, Any]) -> None:
        """Give every rank its request; ranks that share a request share its bytes."""
        blobs = {
            id(r): pickle.dumps(r, protocol=5)
            for r in {id(r): r for r in requests.values()}.values()
        }
        for rank, request in requests.items():
            place = rank * HEART_SLOTS
            self.hearts[place : place + HEART_SLOTS] = LOADING_HEART
            with suppress(BrokenPipeError):  # it has ended, as `wait` is about to find out
                self.workers[rank].pipe.send_bytes(blobs[id(request)])

    def wait(self, ranks: Collection[int], seconds: float) -> list[tuple[int, Any]]:
        pipes = {self.workers[r].pipe: r for r in ranks}
        ready: list[Any] = mp.wait(list(pipes), seconds)
        return [(pipes[p], _receive(p)) for p in ready]

    def heart(self, rank: int) -> Sequence[int]:
        slots: Sequence[int] = self.hearts[rank * HEART_SLOTS : (rank + 1) * HEART_SLOTS]
        return slots

    def node(self, rank: int) -> str:
        """Return an empty name: all ranks are on this machine."""
        return ""

    def silent(self, seconds: float) -> Sequence[int]:
        """Return no ranks: the system tells of every process of this machine that has ended."""
        return ()

    def exit_reason(self, rank: int) -> str:
        try:
            code = self.workers[rank].process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code == HOW_UNKNOWN:
            return (
                "ended; how is not known, since the process that forks workers was killed before it"
            )
        return (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )

    def finish_early(self, ranks: int, steps: int) -> bool:
        """Finish as `Team` says; the rest of the workers may have ended another run at any step."""
        while True:
            last = self._latest(ranks) + steps
            for rank in range(ranks):
                self.hearts[rank * HEART_SLOTS + LAST_STEP] = last
            if self._latest(ranks) < last:
                return True
            steps *= 2  # this process had no core for so long that the ranks have passed that step

    def _latest(self, ranks: int) -> int:
        return max(self.heart(rank)[STEP] for rank in range(ranks))

    def end(self) -> None:
        """Kill and reap every worker and remove the shared files."""
        for w in self.workers:
            if w.process.poll() is None:
                w.process.kill()
        for w in self.workers:
            w.process.wait()
        while self.workers:
            w = self.workers.pop()
            w.pipe.close()
            os.close(w.lifeline)
        shutil.rmtree(self.folder, ignore_errors=True)


class Pool(TeamPool[_Team]):
    """Run workers as processes on this machine; see `TeamPool`."""

    def __init__(self, world: int, *, threads: int = 1):
        super().__init__(world)
        self._threads = threads

    def start(self) -> _Team:
        if self._team is not None:
            return self._team
        folder = tempfile.mkdtemp(prefix="piper-")
        try:
            path = Path(folder, "heart")
            path.write_bytes(bytes(8 * HEART_SLOTS * self.world))
            with path.open("r+b") as file:
                hearts = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
            team = self._keep(_Team(folder, hearts))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        for rank in range(self.world):
            team.workers.append(_spawn(rank, self.world, folder, self._threads))
        for rank, worker in enumerate(team.workers):
            if not worker.pipe.poll(STARTUP_S):
                raise ExecutionError(
                    f"the process of rank {rank} did not start within {STARTUP_S:.0f} s"
                )
            try:
                worker.pipe.recv()
            except EOFError:
                reason = team.exit_reason(rank)
                raise ExecutionError(
                    f"the process of rank {rank} {reason} while it started; its output is above"
                ) from None
        return team


def _spawn(rank: int, world: int, folder: str, threads: int) -> _Worker:
    ours, theirs = Pipe()
    lifeline_read, lifeline_write = os.pipe()
    setup = Setup(
        rank,
        world,
        theirs.fileno(),
        lifeline_read,
        str(Path(folder, "heart")),
        str(Path(folder, "store")),
        threads,
    )
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    try:
        process = fork_worker(setup, environment)
    except BaseException:
        ours.close()
        os.close(lifeline_write)
        raise
    finally:
        theirs.close()
        os.close(lifeline_read)
    return _Worker(process, ours, lifeline_write)


def _receive(pipe: Connection[Any, Any]) -> Any:
    """Return a worker's message, None when it has ended."""
    try:
        return pickle.loads(pipe.recv_bytes())  # from our own worker
    except (EOFError, ConnectionResetError):
        return None
