"""Turn regions into pieces: separate forward functions that hand only tensors to each other.

- A value goes from its producer straight to each consumer. Parameters, buffers and batch tensors are read where they
  are used.
- A region that changes a value of another region in place works on a copy and hands on a new value, which later readers
  get.
- A buffer that changes during the step is an explicit output of the region that changes it. Regions that only read it
  take a snapshot, because their backward may run after the buffer got its new content.
- If regions of experts are cut, too, a view that repeats the elements of a smaller tensor (expand) does not cross: the
  smaller tensor does.
- Sizes never cross: a piece is made for a number of rows, and sizes are integers in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from piper_capture.chunks.dispatch import Dispatch
from piper_capture.chunks.layers import Layers, chosen_layers
from piper_capture.chunks.regions import (
    Operations,
    Region,
    assign,
    free_nodes,
    live_nodes,
    operations,
    own_coords,
    spread_nodes,
)
from piper_capture.chunks.replay import ReplayFacts, replay
from piper_capture.module.tags import OPAQUE
from piper_capture.steps.draws import ORIGIN
from piper_capture.torch_api import _torch
from piper_capture.trace.dynamo import Forward
from piper_capture.values.concrete import (
    canonical_text,
    concrete_call,
    concrete_shape,
    is_size,
    line_of,
)
from piper_ir.ground.errors import CaptureError


@dataclass(frozen=True)
class PieceInput:
    """Name an input of a piece.

    Attributes:
        node: its tensor in the captured graph.
        name: the user's name, if it has one.
        source: the producing piece's number, for a value.
    """

    kind: Literal["value", "param", "buffer", "batch"]
    node: fx.Node
    name: str = ""
    source: int = -1


@dataclass(frozen=True)
class Result:
    """Name an output of a piece.

    Attributes:
        node: its tensor in the captured graph.
        name: the name of the buffer or of the metric.
        varies: whether it depends on the batch or on random numbers.
        changed: whether it is the new content of an input, which the piece changes in place; such an output is not
            among the function's own results.
    """

    kind: Literal["value", "buffer", "loss", "weight", "metric", "metric_weight", "metric_total"]
    node: fx.Node
    name: str = ""
    varies: bool = True
    changed: bool = False


@dataclass
class Piece:
    """Hold a region with its boundary.

    Attributes:
        copied: inputs that are changed in place.
        snapshots: buffers that change elsewhere.
    """

    region: Region
    slots: list[PieceInput] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    copied: list[fx.Node] = field(default_factory=list)
    snapshots: list[fx.Node] = field(default_factory=list)
    changed_buffers: list[fx.Node] = field(default_factory=list)

    @property
    def opaque(self) -> bool:
        return OPAQUE in self.region.coords


@dataclass(frozen=True)
class Cut:
    """Hold all pieces in topological order and the facts that their functions are made from.

    Attributes:
        free: the operations that are repeated by each piece that reads them.
    """

    forward: Forward
    ops: Operations
    facts: ReplayFacts
    free: frozenset[fx.Node]
    pieces: tuple[Piece, ...]
    layers: Layers

    def module(self, piece: Piece, rows: int, dispatch: Dispatch | None = None) -> fx.GraphModule:
        """Return the piece's forward at a number of rows: from its inputs to the results that are not `changed`.

        A `dispatch` says which of them have the form that devices exchange.
        """
        graph = fx.Graph()
        nodes = [slot.node for slot in piece.slots]
        inputs = [graph.placeholder(f"in{i}") for i in range(len(nodes))]
        env = dict(
            zip(
                nodes,
                inputs if dispatch is None else dispatch.take(graph, inputs, _shapes(nodes, rows)),
                strict=True,
            )
        )
        for node in piece.copied:
            env[node] = graph.call_method("clone", (env[node],))
        for node in piece.snapshots:
            env[node] = _snapshot(graph, env[node], node)
        enabled = True
        for node in self.body(piece):
            if self.ops.grad_mode[node] != enabled:
                enabled = not enabled
                graph.call_function(_torch.SET_GRAD, (enabled,))
            args, kwargs = concrete_call(node, env, rows)
            env[node] = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
            env[node].meta = {k: node.meta[k] for k in ("stack_trace",) if k in node.meta}
            env[node].meta["custom"] = {ORIGIN: node.name}
        if not enabled:
            graph.call_function(_torch.SET_GRAD, (True,))
        made = {k: r.node for k, r in enumerate(piece.results) if not r.changed}
        outputs = {k: env[node] for k, node in made.items()}
        if dispatch is not None:
            outputs = dispatch.give(graph, outputs, _shapes([*made.values()], rows))
        graph.output(tuple(outputs.values()))
        return fx.GraphModule(self.forward.owner, graph)

    def body(self, piece: Piece) -> Iterator[fx.Node]:
        """Yield the region's operations; each free operation that it repeats comes before its first use."""
        done = {slot.node for slot in piece.slots}

        def emit(node: fx.Node) -> Iterator[fx.Node]:
            if node in done:
                return
            done.add(node)
            for before in node.all_input_nodes:
                if before in self.free:
                    yield from emit(before)
            yield node

        for node in piece.region.nodes:
            yield from emit(node)
        for result in piece.results:
            if result.node in self.free:
                yield from emit(result.node)

    def random(self, piece: Piece) -> bool:
        """Return whether the piece draws random numbers."""
        return any(node in self.facts.random for node in piece.region.nodes)

    def text(self, piece: Piece) -> str:
        """Return a text that is equal for pieces that compute the same, whatever they are called."""
        names = {slot.node: f"in{i}" for i, slot in enumerate(piece.slots)}
        lines = [
            f"opaque {piece.opaque}",
            f"copied {sorted(names[n] for n in piece.copied)}",
            f"snapshots {sorted(names[n] for n in piece.snapshots)}",
        ]
        for node in self.body(piece):
            lines.append(f"{self.ops.grad_mode[node]} {self._line(node, names)}")
            names[node] = f"%{len(lines)}"
        lines += [f"{r.kind} {names[r.node]} {r.changed}" for r in piece.results]
        return "\n".join(lines)

    def _line(self, node: fx.Node, names: Mapping[fx.Node, str]) -> str:
        if node.op != "get_attr":
            return canonical_text(node, names)
        value = getattr(self.forward.owner, str(node.target))
        return value.code if isinstance(value, fx.GraphModule) else f"{node.target} {value}"


