"""Run the ranks that another program such as torchrun has started: this process is one of them, rank 0 watches all.

The environment tells the ranks: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Ranks talk through torch's store, in
messages that run no code where they are read (`piper_runtime.launch.wire`). Their reports go to rank 0, which decides
how a run ends and tells the others. A rank that is killed is noticed by torchrun, which ends the rest.
"""

from __future__ import annotations

import atexit
import gc
import os
import queue
import socket
import threading
import time
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import piper_ir.errors
from piper_ir.errors import ExecutionError, HangError, PiperError
from piper_ir.plan import Plan
from piper_runtime.engine import core_sharers
from piper_runtime.launch.progress import OnSave, OnStep, Progress
from piper_runtime.launch.protocol import Failure, first_step
from piper_runtime.launch.report import RankReport, aligned
from piper_runtime.launch.watch import LOADING_HEART, STARTUP_S, TICK_S, Watch
from piper_runtime.launch.wire import decode, encode
from piper_runtime.launch.worker import WorkerContext, answer
from piper_runtime.transport.gloo import FOREVER, LOOPBACK, GlooCommunicators

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RENDEZVOUS_S = 60.0
CLOCK_SAMPLES = 9
_DONE = "done"


def is_active() -> bool:
    """Return whether this process was started as one rank of several."""
    return all(name in os.environ for name in VARIABLES)


def is_first() -> bool:
    """Return whether this process is the one that prints and writes: rank 0, or the only one."""
    return not is_active() or _number("RANK") == 0


def restart_count() -> int:
    """Return how many times torchrun has started these processes again."""
    return _number("TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in os.environ else 0


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ExecutionError(
            f"the environment has {name}={os.environ[name]!r}; a number is needed, as torchrun sets it"
        ) from None


@dataclass
class _Member:
    """Keep the store, its context, and the group of all ranks from run to run."""

    context: WorkerContext
    store: Any
    everyone: Any
    said: queue.SimpleQueue[Any]
    clock: tuple[float, float]
    runs: int = 0
    broken: bool = False


_member: _Member | None = None
"""The one rank of this process, as long as it lives, whatever pools come and go."""


def _join() -> _Member:
    global _member
    if _member is None:
        rank, world = _number("RANK"), _number("WORLD_SIZE")
        # torchrun's store outlives its ranks: those that are started again must not read what earlier ones have left.
        store, interface = dist.PrefixStore(f"piper-{restart_count()}", _store()), _interface(world)
        said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        heart = memoryview(array("q", LOADING_HEART))
        communicators = GlooCommunicators(dist.PrefixStore("channels", store), rank, interface)
        everyone = communicators.group("everyone", list(range(world))) if world > 1 else None
        clock = (0.0, 0.0) if interface == LOOPBACK else clock_ahead(everyone, rank, world)
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        local_rank, local_world = (_number(name) if name in os.environ else None for name in names)

        def tell(message: Any) -> None:
            said.put(aligned(message, *clock))

        sharers = core_sharers(store, rank, world)
        context = WorkerContext(rank, communicators, heart, tell, local_rank, local_world, sharers)  # type: ignore[arg-type]  # as in worker
        _member = _Member(context, store, everyone, said, clock)
        atexit.register(_leave)
    return _member


def _leave() -> None:
    """End the communicators' threads while the interpreter still runs.

    gloo's thread drops a tensor a moment after `wait` has returned. If that was the last reference it needs the
    interpreter's lock, and a request for that while the interpreter shuts down ends the process with SIGABRT. After a
    run that failed, its threads may never end: they are left alone.
    """
    global _member
    member, _member = _member, None
    if member is None or member.broken:
        return
    member.context.communicators.close()
    member.everyone = None
    gc.collect()  # a bound plan and its closures hold each other, and the groups


def _store() -> Any:
    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    try:
        return next(dist.rendezvous("env://", timeout=timedelta(seconds=RENDEZVOUS_S)))[0]
    except (RuntimeError, ValueError, OSError) as e:
        in_use = "EADDRINUSE" in str(e) or "already in use" in str(e)
        why = "the port is in use: choose another with --master-port (MASTER_PORT)" if in_use else f"{str(e).splitlines()[0]}"
        raise ExecutionError(f"the ranks cannot meet at {host}:{port} (MASTER_ADDR, MASTER_PORT): {why}") from e


def _interface(world: int) -> str:
    """Return the address under which peers reach this process: loopback when all are on this machine."""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], _number("MASTER_PORT")))  # sends nothing: it only chooses the way out
        address: str = probe.getsockname()[0]
    return address


