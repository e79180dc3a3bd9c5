"""Define the instructions of a role's program, their parts, and the use of the memory of their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from piper_ir.program.ops import COMM, Op

COMPUTE = "compute"
"""The one stream of a role that computes, allocates and frees."""

HOST: Literal["host"] = "host"
"""The category of values in the memory of the host."""

Category = Literal[
    "param", "master", "grad", "optim", "buffer", "gathered", "reduced", "activation", "gradient", "batch", "scalar",
    "host", "workspace",
]  # fmt: skip
"""The use of memory.

States are param, master, grad (buckets), optim and buffer. Values are gathered (all parameters of a bucket that is
sharded), reduced (gradients of such a bucket on their way to the ranks that keep them), activation (outputs and saved
tensors of F), gradient (of activations), batch and scalar. host is a copy of an activation in the memory of the host,
which no sum of a device's bytes has. workspace is the memory of a running instruction beyond its values.
"""
CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True, slots=True)
class Part:
    """Describe one op of an instruction.

    Attributes:
        node: the id of the graph's node that it comes from.
        mb: the microbatch, -1 for ops of the whole step.
        frees: the values that die when it is done.
        held: the values of sharded buckets that a step uses in place of states: gathered parameters, which it reads,
            and buffers of gradients, to which it adds.
    """

    node: str
    op: Op
    mb: int = -1
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Instr:
    """Describe one entry of a role's program.

    Attributes:
        parts: its ops. Only the compute stream has several in one instruction: B is I and W, neighbours may be fused,
            and an overlapped pair of a synthetic program is one instruction.
        waits: pairs (stream, n): the first n instructions of that stream must be done.
        frees_before: values that are freed before the parts run.
        allocs_after: values whose memory is allocated after the parts ran.
        seconds: the given duration of an overlapped pair, which is not the sum of its parts.
    """

    stream: str
    parts: tuple[Part, ...]
    waits: tuple[tuple[str, int], ...] = ()
    frees_before: tuple[str, ...] = ()
    allocs_after: tuple[str, ...] = ()
    seconds: float | None = None

    @property
    def comm(self) -> bool:
        """Return whether it is communication."""
        return isinstance(self.parts[0].op, COMM)

    @property
    def name(self) -> str:
        """Return the node of its first part, with the number of further parts: "layer3.B@2+1"."""
        more = len(self.parts) - 1
        return self.parts[0].node + (f"+{more}" if more else "")
