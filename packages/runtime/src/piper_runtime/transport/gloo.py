"""Communicate over gloo: one process group per channel instance, made of its members only, without a global group."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import memmove
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from piper_ir.ground.errors import ExecutionError
from piper_ir.plan.plan import Plan
from piper_runtime.engine.streams import Posted
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundComm
from piper_runtime.transport.store_meeting import StoreMeeting

LOOPBACK = "127.0.0.1"
COPIED = 1 << 16
"""The most bytes of a gather that runs as an all-to-all of copies, which no plan counts.

If receives are posted and then waited for, gloo's thread spins until the message comes: 2 ms of CPU time for a few
hundred bytes, measured on two busy cores.
"""
FOREVER = timedelta(days=1)
"""The timeout of gloo itself; the launcher, which knows how long a step may take, notices and ends ranks that hang."""


class GlooCommunicators:
    """Hold the communicators of one rank, so that later plans with the same channels use them again."""

    def __init__(self, store: Any, rank: int, interface: str = LOOPBACK):
        """Set up communicators that other ranks reach under the address `interface`."""
        self._store = store
        self._interface = interface
        self._rank = rank
        self._groups: dict[str, Any] = {}
        self._keys: dict[str, str] = {}
        self._meetings: Counter[int] = Counter()

    @property
    def store(self) -> Any:
        """Return the torch.distributed.Store that the ranks share."""
        return self._store

    def connect(self, plan: Plan) -> None:
        """Make the process groups of a plan.

        Every rank goes through the plan's channels in one order, so no two wait for each other in a circle.
        """
        seen: dict[str, int] = {}
        self._keys = {}
        role = plan.role_of(self._rank).role
        for channel in plan.channels:
            if role not in channel.roles:
                continue
            peers = plan.peers(channel, self._rank)
            if self._rank not in peers or len(peers) < 2:
                continue
            base = f"{channel.kind} {'>'.join(map(str, peers))}"
            seen[base] = seen.get(base, 0) + 1
            self._keys[channel.id] = key = f"{base} #{seen[base]}"
            if key not in self._groups:
                self._groups[key] = self.group(key, sorted(peers))

    def group(self, key: str, members: list[int]) -> Any:
        """Return a new process group of these ranks, under a key that no other group of theirs has."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
        with _new_threads_let_others_run():
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._interface)]
        options._timeout = FOREVER
        options._threads = 1
        store = dist.PrefixStore(key, self._store)
        return dist.ProcessGroupGloo(store, members.index(self._rank), len(members), options)

    def meeting(self, world: int, ranks: tuple[int, ...]) -> StoreMeeting:
        """Return the meeting that sums the numbers that these ranks count before a step.

        All ranks of a plan of `world` ranks call this alike. Processes may run plans of fewer ranks between: so each
        number of ranks has meetings of its own, or a rank would read the sums of an earlier run.
        """
        self._meetings[world] += 1
        name = f"meeting {self._meetings[world]} of {world}"
        return StoreMeeting(dist.PrefixStore(name, self._store), self._rank, ranks)

    def close(self) -> None:
        """Drop the groups; a group that nobody else holds waits for its threads, which must be idle."""
        self._groups.clear()

    def bind(self, comm: BoundComm) -> Thunk:
        """Return the closure that runs or posts a communication; a send is done when the peer has the tensor."""
        operand = comm.operand
        if len(comm.peers) < 2:
            return Posted(partial(_alone, comm))
        group = self._groups[self._keys[comm.channel]]
        members = sorted(comm.peers)
        match comm.kind:
            case "send":
                target = members.index(comm.peers[1])
                return Posted(lambda: partial(finish, group.send([operand()], target, 0)))
            case "recv":
                source = members.index(comm.peers[0])
                return Posted(lambda: partial(finish, group.recv([operand()], source, 0)))
            case kind if kind in BINDINGS:
                return Posted(
                    BINDINGS[kind](Members(group, members.index(self._rank), len(members)), comm)
                )
            case kind:
                raise no_binding("gloo", kind, BINDINGS)


@contextmanager
def _new_threads_let_others_run() -> Iterator[None]:
    """Give threads that are started inside the block a policy that lets them displace no other thread on waking up.

    A device of gloo has a thread that reads and writes sockets. When another thread has the lock of a connection, it
    does not sleep but asks again at once. Woken by the peer's message on the core of a thread that sends with that
    lock, it would displace that thread, and then ask for its lock until the system's next tick: 4 ms in which nothing
    moves, met by one message of eight (docs/decisions/0032). If the system has no such policy or does not allow it, as
    some sandboxes, or the caller has a policy of its own, threads keep the default.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    with suppress(OSError):
        os.sched_setscheduler(
            0, os.SCHED_BATCH, os.sched_param(0)
        )  # new threads have the policy of the one that starts them
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@dataclass(frozen=True, slots=True)
class Members:
    """Hold the process group of one channel instance; `here` is this rank's index among its `size` members."""

    group: Any
    here: int
    size: int


GlooBinding = Callable[[Members, BoundComm], Callable[[], Thunk]]
"""A function that binds a collective to its members and returns its start, which returns a closure that waits."""