def clock_ahead(everyone: Any, rank: int, world: int) -> tuple[float, float]:
    """Return the seconds that this rank's clock is ahead of rank 0's, and the error: half of the quickest round trip.

    All ranks of the group `everyone` call this.
    """
    found = [(0.0, 0.0)] if rank == 0 else []
    for other in range(1, world):
        for _ in range(CLOCK_SAMPLES if rank in (0, other) else 0):
            start = time.perf_counter()
            theirs = torch.tensor([start], dtype=torch.float64)
            if rank == 0:
                everyone.recv([theirs], other, 0).wait()
                everyone.send([torch.tensor([time.perf_counter()], dtype=torch.float64)], other, 0).wait()
                continue
            everyone.send([theirs.clone()], 0, 0).wait()
            everyone.recv([theirs], 0, 0).wait()
            end = time.perf_counter()
            found.append(((end - start) / 2, (start + end) / 2 - theirs.item()))
    error, ahead = min(found)
    return ahead, error


@dataclass
class _Mail:
    """Hold the messages of one run in the store: every rank has a box that rank 0 empties, and one for its heart."""

    store: Any
    run: int
    sent: int = 0
    read: dict[int, int] = field(default_factory=dict)

    def post(self, rank: int, message: Any) -> None:
        self.store.set(f"{self.run}/{rank}/{self.sent}", encode(message))
        self.sent += 1

    def collect(self, rank: int) -> list[Any]:
        out = []
        while self.store.check([key := f"{self.run}/{rank}/{self.read.get(rank, 0)}"]):
            out.append(decode(self.store.get(key)))
            self.store.delete_key(key)
            self.read[rank] = self.read.get(rank, 0) + 1
        return out

    def put(self, what: str, value: bytes) -> None:
        self.store.set(f"{self.run}/{what}", value)

    def get(self, what: str) -> bytes | None:
        key = f"{self.run}/{what}"
        return self.store.get(key) if self.store.check([key]) else None


@dataclass
class _Team:
    """Show all ranks to rank 0."""

    member: _Member
    mail: _Mail

    def wait(self, ranks: Collection[int], seconds: float) -> list[tuple[int, Any]]:
        found = [(0, m) for m in _drain(self.member.said, seconds)]
        self.mail.put("pulse", str(time.monotonic()).encode())
        return found + [(r, m) for r in ranks if r for m in self.mail.collect(r)]

    def heart(self, rank: int) -> Sequence[int]:
        """Return a rank's heart as its process last put it into the store."""
        if rank == 0:
            return self.member.context.heart
        found = self.mail.get(f"heart/{rank}")
        return LOADING_HEART if found is None else memoryview(found).cast("q")

    def exit_reason(self, rank: int) -> str:
        """Return that a rank has ended; only torchrun knows how, and tells who was killed."""
        return "has ended"

    def node(self, rank: int) -> str:
        """Return an empty name, since ranks know their own machine only."""
        return ""