def _shapes(nodes: Sequence[fx.Node], rows: int) -> list[tuple[int, ...]]:
    return [concrete_shape(node.meta["example_value"], rows, node) for node in nodes]


def _snapshot(graph: fx.Graph, placeholder: fx.Node, node: fx.Node) -> fx.Node:
    """Return a copy that no simplification takes for the buffer itself."""
    if node.meta["example_value"].dtype == torch.bool:
        return graph.call_function(torch.logical_or, (placeholder, placeholder))
    return graph.call_function(torch.mul, (placeholder, 1))


def cut(
    forward: Forward,
    asked: tuple[str, ...] = (),
    *,
    experts: bool = False,
    shared: frozenset[fx.Node] = frozenset(),
) -> Cut:
    """Split the captured graph at every change of coordinates; `asked` names its layers (see `chosen_layers`).

    With `experts`, the coordinates of experts count. The operations `shared` have a coordinate of their own.
    """
    ops = operations(forward.graph)
    facts = replay(forward, ops.statements)
    live = live_nodes(ops.nodes, forward, facts)
    free = free_nodes(live, forward, facts)
    bound = [n for n in live if n not in free]
    layers = chosen_layers(forward, bound, asked)
    regions = assign(
        bound,
        own_coords(forward, bound, layers, facts.random, experts=experts, shared=shared),
        facts,
    )
    if not regions:
        raise CaptureError("the model computes nothing from its batch; use the inputs in forward")
    repeated = free | spread_nodes(bound, facts) if experts else free
    return Cut(
        forward,
        ops,
        facts,
        frozenset(repeated),
        tuple(_Wiring(forward, facts, repeated, regions).pieces()),
        layers,
    )


