"""Hold the buffers of a rank in the memory of the host, for tensors that wait there.

A buffer is used again when the tensor in it is dropped, which the issuing thread does as the plan says, ahead of the
device. That is safe for the reason that `piper_runtime.engine.cuda_streams` gives for blocks of the device: who frees a
value has waited for the copies that use it, and the next copy into the buffer waits for the instruction that took it.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict

import torch


class HostMemory:
    """Lend buffers of the host: pinned for a CUDA device, so that copies run beside compute; plain ones for a CPU.

    Attributes:
        live: the bytes of the tensors that are lent.
        peak: the most bytes that were lent since `begin`.
    """

    def __init__(self, device: torch.device) -> None:
        self._pin = device.type == "cuda"
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._lent: dict[int, weakref.ref[torch.Tensor]] = {}
        self.live = self.peak = 0

    def begin(self) -> None:
        """Start a step, in which the peak is counted anew."""
        self.peak = self.live

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of this shape and dtype, in a buffer that comes back when the tensor is dropped."""
        nbytes = math.prod(shape) * dtype.itemsize
        free = self._free[nbytes]
        buffer = (
            free.pop() if free else torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pin)
        )
        tensor = buffer.view(dtype).view(shape)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        key = id(buffer)

        def dropped(_: object) -> None:
            del self._lent[key]
            self.live -= nbytes
            free.append(buffer)

        self._lent[key] = weakref.ref(tensor, dropped)
        return tensor
