"""One process per rank on this machine, communicating with gloo over loopback: the pool of workers and what watches over it."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing import connection as mp
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import piper_ir.errors
from piper_ir.errors import ExecutionError, PiperError
from piper_ir.ops import AllReduce, Recv, Send
from piper_ir.plan import COMPUTE, Plan
from piper_runtime.code import CodeStore, ShippedCode, used_code
from piper_runtime.job import InitialState, Job
from piper_runtime.messages import HEART_SLOTS, Failure, Request, Setup
from piper_runtime.report import RankReport
from piper_runtime.shipping import pack
from piper_runtime.store import held_params, state_names
from piper_runtime.streams import FIRST_STREAM, ISSUED, LOADING, PHASE, RUNNING, STEP

STARTUP_S = 120.0
"""Time for the processes to start and import torch, and again to import the user's code and to bind a plan."""
LINGER_S = 0.5
"""After a first failure: time for others to come in, so that the cause is named and not its first victim."""
TICK_S = 0.1
_LOADING = array("q", [LOADING if i == PHASE else 0 for i in range(HEART_SLOTS)])


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    pipe: Connection[Any, Any]
    lifeline: int


@dataclass
class _Team:
    """Running workers with the files that they share; ended by `end`, at the latest when Python exits."""

    folder: str
    heart: Any
    workers: list[_Worker] = field(default_factory=list)

    def end(self) -> None:
        """Kill and reap every worker and remove the shared files."""
        for w in self.workers:
            if w.process.poll() is None:
                w.process.kill()
        for w in self.workers:
            w.process.wait()
            w.pipe.close()
            os.close(w.lifeline)
        self.workers.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


class Pool:
    """Worker processes for up to `world` ranks, for any number of runs, one at a time. They start with the first run, and again
    after a run that failed, since its communicators are broken. Use it as a context manager, or call `close`."""

    def __init__(self, world: int, *, threads: int = 1):
        self.world = world
        self._threads = threads
        self._team: _Team | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty when no workers run."""
        return [w.process.pid for w in self._team.workers] if self._team is not None else []

    def close(self) -> None:
        """End all workers; a later run starts new ones."""
        if self._finalizer is not None:
            self._finalizer()
        self._team = self._finalizer = None

    def run(self, plan: Plan, requests: Mapping[int, bytes], timeout_s: float) -> dict[int, RankReport]:
        """Give every rank its request and collect the reports. On any failure, and on an interrupt, all workers are ended
        first."""
        if len(requests) > self.world:
            raise ExecutionError(
                f"the plan has {len(requests)} ranks, this pool has workers for {self.world}; make a larger pool"
            )
        try:
            team = self.start()
            for worker in team.workers[: len(requests)]:
                place = worker.rank * HEART_SLOTS
                team.heart[place : place + HEART_SLOTS] = _LOADING
                worker.pipe.send_bytes(requests[worker.rank])
            return _Watch(plan, team, len(requests), timeout_s).collect()
        except BaseException:
            self.close()
            raise

    def start(self) -> _Team:
        """Start the workers, unless they run already. ExecutionError when a process does not come up."""
        if self._team is not None:
            return self._team
        folder = tempfile.mkdtemp(prefix="piper-")
        path = Path(folder, "heart")
        path.write_bytes(bytes(8 * HEART_SLOTS * self.world))
        with path.open("r+b") as file:
            heart = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        team = self._team = _Team(folder, heart)
        self._finalizer = weakref.finalize(self, team.end)
        for rank in range(self.world):
            team.workers.append(_spawn(rank, self.world, folder, self._threads))
        for worker in team.workers:
            if not worker.pipe.poll(STARTUP_S):
                raise ExecutionError(f"the process of rank {worker.rank} did not start within {STARTUP_S:.0f} s")
            try:
                worker.pipe.recv()
            except EOFError:
                raise ExecutionError(
                    f"the process of rank {worker.rank} {_fate(worker)} while it started; its output is above"
                ) from None
        return team


def _spawn(rank: int, world: int, folder: str, threads: int) -> _Worker:
    ours, theirs = Pipe()
    lifeline_read, lifeline_write = os.pipe()
    setup = Setup(rank, world, theirs.fileno(), lifeline_read, str(Path(folder, "heart")), str(Path(folder, "store")), threads)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "piper_runtime.worker", json.dumps(vars(setup))],
            stdin=subprocess.DEVNULL, env=environment, pass_fds=(setup.pipe, setup.lifeline),
            start_new_session=True,  # an interrupt at the terminal reaches the launcher only, which then ends its workers
        )  # fmt: skip
    finally:
        theirs.close()
        os.close(lifeline_read)
    return _Worker(rank, process, ours, lifeline_write)


@dataclass
class _Watch:
    """Waits for the reports of one run, and finds out who is to blame when they do not come."""

    plan: Plan
    team: _Team
    world: int
    timeout_s: float

    def collect(self) -> dict[int, RankReport]:
        """All reports. ExecutionError or the PiperError of a rank otherwise."""
        waiting = {w.pipe: w for w in self.team.workers[: self.world]}
        reports: dict[int, RankReport] = {}
        failures: dict[int, Failure | None] = {}
        before, moved, end = b"", time.monotonic(), float("inf")
        while waiting and time.monotonic() < end:
            for pipe in mp.wait(list(waiting), min(TICK_S, self.timeout_s / 4)):
                worker = waiting.pop(pipe)  # type: ignore[call-overload]  # typeshed allows sockets and descriptors too
                answer = _receive(worker)
                if isinstance(answer, RankReport):
                    reports[worker.rank] = answer
                else:
                    failures[worker.rank] = answer
                    end = min(end, time.monotonic() + LINGER_S)
            now = bytes(self.team.heart)
            if now != before:
                before, moved = now, time.monotonic()
            if not failures and time.monotonic() > moved + self._patience(waiting.values()):
                raise ExecutionError(self._hung([w.rank for w in waiting.values()]))
        if failures:
            raise self._blame(failures)
        return reports

    def _patience(self, workers: Iterable[_Worker]) -> float:
        """Seconds without progress that are accepted: more while a rank still imports the user's code and binds the plan."""
        loading = any(self._slots(w.rank)[PHASE] == LOADING for w in workers)
        return max(self.timeout_s, STARTUP_S) if loading else self.timeout_s

    def _blame(self, failures: Mapping[int, Failure | None]) -> PiperError:
        """The error of the rank that failed by itself, before those that only lost their peer."""
        order = sorted(failures, key=lambda r: (failures[r] is not None and _peer(failures[r]), failures[r] is not None, r))
        first, others = order[0], order[1:]
        failure = failures[first]
        seen = "".join(f"; {self._place(r)}" for r in others)
        if failure is None:
            worker = self.team.workers[first]
            return ExecutionError(f"rank {first} {_fate(worker)}: {self._place(first)}{seen}")
        kind = getattr(piper_ir.errors, failure.kind, ExecutionError)
        error: PiperError = kind(failure.message)
        if failure.details:
            error.add_note(f"on rank {first}:\n{failure.details}")
        return error

    def _hung(self, ranks: Sequence[int]) -> str:
        running = [r for r in ranks if self._slots(r)[PHASE] == RUNNING and not self._communicating(r)]
        first = running or list(ranks)
        return (
            f"no rank made progress for {self.timeout_s:g} s (timeout_s); "
            + "; ".join(self._place(r) for r in [*first, *(r for r in ranks if r not in first)])
            + ". If an instruction may take that long, give a larger timeout_s"
        )

    def _slots(self, rank: int) -> list[int]:
        return list(self.team.heart[rank * HEART_SLOTS : (rank + 1) * HEART_SLOTS])

    def _communicating(self, rank: int) -> list[int]:
        """Indices of the communications that a rank is in."""
        return [i - 1 for i in self._slots(rank)[FIRST_STREAM:] if i]

    def _place(self, rank: int) -> str:
        """Where a rank is: step, instruction, stream, and whom it waits for."""
        slots, program = self._slots(rank), self.plan.role_of(rank).program
        if slots[PHASE] == LOADING:
            return f"rank {rank} was loading the plan"
        index = min(max(slots[ISSUED], 0), len(program) - 1)
        doing = "ran" if slots[PHASE] == RUNNING else "waited before"
        name = f"instruction {index} ({program[index].name} on {program[index].stream})" if program else "an empty program"
        text = f"rank {rank} {doing} {name} in step {slots[STEP]}"
        for i in self._communicating(rank):
            if i < len(program) and program[i].stream != COMPUTE:
                op = program[i].parts[0].op
                assert isinstance(op, Send | Recv | AllReduce)
                peers = [p for p in self.plan.peers(self.plan.channel(op.channel), rank) if p != rank]
                text += f" and waited for rank {', '.join(map(str, peers))} in instruction {i} "
                text += f"({program[i].name} on {program[i].stream})"
        return text


