"""Put operations of a step that Inductor can fuse into fusions: groups that are compiled together.

Fused are pointwise operations, reductions, and the norms and losses that `piper_ops` can decompose. Products,
attention, collectives, random draws and gathers have kernels of their own and stay single operations, and so does an
operation that has nothing to be fused with. Single operations stay in their order. A fusion stands right before the
first of them that needs one of its results; it holds all operations that this one needs, and others that read or write
the same tensors. The rest is fused at the end.

A fusion is one node with several results; `codegen` writes its text, `liveness` and `kernels` read its memory and its
kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from piper_capture.graphs.stepgraph import StepGraph
from piper_capture.steps.codegen import fusion_source, input_specs
from piper_capture.steps.kernels import FUSED, flops_of
from piper_capture.torch_api._torch_joint import OpOverload
from piper_capture.values import aliasing
from piper_capture.values.coordinate import Coordinate
from piper_ops import DECOMPOSITIONS, fusion, lowered

aten = torch.ops.aten

OTHERS = frozenset(
    {
        aten._to_copy.default,
        aten._softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten.full.default,
        aten.zeros.default,
        aten.ones.default,
        aten.scalar_tensor.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.full_like.default,
        aten.cat.default,
        aten.stack.default,
        aten.slice_backward.default,
        aten.select_backward.default,
        aten.tril.default,
        aten.triu.default,
    }
)
"""The ops that Inductor fuses without a tag of torch as pointwise or as a reduction."""

FEWEST = 2
"""The least number of operations that are worth a fusion; one that is decomposed counts as so many."""


def fuse(step: StepGraph) -> None:
    """Replace operations of a step by fusions; the graph's nodes are new ones."""
    step.graph = _Fusing(step).graph()


def _fusible(node: fx.Node) -> bool:
    """Return whether Inductor can put an operation into a kernel with others."""
    target = node.target
    if not isinstance(target, OpOverload) or _mutates(node) or aliasing.is_view(node):
        return False
    tags = target.tags
    known = torch.Tag.pointwise in tags or torch.Tag.reduction in tags
    if not known and target not in OTHERS and target not in DECOMPOSITIONS:
        return False
    if target.namespace not in ("aten", "piper") or torch.Tag.nondeterministic_seeded in tags:
        return False
    values = [*aliasing.tensors(node), *map(aliasing.tensor, node.all_input_nodes)]
    return not any(v.is_complex() for v in values) and not _reads_places(node)


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _is_view(node: fx.Node) -> bool:
    """Return whether a node shares a storage and changes nothing in it."""
    return aliasing.is_view(node) and not _mutates(node)


def _reads_places(node: fx.Node) -> bool:
    """Return whether an argument, or one of a view that is read, is a device's coordinate, which only a step knows."""
    leaves: list[object] = []
    fx.node.map_aggregate((node.args, node.kwargs), leaves.append)
    views = (a for a in node.all_input_nodes if aliasing.is_view(a))
    return any(isinstance(leaf, Coordinate) for leaf in leaves) or any(map(_reads_places, views))


