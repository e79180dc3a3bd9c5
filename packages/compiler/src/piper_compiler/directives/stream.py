"""Define `stream`: put communication on a logical stream, and say how many SMs it takes from compute there.

    before  send.layer1:out0@0#pp1 on stream pp0>pp1.act, recv.layer2:gin0@0#pp0 on stream pp1>pp0.grad
    after   both on stream p2p        stream(where(op=("send", "recv")), "p2p")

Legality
 1. The selection matches point-to-point communication that exists: write stream after place, with op="send", op="recv"
    or both. (Reductions take the name that `replicate(reduce=...)` gives them.)
 2. Compute stays on its stream: only the compute stream allocates and frees memory.
 3. A channel uses one stream on each side: all its transfers are selected, or none.
 4. sms is a whole number from 0 to 4096. (With 0 copy engines move the data. The simulator, which knows the device,
   checks that it has more SMs than that.)
 5. A stream of a device has one number of SMs: a directive that names the same stream again agrees, or says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper_compiler.directives.base import compute_nodes, directive, fail, site_field
from piper_compiler.directives.decided import Decided
from piper_ir.graph.graph import Graph, Node
from piper_ir.ground.limits import MOST_SMS
from piper_ir.ground.select import Where
from piper_ir.plan.plan import COMPUTE, Channel
from piper_ir.program.ops import Recv, Send


@directive
@dataclass(frozen=True)
class Stream:
    """Run the selected sends and receives in order on the stream `name` of their device.

    Attributes:
        sms: SMs that all communication on the stream takes from compute while it runs, also the reductions that
            `replicate(reduce=name)` puts there. None: the simulator's constants; 0: copy engines. It changes the
            simulation, not the execution.
        site: where the user wrote it.
    """

    selection: Where
    name: str
    sms: int | None = None
    site: str = site_field()

    def check(self, graph: Graph) -> None:
        if self.name == COMPUTE:
            raise fail(self, 2, f"the stream {COMPUTE!r} is for compute; choose another name")
        if self.sms is not None and (type(self.sms) is not int or not 0 <= self.sms <= MOST_SMS):
            raise fail(
                self,
                4,
                f"sms is {self.sms!r}; a whole number from 0 (copy engines) to {MOST_SMS} is expected",
            )
        nodes = compute_nodes(self, graph, self.selection)
        other = [n for n in nodes if not isinstance(n.op, Send | Recv)]
        if other:
            name = other[0].name(other[0].each[0])
            message = f"{name} is no transfer; compute runs on the stream {COMPUTE!r}. Select op='send' or op='recv'"
            raise fail(self, 2, message)
        selected = {(n.id, mb) for n in nodes for mb in n.each}
        touched = {(channel_of(n), type(n.op)) for n in nodes}
        transfers = [
            n
            for op in ("send", "recv")
            for id in graph.index.get(("op", op), ())
            for n in graph.families[id]
        ]
        for node in transfers:
            left = [mb for mb in node.each if (node.id, mb) not in selected]
            if left and (channel_of(node), type(node.op)) in touched:
                name = node.name(left[0])
                message = (
                    f"{name} uses channel {channel_of(node)} too but is not selected; select all "
                    f"transfers of a channel"
                )
                raise fail(self, 3, message)
        self._check_sms(graph, {(n.role, channel_of(n)) for n in nodes})

    def _check_sms(self, graph: Graph, ends: set[tuple[str, str]]) -> None:
        """Check condition 5 against the ends of channels that are on the stream already."""
        roles = {role for role, _ in ends}
        for channel in graph.channels.values() if self.sms is not None else ():
            for role, stream, sms in zip(channel.roles, channel.streams, channel.sms):
                if (
                    stream == self.name
                    and role in roles
                    and (role, channel.id) not in ends
                    and sms not in (None, self.sms)
                ):
                    raise fail(
                        self,
                        5,
                        f"stream {stream} of {role} has {sms} SMs, by channel {channel.id}; give both the same",
                    )

    def decided(self) -> Decided | None:
        """Return its decisions before it is compiled."""
        return Decided()

    def apply(self, graph: Graph) -> Graph:
        edit = graph.edit()
        for node in graph.pick(self.selection):
            edit.update(replace(node, stream=self.name))
            channel = edit.channels[channel_of(node)]
            streams = tuple(
                self.name if role == node.role else s
                for role, s in zip(channel.roles, channel.streams, strict=True)
            )
            edit.channels[channel.id] = replace(
                channel, streams=streams, sms=self._sms(channel, node.role)
            )
        return edit.done()

    def _sms(self, channel: Channel, role: str) -> tuple[int | None, ...]:
        """Return the SMs of a channel that goes to this stream on a role; an end that does not change keeps its own."""
        named = channel.sms or (None,) * len(channel.roles)
        stays = self.sms is None and channel.stream_on(role) == self.name
        sms = tuple(
            n if stays or r != role else self.sms for r, n in zip(channel.roles, named, strict=True)
        )
        return sms if any(n is not None for n in sms) else ()


def channel_of(node: Node) -> str:
    """Return the channel of a point-to-point node."""
    assert isinstance(node.op, Send | Recv)
    return node.op.channel