def _peer(failure: Failure | None) -> bool:
    return failure is not None and failure.peer


def _receive(worker: _Worker) -> RankReport | Failure | None:
    """A worker's answer, None when it has ended without one."""
    try:
        return pickle.loads(worker.pipe.recv_bytes())  # type: ignore[no-any-return]  # from our own worker
    except (EOFError, ConnectionResetError):
        return None


def _fate(worker: _Worker) -> str:
    try:
        code = worker.process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def run_processes(
    plan: Plan, code: CodeStore, job: Job, initial: InitialState, steps: int, timeout_s: float, trace: bool, memory: bool,
    gradients: bool, ranges: bool, pool: Pool | None,
) -> dict[int, RankReport]:  # fmt: skip
    """Ship to every rank what it needs, run, and collect the reports. Without a pool the processes live for this call only."""
    plan_blob, callables = (
        pickle.dumps(plan),
        pickle.dumps(pack((job.batch, job.optimizer, job.scheduler), (job.model, job.loss))),
    )
    requests: dict[int, bytes] = {}
    for rank in range(plan.mesh.world):
        found: dict[str, dict[str, ShippedCode]] = {}
        for code_id, step in used_code(plan, plan.role_of(rank)):
            source = code[code_id][step]
            found.setdefault(code_id, {})[step] = ShippedCode(source.source, dict(source.constants))
        params = {n: initial.params[n].clone() for n in held_params(plan, rank)}
        buffers = {n: initial.buffers[n].clone() for n in state_names(plan, rank, "buffer")}
        request = Request(plan_blob, callables, found, params, buffers, job.seed, steps, trace, memory, gradients, ranges)
        requests[rank] = pickle.dumps(request, protocol=5)
    if pool is not None:
        return pool.run(plan, requests, timeout_s)
    with Pool(plan.mesh.world) as own:
        return own.run(plan, requests, timeout_s)
