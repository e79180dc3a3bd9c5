"""Find the loops that run through a joint graph, and let the devices of an axis share them.

`loops` says what an op tells of itself, the modules `rules_*` tell it for each op, and `indexes` puts the ops of a graph
together. `choice` takes the indexes that an axis shares, `decide` says of each op what it is computed in parts of, and
`local` rewrites the graph into that of one device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from piper_compiler.capture.layouts.choice import common_degrees, share, split_degrees
from piper_compiler.capture.layouts.local import Sharded, sharded
from piper_compiler.capture.stepgraph import Joint
from piper_ir.layout import Sharding

__all__ = ["Agreed", "Sharded", "common_degrees", "shared_joint", "split_degrees"]


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


def shared_joint(joint: Joint, shardings: Sequence[Sharding], agreed: Agreed = Agreed()) -> Sharded:
    """Return the graph of one of the devices that share a chunk."""
    found = share(joint, shardings, agreed.whole)
    keep = any(s.keep for s in shardings)
    made = sharded(found.joint, found.indexes, found.axes, keep=keep, terms=agreed.terms)
    return replace(made, unshared=found.unshared)
