"""Define every op of a Graph or Plan, as a closed union of frozen dataclasses.

A *value* has one writer and lives within one step on one role. A *state* (parameter, gradient bucket, optimizer state,
buffer) persists. Ops read and write the values that their node lists; the states follow from the op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from piper_ir.program.collectives import LAWS, Law, law_of

KernelSource = Literal["eager", "inductor"]
"""The source of a step's kernels: torch, operation by operation, or Inductor for groups of operations."""

KEEP_ALL = "all"
"""The policy without recomputation: F keeps every tensor that backward needs."""
CHECKPOINT = "checkpoint"
"""The coordinate of regions that the model itself puts under torch.utils.checkpoint."""
HANDS_ON = "!"
"""The mark behind a policy under which R makes the outputs again, too, for the R of later chunks."""
EVERY = "/"
"""The mark behind the policy "products" before the number n of which it keeps every n-th."""
WITHIN = "@"
"""The mark behind a policy that holds inside of modules only; patterns of their names follow, joined by "+"."""
BESIDE = "&"
"""The mark between policies that hold inside of different modules."""

Step = Literal["F", "B", "R", "I", "W"]


def variant_name(chunk: str, keep: str) -> str:
    """Return the name of a chunk under a policy: its id, with the policy behind it unless that keeps all."""
    return chunk if keep == KEEP_ALL else f"{chunk}~{keep}"


@dataclass(frozen=True, slots=True)
class Load:
    """Write this microbatch's rows of one batch tensor."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Seed:
    """Write the gradient of the step's loss with respect to this microbatch's loss: a scalar.

    `scaled` says that the run multiplies it by the scale of the loss, which each Update then divides by.
    """

    value: float
    dtype: str
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """Run one step of a chunk.

    B is I followed by W, with outputs that are ready at its end. I and W add into gradient buckets. Under a policy of
    recomputation, the first of them comes after R, which recomputes the tensors that F did not keep. A plan has parts
    R, I and W for a B of its graph, unless the chunk has a step B.

    Attributes:
        keep: the policy: which tensors F keeps ("all": every one that backward needs).
        apart: whether R is a node of its own, so that the backward does not begin with it. A plan has R parts anyway.
    """

    chunk: str
    step: Step
    keep: str = KEEP_ALL
    apart: bool = False

    @property
    def variant(self) -> str:
        """Return the name of the chunk's variant that runs, as in `piper_ir.program.program.Chunk`."""
        return self.chunk if self.keep == KEEP_ALL else variant_name(self.chunk, self.keep)


@dataclass(frozen=True, slots=True)
class Add:
    """Write the sum of the reads, added left to right."""


@dataclass(frozen=True, slots=True)
class Zeros:
    """Write a scalar zero."""

    dtype: str


@dataclass(frozen=True, slots=True)
class SquaredNorm:
    """Write the squared 2-norm of the gradients that a rank has of these buckets, in fp32 or wider: a scalar.

    Ranks that differ along the axes `over`, other than the axes along which each has a part, have the buckets `once`
    alike; the first of them counts these.
    """

    buckets: tuple[str, ...]
    dtype: str
    once: tuple[str, ...] = ()
    over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fresh:
    """Write a buffer of zeros for all gradients of a bucket."""

    bucket: str


@dataclass(frozen=True, slots=True)
class Cast:
    """Write gradients of a bucket in the dtype in which ranks reduce them.

    These are its read, a buffer that is summed in another dtype; or else all gradients of the bucket that the rank
    keeps, which are zero then.
    """

    bucket: str


@dataclass(frozen=True, slots=True)
class Fold:
    """Add the one read, a rank's part of a bucket's gradients, to the shard that the rank keeps."""

    bucket: str


@dataclass(frozen=True, slots=True)
class Send:
    """Hand the one read to the channel's destination; it is done when the peer has taken it."""

    channel: str


@dataclass(frozen=True, slots=True)
class Recv:
    """Write the next value of the channel."""

    channel: str


@dataclass(frozen=True, slots=True)
class Collective:
    """Run one collective together with the other members of the channel, as COLLECTIVES defines the kind.

    It works with its read and its write or, if a bucket is named, with the state of that bucket that its law names. An
    all-gather sends this rank's shard of the parameters, and gets all of them: into its write, or in place. If the
    shard is on the host, FromHost writes it to a value, which the all-gather reads. A
    reduce-scatter leaves the sum in this rank's shard of the gradients. An all-reduce sums the shard of the gradients
    that this rank's optimizer sees.
    """

    kind: str
    channel: str
    bucket: str = ""

    @property
    def law(self) -> Law:
        """Return the inputs, outputs and cost of this kind of collective; raise PlanError for an unknown kind."""
        return law_of(self.kind)


@dataclass(frozen=True, slots=True)
class Update:
    """Step the optimizer on these buckets, then zero their gradients.

    Attributes:
        weighted: whether the first read is a weight by which gradients are divided before all else.
        clip: the bound to which the global norm is then scaled down, if any; the op then reads the squared norm.
        workspace: bytes of temporaries that the optimizer holds meanwhile.
        scaled: whether gradients are divided by the scale of the loss, and the step is skipped if the squared norm,
            which the op then reads, is not finite.
        host_workspace: bytes on the host of copies of gradients and parameters, for buckets that are updated there.
    """

    buckets: tuple[str, ...]
    weighted: bool = False
    clip: float | None = None
    workspace: int = 0
    scaled: bool = False
    host_workspace: int = 0

    @property
    def normed(self) -> bool:
        """Return whether it reads the squared norm of the gradient."""
        return self.scaled or self.clip is not None


Op = (
    Load
    | Seed
    | Compute
    | Add
    | Zeros
    | SquaredNorm
    | Fresh
    | Cast
    | Fold
    | Send
    | Recv
    | Collective
    | Update
)
Comm = Send | Recv | Collective
COMM = (Send, Recv, Collective)


def op_name(op: Op) -> str:
    """Return an op's name in plans and messages: its class, or its collective's name (its kind if unknown)."""
    if isinstance(op, Collective):
        return op.law.name if op.kind in LAWS else op.kind
    return type(op).__name__


def cost_op(op: Op) -> str:
    """Return the name under which costs know an op of the compute stream: its class, or "UpdateOnHost"."""
    on_host = isinstance(op, Update) and op.host_workspace
    return "UpdateOnHost" if on_host else type(op).__name__


def message_op(op: Comm) -> str:
    """Return the name under which costs know a message: "p2p" for an end of a transfer, else the collective's kind."""
    return op.kind if isinstance(op, Collective) else "p2p"