class _Wiring:
    """Find the tensors that cross between regions."""

    def __init__(
        self, forward: Forward, facts: ReplayFacts, free: set[fx.Node], regions: Sequence[Region]
    ) -> None:
        self._forward, self._facts, self._free, self._regions = forward, facts, free, regions
        self._home = {n: r for r in regions for n in r.nodes}
        self._position = {n: i for i, n in enumerate(forward.graph.nodes)}
        self._last = max(self._home[n].number for n in forward.results if n in self._home)
        self._reads = {r.number: list(self._external(r)) for r in regions}
        self._writes = {
            r.number: frozenset().union(*(facts.writes[n] for n in r.nodes)) for r in regions
        }
        written = frozenset().union(*self._writes.values())
        buffers = {n: o.name for n, o in forward.origins.items() if o.kind == "buffer"}
        self._hot = {
            n
            for n, name in buffers.items()
            if facts.storages[n] & written or name in forward.rewrites
        }

    def pieces(self) -> list[Piece]:
        provider = {
            n: PieceInput(o.kind, n, o.name)
            for n, o in self._forward.origins.items()
            if o.kind != "kept"
        }
        pieces: list[Piece] = []
        for region in self._regions:
            piece = Piece(region, [provider[n] for n in self._reads[region.number]])
            changed = self._changed(region)
            for node in changed:
                if provider[node].kind == "param":
                    raise CaptureError(
                        f"{self._writer(region, node)}: parameter {provider[node].name!r} is changed in place in "
                        f"forward; keep values that change in a buffer (register_buffer)"
                    )
                if provider[node].kind == "buffer" and piece.opaque:
                    raise CaptureError(
                        f"{self._writer(region, node)}: an opaque region changes buffer {provider[node].name!r} in "
                        f"place; update buffers outside of it, or remove opaque=True"
                    )
                (
                    piece.changed_buffers.append
                    if provider[node].kind == "buffer"
                    else piece.copied.append
                )(node)
            piece.snapshots = [
                s.node
                for s in piece.slots
                if s.kind == "buffer" and s.node in self._hot and s.node not in changed
            ]
            pieces.append(piece)
            for node in (*changed, *region.nodes):
                provider[node] = PieceInput("value", node, source=region.number)
        self._results(pieces, provider)
        return pieces

    def _external(self, region: Region) -> Iterator[fx.Node]:
        """Yield the tensors that the region reads from other regions and from the user, in order of first use."""
        inside, seen = set(region.nodes), set()
        extra = self._forward.results if region.number == self._last else ()
        todo = [
            *extra[::-1],
            *(i for n in reversed(region.nodes) for i in reversed(n.all_input_nodes)),
        ]
        while todo:
            node = todo.pop()
            if node in seen or node in inside or is_size(node):
                continue
            seen.add(node)
            if node in self._free:
                todo += reversed(node.all_input_nodes)
            else:
                yield node

    def _changed(self, region: Region) -> list[fx.Node]:
        """Return the external tensors that the region changes in place.

        Raises CaptureError if another tensor of the same storage crosses too.
        """
        changed: list[fx.Node] = []
        for storage in sorted(self._writes[region.number]):
            later = [r for r in self._regions if r.number >= region.number]
            carriers = {
                n: None
                for r in later
                for n in self._reads[r.number]
                if storage in self._facts.storages[n]
            }
            outside = [
                n
                for n in carriers
                if self._home.get(n) is not region and self._number(n) < region.number
            ]
            if len(outside) > 1:
                raise CaptureError(
                    f"{self._writer(region, outside[0])}: changes a tensor in place that other regions see through "
                    f"a view ({', '.join(line_of(n) for n in outside)}); keep the view and the change in one "
                    f"region, or make the view again after the change"
                )
            changed += [n for n in outside if n not in changed]
        return sorted(changed, key=self._reads[region.number].index)

    def _number(self, node: fx.Node) -> int:
        return self._home[node].number if node in self._home else -1

    def _writer(self, region: Region, node: fx.Node) -> str:
        return next(
            line_of(n) for n in region.nodes if self._facts.writes[n] & self._facts.storages[node]
        )

    def _results(self, pieces: Sequence[Piece], provider: Mapping[fx.Node, PieceInput]) -> None:
        forward = self._forward
        wanted: dict[int, set[fx.Node]] = {p.region.number: set() for p in pieces}
        for piece in pieces:
            for slot in piece.slots:
                if slot.kind == "value":
                    wanted[slot.source].add(slot.node)
        buffers = self._final_buffers(provider)
        for piece in pieces:
            number, changed = piece.region.number, piece.changed_buffers
            values = sorted(
                (n for n in wanted[number] if n not in changed), key=self._position.__getitem__
            )
            piece.results = [Result("value", n) for n in values]
            piece.results += [
                Result("buffer", n, name, self._varies(n))
                for name, (home, n) in buffers.items()
                if home == number and n not in changed
            ]
            if number == self._last:
                piece.results.append(Result("loss", forward.loss))
                piece.results += (
                    [Result("weight", forward.weight)] if forward.weight is not None else []
                )
                piece.results += [Result(m.kind, m.node, m.name) for m in forward.metrics]
            for node in changed:
                name = forward.origins[node].name
                final = buffers.get(name) == (number, node)
                piece.results.append(
                    Result(
                        "buffer" if final else "value",
                        node,
                        name if final else "",
                        self._varies(node),
                        True,
                    )
                )

    def _final_buffers(
        self, provider: Mapping[fx.Node, PieceInput]
    ) -> dict[str, tuple[int, fx.Node]]:
        """Return for each buffer the (piece, node) that holds its content after the step."""
        final: dict[str, tuple[int, fx.Node]] = {}
        placeholders = {o.name: n for n, o in self._forward.origins.items() if o.kind == "buffer"}
        for name, node in placeholders.items():
            if provider[node].kind == "value":
                final[name] = (provider[node].source, node)
        for name, node in self._forward.rewrites.items():
            if node not in self._home:
                raise CaptureError(
                    f"buffer {name!r} is replaced in forward by a view or constant; assign a computed tensor"
                )
            own = placeholders.get(name)
            in_place = (
                own is not None
                and node.args
                and node.args[0] is own
                and self._facts.writes[node] & self._facts.storages[own]
            )
            if not in_place or provider[node].source != final.get(name, (-1, node))[0]:
                final[name] = (provider[node].source, node)
        return final

    def _varies(self, node: fx.Node) -> bool:
        return bool(self._facts.storages[node] & self._facts.varies)
