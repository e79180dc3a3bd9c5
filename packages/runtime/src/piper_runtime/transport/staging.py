"""Carry tensors on a CUDA device by gloo, through pinned memory of the host, for ranks that share a device.

NCCL cannot join such ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from piper_ir.plan.plan import Plan
from piper_runtime.rank.binding.parts import Thunk
from piper_runtime.rank.binding.rank import BoundComm
from piper_runtime.transport.gloo import GlooCommunicators


class StagedCommunicators:
    """Add to gloo's communicators a copy to the host before each send and one to the device after each receipt."""

    def __init__(self, gloo: GlooCommunicators):
        self._gloo = gloo

    def connect(self, plan: Plan) -> None:
        """Make the communicators of a plan's channels."""
        self._gloo.connect(plan)

    def bind(self, comm: BoundComm) -> Thunk:
        """Return the closure that carries out a communication on the current stream, on a thread that may wait.

        When it returns, the peers have the sent data, and the copy of received data is issued. Pinned memory comes from
        torch's pool, which takes a buffer back when the copy that reads it is done.
        """
        if len(comm.peers) < 2:
            return self._gloo.bind(comm)
        operand, result, staged = comm.operand, comm.result, list[torch.Tensor]()
        on_host = None if result is None else lambda: staged[1]
        carry = self._gloo.bind(replace(comm, operand=lambda: staged[0], result=on_host))

        def run() -> None:
            tensors = [operand()] if result is None else [operand(), result()]
            staged.extend(
                torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors
            )
            if comm.kind != "recv":
                staged[0].copy_(tensors[0])  # waits for this stream
            try:
                carry()
                if comm.kind != "send":
                    tensors[-1].copy_(staged[-1], non_blocking=True)
            finally:
                staged.clear()

        return run