def no_binding(transport: str, kind: str, bindings: Mapping[str, object]) -> ExecutionError:
    """Return the error for a collective that a transport does not carry."""
    return ExecutionError(
        f"{transport} has no binding for the collective {kind!r}; it has {', '.join(bindings)}"
    )


def _all_reduce(members: Members, comm: BoundComm) -> Callable[[], Thunk]:
    def start() -> Thunk:
        tensor = comm.operand()
        return partial(_finish_holding, members.group.allreduce([_borrowed(tensor)]), tensor)

    return start


def _reduce_scatter(members: Members, comm: BoundComm) -> Callable[[], Thunk]:
    """Sum in place, since the input is undefined afterwards, and copy the own block out.

    gloo's own reduce-scatter is an all-reduce too, of a copy.
    """
    operand, result = comm.operand, comm.result
    assert result is not None

    def start() -> Thunk:
        whole, part = operand(), result()
        own = whole.data_ptr() + members.here * part.nbytes
        work = members.group.allreduce([_borrowed(whole)])

        def take() -> None:
            _finish_holding(work, whole)
            # Not by an operator: it would be taken for the first one of the instruction that waits, which frees before
            # it runs.
            memmove(part.data_ptr(), own, part.nbytes)

        return take

    return start


def _all_gather(members: Members, comm: BoundComm) -> Callable[[], Thunk]:
    operand, result = comm.operand, comm.result
    assert result is not None

    def start() -> Thunk:
        sent, got = operand(), result()
        if got.nbytes > COPIED:
            return _exchange(members, [sent] * members.size, got.chunk(members.size))
        copies = torch.cat([_bytes(sent)] * members.size)
        into = _bytes(got)
        return partial(
            _finish_holding, members.group.alltoall_base(into, copies, [], []), sent, got, copies
        )

    return start


def _all_to_all(members: Members, comm: BoundComm) -> Callable[[], Thunk]:
    """Exchange by gloo's own collective, which works on the given tensors, on a thread of gloo's.

    Receives that are posted from here block if the cores are busy, and gloo's other thread takes CPU time meanwhile.
    """
    operand, result = comm.operand, comm.result
    assert result is not None

    def start() -> Thunk:
        sent, got = operand(), result()
        to, into = _bytes(sent), _bytes(got)
        return partial(_finish_holding, members.group.alltoall_base(into, to, [], []), sent, got)

    return start


def _exchange(members: Members, to: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> Thunk:
    """Start to send block k of `to` to member k, and to receive block k of `into` from it.

    gloo's own collectives work on copies of their inputs, which no plan counts.
    """
    group, here = members.group, members.here
    _check_dense(*to, *into)
    works = []
    for step in range(
        1, members.size
    ):  # each in its own order, so that not all send to the same one at first
        source, target = (here - step) % members.size, (here + step) % members.size
        works += [group.recv([into[source]], source, 0), group.send([to[target]], target, 0)]
    memmove(into[here].data_ptr(), to[here].data_ptr(), into[here].nbytes)

    def wait() -> None:
        for work in works:
            _finish_holding(work, to, into)

    return wait


def _shift(members: Members, comm: BoundComm) -> Callable[[], Thunk]:
    operand, result = comm.operand, comm.result
    assert result is not None
    source, target = (members.here - 1) % members.size, (members.here + 1) % members.size

    def start() -> Thunk:
        sent, got = operand(), result()
        _check_dense(sent, got)
        works = [members.group.recv([got], source, 0), members.group.send([sent], target, 0)]

        def wait() -> None:
            for work in works:
                _finish_holding(work, sent, got)

        return wait

    return start


BINDINGS: dict[str, GlooBinding] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "shift": _shift,
}
"""The bindings of gloo, by kind of collective."""


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that does not keep it alive; the owner must outlive the work.

    gloo's own thread holds its tensor for a moment longer than `wait` takes, so that it would die later than planned.
    """
    _check_dense(tensor)
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), tensor.device, tensor.nbytes
    )
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, borrowed."""
    _check_dense(tensor)
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr(), tensor.device, tensor.nbytes
    )
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (tensor.nbytes,), (1,))


def _alone(comm: BoundComm) -> Thunk:
    """Run a communication that has one member at once, with nothing left to wait for."""
    comm.alone()
    return partial(void, None)


def _check_dense(*tensors: torch.Tensor) -> None:
    """Raise ExecutionError for a tensor that is not contiguous, since gloo reads memory in its order."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ExecutionError(
                f"a collective was given a tensor of shape {tuple(tensor.shape)} that is not contiguous"
            )


def _finish_holding(work: Any, *owners: object) -> None:
    """Wait until a communication is done, with `owners` of its memory kept alive as long as callers of this live.

    In a run that has failed, gloo may still write there.
    """
    finish(work)


def finish(work: Any) -> None:
    """Wait until a communication is done; raise ExecutionError when it ends without success."""
    if not work.wait():
        raise ExecutionError("the communicator gave up")


def void(_: object) -> None:
    """Drop a result."""
