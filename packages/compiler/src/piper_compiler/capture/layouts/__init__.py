"""Find the loops that run through a joint graph, and let the devices of an axis share them.

`loops` says what an op tells of itself, the modules `rules_*` tell it for each op, and `indexes` puts the ops of a graph
together. `choice` takes the indexes that an axis shares, `decide` says of each op what it is computed in parts of, and
`local` rewrites the graph into that of one device.
"""

from collections.abc import Sequence

from piper_compiler.capture.layouts.choice import common_degrees, share, split_degrees
from piper_compiler.capture.layouts.local import Sharded, sharded
from piper_compiler.capture.stepgraph import Joint
from piper_ir.layout import Sharding

__all__ = ["Sharded", "common_degrees", "shared_joint", "split_degrees"]


def shared_joint(joint: Joint, shardings: Sequence[Sharding]) -> Sharded:
    """Return the graph of one of the devices that share a chunk."""
    (only,) = shardings
    found = share(joint, only.over, only.split or (only.degree,), stream=only.stream == "tokens")
    return sharded(found.joint, found.indexes, found.axes, keep=only.keep)
