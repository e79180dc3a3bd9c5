"""Run the ranks that another program such as torchrun has started: this process is one of them, rank 0 watches all.

The environment tells the ranks: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Ranks talk through torch's store, in
messages that run no code on reading (`piper_runtime.launch.worker.wire`). Their reports go to rank 0, which decides how
a run ends and tells the others. A rank that is killed is noticed by torchrun, which ends the rest.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import queue
import threading
import time
from array import array
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

import piper_ir.ground.errors
from piper_ir.ground.errors import ExecutionError, HangError, PiperError
from piper_ir.plan.plan import Plan
from piper_runtime.engine import core_sharers
from piper_runtime.launch.ground.progress import OnSave, OnStep, Progress
from piper_runtime.launch.ground.protocol import Failure, first_step
from piper_runtime.launch.ground.report import RankReport, aligned
from piper_runtime.launch.ground.watch import LOADING_HEART, STARTUP_S, TICK_S, Watch
from piper_runtime.launch.torchrun.meeting import (
    RENDEZVOUS_S,
    clock_ahead,
    env_number,
    host_names,
    meeting_place,
    open_store,
    own_address,
)
from piper_runtime.launch.worker.mail import BEAT, LAST_WORDS_S, Mail, Patient
from piper_runtime.launch.worker.wire import decode, encode
from piper_runtime.launch.worker.worker import WorkerContext, answer
from piper_runtime.transport.gloo import FOREVER, LOOPBACK, GlooCommunicators

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
EXCHANGED_PER_S = 1e7
"""The least bytes per second of the ranks' exchange after a run, over a slow network."""
LEAVE_S = 5.0
"""The seconds that a rank waits at exit, after a run that failed, until the ends of its peers end its own thread."""
HEADLINE = 240
"""The characters of rank 0's error that other ranks repeat."""
_DONE = "done"


def is_active() -> bool:
    """Return whether this process was started as one rank of several."""
    return all(name in os.environ for name in VARIABLES)


def is_first() -> bool:
    """Return whether this process is the one that prints and writes: rank 0, or the only one."""
    return not is_active() or env_number("RANK") == 0


def is_first_to_say(text: str) -> bool:
    """Return whether no other rank says this text: a mistake in a file is one mistake, however many ranks read it.

    Only the store that torchrun itself keeps can tell before ranks have met; without it each rank says the text.
    """
    if not is_active() or not _has_store_of_torchrun():
        return True
    key = f"piper-{restart_count()}/said/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        said: int = Patient("piper store").call(
            lambda: open_store(LAST_WORDS_S).add(key, 1), LAST_WORDS_S, meeting_place()
        )
    except (ExecutionError, RuntimeError):
        return True
    return said == 1


def _has_store_of_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_count() -> int:
    """Return how many times torchrun has started these processes again."""
    return (
        env_number("TORCHELASTIC_RESTART_COUNT")
        if "TORCHELASTIC_RESTART_COUNT" in os.environ
        else 0
    )


@dataclass
class _Member:
    """Keep the store, its context, and the group of all ranks from run to run.

    `hosts` are the names of the ranks' machines; empty when there is only this one.
    """

    context: WorkerContext
    patient: Patient
    store: Any
    hosts: list[str]
    everyone: Any
    said: queue.SimpleQueue[Any]
    clock: tuple[float, float]
    runs: int = 0
    broken: bool = False
    thread: threading.Thread | None = None


_member: _Member | None = None
"""The one rank of this process, as long as it lives, whatever pools come and go."""


def _join() -> _Member:
    global _member
    if _member is None:
        patient = Patient("piper store")
        silence = f"{meeting_place()} does not answer, or not all ranks came to meet there"
        _member = patient.call(lambda: _joined(patient), STARTUP_S + RENDEZVOUS_S, silence)
        atexit.register(_leave)
    return _member


def _joined(patient: Patient) -> _Member:
    rank, world = env_number("RANK"), env_number("WORLD_SIZE")
    # torchrun's store outlives its ranks: ranks that are started again must not read the notes of earlier ones.
    shared: Any = dist.PrefixStore(f"piper-{restart_count()}", open_store())
    address = own_address(world)
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    heart = memoryview(array("q", LOADING_HEART))
    communicators = GlooCommunicators(dist.PrefixStore("channels", shared), rank, address)
    everyone = communicators.group("everyone", list(range(world))) if world > 1 else None
    clock = (0.0, 0.0) if address == LOOPBACK else clock_ahead(everyone, rank, world)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    local_rank, local_world = (env_number(name) if name in os.environ else None for name in names)

    def tell(message: Any) -> None:
        said.put(aligned(message, *clock))

    sharers = core_sharers(shared, rank, world)
    context = WorkerContext(rank, communicators, heart, tell, local_rank, local_world, sharers)  # type: ignore[arg-type]  # as in worker
    machines = [] if address == LOOPBACK else host_names(shared, rank, world, address)
    # A rank's thread waits in the store for its peers; the one that says how it goes must not wait behind it.
    return _Member(context, patient, shared.clone(), machines, everyone, said, clock)


