"""Compute products of gathered or scattered tokens in pieces, whose messages can run beside the products of others.

    y = all_gather(x) @ w       ->   y_j = all_gather(x_j) @ w       for each piece j of a device's tokens
    s = reduce_scatter(x @ w)   ->   s_j = reduce_scatter(x_j @ w)   likewise

A piece has a part of the tokens of every device, so that all devices run the same code and collectives, and each
element is a sum of the same terms. (Megatron-LM calls it tensor-parallel communication overlap, torch asynchronous
tensor parallelism; both follow Wang et al., Overlap communication with dependent computation via decomposition, ASPLOS
2023.) The results of the pieces are put together again; so is the gathered tensor if another op reads it. All
collectives along the axis are marked, so that a step starts them early (`piper_capture.graphs.posting`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from piper_capture.graphs.closures import ancestors
from piper_capture.graphs.posting import POSTED
from piper_capture.graphs.stepgraph import TOKENS, Joint
from piper_capture.layouts.conversions import WHOLE, DimPlace
from piper_capture.layouts.emit import WHY, Emitter, named_arguments
from piper_capture.steps.recompute import PIECE_OF
from piper_capture.values import aliasing
from piper_ir.ground.errors import DirectiveError
from piper_ops import all_gather, reduce_scatter

aten = torch.ops.aten

RESHAPED = (aten.view.default, aten._unsafe_view.default)
LEFT: Mapping[Any, str] = {aten.mm.default: "self", aten.addmm.default: "mat1"}
"""The products, each with the name of the operand whose rows are tokens."""

WIDEST = 4
"""The most elements of products per element that is gathered.

