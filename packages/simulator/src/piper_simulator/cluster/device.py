"""Describe one device: its arithmetic, its memory, the cost of launches, and the kernels that run on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from piper_simulator.cluster.checks import (
    POSITIVE,
    Bandwidth,
    Count,
    Index,
    NotNegative,
    Positive,
    Text,
    check_fields,
    mapping,
    one_of,
)
from piper_simulator.cluster.kernel_table import KernelDuration, KernelTable
from piper_simulator.cluster.stacks import GENERATIONS, Stack

CPU = "cpu-local"
"""The name of this machine's own cluster and of its device."""
FLOAT8 = "float8"
"""The name of the rate of products in any float8 dtype, which a device may lack."""


@dataclass(frozen=True)
class Device:
    """Describe one device. Units are bytes, bytes/s, FLOP/s and seconds.

    Attributes:
        name: the name in clusters, e.g. "h100-80g-sxm".
        peak_flops: FLOP/s by dtype, dense.
        memory_bandwidth: bytes/s.
        matmul_fraction: fraction of the peak that matrix products and attention reach.
        matmul_fractions: the fraction that they reach in some dtypes, by dtype, in place of `matmul_fraction`.
        clock: sustained clock over that of other devices of the generation, as a power limit lowers it; it counts if a
            stack has constants.
        memory_fraction: fraction of the memory bandwidth that kernels bound by memory reach.
        launch_s: host seconds per kernel.
        kernel_s: seconds of the device from the end of a kernel to that of a next one that does nothing; they count
            if there is a stack.
        load_s: seconds until a load from memory arrives that no cache answers, likewise.
        host_issue_s: host seconds per instruction of a plan.
        synchronous: whether the host runs the kernels itself (a CPU); launches then add to their time instead of hiding
            behind it.
        context_bytes: taken on the device before the first tensor.
        allocator_factor: reserved over allocated bytes.
        group_bytes: memory of a communicator of a group.
        p2p_bytes: memory of a communicator of two neighbours.
        sms: streaming multiprocessors; 0 if there are none, or their number is not known.
        generation: architecture, for constants that a stack gives by architecture.
        memory_steps: (bytes from which on, fraction of the memory bandwidth), largest first; they count if there is
            a stack.
        stack: the kernel stack that runs the model; without one all kernels reach the same fractions.
        kernels: measured kernels, which come before any formula.
        notes: which of these numbers are assumed or not calibrated; every prediction shows it as a warning. It may be
            empty.
        price_per_hour: dollars for one device and hour; 0 if unknown.
    """

    name: Text
    peak_flops: Annotated[Mapping[str, float], mapping(POSITIVE, least=1)]
    memory_bandwidth: Bandwidth
    memory_bytes: Count
    matmul_fraction: Positive = 1.0
    matmul_fractions: Annotated[Mapping[str, float], mapping(POSITIVE)] = field(
        default_factory=dict
    )
    clock: Positive = 1.0
    memory_fraction: Positive = 1.0
    launch_s: NotNegative = 0.0
    kernel_s: NotNegative = 0.0
    load_s: NotNegative = 0.0
    host_issue_s: NotNegative = 0.0
    synchronous: bool = False
    context_bytes: Index = 0
    allocator_factor: Positive = 1.0
    group_bytes: Index = 0
    p2p_bytes: Index = 0
    sms: Index = 0
    generation: Annotated[str, one_of("", *GENERATIONS)] = ""
    memory_steps: tuple[tuple[NotNegative, Positive], ...] = ()
    stack: Stack | None = None
    kernels: tuple[KernelDuration, ...] = ()
    notes: str = field(default="", compare=False)
    price_per_hour: NotNegative = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, f"device {self.name}")

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s in a dtype; an unknown dtype gets the slowest known ones (see `guess`)."""
        return self.peak_flops.get(dtype) or min(self.peak_flops.values())

    def product_fraction(self, dtype: str) -> float:
        """Return the fraction of the peak that products in a dtype reach."""
        return self.matmul_fractions.get(dtype, self.matmul_fraction)

    def guess(self, dtype: str, who: str) -> str:
        """Return a warning of `who` that says which rate `peak` takes for a dtype that it does not know."""
        slowest = min(self.peak_flops, key=lambda d: self.peak_flops[d])
        return (
            f"{who}: no FLOP/s known for {dtype}; computed with those of {slowest}, "
            f"{self.peak(dtype) / 1e12:g} TFLOP/s"
        )

    @cached_property
    def kernel_table(self) -> KernelTable:
        """Return `kernels` as a table for look-ups."""
        return KernelTable(self.kernels)
