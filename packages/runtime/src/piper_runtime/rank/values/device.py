"""Choose the device of a rank, and let the host read numbers that it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from piper_ir.ground.errors import ExecutionError

CPU = torch.device("cpu")
DeviceKind = Literal["auto", "cpu", "cuda"]
NO_CUDA = "no CUDA device"

default: DeviceKind = "auto"
"""The kind of device for runs that start in this process, see `using`; the test suite sets it to "cpu"."""

Read = Callable[[torch.Tensor], None]
Use = Callable[[float], None]


def choose_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of a rank; raise ExecutionError when there is no such device.

    `kind` is "cpu"; "cuda", the node's CUDA devices in turn; or "auto", "cuda" if there is one, else "cpu".
    `local_rank` is the rank's number on its node.
    """
    if kind not in ("auto", "cpu", "cuda"):
        raise ExecutionError(f'device {kind!r} is not known; use "auto", "cpu" or "cuda"')
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        raise ExecutionError(
            f'device "cuda": {NO_CUDA}; use device="cpu", or torch for CUDA on a machine that has '
            f"one"
        )
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def default_kind() -> DeviceKind:
    """Return the kind of device for runs that start now."""
    return default


@contextmanager
def using(kind: DeviceKind) -> Iterator[None]:
    """Let runs that start inside the block take this kind of device, as in `choose_device`."""
    global default
    before, default = default, kind
    try:
        yield
    finally:
        default = before


class NumberReader:
    """Hand numbers of tensors on the CPU to the host at once."""

    late = False

    def reader(self, dtype: torch.dtype, use: Use) -> Read:
        """Return the closure that hands the number in a tensor of one element and this dtype to `use`."""
        return lambda tensor: use(float(tensor))

    def finish(self) -> None:
        """End a step: everything has been handed over."""


class LateNumbers(NumberReader):
    """Hand numbers of tensors on a CUDA device to the host at the end of the step, in the order of reading.

    Until then each is a copy on its way to pinned memory, so that nothing inside of a step waits for the device. It
    also works on tensors of the CPU, for tests.
    """

    late = True

    def __init__(self, device: torch.device) -> None:
        self._pin = device.type == "cuda"
        self._copied: list[tuple[torch.Tensor, Use]] = []

    def reader(self, dtype: torch.dtype, use: Use) -> Read:
        slot = torch.empty(
            (), dtype=dtype, pin_memory=self._pin
        )  # of the tensor's dtype: a copy that converts is two kernels
        copied = self._copied

        def read(tensor: torch.Tensor) -> None:
            slot.copy_(tensor, non_blocking=True)
            copied.append((slot, use))

        return read

    @property
    def pending(self) -> list[tuple[torch.Tensor, Use]]:
        """Return the numbers that were read in this step so far, each with the function that gets it."""
        return self._copied.copy()

    def read_again(self, pending: list[tuple[torch.Tensor, Use]]) -> None:
        """Note that the device reads these numbers in this step, too, as a CUDA graph does."""
        self._copied.extend(pending)

    def finish(self) -> None:
        """Wait for the copies, all on the stream that is current, and hand the numbers over."""
        if self._pin:
            torch.cuda.current_stream().synchronize()
        copied = self._copied.copy()
        self._copied.clear()
        for slot, use in copied:
            use(float(slot))


def numbers_of(device: torch.device) -> NumberReader:
    """Return the reader that brings numbers from a device to the host."""
    return LateNumbers(device) if device.type == "cuda" else NumberReader()
