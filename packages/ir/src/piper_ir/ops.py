"""Every op of a Graph or Plan: a closed sum of frozen dataclasses. One comment says what each promises.

Terms: a *value* has one writer and lives within one step on one role; a *state* (parameter, gradient bucket, optimizer
state, buffer) persists. Ops read and write the values that their node lists; the states follow from the op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from piper_ir.collectives import COLLECTIVES, Law, law_of

ComputeStep = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Load:  # writes this microbatch's rows of one batch tensor
    tensor: str


@dataclass(frozen=True, slots=True)
class Seed:  # writes the gradient of the step's loss with respect to this microbatch's loss: a scalar
    value: float
    dtype: str


@dataclass(frozen=True, slots=True)
class Compute:  # runs one step of a chunk; B is I followed by W, its outputs ready at its end; I and W add into gradient buckets
    chunk: str
    step: ComputeStep


@dataclass(frozen=True, slots=True)
class Add:  # writes the sum of its reads, added left to right
    pass


@dataclass(frozen=True, slots=True)
class Zeros:  # writes a scalar zero
    dtype: str


@dataclass(frozen=True, slots=True)
class SquaredNorm:  # writes the squared 2-norm of the gradients in these buckets, in fp32 or wider: a scalar
    buckets: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Send:  # hands its one read to the channel's destination; done when the peer has taken it
    channel: str


@dataclass(frozen=True, slots=True)
class Recv:  # writes the next value of the channel
    channel: str


@dataclass(frozen=True, slots=True)
class Collective:
    # meets the same op of every member of the channel and does what COLLECTIVES says of its kind: with its read and its write, or
    # (bucket named) with the gradients of that bucket, in place
    kind: str
    channel: str
    bucket: str = ""

    @property
    def law(self) -> Law:
        """What this kind of collective gives, gets and costs. PlanError for a kind that is not in the table."""
        return law_of(self.kind)


@dataclass(frozen=True, slots=True)
class Update:
    # steps the optimizer on these buckets, then zeroes their gradients. Gradients are first divided by the value read
    # as weight (if any), then scaled so that the global norm is at most `clip` (if any; reads the squared norm).
    # Meanwhile the optimizer holds `workspace` bytes of temporaries.
    buckets: tuple[str, ...]
    weighted: bool = False
    clip: float | None = None
    workspace: int = 0


Op = Load | Seed | Compute | Add | Zeros | SquaredNorm | Send | Recv | Collective | Update
Comm = Send | Recv | Collective
COMM = (Send, Recv, Collective)


def op_name(op: Op) -> str:
    """Return how a plan's text and messages call an op: its class, or its collective's name (of an unknown one, its kind)."""
    if isinstance(op, Collective):
        return op.law.name if op.kind in COLLECTIVES else op.kind
    return type(op).__name__


def message_op(op: Comm) -> str:
    """Return the name under which costs know a message: "p2p" for either end of a transfer, else the collective's kind."""
    return op.kind if isinstance(op, Collective) else "p2p"
