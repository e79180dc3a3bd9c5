"""Compute logits, loss and its gradients tile by tile, so that the logits of one tile of tokens are alive at once.

    before  F  logits = x w, loss = cross_entropy(logits)       I  d = dgrad(logits), dx = d w      W  dw += d x
    after   F  for each tile: the same, and from d dx of its tokens and its term of dw     I  dx * g     W  dw += dw * g

A loss that is a sum or a mean has gradients that are linear in its own gradient g, so that the forward can make them
for g = 1, and nothing is computed twice (so do the fused losses of Liger-Kernel and the chunked loss of torchtitan).
Between F and its backward dx and dw wait in place of x and the logits. Terms of dw are added up in the dtype in which
gradients are.

A tile has every n-th token of each row. So the tokens that devices share lie outside of the tiles, in whole blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from piper_capture.graphs.stepgraph import Joint
from piper_capture.layouts.emit import Emitter, named_arguments
from piper_capture.layouts.loops import OpCall
from piper_capture.layouts.means import IGNORED
from piper_capture.layouts.rules.rules import is_elementwise
from piper_capture.torch_api._torch import OpOverload
from piper_capture.values import aliasing
from piper_ir.ground.errors import DirectiveError

aten = torch.ops.aten
piper = torch.ops.piper
LOSS, GRADIENT = piper.cross_entropy.default, piper.cross_entropy_dgrad.default
PRODUCTS = (aten.mm.default, aten.addmm.default)
VIEWS = (aten.view.default, aten._unsafe_view.default)
TRANSPOSED = (aten.t.default, aten.permute.default, aten.transpose.int)


@dataclass
class _Region:
    """Hold the nodes between a product that makes logits and the products that use their gradient.

    Attributes:
        product: makes the logits, of tokens [N, W].
        logits: the element-wise ops and views from its result to the loss, in order.
        loss: the loss.
        gradient: the gradient of the logits; None if nothing is trained.
        gradients: the element-wise ops and views behind it, in order.
        tokens: the ops that make the gradient of the tokens.
        sums: the ops that make the gradient of a weight or bias, each a sum over tokens.
    """

    product: fx.Node
    logits: list[fx.Node]
    loss: fx.Node
    gradient: fx.Node | None = None
    gradients: list[fx.Node] = field(default_factory=list)
    tokens: list[fx.Node] = field(default_factory=list)
    sums: list[fx.Node] = field(default_factory=list)

    @property
    def inside(self) -> set[fx.Node]:
        """Return the nodes that tiles replace."""
        return {
            self.product, *self.logits, self.loss, *self.loss.users, *self.gradients, *self.tokens, *self.sums,
            *([self.gradient] if self.gradient is not None else []),
        }  # fmt: skip

    @property
    def source(self) -> fx.Node:
        """Return the tokens that the product reads, [N, W]."""
        return self.product.all_input_nodes[-2]


def tiled(joint: Joint, rows: int, tiles: int) -> Joint:
    """Return a chunk whose cross-entropy is computed in `tiles` tiles of the tokens; the given one stays as it is.

    Raises DirectiveError, with the user's line where it is known, for a loss that no tiles can compute.
    """
    regions = [_region(n) for n in joint.graph.nodes if n.target is LOSS]
    if not regions:
        raise refused(
            "the chunk that ends the model has no cross-entropy that tiles know: torch.nn.functional.cross_entropy of a "
            "linear layer's result is needed, with reduction 'mean' or 'sum', without label_smoothing and weights"
        )
    for region in regions:
        tokens = aliasing.tensor(region.source).shape[0]
        if tokens % rows or (tokens // rows) % tiles:
            raise refused(
                f"{tokens // rows} tokens of a row do not divide into {tiles} tiles; use a number that divides them",
                4,
            )
    return _Tiles(joint, regions, tiles).built()


def _region(loss: fx.Node) -> _Region:
    named = named_arguments(loss)
    if named.get("reduction", "mean") == "none":
        raise refused("the loss has reduction 'none'; with 'mean' or 'sum' tiles know its gradient")
    logits: list[fx.Node] = []
    node = named["logits"]
    while node.target not in PRODUCTS:
        if not _by_token(node, node.args[0]):
            raise refused(
                f"between the last linear layer and the loss stands {aliasing.producer(node).target}, which is no "
                "element-wise operation on the logits alone"
            )
        logits.insert(0, node)
        node = node.args[0]
    region = _Region(node, logits, loss)
    every = {node, *logits}
    outside = [u for n in every for u in n.users if u not in every and u is not loss]
    region.gradient = next((u for u in outside if u.target is GRADIENT), None)
    if region.gradient is not None:
        _backward(region, every)
    statistics = [u for n in loss.users if n.args[1] == 1 for u in n.users]
    if not {*outside, *statistics} <= region.inside:
        raise refused("the logits are used beside the loss, so that all of them are needed at once")
    return region


def _backward(region: _Region, logits: set[fx.Node]) -> None:
    """Find the ops behind the gradient of the logits."""
    assert region.gradient is not None
    todo, seen = [region.gradient], {region.gradient}
    while todo:
        node = todo.pop(0)
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            if user.target in TRANSPOSED:
                region.gradients.append(user)
                todo.append(user)
            elif _sums_tokens(user, seen):
                region.sums.append(user)
            elif user.target in PRODUCTS and user.all_input_nodes[-2] is node:
                region.tokens.append(user)
            elif _by_token(user, node) or _of_both(user, node, seen | logits):
                region.gradients.append(user)
                todo.append(user)
            else:
                raise refused(
                    f"the gradient of the logits is used by {user.target}, which tiles cannot compute"
                )


def _sums_tokens(node: fx.Node, gradients: set[fx.Node]) -> bool:
    """Return whether an op sums over the tokens: the gradient of a weight, or of a bias."""
    if node.target is aten.mm.default:
        return any(n.target in TRANSPOSED and n in gradients for n in node.all_input_nodes)
    return node.target is aten.sum.dim_IntList and list(node.args[1]) == [0]  # type: ignore[arg-type]  # a list


def _by_token(node: fx.Node, source: Any) -> bool:
    """Return whether an op computes each element of its result from the element of `source` in the same place."""
    if not isinstance(node.target, OpOverload) or node.all_input_nodes != [source]:
        return False
    before, after = aliasing.tensor(source).shape, aliasing.tensor(node).shape
    if node.target in VIEWS:
        return before[-1] == after[-1]
    call = OpCall.of(node.target, node.args, node.kwargs, node.meta["val"])
    return is_elementwise(call.op) and before == after


def _of_both(node: fx.Node, gradient: fx.Node, known: set[fx.Node]) -> bool:
    """Return whether an op computes each element from elements of logits and gradients in the same place."""
    if not isinstance(node.target, OpOverload) or not set(node.all_input_nodes) <= known:
        return False
    shapes = {aliasing.tensor(n).shape for n in (node, gradient, *node.all_input_nodes)}
    return is_elementwise(node.target) and len(shapes) == 1


def refused(text: str, condition: int = 3) -> DirectiveError:
    """Return the error for a condition of the directive `tile_loss`."""
    return DirectiveError(f"{text} [tile_loss condition {condition}]")


class _Tiles:
    """Write a joint graph anew, with the loop over tiles at the place of a loss."""

    def __init__(self, joint: Joint, regions: Sequence[_Region], tiles: int) -> None:
        self._joint, self._tiles = joint, tiles
        self._regions = {r.loss: r for r in regions}
        self._inside = {n for r in regions for n in r.inside}
        self._env: dict[fx.Node, fx.Node] = {}
        self._unit: dict[fx.Node, fx.Node] = {}
        """A gradient of tokens or of a weight -> its node for a loss whose own gradient is 1."""
        self._counted: dict[fx.Node, fx.Node] = {}
        self._emit = Emitter(fx.Graph(), joint.inputs[0].meta["val"].fake_mode)

    def built(self) -> Joint:
        ends = {n: r for r in self._regions.values() for n in (*r.tokens, *r.sums)}
        for node in self._joint.graph.nodes:
            if region := self._regions.get(node):
                self._loop(region)
            elif region := ends.get(node):
                self._env[node] = self._scaled(node, region)
            elif node not in self._inside:
                self._env[node] = self._emit.graph.node_copy(node, self._env.__getitem__)
                self._env[node].meta = dict(node.meta)
        env, joint = self._env, self._joint
        return replace(
            joint,
            graph=self._emit.graph,
            inputs=tuple(env[n] for n in joint.inputs),
            outputs=tuple(env[n] for n in joint.outputs),
            tangents={k: env[n] for k, n in joint.tangents.items()},
            grads={k: env[n] for k, n in joint.grads.items()},
            constant_names={env[n]: name for n, name in joint.constant_names.items()},
        )

    def _loop(self, region: _Region) -> None:
        """Add the loss of all tiles, and the gradients for a loss whose own gradient is 1."""
        named = named_arguments(region.loss)
        parts = {"reduction": "sum", "ignore_index": int(named.get("ignore_index", IGNORED))}
        with self._emit.like(region.loss, late=False):
            one = self._one(region)
            losses = [self._tile(region, parts, one, k) for k in range(self._tiles)]
            total = self._sum(losses)
            if named.get("reduction", "mean") == "mean":
                counted = self._emit.call(
                    aten.ne.Scalar, self._env[named["target"]], parts["ignore_index"]
                )
                self._counted[region.loss] = self._emit.call(aten.sum.default, counted)
                total = self._emit.call(aten.div.Tensor, total, self._counted[region.loss])
            for node in region.tokens:
                tokens = aliasing.tensor(node).shape
                stacked = self._emit.call(aten.stack.default, self._tokens.pop(node), 1)
                self._unit[node] = self._emit.call(aten.view.default, stacked, list(tokens))
        for user in region.loss.users:
            if user.target is operator.getitem and user.args[1] == 0:
                self._env[user] = total

    def _one(self, region: _Region) -> fx.Node | None:
        """Return the number 1 as the gradient of a loss; None if nothing is trained."""
        if region.gradient is None:
            return None
        dtype = aliasing.tensor(region.gradient.all_input_nodes[0]).dtype
        self._tokens: dict[fx.Node, list[fx.Node]] = {n: [] for n in region.tokens}
        return self._emit.call(aten.full.default, [], 1.0, dtype=dtype, device=torch.device("cpu"))

    def _tile(
        self, region: _Region, parts: Mapping[str, Any], one: fx.Node | None, k: int
    ) -> fx.Node:
        """Add one tile, and return its loss."""
        source = self._taken(self._env[region.source], k)
        target = self._taken(self._env[named_arguments(region.loss)["target"]], k)
        env = {region.source: source}
        for node in (region.product, *region.logits):
            env[node] = self._copied(node, env)
        logits = env[region.logits[-1] if region.logits else region.product]
        loss = self._emit.call(LOSS, logits, target, *parts.values())
        if region.gradient is None or one is None:
            return self._emit.item(loss, 0)
        env[region.gradient] = self._emit.call(
            GRADIENT, one, logits, target, self._emit.item(loss, 1), *parts.values()
        )
        for node in region.gradients:
            env[node] = self._copied(node, env)
        for node in region.tokens:
            self._tokens[node].append(self._copied(node, env))
        for node in region.sums:
            self._add_term(node, self._copied(node, env))
        return self._emit.item(loss, 0)

    def _taken(self, tensor: fx.Node, k: int) -> fx.Node:
        """Return every n-th token from token k on, of tokens in the first dimension."""
        tokens, *rest = aliasing.tensor(tensor).shape
        apart = self._emit.call(
            aten.view.default, tensor, [tokens // self._tiles, self._tiles, *rest]
        )
        return self._emit.call(aten.select.int, apart, 1, k)

    def _copied(self, node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Add an op on a tile in place of all tokens; views of the logits are left out: a tile is [tokens, classes]."""
        if node.target in VIEWS:
            return env[node.all_input_nodes[0]]
        assert isinstance(node.target, OpOverload)
        late = [n for n in node.all_input_nodes if n not in env and n not in self._env]
        if late:
            raise refused(
                f"the backward of the loss reads {late[0].target}, which no forward makes"
            )
        named = fx.node.map_arg(named_arguments(node), lambda n: env.get(n) or self._env[n])
        return self._emit.op(node, node.target, named)

    def _add_term(self, node: fx.Node, term: fx.Node) -> None:
        """Add a tile's term to the gradient of a weight, in the dtype of gradient accumulation."""
        before, dtype = self._unit.get(node), self._joint.reduce
        if before is not None:
            self._unit[node] = self._emit.call(aten.add.Tensor, before, term)
        elif dtype is None or dtype == aliasing.tensor(term).dtype:
            self._unit[node] = term
        else:
            self._unit[node] = self._emit.call(aten._to_copy.default, term, dtype=dtype)

    def _sum(self, terms: Sequence[fx.Node]) -> fx.Node:
        total, *rest = terms
        for term in rest:
            total = self._emit.call(aten.add.Tensor, total, term)
        return total

    def _scaled(self, node: fx.Node, region: _Region) -> fx.Node:
        """Return a gradient for the loss's own gradient, which the backward gets."""
        assert region.gradient is not None
        with self._emit.like(node, late=True):
            scale = self._env[named_arguments(region.gradient)["grad_loss"]]
            if region.loss in self._counted:
                scale = self._emit.call(aten.div.Tensor, scale, self._counted[region.loss])
            return self._emit.call(aten.mul.Tensor, self._unit[node], scale)