def _leave() -> None:
    """End the communicators' threads while the interpreter still runs.

    gloo's thread drops a tensor a moment after `wait` has returned. If that was the last reference it needs the
    interpreter's lock, and a request for that while the interpreter shuts down ends the process with SIGABRT. So does
    the rank's own thread, if a peer that it waits for ends at that moment: after a run that failed, `LEAVE_S` are given
    for the peers to end before. gloo's threads may never end then, and are left alone.
    """
    global _member
    member, _member = _member, None
    if member is None:
        return
    if member.broken:
        if member.thread is not None:
            member.thread.join(LEAVE_S)
        return
    member.context.communicators.close()
    member.everyone = None
    member.patient.close()
    gc.collect()  # a bound plan and its closures hold each other, and the groups


@dataclass
class _Team:
    """Show all ranks to rank 0."""

    member: _Member
    mail: Mail
    world: int
    hearts: dict[int, bytes] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)

    def wait(self, ranks: Collection[int], seconds: float) -> list[tuple[int, Any]]:
        messages = [(0, m) for m in _drain(self.member.said, seconds)]
        others = range(1, self.world)
        said, hearts = self.mail.visit([r for r in ranks if r], others)
        now = time.monotonic()
        for rank in others:
            if rank not in self.heard or hearts.get(rank) != self.hearts.get(rank):
                self.heard[rank] = now
        self.hearts = hearts
        return messages + said

    def heart(self, rank: int) -> Sequence[int]:
        """Return a rank's heart as of the last look."""
        if rank == 0:
            return self.member.context.heart
        last_heart = self.hearts.get(rank)
        return LOADING_HEART if last_heart is None else memoryview(last_heart[BEAT:]).cast("q")

    def exit_reason(self, rank: int) -> str:
        """Return that a rank has ended; only torchrun knows how, and tells who was killed."""
        return "has ended"

    def node(self, rank: int) -> str:
        return f"node {self.member.hosts[rank]}" if self.member.hosts else ""

    def silent(self, seconds: float) -> list[int]:
        now = time.monotonic()
        return [rank for rank, heard in self.heard.items() if now - heard > seconds]


