"""Define `shard`: let the devices of an axis share the work of each chunk, or the experts of a mixture.

    before  layer0.F@0 on ranks 0..1, each with all heads
    after   layer0.F@0 on ranks 0..1, each with half of the heads; inside of the step they all-reduce partial sums

The devices shard along indexes of the model: its heads, the hidden elements of its feed-forward parts, the vocabulary
of its embedding, output head and loss. They are found in the captured graph, and the parameters follow. An index stays
whole if the devices do not divide its size, and so does a parameter that two chunks cannot share alike. With
index="tokens" each device computes its tokens of every op. Attention needs all of them: around it the devices exchange
tokens for heads, or keys and values go around in a ring, or are gathered. (These are tensor, sequence and context
parallelism.)

With stream="rows" the devices share the experts of the selected chunks, and have rows of their own everywhere else
(expert parallelism; GShard, arXiv 2006.16668). Activations between these chunks and the others are exchanged:

    before  layer0.F@0 -> layer0_experts0.F@0 -> layer0.1.F@0, on each rank with its rows and all experts
    after   layer0.F@0 -> AllToAll -> layer0_experts0.F@0 -> AllToAll -> layer0.1.F@0
            layer0_experts0.F@0 with the rows of all ranks, and this rank's experts

With cut=True the devices sum between chunks, and not inside of steps: each chunk is cut where they begin and end to
share its work, and the partial sums are all-reduced on a stream of their own, which compute of another microbatch can
hide (Wang et al., Domino, arXiv 2409.15241).

    before  layer0.F@0, with two sums inside
    after   layer0.F@0 -> layer0_shared0.F@0 -> AllReduce -> layer0.1.F@0 -> layer0_shared0.1.F@0 -> AllReduce -> ...

The code of chunks is rewritten on the capture, before a plan's graph is made: `prepare` asks for it, and
`piper_capture.with_shardings` does it, by the rules of `piper_capture.layouts`. `check` and `apply` put the exchanges
and partial sums between chunks into the graph.

Legality
 1. It stands before every other directive, and selects all chunks; with stream="rows" those that compute experts.
 2. `over` is the name of an axis that no other directive uses. An axis of one device changes nothing. With
    stream="rows" `replicate` names it, too. Dropless experts may have several axes, also such whose devices share
    tokens by another `shard`; only the others are named by `replicate`.
 3. `stream` is "", "tokens" or "rows", and `keep` is True or False.
 4. The program is of a captured model: only its code can be rewritten.
 5. Of several, each is over an axis of its own; one at most shares the tokens, one at most experts, one at most
    anything else.
 6. `index` is a text, or a tuple of texts.
 7. `attention` is "heads", "ring" or "gather", `order` is "", "zigzag" or "blocks"; both are said with index="tokens".
 8. Each name in `index` is that of an index, no op wants it whole, and the devices divide it.
 9. Where tokens are shared, the devices divide them, and no region is opaque.
10. The optimizer is one that works element by element where parameters are in parts: those of torch.optim but
    Adafactor and Muon, or one that piper.elementwise declares. Where each device has whole matrices of a stack, as of
    experts, piper.BatchedMuon is accepted, too.
11. `channel` and `sms` stand with stream="rows" or cut=True alone, and not for dropless mixtures, whose exchanges are
    inside of steps: the name of a stream other than compute's, and a number from 0 to 4096 or None. With
    stream="rows" `index` names one index, and `keep` is False.
12. With stream="rows" what passes between the selected chunks and others has a dimension of experts and one of rows.
    These chunks draw no random numbers and read no batch tensor, and their other parameters have gradients that are
    sums over experts.
13. `bound` and `overflow` stand with stream="rows" alone, for dropless mixtures: a positive number; "rounds", "error"
    or "drop". A region of such a mixture holds one `route` and one `unroute`, between which only stacks of weights
    [experts, ...] are read. Where another `shard` divides its tokens, its other operations treat each token alone.
14. `cut` is True or False. It stands without `stream`, index="tokens" and `keep`, and no other `shard` stands beside
    it. No chunk draws random numbers: their order is that of a whole layer.
15. `hidden` stands with stream="rows" alone, for dropless mixtures: axes other than `over`, along which devices have
    tokens of their own, too: by another `shard`, or by `replicate`, which names them then. They divide the hidden
    elements of each expert, every stack has such a dimension but biases of the second product, and between `route`
    and `unroute` nothing needs the sum of that product.
16. `pieces` is a number from 1 on. More than 1 stands with stream="tokens" alone, and divides the tokens of a device.
17. `beside` is True or False. It stands with stream="rows" alone, for dropless mixtures whose regions compute something
    beside the experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from piper_compiler.directives.base import (
    as_names,
    compute_nodes,
    describe,
    directive,
    fail,
    site_field,
)
from piper_compiler.directives.decided import Decided
from piper_compiler.directives.prepare import CaptureRequest, Preparation
from piper_ir.graph.graph import Graph
from piper_ir.graph.graph_parts import EdgeExchange
from piper_ir.ground.limits import MOST_SMS
from piper_ir.ground.mesh import AXES, Mesh, whole_axis
from piper_ir.ground.select import Where, where
from piper_ir.plan.plan import COMPUTE
from piper_ir.program.layout import (
    BOUND,
    EXPERTS,
    EXPERTS_SHARED,
    OVERFLOWS,
    ROWS,
    TOKENS,
    Sharding,
)

Activations = Literal["", "tokens", "rows"]
AttentionExchange = Literal["heads", "ring", "gather"]
TokenOrder = Literal["", "zigzag", "blocks"]
Overflow = Literal["rounds", "error", "drop"]
STREAMS: tuple[Activations, ...] = get_args(Activations)
ATTENTION: tuple[AttentionExchange, ...] = get_args(AttentionExchange)
ORDERS: tuple[TokenOrder, ...] = get_args(TokenOrder)


@directive
@dataclass(frozen=True)
class Shard:
    """Share the work of each chunk among the devices along `over`, or the experts of the selected chunks.

    Attributes:
        over: the mesh axis, as a name or a tuple of one. Dropless experts take several, as a tuple or "tp+ep": the
            devices along all of them share the experts. They are axes whose devices share the tokens of a row, and
            axes with rows of their own.
        index: names of the indexes to share; without names, all that can be shared.
        stream: "tokens" shards activations between layers along their tokens, too (sequence parallelism; Korthikanti
            et al., arXiv 2205.05198). "rows" lets each device have rows of its own, but for experts.
        keep: whether activations that the forward gathers for it are saved for the backward, and not gathered again.
        attention: how attention is computed if tokens are shared: "heads" exchanges tokens for heads around it
            (Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509), "ring" sends keys and values from device to device
            (Liu et al., arXiv 2310.01889), "gather" gathers them.
        order: the tokens of a device then: "blocks", or one block from the front and one from the back ("zigzag"), so
            that a causal ring gives all devices equal work. It is "zigzag" by itself for "ring" and "gather" if
            attention is causal.
        channel: name of the stream of the exchanges between chunks (default: the axis's own stream).
        sms: SMs that an exchange takes from compute, 0 when copy engines move it; None for the cluster's number. Only
            simulations read it.
        bound: of a dropless mixture, the rows that a device has places for over the rows that would come from each
            other one if all experts were chosen equally often.
        overflow: the treatment of more rows: "rounds" sends them in further rounds, which takes time and no memory;
            "error" ends the run; "drop" leaves out the last tokens, as a capacity does.
        hidden: the axes whose devices cut each expert of a dropless mixture along its hidden elements, while they
            exchange rows over the others (expert tensor parallelism): all compute the rows of all of them.
        cut: whether chunks are cut where devices begin and end to share their work, so that sums are made between them
            and can be hidden. A plan has several times as many instructions then.
        pieces: the number of pieces of each product whose tokens are gathered before it, or scattered behind it, so
            that the messages of one piece run beside the product of another.
        beside: whether rows of a dropless mixture are exchanged while a device computes the other operations of the
            experts' region, such as a shared expert.
        site: where the user wrote it.
    """

    selection: Where
    over: str | tuple[str, ...] = "tp"
    index: str | tuple[str, ...] = ()
    stream: Activations = ""
    keep: bool = False
    attention: AttentionExchange = "heads"
    order: TokenOrder = ""
    channel: str = ""
    sms: int | None = None
    bound: float = BOUND
    overflow: Overflow = "rounds"
    cut: bool = False
    hidden: str | tuple[str, ...] = ""
    pieces: int = 1
    beside: bool = False
    site: str = site_field()

    def __post_init__(self) -> None:
        for name in ("over", "hidden"):
            named = as_names(getattr(self, name))
            # all others are refused by `check_form`
            if isinstance(named, tuple) and named and all(isinstance(axis, str) for axis in named):
                object.__setattr__(self, name, "+".join(named))

    def check(self, graph: Graph) -> None:
        self.check_form()
        if graph.log and not all(text.text.startswith("shard(") for text in graph.log):
            raise fail(self, 1, "another directive stands before it; write it first")
        if self.experts:
            self._check_experts(graph)
            return
        chosen = sum(len(node.each) for node in compute_nodes(self, graph, self.selection))
        every = sum(len(node.each) for node in compute_nodes(self, graph, where()))
        if chosen != every:
            raise fail(
                self,
                1,
                f"{chosen} of {every} nodes are selected; devices share all chunks or none, so write where()",
            )
        if graph.mesh.along(self.joined) and not set(graph.mesh.along(self.joined)) <= set(
            dict(graph.program.axes)
        ):
            raise fail(
                self,
                4,
                "the program has no code that could be rewritten; compile a job, not a program",
            )

    def check_form(self) -> None:
        """Raise DirectiveError for an argument that is wrong in any strategy."""
        if not isinstance(self.over, str) or not set(self.axes) <= set(AXES):
            raise fail(self, 2, f"over={self.over!r}; one of {', '.join(sorted(AXES))} is accepted")
        if len(self.axes) > 1 and (self.stream != ROWS or len({*self.axes}) < len(self.axes)):
            raise fail(
                self,
                2,
                f"over={self.over!r}; one of {', '.join(sorted(AXES))} is accepted; only experts "
                f'(stream="rows") are shared over several axes',
            )
        if not isinstance(self.stream, str) or self.stream not in STREAMS:
            raise fail(self, 3, f'stream={self.stream!r}; "", "tokens" or "rows" is accepted')
        self._check_exchange()
        self._check_selected()
        if type(self.keep) is not bool:
            raise fail(self, 3, f"keep={self.keep!r}; True or False is accepted")
        if not isinstance(self.index, str) and not (
            isinstance(self.index, tuple) and all(isinstance(i, str) for i in self.index)
        ):
            text = "the name of an index, or a tuple of names, is accepted"
            raise fail(self, 6, f"index={self.index!r}; {text}")
        if not isinstance(self.attention, str) or self.attention not in ATTENTION:
            raise fail(
                self, 7, f'attention={self.attention!r}; "heads", "ring" or "gather" is accepted'
            )
        if not isinstance(self.order, str) or self.order not in ORDERS:
            raise fail(
                self, 7, f'order={self.order!r}; "zigzag" or "blocks" is accepted, or "" to choose'
            )
        for name, given, usual in (
            ("attention", self.attention, "heads"),
            ("order", self.order, ""),
        ):
            if given != usual and not self.context:
                text = 'says how the tokens of attention are shared; write index="tokens", too'
                raise fail(self, 7, f"{name}={given!r} {text}")

    def _check_selected(self) -> None:
        """Raise DirectiveError if experts are selected and not shared, or shared and not selected."""
        if self.experts and self.selection == where():
            text = f'it selects all chunks; with stream="rows" devices share those of the experts: {EXPERTS_SHARED}'
            raise fail(self, 1, text)
        if not self.experts and EXPERTS in dict(self.selection.terms):
            text = (
                f"stream={self.stream!r} shares all chunks, so where() is accepted; devices share "
                f"experts by {EXPERTS_SHARED}"
            )
            raise fail(self, 1, text)

    def _check_exchange(self) -> None:
        if not isinstance(self.channel, str) or self.channel == COMPUTE:
            text = f"the name of a stream other than {COMPUTE} is accepted"
            raise fail(self, 11, f"channel={self.channel!r}; {text}")
        if self.sms is not None and (type(self.sms) is not int or not 0 <= self.sms <= MOST_SMS):
            text = f"a number from 0 (copy engines) to {MOST_SMS}, or None, is accepted"
            raise fail(self, 11, f"sms={self.sms!r}; {text}")
        self._check_bound()
        self._check_cut()
        self._check_hidden()
        self._check_pieces()
        if not self.experts:
            if (self.channel or self.sms is not None) and not self.cut:
                text = 'channel and sms are for exchanges between chunks: use stream="rows" or cut=True, or leave them out'
                raise fail(self, 11, text)
            return
        if self.context or len(self.names) != 1:
            raise fail(
                self,
                11,
                f'index={self.index!r}; with stream="rows" one index is named, such as "experts"',
            )
        if self.keep:
            raise fail(self, 11, 'keep=True: nothing is gathered with stream="rows"; leave it out')

    def _check_cut(self) -> None:
        if type(self.cut) is not bool:
            raise fail(self, 14, f"cut={self.cut!r}; True or False is accepted")
        options = (
            ("stream", self.stream),
            ("index", self.context and self.index),
            ("keep", self.keep),
        )
        if self.cut and (
            other := next((f"{name}={value!r}" for name, value in options if value), "")
        ):
            text = "only sums are made between chunks; leave one of the two out"
            raise fail(self, 14, f"cut=True and {other}: {text}")

    def _check_pieces(self) -> None:
        if type(self.pieces) is not int or self.pieces < 1:
            raise fail(self, 16, f"pieces={self.pieces!r}; a number from 1 on is accepted")
        if self.pieces > 1 and self.stream != TOKENS:
            text = 'tokens are gathered and scattered in pieces; write it with stream="tokens", or leave it out'
            raise fail(self, 16, f"pieces={self.pieces}: {text}")
        if type(self.beside) is not bool or (self.beside and not self.experts):
            text = 'True or False is accepted, and True with stream="rows" alone'
            raise fail(self, 17, f"beside={self.beside!r}; {text}")

    def _check_hidden(self) -> None:
        if not isinstance(self.hidden, str) or not set(self.hidden_axes) <= set(AXES):
            text = f"hidden={self.hidden!r}; {', '.join(sorted(AXES))} are accepted, one or more of them"
            raise fail(self, 15, text)
        if self.hidden and not self.experts:
            text = 'it says which devices cut experts that are exchanged; use stream="rows", or leave it out'
            raise fail(self, 15, f"hidden={self.hidden!r}: {text}")
        every = (*self.axes, *self.hidden_axes)
        if self.experts and len({*every}) < len(every):
            text = "devices have different experts over an axis, or cut each: name it once"
            raise fail(self, 15, f"over={self.over!r}, hidden={self.hidden!r}: {text}")

    def _check_experts(self, graph: Graph) -> None:
        """Raise DirectiveError if the program was not made for experts that devices share."""
        if not graph.mesh.along(self.joined):
            return
        known = {*graph.program.experts, *graph.program.axes}
        if not {(a, graph.mesh.size(a)) for a in self.meeting(graph.mesh)} <= known:
            raise fail(
                self,
                4,
                "the program has no code that could be rewritten; compile a job, not a program",
            )
        for node in compute_nodes(self, graph, self.selection):
            if graph.program.chunk(str(node.coords["chunk"])).experts != _name(
                graph.mesh, self.joined
            ):
                raise fail(
                    self,
                    1,
                    f"{node.id} computes no experts; select whole chunks by their regions: where(experts=ANY)",
                )
        if (self.channel or self.sms is not None) and not any(
            chunk.trades for chunk in graph.program.chunks
        ):
            text = "dropless mixtures have their exchanges inside of steps"
            raise fail(
                self,
                11,
                f"channel and sms are for exchanges between chunks; {text}: leave them out",
            )

    def _check_bound(self) -> None:
        if (
            isinstance(self.bound, bool)
            or not isinstance(self.bound, int | float)
            or not 0 < self.bound < math.inf
        ):
            raise fail(
                self, 13, f"bound={self.bound!r}; a positive number is accepted, such as 1.25"
            )
        if not isinstance(self.overflow, str) or self.overflow not in OVERFLOWS:
            raise fail(
                self,
                13,
                f"overflow={self.overflow!r}; {', '.join(map(repr, OVERFLOWS))} are accepted",
            )
        if not self.experts and (self.bound, self.overflow) != (BOUND, OVERFLOWS[0]):
            raise fail(
                self,
                13,
                'bound and overflow are for dropless mixtures: use stream="rows", or leave them '
                "out",
            )

    @property
    def joined(self) -> str:
        """Return its axes as one text, such as "tp+ep"."""
        return self.over if isinstance(self.over, str) else "+".join(self.over)

    @property
    def axes(self) -> tuple[str, ...]:
        """Return its axes."""
        return tuple(self.joined.split("+"))

    @property
    def hidden_axes(self) -> tuple[str, ...]:
        """Return the axes whose devices cut each expert."""
        return tuple(str(self.hidden).split("+")) if self.hidden else ()

    def meeting(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes of a mesh whose devices exchange or gather rows for experts."""
        return mesh.along("+".join((*self.axes, *self.hidden_axes)))

    @property
    def experts(self) -> bool:
        """Return whether it shares experts, and rows everywhere else."""
        return self.stream == ROWS

    @property
    def shares_tokens(self) -> bool:
        """Return whether its devices share the tokens of a row."""
        return self.context or self.stream == TOKENS

    @property
    def context(self) -> bool:
        """Return whether it shares the tokens of all ops."""
        return self.index in (TOKENS, (TOKENS,))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the indexes that it shares; none for all, and for the tokens."""
        if self.context:
            return ()
        return (self.index,) if isinstance(self.index, str) else self.index

    def sharding(self, mesh: Mesh) -> Sharding:
        """Return the sharding that it asks for on a mesh."""
        selection = self.selection if self.experts else None
        along = tuple((axis, mesh.size(axis)) for axis in reversed(mesh.along(self.joined)))
        return Sharding(
            _name(mesh, self.joined),
            mesh.degree(mesh.along(self.joined)),
            self.names,
            self.stream,
            self.keep,
            context=self.context,
            attention=self.attention,
            order=self.order,
            selection=selection,
            bound=float(self.bound),
            overflow=self.overflow,
            cut=self.cut,
            pieces=self.pieces,
            beside=self.beside,
            folded=along if len(along) > 1 else (),
            hidden=tuple(
                (axis, mesh.size(axis)) for axis in reversed(mesh.along("+".join(self.hidden_axes)))
            ),
        )

    def prepare(self, request: CaptureRequest, seen: Preparation) -> CaptureRequest:
        """Ask for code in which the devices of the axis share the work, if it has more than one."""
        self.check_form()
        if not seen.mesh.along(self.joined):
            if self.hidden and seen.mesh.along("+".join(self.hidden_axes)):
                text = f"{seen.mesh} has no {self.over}, so that no rows are exchanged; shard(where()) cuts experts then"
                raise fail(self, 15, text)
            return request
        for item in seen.before:
            if isinstance(item, Shard) and seen.mesh.along(item.joined):
                self._check_beside(item)
        self._check_folded(seen)
        return replace(request, shardings=(*request.shardings, self.sharding(seen.mesh)))

    def _check_beside(self, other: Shard) -> None:
        """Raise DirectiveError if it cannot stand behind another one."""
        same = (other.context, other.experts) == (self.context, self.experts)
        twice = {*other.axes, *other.hidden_axes} & {*self.axes, *self.hidden_axes}
        folds = self.experts != other.experts and (self.shares_tokens or other.shares_tokens)
        if same or (twice and not folds):
            text = f"{describe(other)} shares the same already, over {other.joined}; keep one of the two"
            raise fail(self, 5, text)
        if self.cut or other.cut:
            first, second = (self, other) if self.cut else (other, self)
            text = f"cut=True beside {describe(second)}: only one of the two can be; leave cut=True out"
            raise fail(first, 14, text)

    def _check_folded(self, seen: Preparation) -> None:
        """Raise DirectiveError for an axis of experts along which devices have neither rows nor tokens of their own."""
        if not self.experts:
            return
        others = [d for d in seen.directives if isinstance(d, Shard) and not d.experts]
        for axis in self.meeting(seen.mesh):
            whole = [d for d in others if axis in d.axes and not d.shares_tokens]
            if whole:
                name = "over" if axis in seen.mesh.along(self.joined) else "hidden"
                text = (
                    f"{name}={getattr(self, name)!r}: devices along {axis} have the same tokens by {describe(whole[0])}, so they "
                    f'would send the same rows; write stream="tokens" there, or another axis here'
                )
                raise fail(self, 2, text)

    def apply(self, graph: Graph) -> Graph:
        if not (self.experts or self.cut) or not graph.mesh.along(self.joined):
            return graph
        edit = graph.edit()
        named = (*self.axes, *self.hidden_axes)
        own = [axis for axis in named if axis in dict(graph.program.experts)]
        for axis in own if self.experts else self.axes:
            edit.exchanges[axis] = EdgeExchange(self.channel or axis, self.sms)
        return edit.done()

    def decided(self) -> Decided | None:
        """Return its decisions before it is compiled."""
        return Decided(self)


def _name(mesh: Mesh, joined: str) -> str:
    """Return the axes of a mesh among some as one text, fastest first: "tp+ep"."""
    return "+".join(dict.fromkeys(whole_axis(axis) for axis in mesh.along(joined)))


def shared_axes(graph: Graph, axes: Iterable[str]) -> tuple[str, ...]:
    """Return the axes, among some, along which devices share the chunks of a graph."""
    taken = {whole_axis(axis) for axis, _ in graph.program.axes}
    return tuple(axis for axis in axes if axis in taken)
