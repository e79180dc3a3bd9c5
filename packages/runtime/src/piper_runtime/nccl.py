"""Communicators over NCCL: one process group per channel instance, made of its members only. One rank per CUDA device.

NCCL refuses two ranks of one host on one device. Where a test wants that, each rank tells it that it is a host of its own
(NCCL_HOSTID), and messages go through sockets: all of this file runs then, slowly, and nothing of NVLink.

What torch does (ProcessGroupNCCL, its source read; a group of one rank was run, never two devices): a reduction with
asyncOp=False is issued on the stream that is current, and returns nothing. A send or receive goes to a stream of the group's own,
which is made to wait for the current one; `wait` then makes the current stream wait for it and does not hold the host. So in both
cases an event recorded on our stream afterwards is reached when the communication is done. A group that is connected eagerly uses
that one communicator for sends and receives too; without it torch would make another one at the first send. torch calls
`record_stream` on what is sent and received: such a buffer is counted as requested until the device has come to its end, and
peaks of a CUDA run can be above the plan's by buffers in flight.

NCCL needs the union of all ranks' issue orders to have no cycle: R20.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
import torch.distributed as dist

from piper_ir.errors import ExecutionError
from piper_ir.plan import Plan
from piper_runtime.gloo import FOREVER, GlooCommunicators, void
from piper_runtime.rank import Comm
from piper_runtime.streams import Work


class NcclCommunicators(GlooCommunicators):
    """The groups that `gloo` would make, over its store. `nbytes`: device memory that they took when they were made. `shared`:
    whether ranks share a device; known before the first group of the process, for NCCL asks for the host once."""

    def __init__(self, gloo: GlooCommunicators, device: torch.device, *, shared: bool = False):
        super().__init__(dist.PrefixStore("nccl", gloo._store), gloo._rank)
        self._device = device
        self.nbytes = 0
        if shared:
            os.environ["NCCL_HOSTID"] = f"{platform.node()} {self._rank}"
        # Sends of a group wait for each other: a channel is one FIFO.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")

    def connect(self, plan: Plan) -> None:
        """Make what a plan needs, and connect it: the first communication of a step is as fast as the others."""
        before, _ = torch.cuda.mem_get_info(self._device)
        super().connect(plan)
        self.nbytes += max(0, before - torch.cuda.mem_get_info(self._device)[0])

    def _group(self, key: str, members: list[int]) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        group = dist.ProcessGroupNCCL(dist.PrefixStore(key, self._store), members.index(self._rank), len(members), options)
        group.eager_connect_single_device(self._device)
        return group

    def bind(self, comm: Comm) -> Work:
        """The closure that issues a communication behind what the current stream has to do, so that the stream goes on when it
        is done."""
        operand = comm.operand
        if len(comm.peers) < 2:
            return lambda: void(operand())
        group = self._groups[self._keys[comm.channel]]
        members = sorted(comm.peers)
        match comm.kind:
            case "send":
                target = members.index(comm.peers[1])
                return lambda: join(group.send([operand()], target, 0))
            case "recv":
                source = members.index(comm.peers[0])
                return lambda: join(group.recv([operand()], source, 0))
            case "all_reduce":
                options = dist.AllreduceOptions()
                options.asyncOp = False
                return lambda: join(group.allreduce([operand()], options))

    def abort(self) -> None:
        """Give up all groups, so that this rank's kernels end and its peers' do not wait for ever. They cannot be used again."""
        for group in self._groups.values():
            group.abort()
        self._groups.clear()
        self._keys.clear()


def join(work: Any) -> None:
    """Make the current stream wait for a piece of communication; None is one that was issued on it. ExecutionError when it has
    failed already."""
    if work is not None and not work.wait():
        raise ExecutionError("the communicator gave up")