class TorchrunPool:
    """Run a plan's workers when this process is one of them.

    Every process makes the same calls with the same plan and gets the same reports. States and gradients in them come
    from the first replica of each role, since the others hold equal ones. `on_step` and `on_save` are called on rank 0
    only.
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
        started = env_number("WORLD_SIZE")
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
        rank = member.context.rank
        mail = Mail(member.store, member.runs, member.patient, meeting_place(), timeout_s)
        member.runs += 1
        _check_same(plan, mail, rank)
        member.broken = True
        kept: list[Any] = []
        member.thread = threading.Thread(
            target=_perform, args=(member, requests[rank], kept), name="piper rank", daemon=True
        )
        member.thread.start()
        if rank == 0:
            watch = Watch(plan, _Team(member, mail, started), started, timeout_s)
            _lead(mail, watch, Progress(plan, on_step, on_save, first_step(requests)))
        else:
            _follow(member, mail, timeout_s)
        answers = _exchange(member, plan, kept[0], timeout_s)
        member.broken = False
        return answers


def _check_same(plan: Plan, mail: Mail, rank: int) -> None:
    if rank == 0:
        mail.put("plan", plan.key.encode())
    end = time.monotonic() + STARTUP_S
    while (theirs := mail.get("plan")) is None:
        if time.monotonic() > end:
            raise HangError(
                f"rank 0 has not come to this run within {STARTUP_S:g} s after rank {rank}"
            )
        time.sleep(TICK_S)
    if theirs != plan.key.encode():
        raise ExecutionError(
            f"rank {rank} compiled another plan than rank 0 ({plan.key} and {theirs.decode()}); job and strategy "
            f"must not depend on the process"
        )


def _perform(member: _Member, request: Any, kept: list[Any]) -> None:
    """Answer a request in a thread of its own, so that a rank that hangs can still be given up."""
    member.context.heart[:] = memoryview(LOADING_HEART)
    reply = aligned(answer(member.context, request), *member.clock)
    kept.append(reply)
    member.said.put(reply if isinstance(reply, Failure) else _DONE)


def _lead(mail: Mail, watch: Watch, progress: Progress) -> None:
    """Watch over all as rank 0, then tell them how the run ended."""
    try:
        watch.collect(progress)
    except BaseException as e:
        kind = type(e).__name__ if isinstance(e, PiperError) else "ExecutionError"
        why = str(e) if isinstance(e, PiperError) else f"rank 0 was ended by {type(e).__name__}"
        # Those who read a store of this process lose it with us.
        listeners = () if _has_store_of_torchrun() else range(1, watch.world)
        mail.last_word(encode(Failure(kind, why, "")), listeners)
        raise
    mail.put("end", encode(None))


def _follow(member: _Member, mail: Mail, timeout_s: float) -> None:
    """Send rank 0, from another rank, this rank's messages and heart, until rank 0 reports the end of the run."""
    rank, pulse, beat = member.context.rank, b"", time.monotonic()
    here = f" on node {member.hosts[rank]}" if member.hosts else ""
    try:
        while True:
            now, end = mail.tell(rank, _drain(member.said, TICK_S), bytes(member.context.heart))
            if end is not None:
                break
            if now != pulse:
                pulse, beat = now or b"", time.monotonic()
            if time.monotonic() > beat + timeout_s + STARTUP_S:
                raise HangError(
                    f"rank 0 has not answered rank {rank} for {timeout_s + STARTUP_S:g} s"
                )
    except HangError as e:
        raise HangError(f"rank {rank}{here} gave up: {e}") from None
    failure = decode(end)
    if failure is not None:
        with suppress(ExecutionError):
            mail.put(f"heard/{rank}", b"", LAST_WORDS_S)
        raise _ended_by_first(failure, member.hosts)


def _ended_by_first(failure: Failure, hosts: Sequence[str]) -> PiperError:
    """Return the error of a run that rank 0 has ended, which says it in full."""
    text = failure.message
    if len(text) > HEADLINE:
        text = f"{text[:HEADLINE].rstrip()} ... (rank 0{f' on node {hosts[0]}' if hosts else ''} says the rest)"
    error: PiperError = getattr(piper_ir.ground.errors, failure.kind, ExecutionError)(text)
    error.told_by_another = True
    return error


def _drain(said: queue.SimpleQueue[Any], seconds: float) -> list[Any]:
    """Return the queued messages; wait for the first one at most `seconds`."""
    messages = []
    try:
        messages.append(said.get(timeout=seconds))
        while True:
            messages.append(said.get_nowait())
    except queue.Empty:
        return messages


def _exchange(member: _Member, plan: Plan, mine: Any, timeout_s: float) -> dict[int, Any]:
    """Return the answers of all ranks, each as a broadcast from its rank."""
    mine = without_copies(mine, plan, member.context.rank)
    answers = {}
    for rank in range(plan.mesh.world):
        own = rank == member.context.rank
        sent = encode(mine) if own else b""
        if member.everyone is not None:
            sent = _broadcast(member, rank, sent, timeout_s)
        answers[rank] = mine if own else decode(sent)
    return answers


def without_copies(found: Any, plan: Plan, rank: int) -> Any:
    """Return a rank's report without states and gradients that the first rank with the same parts of them reports."""
    first = plan.mesh.coords(plan.role_of(rank).ranks[0])
    cut = {part.axis for param in plan.params for part in param.layout}
    moved = {axis for axis, at in plan.mesh.coords(rank).items() if at != first[axis]}
    if not isinstance(found, RankReport) or moved <= cut:
        return found
    return replace(found, states={}, gradients=[])


def _broadcast(member: _Member, source: int, data: bytes, timeout_s: float) -> bytes:
    def of(tensor: torch.Tensor) -> None:
        patience = timeout_s + STARTUP_S + tensor.nbytes / EXCHANGED_PER_S
        from_where = f"rank {source}{f' on node {member.hosts[source]}' if member.hosts else ''}"
        silence = f"the run is done, but rank {member.context.rank} did not get the results of {from_where}"
        member.patient.call(
            lambda: member.everyone.broadcast([tensor], _options(source)).wait(), patience, silence
        )

    size = torch.tensor([len(data)])
    of(size)
    body = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(int(size), dtype=torch.uint8)
    )
    of(body)
    return body.numpy().tobytes()


def _options(source: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = source, FOREVER
    return options
