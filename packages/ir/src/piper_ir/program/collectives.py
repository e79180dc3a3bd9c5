"""Describe each collective by one row of a table, which verifier, simulator and executors read.

A collective joins the n members of a channel, ordered by rank; each member gives one tensor and gets one. A tensor is
*whole* when it has the full length along its first dimension, and a *part* when it is one of the n equal blocks of that
length; block k belongs to the k-th member. The bytes of a message are the bytes of the whole tensor.

A new collective needs a row here, and a binding in each transport that is to carry it; CONTRIBUTING.md shows it for a
broadcast.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from piper_ir.ground.errors import PlanError
from piper_ir.ground.sizes import Dim, TensorSpec

Extent = Literal["whole", "part"]
Combination = Literal["sum", "blocks", "first", "previous"]
Pattern = Literal["ring", "pairs", "next", "host"]


SUMMED_DTYPES = (
    *(
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "complex128",
        "complex64",
        "int64",
        "int32",
        "int8",
        "uint8",
    ),
)
"""The dtypes whose numbers every transport adds, and in the same way."""


@dataclass(frozen=True, slots=True)
class Law:
    """Describe one collective.

    Attributes:
        name: its name in a plan's text and in messages.
        reads: the extent of a member's input.
        writes: the extent of a member's output, which has the dtype of the input.
        result: the content of the output. "sum": the sum of all inputs. "blocks": one block of each member, in the
            order of ranks. "first": the input of the first member. "previous": the input of the member before it, and
            for the first member that of the last. If a part is written, it is the member's own block of that.
        route: how it travels. "ring": everything passes by every member. "pairs": each member sends a block to each
            other one. "next": each member sends all of it to the one behind it, and the last one to the first. "host":
            a member alone copies it between its device's memory and the host's.
        rounds: how often the whole tensor goes around a ring, so that rounds * (n - 1) / n of its bytes leave each
            member (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009). It is 1 for other routes.
        state: the state of a bucket on which it may work, instead of on values: its parameters or its gradients.
        spoils: whether its input is undefined afterwards, so that a transport may use it as workspace.
        undoes: the collective whose results it turns back into that one's inputs, among the same members.
    """

    name: str
    reads: Extent
    writes: Extent
    result: Combination
    route: Pattern = "ring"
    rounds: int = 1
    state: Literal["", "param", "grad"] = ""
    spoils: bool = False
    undoes: str = ""

    @property
    def in_place(self) -> bool:
        """Return whether the result can replace the input: it has the same size, and nothing changes its place."""
        return self.reads == self.writes and self.result in ("sum", "first")

    @property
    def blocks(self) -> bool:
        """Return whether whole tensors are made of n equal blocks, so that their first dimension must divide by n."""
        return self.result == "blocks" or self.writes == "part"

    def wire(self, n: int) -> float:
        """Return the bytes that leave each of n members, per byte of the message."""
        if self.route == "host":
            return 1.0
        if self.route == "next":
            return float(n > 1)
        return self.rounds * (n - 1) / n

    def written(self, read: TensorSpec, n: int) -> TensorSpec:
        """Return a member's output for n inputs of `read`; raise PlanError if the first dimension does not divide."""
        if self.result == "sum" and read.dtype not in SUMMED_DTYPES:
            raise PlanError(
                f"{self.name} adds {', '.join(SUMMED_DTYPES)}; {read.dtype} is none of them"
            )
        if not self.blocks:
            return read
        if not read.shape:
            raise PlanError(
                f"{self.name} takes a tensor apart along its first dimension, and a scalar has none"
            )
        rows, *others = read.shape
        return TensorSpec((self._rows(rows, n), *others), read.dtype)

    def _rows(self, rows: Dim, n: int) -> Dim:
        if self.reads == "part":
            return rows * n
        if not isinstance(rows, int) or rows % n:
            raise PlanError(
                f"{self.name} of {n} members needs a first dimension that divides by {n}, found {rows}"
            )
        return rows // n if self.writes == "part" else rows


COLLECTIVES: dict[str, Law] = {
    "all_reduce": Law("AllReduce", "whole", "whole", "sum", rounds=2, state="grad"),
    "all_gather": Law(
        "AllGather", "part", "whole", "blocks", state="param", undoes="reduce_scatter"
    ),
    "reduce_scatter": Law("ReduceScatter", "whole", "part", "sum", state="grad", spoils=True),
    "all_to_all": Law("AllToAll", "whole", "whole", "blocks", route="pairs", undoes="all_to_all"),
    "shift": Law("Shift", "whole", "whole", "previous", route="next"),
}
"""The law of each kind of collective; costs and cluster files know a collective by its kind, too."""
TO_HOST, FROM_HOST = "to_host", "from_host"
HOST_COPIES: dict[str, Law] = {
    TO_HOST: Law("ToHost", "whole", "whole", "first", route="host"),
    FROM_HOST: Law("FromHost", "whole", "whole", "first", route="host", state="param"),
}
"""The law of copies to the memory of the host and back: collectives of one rank, which every executor runs alike."""
LAWS: Mapping[str, Law] = ChainMap(HOST_COPIES, COLLECTIVES)
"""The law of each kind in either table."""


def law_of(kind: str) -> Law:
    """Return the law of a kind of collective; raise PlanError when there is none."""
    # each table by itself: LAWS, which chains them, takes five times as long
    law = COLLECTIVES.get(kind) or HOST_COPIES.get(kind)
    if law is None:
        raise PlanError(f"there is no collective {kind!r}; known are {', '.join(LAWS)}")
    return law