class TorchrunPool:
    """Run a plan's workers when this process is one of them.

    Every process makes the same calls with the same plan and gets all reports. States and gradients in them are those
    of the first rank of each role, whose replicas hold equal ones, and this rank's own. `on_step` and `on_save` are
    called on rank 0 only.
    """

    def __init__(self, world: int):
        self.world = world

    def __enter__(self) -> TorchrunPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: the process is the worker."""

    def room(self) -> float:
        """Return the number of ranks, which cannot change."""
        return self.world

    def run(
        self,
        plan: Plan,
        requests: Mapping[int, Any],
        timeout_s: float,
        on_step: OnStep | None = None,
        on_save: OnSave | None = None,
    ) -> dict[int, Any]:
        started = _number("WORLD_SIZE")
        if len(requests) != started:
            raise ExecutionError(
                f"the plan has {len(requests)} ranks, but {started} processes were started (WORLD_SIZE); use "
                f"--nproc-per-node {len(requests)}, or another mesh"
            )
        member = _join()
        if member.broken:
            raise ExecutionError(
                "an earlier run in this process failed and left its communicators broken; start the processes again"
            )
        rank, mail = member.context.rank, _Mail(member.store, member.runs)
        member.runs += 1
        _check_same(plan, mail, rank)
        member.broken = True
        kept: list[Any] = []
        threading.Thread(target=_perform, args=(member, requests[rank], kept), name="piper rank", daemon=True).start()
        if rank == 0:
            _lead(
                member,
                mail,
                Watch(plan, _Team(member, mail), started, timeout_s),
                Progress(plan, on_step, on_save, first_step(requests)),
            )
        else:
            _follow(member, mail, timeout_s)
        member.broken = False
        return _exchange(member, plan, kept[0])


def _check_same(plan: Plan, mail: _Mail, rank: int) -> None:
    if rank == 0:
        mail.put("plan", plan.key.encode())
    mail.store.wait([f"{mail.run}/plan"], timedelta(seconds=STARTUP_S))
    if (theirs := mail.get("plan")) != plan.key.encode():
        raise ExecutionError(
            f"rank {rank} compiled another plan than rank 0 ({plan.key} and {(theirs or b'').decode()}); job and strategy must "
            f"not depend on the process"
        )


def _perform(member: _Member, request: Any, kept: list[Any]) -> None:
    """Answer a request in a thread of its own, so that a rank that hangs can still be given up."""
    member.context.heart[:] = memoryview(LOADING_HEART)
    found = aligned(answer(member.context, request), *member.clock)
    kept.append(found)
    member.said.put(found if isinstance(found, Failure) else _DONE)


def _lead(member: _Member, mail: _Mail, watch: Watch, progress: Progress) -> None:
    """Watch over all as rank 0, then tell them how the run ended."""
    try:
        watch.collect(progress)
    except BaseException as e:
        kind = type(e).__name__ if isinstance(e, PiperError) else "ExecutionError"
        mail.put("end", encode(Failure(kind, str(e) or f"rank 0 was ended by {type(e).__name__}", "", False)))
        raise
    mail.put("end", encode(None))


def _follow(member: _Member, mail: _Mail, timeout_s: float) -> None:
    """Tell rank 0, as another rank, what happens here, until it says how the run has ended."""
    rank, pulse, beat = member.context.rank, b"", time.monotonic()
    while (end := mail.get("end")) is None:
        for message in _drain(member.said, TICK_S):
            mail.post(rank, message)
        mail.put(f"heart/{rank}", bytes(member.context.heart))
        now = mail.get("pulse") or b""
        if now != pulse:
            pulse, beat = now, time.monotonic()
        if time.monotonic() > beat + timeout_s + STARTUP_S:
            raise HangError(f"rank 0 has not answered rank {rank} for {timeout_s + STARTUP_S:g} s")
    failure = decode(end)
    if failure is not None:
        raise getattr(piper_ir.errors, failure.kind, ExecutionError)(failure.message)


def _drain(said: queue.SimpleQueue[Any], seconds: float) -> list[Any]:
    """Return the queued messages; wait for the first one at most `seconds`."""
    out = []
    try:
        out.append(said.get(timeout=seconds))
        while True:
            out.append(said.get_nowait())
    except queue.Empty:
        return out


def _exchange(member: _Member, plan: Plan, mine: Any) -> dict[int, Any]:
    """Return the answers of all ranks, each as a broadcast from its rank."""
    out = {}
    for rank in range(plan.mesh.world):
        own = rank == member.context.rank
        sent = encode(_without_copies(mine, plan, rank)) if own else b""
        if member.everyone is not None:
            sent = _broadcast(member.everyone, rank, sent)
        out[rank] = mine if own else decode(sent)
    return out


def _without_copies(found: Any, plan: Plan, rank: int) -> Any:
    """Return a report without the parts that other ranks do not get."""
    if not isinstance(found, RankReport) or plan.role_of(rank).ranks[0] == rank:
        return found
    return replace(found, states={}, gradients=[])


def _broadcast(group: Any, source: int, data: bytes) -> bytes:
    size = torch.tensor([len(data)])
    group.broadcast([size], _options(source)).wait()
    body = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
    group.broadcast([body], _options(source)).wait()
    return body.numpy().tobytes()


def _options(source: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = source, FOREVER
    return options
