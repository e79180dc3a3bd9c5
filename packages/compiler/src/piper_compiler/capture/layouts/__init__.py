"""Find the loops that run through a joint graph, and let the devices of an axis share them.

`loops` says what an op tells of itself, the modules `rules_*` tell it for each op, `rewrites` has other ops for parts
that an op cannot compute itself, and `indexes` puts the ops of a graph together. `names` calls indexes as people do,
`asked` checks those that the user names, `choice` takes the indexes that an axis shares, `decide` says of each op what
it is computed in parts of, and `local` rewrites the graph for one device.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import fx

from piper_compiler.capture.layouts.asked import NamedIndexes, check_asked
from piper_compiler.capture.layouts.choice import (
    SharedChunk,
    common_degrees,
    experts_of,
    share,
    shareable,
    split_degrees,
    steps_of,
    taken_apart,
    uneven,
)
from piper_compiler.capture.layouts.decide import Decision, decided
from piper_compiler.capture.layouts.indexes import key_of
from piper_compiler.capture.layouts.local import Sharded, sharded
from piper_compiler.capture.layouts.names import AskedIndexes, Nested, ParamNames
from piper_compiler.capture.layouts.reasons import title, wants_whole
from piper_compiler.capture.stepgraph import Joint
from piper_ir.layout import Sharding

__all__ = [
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
    "parted",
    "shareable",
    "shared_joint",
    "split_degrees",
    "steps_of",
    "taken_apart",
    "title",
    "uneven",
    "wants_whole",
]


@dataclass(frozen=True)
class Agreed:
    """Say what other chunks want of the inputs of one, because they have the same parameters.

    Attributes:
        whole: the inputs that stay whole.
        terms: the inputs whose gradients are terms of a sum, also where a device could make all of one.
    """

    whole: frozenset[int] = frozenset()
    terms: frozenset[int] = frozenset()

    @property
    def text(self) -> str:
        """Return it as one text, in a fixed order."""
        return f"{sorted(self.whole)} {sorted(self.terms)}"


@dataclass(frozen=True)
class Parted:
    """Hold a chunk that devices share, and how its tensors lie along each axis."""

    shared: SharedChunk
    decisions: tuple[Decision, ...]

    @property
    def ops(self) -> Iterable[fx.Node]:
        return self.shared.indexes.ops

    def degree(self, node: fx.Node) -> int:
        """Return into how many parts an op is taken."""
        axes = zip(self.shared.axes, self.decisions, strict=True)
        return prod(axis.degree for axis, decision in axes if node in decision.along)


def parted(joint: Joint, shardings: Sequence[Sharding], agreed: Agreed = Agreed(), params: ParamNames = ()) -> Parted:
    """Return what the devices that share a chunk compute in parts."""
    found = share(joint, shardings, agreed.whole, params)
    return Parted(found, tuple(decided(found.joint, found.indexes, axis, agreed.terms) for axis in found.axes))


def shared_joint(joint: Joint, shardings: Sequence[Sharding], agreed: Agreed = Agreed(), params: ParamNames = ()) -> Sharded:
    """Return the graph of one of the devices that share a chunk; `params` are the names of its inputs."""
    found = share(joint, shardings, agreed.whole, params)
    keep = any(s.keep for s in shardings)
    made = sharded(found.joint, found.indexes, found.axes, keep=keep, terms=agreed.terms)
    return replace(made, unshared=found.unshared)
