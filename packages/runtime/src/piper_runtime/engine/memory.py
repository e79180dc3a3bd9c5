"""Count the memory in use without any knowledge of the plan.

It is the bytes of live tensor storages as torch's dispatcher shows them, or the bytes requested from a CUDA device's
allocator.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piper_ops import OP_KERNELS


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Hold one run of an instruction: the most bytes alive while it ran, and the bytes alive when it was done."""

    instr: int
    within: int
    after: int


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """Hold the memory of one rank in the measured step.

    Attributes:
        peak: the most bytes that were alive.
        peak_at: the first instruction that reached it; -1: before the first one.
        states: bytes of states, which live always.
        points: one per compute instruction, in order.
        host: the most bytes of values that were in the memory of the host.
    """

    peak: int
    peak_at: int
    states: int
    points: tuple[MemoryPoint, ...]
    host: int = 0


class MemoryCounter(TorchDispatchMode):
    """Count the bytes of storages that operators return in a `during` block of one device, until each storage dies.

    It sees temporaries of composed operators but not the workspace of a kernel; with `inside` it looks into the kernels
    of piper's ops, which are made of torch's. `points` has one entry per block, in order; `base` is the bytes that were
    given to `track`.
    """

    def __init__(self, device: str = "cpu", inside: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._device, self._inside = device, inside
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._paused = False
        self.live = 0
        self.base = 0
        self.peak = 0
        self.peak_at = -1
        self.points: list[MemoryPoint] = []
        self._within = 0
        self._instr = -1

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that exist already, such as parameters."""
        before = self.live
        for t in tensors:
            self._add(t)
        self.base += self.live - before

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never count these tensors, such as constants of the code; an operator may return a view of one."""
        for t in tensors:
            storage = t.untyped_storage()
            self._alive[id(storage)] = weakref.ref(storage)

    @contextmanager
    def during(self, instr: int) -> Iterator[None]:
        """Observe one instruction."""
        self._instr, self._within = instr, 0
        try:
            with self:
                yield
        finally:
            self._note()
            self.points.append(MemoryPoint(instr, self._within, self.live))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore storages that are made inside this block."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def record(self) -> MemoryRecord:
        """Return the record so far."""
        return MemoryRecord(self.peak, self.peak_at, self.base, tuple(self.points))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, since nothing is compiled under a counter: to keep the compiler out costs 3 us per operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        paused = self._paused
        if not paused:
            self._note()  # memory that an instruction frees before its first operator is gone now
        if self._inside and func in OP_KERNELS:
            with self:
                result = OP_KERNELS[func](*args, **(kwargs or {}))
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
        if paused:
            return result
        if isinstance(result, torch.Tensor):
            self._add(result)
        else:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._add(leaf)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._alive.get(key)
        if known is not None and known() is storage:
            return
        if storage.device.type != self._device:
            return
        nbytes = storage.nbytes()
        self._alive[key] = weakref.ref(storage, lambda _: self._drop(key, nbytes))
        self.live += nbytes
        self._note()

    def _drop(self, key: int, nbytes: int) -> None:
        del self._alive[key]
        self.live -= nbytes

    def _note(self) -> None:
        live = self.live
        if live > self._within:
            self._within = live
            if live > self.peak:
                self.peak, self.peak_at = live, self._instr


class AllocatorCounter:
    """Count as `MemoryCounter` does, by a CUDA device's caching allocator, in a process that holds one rank only.

    It counts the requested bytes in program order: the allocator learns of every allocation and free when the host
    issues it. The workspace of kernels is counted, too. Memory that was alive before the first block beside the states
    (such as cuBLAS's workspaces) is not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outside: int | None = None
        self._peaks: list[int] = []
        self.base = 0
        self.points: list[MemoryPoint] = []

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that exist already, such as parameters."""
        storages = {
            s.data_ptr(): s.nbytes()
            for t in tensors
            if t.is_cuda and (s := t.untyped_storage()).nbytes()
        }
        self.base += sum(storages.values())

    @contextmanager
    def during(self, instr: int) -> Iterator[None]:
        """Observe one instruction."""
        if self._outside is None:
            torch.empty(
                1, device=self._device
            )  # the allocator looks for frees that waited for a stream when it is asked next
            self._outside = self._asked("current") - self.base
        torch.cuda.reset_peak_memory_stats(self._device)
        self._peaks.clear()
        try:
            yield
        finally:
            within = max(*self._peaks, self._asked("peak")) if self._peaks else self._asked("peak")
            self.points.append(
                MemoryPoint(instr, within - self._outside, self._asked("current") - self._outside)
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore memory that is allocated inside this block, unless it outlives it."""
        self._peaks.append(self._asked("peak"))
        try:
            yield
        finally:
            torch.cuda.reset_peak_memory_stats(self._device)

    def record(self) -> MemoryRecord:
        """Return the record so far."""
        first = max(self.points, key=lambda p: p.within)  # the earliest of equals
        return MemoryRecord(first.within, first.instr, self.base, tuple(self.points))

    def _asked(self, what: str) -> int:
        nbytes: int = torch.cuda.memory_stats_as_nested_dict(self._device)["requested_bytes"][
            "all"
        ][what]
        return nbytes


Counter = MemoryCounter | AllocatorCounter
