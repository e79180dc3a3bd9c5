"""gloo for tensors on a CUDA device, through pinned memory of the host: for ranks that share a device, which NCCL cannot join."""

from __future__ import annotations

from dataclasses import replace

import torch

from piper_ir.plan import Plan
from piper_runtime.gloo import GlooCommunicators
from piper_runtime.rank import Comm
from piper_runtime.streams import Work


class StagedCommunicators:
    """gloo's communicators, with a copy to the host before what is sent and one to the device after what has come."""

    def __init__(self, gloo: GlooCommunicators):
        self._gloo = gloo

    def connect(self, plan: Plan) -> None:
        """Make what a plan needs."""
        self._gloo.connect(plan)

    def bind(self, comm: Comm) -> Work:
        """The closure that carries out a communication on the stream that is current, on a thread that may wait. When it
        returns, the peers have what was sent, and the copy of what has come is issued.

        Pinned memory comes from torch's pool, which takes a buffer back when the copy that reads it is done."""
        if len(comm.peers) < 2:
            return self._gloo.bind(comm)
        operand, staged = comm.operand, list[torch.Tensor]()
        carry = self._gloo.bind(replace(comm, operand=lambda: staged[0]))
        sends, receives = comm.kind != "recv", comm.kind != "send"

        def run() -> None:
            tensor = operand()
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            if sends:
                host.copy_(tensor)  # waits for this stream
            staged.append(host)
            try:
                carry()
            finally:
                staged.clear()
            if receives:
                tensor.copy_(host, non_blocking=True)

        return run
