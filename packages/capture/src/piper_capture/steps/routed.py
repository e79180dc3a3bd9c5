"""Exchange the rows of a dropless mixture among devices inside of a step; each computes the rows of its experts.

    rows, counts = route(x, chosen, experts)             rows, counts = route(x, chosen, experts)
    made = products(rows, counts, weights)          ->   table = all_gather(counts)
    y = unroute(made, chosen, share)                     mine, own = take(all_to_all(send(rows, table)), table)
                                                         made = products(mine, own, weights of own experts)
                                                         made = return(all_to_all(give(made, table)), rows, ...)
                                                         y = unroute(made, chosen, share)

A device has buffers for `bound` times the rows that each device would send if all experts were chosen equally often.
The operators between `route` and `unroute` run on these buffers; they are also printed as the body of further rounds
(`piper_ops.experts.rounds`). Where devices along another axis cut each expert, they gather the rows that came before
`take`, and reduce-scatter the partial sums behind `give`. The chunk's forward function is rewritten, so that autograd
derives all gradients.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor, fx

from piper_capture.graphs.posting import POSTED
from piper_capture.graphs.stepgraph import Joint
from piper_capture.steps import phases
from piper_capture.steps.by_rows import takes_any_rows
from piper_capture.steps.codegen import StepCode, compile_step, generate
from piper_capture.steps.filling import FILLED
from piper_capture.steps.joint import Interpreter, JointInput, constants_of, trace_joint
from piper_capture.steps.kernels import SHARED
from piper_capture.steps.schedule import schedule
from piper_capture.torch_api import _torch_joint
from piper_capture.values.coordinate import Coordinate
from piper_ir.ground.errors import DirectiveError
from piper_ir.ground.sizes import Affine, TensorSpec
from piper_ir.program.layout import DimPart, Layout
from piper_ops import (
    ANY_ROWS,
    PLACED,
    ExpertBody,
    all_gather,
    all_to_all,
    experts_checked,
    experts_drop,
    experts_give,
    experts_home,
    experts_return,
    experts_send,
    experts_take,
    reduce_scatter,
    room_of_rounds,
    route,
    unroute,
)

ROUTES = (route, torch.ops.piper.route)
UNROUTES = (unroute, torch.ops.piper.unroute)
FEW, MANY = 1, 1000
_ROOM: dict[tuple[object, ...], list[int]] = {}
"""The bytes of further rounds by source of the body, forms of tensors and trained stacks; a search asks many times."""
ChunkInputs = Callable[[int], list[JointInput]]
"""A function from a number of rows to the unsharded inputs of a chunk."""


@dataclass(frozen=True)
class Routed:
    """Describe how devices exchange the rows of a dropless mixture: see `piper_compiler.directives.shard`.

    Attributes:
        tokens: the tokens of a row.
        sharing: the axes whose devices share the tokens of a row, with their sizes. Each routes its own.
        axes: the axes, outermost first, of which `axis` is made; none if it is one axis.
        hidden: the axes, outermost first, whose devices cut each expert, with their sizes.
        cuts: for each stack that these cut, by its input, the dimension and the outer steps in it.
        beside: whether rows travel while the device computes the other operations of the region.
        divided: the stacks of which each of these adds an equal part to its partial sum: biases of the second product.
    """

    axis: str
    degree: int
    bound: float
    overflow: str
    tokens: int = field(default=0, repr=False)
    sharing: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    axes: tuple[str, ...] = field(default=(), repr=False)
    hidden: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    cuts: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)
    divided: tuple[int, ...] = field(default=(), repr=False)
    beside: bool = field(default=False, repr=False)

    @property
    def within(self) -> str:
        """Return the axes whose devices cut each expert as one text, fastest first; "" if experts are whole."""
        return "+".join(axis for axis, _ in reversed(self.hidden))

    @property
    def cut_by(self) -> int:
        """Return the number of devices that cut each expert."""
        return prod(size for _, size in self.hidden)

    @property
    def text(self) -> str:
        """Return it as one text."""
        shares = f" {self.tokens} tokens over {self.sharing}" if self.sharing else ""
        cut = f" {self.cuts} {self.divided} over {self.hidden}" if self.hidden else ""
        beside = " beside others" * self.beside
        return f"{self!r}{shares}{' of '.join(('', *self.axes))}{cut}{beside}"

    def own(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of a device's tokens of a value [rows x tokens, ...] or [rows, tokens, ...]."""
        at = self.token_dim(spec)
        if at is None:
            return spec
        sizes, parts = list(spec.shape), prod(n for _, n in self.sharing)
        sizes[at] = Affine(0, self.tokens // parts) if at == 0 else self.tokens // parts
        return TensorSpec(tuple(sizes), spec.dtype)

    def token_dim(self, spec: TensorSpec) -> int | None:
        if not self.sharing:
            return None
        if spec.shape[:1] == (Affine(0, self.tokens),):
            return 0
        return 1 if spec.shape[:2] == (Affine(0, 1), self.tokens) else None


@dataclass(frozen=True)
class RoutedLayouts:
    """Describe the placement of such a chunk's inputs: stacks are sharded along experts, all others replicated.

    Attributes:
        stacks: the placement of each stack of matrices, by its input.
        grads: the indices of inputs whose gradients it makes.
        sharing: the axes along which gradients of parameters are partial sums.
    """

    stacks: Mapping[int, Layout]
    grads: frozenset[int]
    sharing: tuple[str, ...] = ()
    unshared: tuple[()] = ()

    def layout_of(self, number: int) -> Layout:
        return self.stacks.get(number, ())

    def summed(self, number: int) -> tuple[str, ...]:
        own = {part.axis for part in self.layout_of(number)}
        return tuple(axis for axis in self.sharing if axis not in own)


class RoutedForms:
    """Make the graphs of a device at any number of rows; `module` makes the unsharded forward."""

    def __init__(
        self, how: Routed, module: Callable[[int], fx.GraphModule], inputs: ChunkInputs
    ) -> None:
        self._how, self._module, self._inputs = how, module, inputs
        self._lines, self._any_rows = list[tuple[int, int]](), ""

    def _at(self, rows: int) -> _Rewriting:
        return _Rewriting(self._how, self._module(rows), self._inputs(rows), rows)

    @cached_property
    def layouts(self) -> RoutedLayouts:
        """Return the placement of the parameters."""
        trained = {k for k, i in enumerate(self._inputs(FEW)) if i.needs_grad}
        sharing = tuple(axis for axis, _ in self._how.sharing)
        experts = tuple(DimPart(axis, 0) for axis in self._how.axes or (self._how.axis,))
        stacks = dict.fromkeys(sorted(self._at(FEW).stacks), experts)
        for number, dim, outer in self._how.cuts:
            cut = tuple(DimPart(axis, dim, outer) for axis, _ in self._how.hidden)
            stacks[number] = (*experts, *cut)
        return RoutedLayouts(stacks, frozenset(trained), sharing)

    def joint(self, rows: int, mask: Sequence[bool]) -> Joint:
        """Return the joint graph of a device."""
        rewriting, further = self._at(rows), self._how.overflow == "rounds"
        body, room = (self._body(rewriting), self._room(rows)) if further else ("", [])
        rewritten = rewriting.module(body, room)
        own = [
            replace(i, example=rewriting.own(k)) if k in rewriting.stacks else i
            for k, i in enumerate(self._inputs(rows))
        ]
        joint = trace_joint(rewritten, own, mask)
        shared = prod(({**dict(self._how.sharing), **dict(self._how.hidden)}).values())
        for node in joint.graph.nodes:
            if shared > 1:
                node.meta[SHARED] = shared
            at = PLACED.get(node.target) if node.op == "call_function" else None
            if at is not None:
                node.args = (*node.args[:at], Coordinate(self._how.axis), *node.args[at + 1 :])
            if self._how.beside and node.target is all_to_all:
                node.meta |= {POSTED: True, FILLED: True}
        return joint

    def _body(self, rewriting: _Rewriting) -> str:
        """Return the source of the body, made once if it takes any number of rows."""
        text = self._any_rows or rewriting.body_text()
        self._any_rows = text if text.endswith(ANY_ROWS) else ""
        return text

    def _room(self, rows: int) -> list[int]:
        """Return the workspace bytes of further rounds: affine in the rows, and an upper bound.

        The exact bytes are the maximum of several affine functions. So the value at one row plus the slope at many rows
        bounds them.
        """
        if not self._lines:
            few, many, more = (
                rewriting.room(self._body(rewriting))
                for rewriting in map(self._at, (FEW, MANY, MANY + 1))
            )
            self._lines = [(a, c - b) for a, b, c in zip(few, many, more, strict=True)]
        return [first + (rows - FEW) * slope for first, slope in self._lines]


def route_of(nodes: Iterable[fx.Node]) -> fx.Node | None:
    """Return the `route` among nodes, which sorts tokens by expert."""
    return next((node for node in nodes if node.target in ROUTES), None)


class _Shapes(Interpreter):
    """Run a forward function on fake tensors and record the result of each node."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[JointInput]) -> None:
        super().__init__(module, constants_of(module))
        self.found: dict[fx.Node, object] = {}
        with _torch_joint.fake_mode(), torch.no_grad():
            self.run(*(torch.empty(i.example.shape, dtype=i.example.dtype) for i in inputs))

    def run_node(self, n: fx.Node) -> object:
        self.found[n] = super().run_node(n)
        return self.found[n]

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        value = self.found[node]
        assert isinstance(value, Tensor)
        return tuple(value.shape)


class _Rewriting:
    """Find the nodes between `route` and `unroute`, and make the forward function of a device."""

    def __init__(
        self, how: Routed, module: fx.GraphModule, inputs: Sequence[JointInput], rows: int
    ) -> None:
        self._how, self._module, self._inputs = how, module, inputs
        nodes = list(module.graph.nodes)
        self._route, self._unroute = (
            self._only(nodes, ops, name) for ops, name in ((ROUTES, "route"), (UNROUTES, "unroute"))
        )
        self.experts = int(self._route.args[2])  # type: ignore[arg-type]  # a number
        if self.experts % how.degree:
            raise self._fail(
                f"{self.experts} experts cannot be shared equally by {how.degree} devices"
            )
        items = {u.args[1]: u for u in self._route.users if u.target is operator.getitem}
        self._rows, self._counts = items[0], items[1]
        self._result = self._unroute.args[0]
        self._body, self._leaves = self._between()
        self._stacks = [n for n in self._leaves if n not in (self._rows, self._counts)]
        placeholders = module.graph.find_nodes(op="placeholder")
        self.stacks = frozenset(
            placeholders.index(self._checked(n, placeholders)) for n in self._stacks
        )
        self._shapes = self._run()
        self.slot = self._slot(rows)

    def _fail(self, message: str) -> DirectiveError:
        return DirectiveError(
            f"shard(over={self._how.axis!r}, stream='rows') of a dropless mixture: {message}"
        )

    def _run(self) -> _Shapes:
        """Return the shapes of all nodes for a device's tokens; raise DirectiveError if one has their number in it."""
        try:
            return _Shapes(self._module, self._inputs)
        except RuntimeError as error:
            if not self._how.sharing:
                raise
            raise self._fail(
                f"an operation of its region is written for {self._how.tokens} tokens, which devices share over "
                f"{', '.join(axis for axis, _ in self._how.sharing)}: {str(error).splitlines()[0]}; leave it out of "
                f"the region"
            ) from error

    def _only(self, nodes: Sequence[fx.Node], ops: Sequence[object], name: str) -> fx.Node:
        calls = [n for n in nodes if n.target in ops]
        if len(calls) != 1:
            raise self._fail(
                f"its region calls {name} {len(calls)} times; one region holds one route and one unroute"
            )
        return calls[0]

    def _between(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the nodes between `route` and `unroute`, and the other nodes that these read."""
        todo, body, leaves = [self._result], set[fx.Node](), dict[fx.Node, None]()
        while todo:
            node = todo.pop()
            if not isinstance(node, fx.Node) or node in body:
                continue
            if node in (self._rows, self._counts) or node.op in ("placeholder", "get_attr"):
                leaves[node] = None
                continue
            body.add(node)
            todo += node.all_input_nodes
        outside = [
            n
            for n in (*body, self._rows, self._counts)
            for u in n.users
            if u not in body and u is not self._unroute
        ]
        if outside or self._route in body or self._rows not in leaves:
            raise self._fail(
                "what stands between route and unroute is used elsewhere, too; leave that out of the region"
            )
        order = list(self._module.graph.nodes)
        return sorted(body, key=order.index), sorted(leaves, key=order.index)

    def _checked(self, node: fx.Node, placeholders: Sequence[fx.Node]) -> fx.Node:
        """Return a parameter that the nodes between the two read; raise DirectiveError unless it is a stack."""
        joint_input = self._inputs[placeholders.index(node)] if node in placeholders else None
        if (
            joint_input is None
            or joint_input.kind != "param"
            or joint_input.example.dim() < 2
            or joint_input.example.shape[0] != self.experts
        ):
            raise self._fail(
                f"{node.name} is read between route and unroute, and is no parameter [{self.experts}, ...] of the "
                f"experts"
            )
        if any(u not in self._body for u in node.users):
            raise self._fail(f"{node.name} is read outside of route and unroute, too")
        return node

    def _slot(self, rows: int) -> int:
        """Return the maximum number of rows that a device sends to each device in a round."""
        tokens, choices = self._shapes.shape(self._route.args[1])  # type: ignore[arg-type]  # a node
        self._rows_count, self._mean = rows, tokens // rows * choices / self._how.degree
        return rows * min(math.ceil(self._how.bound * self._mean), tokens // rows * choices)

    def own(self, number: int) -> Tensor:
        """Return a device's shard of a stack, an input."""
        example = self._inputs[number].example
        sizes = [example.shape[0] // self._how.degree, *example.shape[1:]]
        for k, dim, _ in self._how.cuts:
            if k == number:
                sizes[dim] //= self._how.cut_by
        return example.new_empty(sizes)

    def body_text(self) -> str:
        """Return the source of the nodes between the two, for the number of rows of a device's buffers.

        Its last line is ANY_ROWS if it takes any number of rows.
        """
        graph = fx.Graph()
        env = {self._rows: graph.placeholder("rows"), self._counts: graph.placeholder("counts")}
        env |= {node: graph.placeholder(f"weight{k}") for k, node in enumerate(self._stacks)}
        self._add_body(graph, env)
        graph.output((env[self._result],))  # type: ignore[index]  # a node
        module = fx.GraphModule(self._module, graph)
        joint = self._body_joint(module)
        step = phases.cut(joint).steps["F"]
        return generate("F", step, schedule(step), joint.constants).source + (
            ANY_ROWS if takes_any_rows(joint.graph) else ""
        )

    def _body_joint(self, module: fx.GraphModule) -> Joint:
        """Return the graph of the body; raise DirectiveError if it is written for all hidden elements of an expert."""
        try:
            return trace_joint(
                module, [JointInput("value", t) for t in self.body_inputs()], (False,)
            )
        except RuntimeError as error:
            if not self._how.hidden:
                raise
            raise self._fail(
                f"an operation between route and unroute is written for all hidden elements of an expert, which "
                f"{self._how.cut_by} devices along {self._how.within} cut: {str(error).splitlines()[0]}"
            ) from error

    def body_inputs(self) -> list[Tensor]:
        """Return meta tensors like the arguments of the body."""
        source = self._shapes.found[self._rows]
        assert isinstance(source, Tensor)
        rows = torch.empty(
            (self._how.cut_by * self._how.degree * self.slot, source.shape[1]),
            dtype=source.dtype,
            device="meta",
        )
        counts = torch.empty(self.experts // self._how.degree, dtype=torch.int64, device="meta")
        return [rows, counts, *(self.own(self._number(n)).to("meta") for n in self._stacks)]

    def _number(self, node: fx.Node) -> int:
        return self._module.graph.find_nodes(op="placeholder").index(node)

    def room(self, body: str) -> list[int]:
        """Return the workspace bytes of further rounds."""
        rows, _, *weights = self.body_inputs()
        assert isinstance(self._result, fx.Node)
        count, width = self._shapes.shape(self._rows)[0], self._shapes.shape(self._result)[1]
        table = torch.empty((self._how.degree, self.experts), dtype=torch.int64, device="meta")
        every = table.new_empty((self._how.cut_by, *table.shape)) if self._how.hidden else table
        back = rows.new_empty((self._how.degree, self.slot, width))
        home = rows.new_empty((count, rows.shape[1]))
        wanted = [self._trained(n) for n in self._stacks]
        forms = *((t.shape, t.dtype) for t in (home, back, *weights)), every.shape
        key = body, forms, tuple(wanted)
        if key not in _ROOM:
            on_meta = ExpertBody(compile_step(StepCode(body), "meta"), body.endswith(ANY_ROWS))
            _ROOM[key] = room_of_rounds(home, back, table, every, weights, on_meta, wanted)
        return _ROOM[key]

    def _trained(self, node: fx.Node) -> bool:
        return self._inputs[self._number(node)].needs_grad

    def module(self, body: str, room: Sequence[int]) -> fx.GraphModule:
        """Return the forward function of a device."""
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        inside = set(self._body)
        for node in self._module.graph.nodes:
            if node is self._route:
                self._add_route(graph, env)
            elif node is self._unroute:
                self._add_return(graph, env, body, room)
            elif node not in inside and node not in (self._rows, self._counts):
                env[node] = graph.node_copy(node, env.__getitem__)
        return fx.GraphModule(self._module, graph)

    def _add_route(self, graph: fx.Graph, env: dict[fx.Node, fx.Node]) -> None:
        how, drops = self._how, self._how.overflow == "drop"
        x, chosen = (env[n] for n in self._route.args[:2])  # type: ignore[index]  # nodes
        if drops:
            chosen = graph.call_function(
                experts_drop, (chosen, self.experts, how.degree, self.slot)
            )
        self._chosen = chosen
        routed = graph.call_function(route, (x, chosen, self.experts + drops))
        env[self._rows] = self._home_rows = graph.call_function(operator.getitem, (routed, 0))
        counts = graph.call_function(operator.getitem, (routed, 1))
        if drops:
            counts = graph.call_method("narrow", (counts, 0, 0, self.experts))
        table = every = graph.call_function(all_gather, (counts, how.axis, how.degree))
        if how.hidden:
            every = graph.call_function(all_gather, (table, how.within, how.cut_by))
        if how.overflow == "error":
            every = graph.call_function(
                experts_checked, (every, self.slot, float(how.bound), self._rows_count, self._mean)
            )
        self._table, self._every = table if how.hidden else every, every
        sent = graph.call_function(experts_send, (self._home_rows, self._table, 0, self.slot))
        came = graph.call_function(all_to_all, (sent, how.axis, how.degree))
        if how.hidden:
            came = graph.call_function(all_gather, (came, how.within, how.cut_by))
            came = graph.call_method("flatten", (came, 0, 1))
        taken = graph.call_function(experts_take, (came, every, 0))
        env[self._rows], env[self._counts] = (
            graph.call_function(operator.getitem, (taken, k)) for k in range(2)
        )
        for node in (routed, table, every, sent, came, taken):
            node.meta = dict(self._route.meta)

    def _add_body(self, graph: fx.Graph, env: dict[fx.Node, fx.Node]) -> None:
        """Copy the nodes between the two."""
        parts = {
            node: graph.call_function(operator.truediv, (env[node], self._how.cut_by))
            for node in self._stacks
            if self._number(node) in self._how.divided
        }
        for node in self._body:
            env[node] = graph.node_copy(node, lambda n: parts.get(n) or env[n])

    def _add_return(
        self, graph: fx.Graph, env: dict[fx.Node, fx.Node], body: str, room: Sequence[int]
    ) -> None:
        how = self._how
        self._add_body(graph, env)
        outgoing = graph.call_function(experts_give, (env[self._result], self._every, 0))  # type: ignore[index]  # a node
        if how.hidden:
            outgoing = graph.call_method("unflatten", (outgoing, 0, (how.cut_by, how.degree)))
            outgoing = graph.call_function(reduce_scatter, (outgoing, how.within, how.cut_by))
        back = graph.call_function(all_to_all, (outgoing, how.axis, how.degree))
        if how.overflow == "rounds":
            weights = [env[n] for n in self._stacks]
            tables = self._home_rows, self._table, self._every
            args = (back, *tables, weights, body, how.axis, how.within, self.slot, 0, list(room))
            returned = graph.call_function(experts_return, args)
        else:
            returned = graph.call_function(
                experts_home, (back, self._table, 0, self._shapes.shape(self._rows)[0])
            )
        share = env[self._unroute.args[2]]  # type: ignore[index]  # a node
        env[self._unroute] = graph.call_function(unroute, (returned, self._chosen, share))
        for node in (outgoing, back, returned, env[self._unroute]):
            node.meta = dict(self._unroute.meta)
