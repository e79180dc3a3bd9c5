"""Hold the rows and numbers that the host gives a step at fixed addresses, from which a CUDA graph reads them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from piper_ops import Key, signed

Copy = Callable[[torch.Tensor], torch.Tensor]
"""A function that copies an input of the step into a tensor of the device, and returns this tensor."""


class StepInputs:
    """Hold a buffer on the host for each input of a step: pinned for a CUDA device, plain for a CPU.

    The step copies an input from there to the device where the plan loads it, so inputs take no memory of the device
    beside the plan's. The host may write the buffers of a step when the step before is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._captures = device, False
        self._writes: list[Callable[[], object]] = []
        self._keys: dict[str, tuple[torch.Tensor, Copy]] = {}

    def bind(
        self, shape: tuple[int, ...], dtype: torch.dtype, give: Callable[[], torch.Tensor | float]
    ) -> Copy:
        """Return the function that copies an input; `give` returns it in the present step.

        A float stands for all elements. While a step is captured nothing is given: `write` gives it before the graph
        is launched.
        """
        staged = torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda")

        def write() -> None:
            given = give()
            staged.copy_(given) if isinstance(given, torch.Tensor) else staged.fill_(given)

        def copy(target: torch.Tensor) -> torch.Tensor:
            if not self._captures:
                write()
            return target.copy_(staged, non_blocking=True)

        self._writes.append(write)
        return copy

    def key(self, name: str, make: Callable[[], Key]) -> Key:
        """Return a key of random numbers as numbers on the device; `make` returns that of the present step."""
        if name not in self._keys:
            pair = torch.empty(2, dtype=torch.int64, device=self._device)
            self._keys[name] = (
                pair,
                self.bind((2,), torch.int64, lambda: torch.tensor([*map(signed, make())])),
            )
        pair, copy = self._keys[name]
        start, increment = copy(pair)
        return start, increment

    def write(self) -> None:
        """Write all inputs of the present step, in the order in which the program was bound."""
        for write in self._writes:
            write()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Copy the buffers as they are, inside of this block."""
        self._captures = True
        try:
            yield
        finally:
            self._captures = False
