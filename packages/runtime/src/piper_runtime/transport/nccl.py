"""Communicate over NCCL: one process group per channel instance, made of its members only, one rank per CUDA device.

NCCL refuses two ranks of one host on one device. If a test needs that, each rank tells NCCL that it is a host of its
own (NCCL_HOSTID), and messages go through sockets. All of this file runs then, slowly and without NVLink.

The behaviour of torch (ProcessGroupNCCL, its source read; run on one H100): a collective with asyncOp=False is issued
on the stream that is current, and returns nothing, so an event recorded afterwards is reached when it is done. A send
or receive is not: it goes to a stream of the group's own, and torch calls `record_stream` on its tensor, so that the
allocator takes the memory back only when the device has come to its end. A host that is a step ahead then keeps all
sent and received tensors of a step (seen: more memory than the plan's after the first free of a received tensor). So a
message from rank to rank is a broadcast on its channel, whose members are the two.

NCCL needs the union of all ranks' issue orders to have no cycle: R20.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundComm
from piper_runtime.transport.gloo import FOREVER, GlooCommunicators, no_binding, void


class NcclCommunicators(GlooCommunicators):
    """Hold the same groups as `gloo`, made over its store.

    If `apart`, each rank is a host of its own to NCCL, which asks for the host once per process.
    """

    def __init__(self, gloo: GlooCommunicators, device: torch.device, *, apart: bool = False):
        super().__init__(dist.PrefixStore("nccl", gloo._store), gloo._rank)
        self._device = device
        self.name = "nccl by sockets" if apart else "nccl"
        if apart:
            os.environ["NCCL_HOSTID"] = f"{platform.node()} {self._rank}"

    @property
    def in_use(self) -> bool:
        """Return whether there are groups."""
        return bool(self._groups)

    def group(self, key: str, members: list[int]) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        group = dist.ProcessGroupNCCL(
            dist.PrefixStore(key, self._store), members.index(self._rank), len(members), options
        )
        group.eager_connect_single_device(
            self._device
        )  # else its first use would make it, and wait for the others
        return group

    def bind(self, comm: BoundComm) -> Thunk:
        """Return the closure that issues a communication behind the current stream's work; the stream then waits."""
        operand = comm.operand
        if len(comm.peers) < 2:
            return comm.alone
        group = self._groups[self._keys[comm.channel]]
        match comm.kind:
            case "send" | "recv":
                broadcast = on_this_stream(c10d.BroadcastOptions())
                broadcast.rootRank = sorted(comm.peers).index(comm.peers[0])
                return lambda: void(group.broadcast([operand()], broadcast))
            case kind if kind in BINDINGS:
                return BINDINGS[kind](group, comm)
            case kind:
                raise no_binding("NCCL", kind, BINDINGS)


def on_this_stream(options: Any) -> Any:
    """Return the options of a collective, which is then issued on the stream that is current."""
    options.asyncOp = False
    return options


NcclBinding = Callable[[Any, BoundComm], Thunk]
"""A function that binds a collective to a process group and returns the closure that issues it."""


def _all_reduce(group: Any, comm: BoundComm) -> Thunk:
    options = on_this_stream(c10d.AllreduceOptions())
    return lambda: void(group.allreduce([comm.operand()], options))


def _all_gather(group: Any, comm: BoundComm) -> Thunk:
    options, result = on_this_stream(c10d.AllgatherOptions()), comm.result
    assert result is not None
    return lambda: void(group._allgather_base(result(), comm.operand(), options))


def _reduce_scatter(group: Any, comm: BoundComm) -> Thunk:
    options, result = on_this_stream(c10d.ReduceScatterOptions()), comm.result
    assert result is not None
    return lambda: void(group._reduce_scatter_base(result(), comm.operand(), options))


def _all_to_all(group: Any, comm: BoundComm) -> Thunk:
    options, result = on_this_stream(c10d.AllToAllOptions()), comm.result
    assert result is not None
    return lambda: void(group.alltoall_base(result(), comm.operand(), [], [], options))


def _shift(group: Any, comm: BoundComm) -> Thunk:
    """Issue an all-to-all that sends to the next member only: as two messages it would leave the stream."""
    options, operand, result = on_this_stream(c10d.AllToAllOptions()), comm.operand, comm.result
    assert result is not None
    here, size = group.rank(), group.size()

    def run() -> None:
        sent, got = operand().view(-1), result().view(-1)
        to = [sent.numel() if k == (here + 1) % size else 0 for k in range(size)]
        source = [got.numel() if k == (here - 1) % size else 0 for k in range(size)]
        void(group.alltoall_base(got, sent, source, to, options))

    return run


BINDINGS: dict[str, NcclBinding] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "shift": _shift,
}
"""The bindings of NCCL, by kind of collective."""
