"""Describe the events of one rank's trace. Times are in seconds, on the clock of the trace's machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EventKind = Literal["product", "attention", "norm", "message", "copy", "optimizer", "other"]
"""The kind of work of an event on a device."""

_KINDS: tuple[tuple[EventKind, str], ...] = (
    ("message", r"nccl|rccl|^gloo:|^c10d::|allreduce_kernel|nvshmem"),
    ("copy", r"^mem(cpy|set)|^memory"),
    ("attention", r"flash|fmha|attention|cudnn_generated_fort_native_sdpa|cudnn.*sdpa"),
    ("product", r"gemm|cutlass|xmma|cublas|nvjet|wgmma|gemv|_mm_|matmul|convol|conv.*kernel|wgrad|dgrad|fprop|^aten::\w*mm_?$"),
    ("norm", r"(?<!foreach_)(?<!vector_)(?<!lp)norm(?!al)|rms_|bn_(fw|bw)|welford"),
    ("optimizer", r"adam|sgd|lamb|multi_tensor_apply"),
)  # fmt: skip
"""The kinds by parts of kernels' names, the first that applies.

NCCL, RCCL, cuBLAS ("nvjet", "gemm"), CUTLASS, cuDNN, FlashAttention and ATen name their kernels so.
"""
_PATTERNS = [(kind, re.compile(text, re.IGNORECASE)) for kind, text in _KINDS]


def kind_of(name: str) -> EventKind:
    """Return the kind of a kernel, copy or message by its name."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")


@dataclass(frozen=True, slots=True)
class SentMessage:
    """Describe a message as the profiler of newer versions of torch records it.

    Attributes:
        op: the kind of collective: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p" or
            the name that the trace has.
        nbytes: bytes of the whole tensor: the larger one of a rank's input and output.
        size: the number of ranks in its group.
        ranks: the ranks of its group; empty if the trace does not name them.
        group: the name of the process group; "" if the trace has none.
    """

    op: str
    nbytes: int
    size: int
    ranks: tuple[int, ...] = ()
    group: str = ""

    @property
    def label(self) -> str:
        """Return the group for people: its name if its ranks are not known."""
        return self.group or f"group of {self.size}"


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Describe a kernel, a copy or a message on a device; on a CPU, an operator without its callees, or a message.

    Attributes:
        launched: when the host had launched it; None if the trace does not say.
        message: of a message, its sizes; None if the trace has none.
    """

    name: str
    stream: int
    start: float
    end: float
    kind: EventKind
    launched: float | None = None
    message: SentMessage | None = None


@dataclass(frozen=True, slots=True)
class HostEvent:
    """Describe a range that a program has named (`record_function`) on a host's thread."""

    name: str
    thread: str
    start: float
    end: float


@dataclass(frozen=True)
class RankEvents:
    """Hold the events of one rank, each list in order of start.

    Attributes:
        path: the file.
        rank: the number of the rank; -1 if neither the file nor its name says it.
        world: the number of ranks; 0 if the file does not say it.
        device: the name of the accelerator; "" if the trace does not say it, and on a CPU.
        host: the name of the machine; "" if the trace does not say it.
        on_device: whether `events` are of an accelerator; else they are of the CPU.
        ranges: ranges on the host, without steps and messages.
        steps: (number, start, end) of each step that the profiler has marked.
        program: the key of the program of a run of Piper's; "" for other runs.
    """

    path: str
    rank: int = -1
    world: int = 0
    device: str = ""
    host: str = ""
    on_device: bool = False
    events: Sequence[DeviceEvent] = ()
    ranges: Sequence[HostEvent] = ()
    steps: Sequence[tuple[int, float, float]] = ()
    program: str = ""
