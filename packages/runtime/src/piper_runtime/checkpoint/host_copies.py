"""Copy a rank's state to host memory; a thread writes it from there while the rank trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piper_runtime.checkpoint.rank_tensors import FlatState


class HostCopies:
    """Hold a copy of flat tensors on the host, in memory that is made once and used for every checkpoint.

    On a CUDA device the memory is pinned, and the copies run on a stream of their own beside the next step. `hold`
    makes the compute stream wait for them, for an Update to call before it writes; `settle` makes the host wait.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._slots: list[torch.Tensor] = []
        self._stream: Any = None
        self._copied: Any = None
        self._held = False

    def copy(self, states: Sequence[FlatState]) -> list[torch.Tensor]:
        """Copy these tensors, and return the copies; on a device they are there when `settle` returns."""
        self._slots = [self._slot(k, s.tensor) for k, s in enumerate(states)]
        if self._device.type == "cpu":
            for slot, state in zip(self._slots, states, strict=True):
                slot.copy_(state.tensor)
        else:
            self._copy_beside(states)
        return self._slots

    def _slot(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory for a tensor: the last checkpoint's, unless the state has changed its size."""
        if index < len(self._slots):
            slot = self._slots[index]
            if (slot.numel(), slot.dtype) == (tensor.numel(), tensor.dtype):
                return slot
        return torch.empty(
            tensor.numel(), dtype=tensor.dtype, pin_memory=self._device.type == "cuda"
        )

    def _copy_beside(self, states: Sequence[FlatState]) -> None:
        if self._stream is None:
            self._stream, self._copied = torch.cuda.Stream(self._device), torch.cuda.Event()
        compute = torch.cuda.current_stream(self._device)
        both = list(zip(self._slots, states, strict=True))
        for slot, state in both:
            if (
                state.early
            ):  # the next forward may write it, which waits for nothing: in order with compute
                slot.copy_(state.tensor, non_blocking=True)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            for slot, state in both:
                if not state.early:
                    slot.copy_(state.tensor, non_blocking=True)
                    if state.tensor.is_cuda:  # one that was made to be copied is freed before that
                        state.tensor.record_stream(self._stream)
            self._copied.record(self._stream)
        self._held = True

    def hold(self) -> None:
        """Let the device's current stream wait for the copies."""
        if self._held:
            self._copied.wait(torch.cuda.current_stream(self._device))
            self._held = False

    def settle(self) -> None:
        """Block until the copies are made."""
        if self._copied is not None:
            self._copied.synchronize()
