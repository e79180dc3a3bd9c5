"""Shard a joint graph over the devices of an axis: placements are propagated, and tensors redistributed by collectives.

The words are DTensor's: along an axis a tensor is sharded along a loop index, replicated, or a partial sum. `loops` has
the form of an op's sharding rule, the modules of `rules` have the rule of each op, `rewrites` the replacements of ops
that cannot be sharded themselves, and `indexes` finds the loops that run through the graph. `names` gives indexes the
names that people use, `asked` checks the names of a user, `choice` picks the indexes that an axis shares, `unfuse` and
`means` take ops apart that would prevent it, `decide` propagates placements, `conversions` redistributes a tensor,
`local` writes the graph of one device, and `pieces` computes its products in pieces beside messages.

May import: torch_api, values, graphs, steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import fx

from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts.asked import NamedIndexes, check_asked
from piper_capture.layouts.choice import (
    HEADS,
    SharedChunk,
    common_degrees,
    experts_of,
    share,
    shareable,
    split_degrees,
    taken_apart,
)
from piper_capture.layouts.context import HEADS as HEADS_AROUND
from piper_capture.layouts.context import ordered
from piper_capture.layouts.decide import PARTIAL, Decision, decided
from piper_capture.layouts.fitting import steps_of, uneven
from piper_capture.layouts.indexes import key_of
from piper_capture.layouts.local import Sharded, sharded
from piper_capture.layouts.names import AskedIndexes, Nested, ParamNames
from piper_capture.layouts.pieces import in_pieces
from piper_capture.layouts.reasons import title, wants_whole
from piper_capture.layouts.rules.rules_experts import BY_EXPERT
from piper_ir.program.layout import Sharding

__all__ = [
    "BY_EXPERT",
    "HEADS",
    "PARTIAL",
    "Agreed",
    "AskedIndexes",
    "NamedIndexes",
    "Nested",
    "Parted",
    "Sharded",
    "check_asked",
    "common_degrees",
    "experts_of",
    "key_of",
    "ordered",
    "parted",
    "shareable",
    "shared_joint",
    "split_degrees",
    "steps_of",
    "taken_apart",
    "title",
    "uneven",
    "wants_whole",
    "with_flat_tokens",
]


@dataclass(frozen=True)
class Agreed:
    """Hold the placements that chunks must agree on, because they share parameters or pass constants to each other.

    Attributes:
        whole: the inputs that stay unsharded.
        partial_grads: the inputs whose gradients are partial sums, even if a device could compute all of one.
        tables: the inputs that are constants, which stay replicated.
        made: the outputs that are constants, which stay replicated.
        first_inputs: the inputs that are sharded in their first dimension, and not in the second.
        first_outputs: the outputs that are sharded in their first dimension, and not in the second.
        flat_inputs: the inputs whose first dimension is rows x tokens.
        flat_outputs: the outputs whose first dimension is rows x tokens.
        row_tokens: the tokens of a row in these.
        open: the outputs that may be partial sums, as the gradients of all values may be then; None if partial sums
            are reduced before they pass between chunks.
    """

    whole: frozenset[int] = frozenset()
    partial_grads: frozenset[int] = frozenset()
    tables: frozenset[int] = frozenset()
    made: frozenset[int] = frozenset()
    first_inputs: frozenset[int] = frozenset()
    first_outputs: frozenset[int] = frozenset()
    flat_inputs: frozenset[int] = frozenset()
    flat_outputs: frozenset[int] = frozenset()
    row_tokens: int = 0
    open: frozenset[int] | None = None

    @property
    def text(self) -> str:
        """Return it as one text, in a fixed order."""
        constants = (
            f" {sorted(self.tables)} {sorted(self.made)}" if self.tables or self.made else ""
        )
        constants += f" first {sorted(self.first_inputs)} {sorted(self.first_outputs)}" * bool(
            self.first_inputs | self.first_outputs
        )
        constants += (
            f" flat {self.row_tokens} {sorted(self.flat_inputs)} {sorted(self.flat_outputs)}"
            * bool(self.flat_inputs | self.flat_outputs)
        )
        sums = "" if self.open is None else f" open {sorted(self.open)}"
        return f"{sorted(self.whole)} {sorted(self.partial_grads)}{constants}{sums}"


@dataclass(frozen=True)
class Parted:
    """Hold a chunk that devices share, and the placements of its tensors along each axis."""

    shared: SharedChunk
    decisions: tuple[Decision, ...]

    @property
    def ops(self) -> Iterable[fx.Node]:
        return self.shared.indexes.ops

    def degree(self, node: fx.Node) -> int:
        """Return the number of shards of an op."""
        axes = zip(self.shared.axes, self.decisions, strict=True)
        return prod(axis.degree for axis, decision in axes if node in decision.along)


def with_flat_tokens(joint: Joint, agreed: Agreed) -> Joint:
    """Return the chunk with the inputs and outputs named whose first dimension is rows x tokens."""
    return replace(
        joint,
        flat_inputs=tuple(sorted(agreed.flat_inputs)),
        flat_outputs=tuple(sorted(agreed.flat_outputs)),
        row_tokens=agreed.row_tokens,
    )


def parted(
    joint: Joint, shardings: Sequence[Sharding], agreed: Agreed = Agreed(), params: ParamNames = ()
) -> Parted:
    """Return the chunk with the placements along the axes whose devices share it."""
    shared = _shared(joint, shardings, agreed, params)
    return Parted(
        shared,
        tuple(
            decided(shared.joint, shared.indexes, axis, agreed.partial_grads)
            for axis in shared.axes
        ),
    )


def shared_joint(
    joint: Joint, shardings: Sequence[Sharding], agreed: Agreed = Agreed(), params: ParamNames = ()
) -> Sharded:
    """Return the graph of one of the devices that share a chunk; `params` are the names of its inputs."""
    shared = _shared(joint, shardings, agreed, params)
    keep = any(s.keep for s in shardings)
    device_part = sharded(
        shared.joint, shared.indexes, shared.axes, keep=keep, partial_grads=agreed.partial_grads
    )
    pieces = {axis: s.pieces for s in shardings if s.pieces > 1 for axis, _ in s.axes}
    return replace(
        device_part,
        build=lambda: in_pieces(device_part.joint, pieces),
        unshared=shared.unshared,
    )


def _shared(
    joint: Joint, shardings: Sequence[Sharding], agreed: Agreed, params: ParamNames
) -> SharedChunk:
    """Return the indexes that axes share.

    Constants are replicated along axes that gather tokens, as all of a constant is needed there.

    So is a mask of queries and keys if attention is sharded along heads, each of which needs all of it. Values between
    chunks may be partial sums along axes at which chunks are cut.
    """
    joint = replace(
        with_flat_tokens(joint, agreed),
        first_inputs=tuple(agreed.first_inputs),
        first_outputs=tuple(agreed.first_outputs),
    )
    shared = share(joint, shardings, agreed.whole, params)
    tables = frozenset(shared.joint.inputs[k] for k in agreed.tables) | {
        shared.joint.outputs[k] for k in agreed.made
    }
    context = {name for s in shardings if s.context for name, _ in s.axes}
    masks = tables & shared.joint.first
    of_heads = {
        name for s in shardings if s.context and s.attention == HEADS_AROUND for name, _ in s.axes
    }
    whole = {
        a.name: tables if a.name not in context else masks if a.name in of_heads else frozenset()
        for a in shared.axes
    }
    axes = tuple(replace(a, replicated=whole[a.name]) for a in shared.axes)
    if agreed.open is not None:
        cut = {name for s in shardings if s.cut for name, _ in s.axes}
        sums = _passed(shared.joint, agreed.open)
        axes = tuple(replace(a, partial=sums) if a.name in cut else a for a in axes)
    return replace(shared, axes=axes)


def _passed(joint: Joint, outputs: Iterable[int]) -> frozenset[fx.Node]:
    """Return the nodes of some outputs, and of the gradients of values."""
    grads = (node for k, node in joint.grads.items() if joint.kinds[k] == "value")
    return frozenset((*(joint.outputs[k] for k in outputs), *grads))