Results of pieces are copied into one tensor, which reads and writes them. An H100 moves 3350 GB/s of memory and gathers
at 370 GB/s over NVLink (`piper_simulator.contention.flows`): the copy of more elements than this takes longer than the
message that it hides. So do the logits of most models.
"""


@dataclass(frozen=True)
class _Gathered:
    """Hold a gather of tokens, the gathered tensor, and the products whose rows it is."""

    gather: fx.Node
    whole: fx.Node
    products: tuple[fx.Node, ...]


@dataclass(frozen=True)
class _Tokens:
    """Describe a whole tensor as [rows, tokens, rest]: it is gathered, or scattered, along the tokens."""

    rows: int
    number: int
    rest: tuple[int, ...]

    @staticmethod
    def of(whole: fx.Node, place: DimPlace) -> _Tokens:
        shape = tuple(aliasing.tensor(whole).shape)
        rows = prod(shape[: place.dim]) * place.outer
        return _Tokens(rows, shape[place.dim] // place.outer, shape[place.dim + 1 :])

    def are_rows_of(self, node: fx.Node) -> bool:
        """Return whether a tensor is a matrix with a row for each token."""
        value = aliasing.tensor(node)
        return value.dim() == 2 and value.shape[0] == self.rows * self.number


def in_pieces(joint: Joint, pieces: Mapping[str, int]) -> Joint:
    """Return a device's graph with products in pieces; `pieces` has the number of them along each such axis.

    Gathers and reduce-scatters whose tokens have another op than a product behind or before them stay whole.
    """
    return _Builder(joint, pieces).build() if pieces else joint


class _Builder:
    def __init__(self, joint: Joint, pieces: Mapping[str, int]) -> None:
        self._joint, self._pieces = joint, pieces
        self._emit = Emitter(fx.Graph(), joint.inputs[0].meta["val"].fake_mode)
        self._copies: dict[fx.Node, fx.Node] = {}
        self._number = {node: k for k, node in enumerate(joint.graph.nodes)}
        self._gathered: dict[fx.Node, _Gathered] = {}
        self._scattered: dict[fx.Node, set[fx.Node]] = {}
        for node in joint.graph.nodes:
            if node.target is all_gather and (found := self._group(node)) is not None:
                self._gathered |= dict.fromkeys((found.whole, *found.products), found)
        for node in joint.graph.nodes:
            if node.target is reduce_scatter and (inside := self._sum(node)):
                self._scattered[node] = inside

    def build(self) -> Joint:
        joint = self._joint
        for node in joint.graph.nodes:
            if node.op != "output":
                self._copy(node)
        returned = [self._copy(n) for n in (*joint.outputs, *joint.grads.values())]
        self._emit.graph.output(returned)
        self._emit.graph.eliminate_dead_code(
            is_impure_node=lambda n: n.op in ("placeholder", "output")
        )
        return replace(
            joint,
            graph=self._emit.graph,
            inputs=tuple(self._copy(n) for n in joint.inputs),
            outputs=tuple(self._copy(n) for n in joint.outputs),
            tangents={k: self._copy(n) for k, n in joint.tangents.items()},
            grads={k: self._copy(n) for k, n in joint.grads.items()},
            constant_names={self._copy(n): name for n, name in joint.constant_names.items()},
        )

    def _piece_count(self, node: fx.Node) -> int:
        """Return the number of pieces of a gather or reduce-scatter of tokens; 1 for one of another index."""
        place = node.meta.get(WHOLE, (None,))[0]
        if place is None or place.dim > TOKENS or place.mirrored:
            return 1
        return min([self._pieces.get(name, 1) for name in str(node.args[1]).split("+")])

    def _group(self, gather: fx.Node) -> _Gathered | None:
        """Return the products of a gathered tensor; None if it has none, or is not gathered in pieces."""
        if self._piece_count(gather) == 1:
            return None
        place, whole = gather.meta[WHOLE]
        tokens = _Tokens.of(whole, place)
        flat = [n for n in _reshaped(whole) if tokens.are_rows_of(n)]
        products = sorted(
            {u for n in flat for u in n.users if _left(u) is n and self._early(u, n, whole)},
            key=self._number.__getitem__,
        )
        if not products or _elements(*products) > WIDEST * _elements(whole):
            return None
        self._check(gather, tokens)
        return _Gathered(gather, whole, tuple(products))

    def _check(self, node: fx.Node, tokens: _Tokens) -> None:
        """Raise DirectiveError if the pieces do not divide the tokens of a device."""
        count, own = self._piece_count(node), tokens.number // int(node.args[2])  # type: ignore[arg-type]  # a number
        if own % count:
            fits = max(k for k in range(1, count) if own % k == 0)
            raise DirectiveError(
                f"pieces={count}: a device has {own} tokens along {node.args[1]}, which are not {count} equal "
                f"pieces; {fits} would be accepted"
            )

    def _early(self, product: fx.Node, left: fx.Node, whole: fx.Node) -> bool:
        """Return whether the other operands of a product are there where the gather is, or can be made there."""
        needed = ancestors(n for n in product.all_input_nodes if n is not left)
        return whole not in needed and all(
            n.op != "call_function"
            or self._number[n] < self._number[whole]
            or aliasing.is_view(n)
            or n.target is aten._to_copy.default
            for n in needed
        )

    def _sum(self, node: fx.Node) -> set[fx.Node]:
        """Return the sum of products that a reduce-scatter scatters; nothing if it is not computed in pieces."""
        if self._piece_count(node) == 1:
            return set()
        place, whole = node.meta[WHOLE]
        tokens, inside = _Tokens.of(whole, place), self._summed(whole)
        products = [n for n in inside if self._sliced(n)]
        if not products or not all(map(tokens.are_rows_of, products)):
            return set()
        self._check(node, tokens)
        return inside

    def _sliced(self, node: fx.Node) -> bool:
        """Return whether a node is a product that can be computed from a part of its rows."""
        return node.target is aten.mm.default and node not in self._gathered

    def _summed(self, node: fx.Node) -> set[fx.Node]:
        """Return the sums, products and reshapings that make a tensor and that nothing else reads."""
        if len(node.users) > 1:
            return set()
        if self._sliced(node):
            return {node}
        terms = node.all_input_nodes
        added = (
            node.target is aten.add.Tensor
            and not node.kwargs
            and [aliasing.tensor(n).shape for n in terms] == 2 * [aliasing.tensor(node).shape]
        )
        if added or node.target in RESHAPED:
            return {node}.union(*map(self._summed, terms))
        return set()

    def _copy(self, node: fx.Node) -> fx.Node:
        """Return the copy of a node, made with all that it needs if there is none yet."""
        if node not in self._copies:
            if node in self._gathered:
                self._gather(self._gathered[node])
            elif node in self._scattered:
                self._scatter(node)
            else:
                for needed in node.all_input_nodes:
                    self._copy(needed)
                made = self._emit.graph.node_copy(node, self._copies.__getitem__)
                made.meta = {k: v for k, v in node.meta.items() if k != WHOLE}
                if node.target in (all_gather, reduce_scatter) and any(
                    name in self._pieces for name in str(node.args[1]).split("+")
                ):
                    made.meta[POSTED] = True
                self._copies[node] = made
        return self._copies[node]

    def _gather(self, found: _Gathered) -> None:
        """Add the gathers of the pieces, each with its products, and put their results together."""
        gather, count, emit = found.gather, self._piece_count(found.gather), self._emit
        axis, degree = gather.args[1:]
        assert isinstance(degree, int)
        source = self._copy(gather.args[0])  # type: ignore[arg-type]  # a node
        whole = _Tokens.of(found.whole, gather.meta[WHOLE][0])
        rows, share = whole.rows, whole.number // degree // count
        for product in found.products:
            for other in product.all_input_nodes:
                if other is not _left(product):
                    self._copy(other)
        with self._like(gather):
            split = emit.call(aten.view.default, source, [rows, count, share, *whole.rest])
            own = [self._dense(emit.call(aten.select.int, split, 1, k)) for k in range(count)]
        parts = []
        results: dict[fx.Node, list[fx.Node]] = {product: [] for product in found.products}
        for part in own:
            with self._like(gather):
                parts.append(self._posted(all_gather, part, axis, degree))
            for product, made in results.items():
                with self._like(product):
                    wide = aliasing.tensor(_left(product)).shape[1]  # type: ignore[arg-type]  # a product's
                    flat = [degree * rows * share, wide]
                    made.append(
                        self._product(product, emit.call(aten.view.default, parts[-1], flat))
                    )
        for product, made in results.items():
            with self._like(product):
                self._copies[product] = self._joined(product, made, degree, rows)
        with self._like(gather):
            self._copies[found.whole] = self._joined(found.whole, parts, degree, rows)

    def _scatter(self, node: fx.Node) -> None:
        """Add the products of the pieces, each with its reduce-scatter, and put the results together."""
        source, count, emit = node.meta[WHOLE][1], self._piece_count(node), self._emit
        axis, degree = node.args[1:]
        assert isinstance(degree, int)
        inside = self._scattered[node]
        tokens = _Tokens.of(source, node.meta[WHOLE][0])
        rows, share = tokens.rows, tokens.number // degree // count
        for made in sorted(inside, key=self._number.__getitem__):
            for needed in made.all_input_nodes:
                if needed not in inside:
                    self._copy(needed)

        def taken(whole: fx.Node, k: int) -> fx.Node:
            """Take the piece of all devices' tokens, [devices x rows x tokens, elements], of a whole tensor."""
            wide = aliasing.tensor(whole).numel() // (rows * tokens.number)
            split = emit.call(
                aten.view.default, self._copies[whole], [rows, degree, count, share, wide]
            )
            part = emit.call(aten.select.int, split, 2, k)
            first = self._dense(emit.call(aten.permute.default, part, [1, 0, 2, 3]))
            return emit.call(aten.view.default, first, [degree * rows * share, wide])

        def piece(one: fx.Node, k: int) -> fx.Node:
            if one not in inside:
                with self._like(node):
                    return taken(one, k)
            with self._like(one):
                if self._sliced(one):
                    return self._product(one, taken(_left(one), k))  # type: ignore[arg-type]  # a product's
                terms = [piece(n, k) for n in one.all_input_nodes]
                return terms[0] if one.target in RESHAPED else emit.call(aten.add.Tensor, *terms)

        parts = []
        for k in range(count):
            made = piece(source, k)
            with self._like(node):
                blocks = emit.call(aten.view.default, made, [degree, rows, share, *tokens.rest])
                parts.append(self._posted(reduce_scatter, blocks, axis, degree))
        with self._like(node):
            joined = emit.call(aten.stack.default, parts, 1)
            self._copies[node] = emit.call(
                aten.view.default, joined, list(aliasing.tensor(node).shape)
            )

    def _product(self, product: fx.Node, rows: fx.Node) -> fx.Node:
        """Add a product of some rows."""
        left = _left(product)
        named: Any = fx.node.map_arg(
            named_arguments(product), lambda n: rows if n is left else self._copies[n]
        )
        made = self._emit.op(product, product.target, named)  # type: ignore[arg-type]  # an op
        made.meta[PIECE_OF] = product.name
        return made

    def _joined(self, whole: fx.Node, parts: Sequence[fx.Node], degree: int, rows: int) -> fx.Node:
        """Put pieces [devices, rows, tokens, ...] together in the order of tokens, as the tensor of a node."""
        elements = aliasing.tensor(parts[0]).numel() // (degree * rows)
        blocks = []
        for part in parts:
            split = self._emit.call(aten.view.default, part, [degree, rows, elements])
            blocks.append(self._emit.call(aten.permute.default, split, [1, 0, 2]))
        stacked = self._emit.call(aten.stack.default, blocks, 2)
        return self._emit.call(aten.view.default, stacked, list(aliasing.tensor(whole).shape))

    def _posted(self, op: Any, source: fx.Node, axis: Any, degree: int) -> fx.Node:
        made = self._emit.call(op, source, axis, degree)
        made.meta[POSTED] = True
        return made

    def _dense(self, source: fx.Node) -> fx.Node:
        if aliasing.tensor(source).is_contiguous():
            return source
        return self._emit.call(aten.clone.default, source, memory_format=torch.contiguous_format)

    def _like(self, node: fx.Node) -> Any:
        """Let nodes come from where a node does, for the same purpose."""
        late = "backward" in str(node.meta["partitioner_tag"])
        return self._emit.like(node, late, str(node.meta.get(WHY, "")))


def _left(node: fx.Node) -> fx.Node | None:
    """Return the operand of a product whose rows are tokens; None for another op."""
    name = LEFT.get(node.target)
    operand = None if name is None else named_arguments(node)[name]
    return operand if isinstance(operand, fx.Node) else None


def _elements(*nodes: fx.Node) -> int:
    return sum(aliasing.tensor(n).numel() for n in nodes)


def _reshaped(node: fx.Node) -> list[fx.Node]:
    """Return a node and its reshapings."""
    return [node, *(m for u in node.users if u.target in RESHAPED for m in _reshaped(u))]
