"""stream: put communication on a logical stream.

    before  send.layer1:out0@0#pp1 on stream pp0>pp1.act, recv.layer2:gin0@0#pp0 on stream pp1>pp0.grad
    after   both on stream p2p        stream(where(op=("send", "recv")), "p2p")

Legality
 1. The selection matches point-to-point communication that exists: write stream after place, with op="send", op="recv" or both.
    (Reductions take the name that `replicate(reduce=...)` gives them.)
 2. Compute stays on its stream: only the compute stream allocates and frees memory.
 3. A channel uses one stream on each side: all its transfers are selected, or none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper_compiler.directives.base import compute_nodes, directive, fail, site_field
from piper_ir.graph import Graph, Node
from piper_ir.ops import Recv, Send
from piper_ir.plan import COMPUTE
from piper_ir.select import Where


@directive
@dataclass(frozen=True)
class Stream:
    """The selected sends and receives run in order on the stream `name` of their device."""

    selection: Where
    name: str
    site: str = site_field()

    def check(self, graph: Graph) -> None:
        if self.name == COMPUTE:
            raise fail(self, 2, f"the stream {COMPUTE!r} is for compute; choose another name")
        nodes = compute_nodes(self, graph, self.selection)
        other = [n for n in nodes if not isinstance(n.op, Send | Recv)]
        if other:
            raise fail(
                self, 2, f"{other[0].id} is no transfer; compute runs on the stream {COMPUTE!r}. Select op='send' or op='recv'"
            )
        selected = {n.id for n in nodes}
        touched = {(channel_of(n), type(n.op)) for n in nodes}
        transfers = [graph.nodes[i] for op in ("send", "recv") for i in graph.index.get(("op", op), ())]
        for node in transfers:
            if (channel_of(node), type(node.op)) in touched and node.id not in selected:
                message = f"{node.id} uses channel {channel_of(node)} too but is not selected; select all transfers of a channel"
                raise fail(self, 3, message)

    def apply(self, graph: Graph) -> Graph:
        edit = graph.edit()
        for node in graph.select(self.selection):
            edit.update(replace(node, stream=self.name))
            channel = edit.channels[channel_of(node)]
            streams = tuple(self.name if role == node.role else s for role, s in zip(channel.roles, channel.streams, strict=True))
            edit.channels[channel.id] = replace(channel, streams=streams)
        return edit.done()


def channel_of(node: Node) -> str:
    """The channel of a point-to-point node."""
    assert isinstance(node.op, Send | Recv)
    return node.op.channel
