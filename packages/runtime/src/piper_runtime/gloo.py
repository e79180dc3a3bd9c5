"""Communicators over gloo: one process group per channel instance, made of its members only, without a global group."""

from __future__ import annotations

from ctypes import memmove
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from piper_ir.errors import ExecutionError
from piper_ir.plan import Plan
from piper_runtime.rank import Comm
from piper_runtime.streams import Posted, Work

LOOPBACK = "127.0.0.1"
FOREVER = timedelta(days=1)
"""gloo's own timeout: who hangs is noticed and ended by the launcher, which knows how long a step may take."""


class GlooCommunicators:
    """The communicators of one rank. They are kept, so that later plans with the same channels use them again."""

    def __init__(self, store: Any, rank: int, interface: str = LOOPBACK):
        """`interface`: the address under which the other ranks reach this one."""
        self._store = store
        self._interface = interface
        self._rank = rank
        self._groups: dict[str, Any] = {}
        self._keys: dict[str, str] = {}

    @property
    def store(self) -> Any:
        """Where the ranks that may talk to each other leave notes (a torch.distributed.Store)."""
        return self._store

    def connect(self, plan: Plan) -> None:
        """Make what a plan needs. Every rank goes through the plan's channels in one order, so no two wait for each other in a
        circle."""
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
        """A new process group of these ranks, under a key that no other group of theirs has."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._interface)]
        options._timeout = FOREVER
        options._threads = 1
        store = dist.PrefixStore(key, self._store)
        return dist.ProcessGroupGloo(store, members.index(self._rank), len(members), options)

    def close(self) -> None:
        """Drop the groups. One that nobody else holds waits for its threads, which must have nothing left to do."""
        self._groups.clear()

    def bind(self, comm: Comm) -> Posted:
        """The closure that runs a communication, or posts it. A send is done when the peer has taken the tensor."""
        operand = comm.operand
        if len(comm.peers) < 2:
            return Posted(lambda: partial(void, operand()))
        group = self._groups[self._keys[comm.channel]]
        members = sorted(comm.peers)
        match comm.kind:
            case "send":
                target = members.index(comm.peers[1])
                return Posted(lambda: partial(finish, group.send([operand()], target, 0)))
            case "recv":
                source = members.index(comm.peers[0])
                return Posted(lambda: partial(finish, group.recv([operand()], source, 0)))
            case "all_reduce":
                return Posted(lambda: all_reduce(group, operand()))


def all_reduce(group: Any, tensor: torch.Tensor) -> Work:
    """Start to sum a tensor in place. gloo's own thread holds what it reduces for a moment longer than `wait`: nothing to a
    bucket, but a scalar would die later than the plan says, so a copy is reduced in its stead."""
    if tensor.dim():
        return partial(finish, group.allreduce([tensor]))
    copy = tensor.clone()
    work = group.allreduce([copy])

    def copy_back() -> None:
        finish(work)
        # Not by an operator: it would be taken for the first one of the instruction that waits, which frees before it runs.
        memmove(tensor.data_ptr(), copy.data_ptr(), tensor.nbytes)

    return copy_back


def finish(work: Any) -> None:
    """Wait until a piece of communication is done. ExecutionError when it ends without success."""
    if not work.wait():
        raise ExecutionError("the communicator gave up")


def void(_: object) -> None:
    """Drop a result."""