class _Fusing:
    """Build a step's graph anew, with fusions.

    `_roots` of an operation are the storages that it reads; an operation is `_placed` when the new graph has it.
    """

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self._ops = [
            n
            for n in step.graph.nodes
            if n.op == "call_function" and n.target is not operator.getitem and not _is_view(n)
        ]
        self._fusible = {n for n in self._ops if _fusible(n) and self._plain(n)}
        self._roots = {n: [aliasing.root(a) for a in n.all_input_nodes] for n in self._ops}
        self._needed_outside = {aliasing.root(n) for n in step.graph.output_node().all_input_nodes}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        for node, roots in self._roots.items():
            for root in roots:
                self._readers.setdefault(root, []).append(node)
        self._placed: set[fx.Node] = set()
        self._new = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}

    @staticmethod
    def _plain(node: fx.Node) -> bool:
        """Return whether the storages that a fusion would get and give are contiguous tensors."""
        read = (aliasing.tensor(aliasing.root(a)) for a in node.all_input_nodes)
        return all(v.is_contiguous() and aliasing.fills_storage(v) for v in read) and all(
            aliasing.fills_storage(v) for v in aliasing.tensors(node)
        )

    def graph(self) -> fx.Graph:
        """Return the new graph."""
        for node in self._step.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._copies[node] = self._new.node_copy(node)
        for node in self._ops:
            if node not in self._fusible:
                self._place(self._wanted_by([node]))
                self._single(node)
        self._place([n for n in self._ops if n in self._fusible - self._placed])
        output = self._step.graph.output_node()
        self._new.node_copy(output, self._copy)
        self._new.lint()
        return self._new

    def _single(self, node: fx.Node) -> None:
        """Place an operation by itself."""
        self._copy(node)
        self._placed.add(node)

    def _copy(self, node: fx.Node) -> fx.Node:
        """Return the copy of a node, made here with the views that it is made from if there is none yet."""
        if node not in self._copies:
            self._copies[node] = self._new.node_copy(node, self._copy)
            if aliasing.producer(node) is node and not _is_view(node):
                for user in node.users:
                    if user.target is operator.getitem:
                        self._copy(user)
        return self._copies[node]

    def _wanted_by(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the operations to fuse before some: the ones that they need, and others on the same tensors."""
        wanted: set[fx.Node] = set()
        stack = list(nodes)
        while stack:
            for root in self._roots[stack.pop()]:
                made = aliasing.producer(root)
                if made in self._fusible and made not in self._placed and made not in wanted:
                    wanted.add(made)
                    stack.append(made)
        if wanted:
            self._join_neighbours(wanted)
        return [n for n in self._ops if n in wanted]

    def _join_neighbours(self, wanted: set[fx.Node]) -> None:
        """Add the operations that can run now and that read a tensor which is read or made in the fusion."""
        near = list(wanted)
        while near:
            node = near.pop()
            made = [node, *(u for u in node.users if u.target is operator.getitem)]
            for root in (*self._roots[node], *made):
                for reader in self._readers.get(root, ()):
                    if reader in wanted or not self._can_run(reader, wanted):
                        continue
                    wanted.add(reader)
                    near.append(reader)

    def _can_run(self, node: fx.Node, wanted: set[fx.Node]) -> bool:
        if node not in self._fusible or node in self._placed:
            return False
        makers = map(aliasing.producer, self._roots[node])
        return all(m.op != "call_function" or m in self._placed or m in wanted for m in makers)

    def _place(self, nodes: Sequence[fx.Node]) -> None:
        """Place operations as a fusion, or one by one if a fusion would not be right or is not worth it."""
        worth = len(nodes) >= FEWEST or any(n.target in DECOMPOSITIONS for n in nodes)
        if not worth or not self._fused(nodes):
            for node in nodes:
                self._copy(node)
        self._placed |= set(nodes)

    def _fused(self, nodes: Sequence[fx.Node]) -> bool:
        """Place operations as a fusion; return False if Inductor's form would not fit into the step."""
        inside = set(nodes)
        makes = [m for n in nodes for m in _results(n)]
        inputs = list(
            dict.fromkeys(
                r for n in nodes for r in self._roots[n] if aliasing.producer(r) not in inside
            )
        )
        outputs = [m for m in makes if self._outlives(m, inside)]
        if not outputs:
            return True  # nobody reads them
        source = fusion_source(_with_views(nodes), inputs, outputs)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        form = lowered(source, input_specs(inputs), device)
        strides = tuple(aliasing.tensor(m).stride() for m in outputs)
        if not form.owning or form.others or not _same_strides(form.strides, strides, outputs):
            return False
        node = self._new.call_function(
            fusion, ([self._copy(i) for i in inputs], source), name="fusion"
        )
        node.meta = {**nodes[-1].meta, "val": [aliasing.tensor(m) for m in outputs]}
        node.meta[FUSED] = (form, sum(flops_of(n) for n in nodes))
        for k, made in enumerate(outputs):
            item = self._copies[made] = self._new.call_function(operator.getitem, (node, k))
            item.meta = dict(made.meta)
        return True

    def _outlives(self, made: fx.Node, inside: set[fx.Node]) -> bool:
        """Return whether a result is read by an operation outside of a fusion, or written by the step."""
        readers = self._readers.get(made, ())
        return made in self._needed_outside or any(r not in inside for r in readers)


def _results(node: fx.Node) -> list[fx.Node]:
    items = [u for u in node.users if u.target is operator.getitem]
    return items or [node]


def _with_views(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return operations with the views that they read, and with their single results, in order."""
    order: dict[fx.Node, None] = {}

    def add(node: fx.Node) -> None:
        if node in order or not (aliasing.is_view(node) or node.target is operator.getitem):
            return
        if aliasing.is_view(node):
            for argument in node.all_input_nodes:
                add(argument)
            order[node] = None

    for node in nodes:
        for argument in node.all_input_nodes:
            add(argument)
        order[node] = None
        order.update(dict.fromkeys(r for r in _results(node) if r is not node))
    return list(order)


def _same_strides(
    ours: Sequence[tuple[int, ...]], theirs: Sequence[tuple[int, ...]], nodes: Sequence[fx.Node]
) -> bool:
    """Return whether results have the strides that the step's graph shows, where a dimension has several elements."""
    return all(
        size == 1 or a == b
        for node, one, other in zip(nodes, ours, theirs, strict=True)
        for size, a, b in zip(aliasing.tensor(node).shape, one, other, strict=True)
    )
