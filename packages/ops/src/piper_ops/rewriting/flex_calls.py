"""Rewrite calls of flex_attention: into piper::attention with a mask, or written out if scores change.

A `score_mod` and a `mask_mod` are functions of one score and its place. Dynamo has traced them on single numbers; here
they are computed for all places at once. That gives the same result if each operation is element-wise or looks up a
table with all of its indexes. Anything else is refused by name. Of a block mask only its `mask_mod` is computed: the
blocks only let kernels skip work, and do not change the result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from piper_ops.attention.sdpa import attention
from piper_ops.ground.errors import UnsupportedVariant
from piper_ops.rewriting.attention_calls import repeated, scores_of, size_of, weighted
from piper_ops.rewriting.builder import Builder

FLEX = torch.ops.higher_order.flex_attention
"""The call of flex_attention in Dynamo's graph.

Its arguments are (q, k, v, score_mod, block mask with mask_mod last, scale, kernel options, tensors of score_mod,
tensors of mask_mod), and its results (out, logsumexp / ln 2, largest scores).
"""

aten = torch.ops.aten
_MAKES = frozenset(("new_ones", "new_zeros", "new_full"))
_PLAIN = frozenset(
    (aten._to_copy, aten.detach, aten.alias, aten.clone, aten.lift_fresh_copy, aten.scalar_tensor)
)


def rewrite_flex(build: Builder, owner: fx.GraphModule) -> list[fx.Node]:
    """Replace the results of a flex_attention call in the graph of `owner`, and return the new nodes."""
    node = build.old
    results: dict[Any, fx.Node] = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    if len(results) != len(node.users) or (2 in results and results[2].users):
        raise build.refuse("its largest scores are asked for", "Ask for `out` and `lse` only.")
    asked = {index: result for index, result in results.items() if result.users}
    computed = _computed(build, owner, statistics=1 in asked)
    for index, result in results.items():
        if index in asked:
            result.replace_all_uses_with(computed[index])
        build.graph.erase_node(result)
    inputs = node.all_input_nodes
    build.graph.erase_node(node)
    _erase_unused(build.graph, inputs)
    return [computed[index] for index in asked]


def _computed(build: Builder, owner: fx.GraphModule, statistics: bool) -> list[fx.Node]:
    """Return the results of a call, and its logsumexp / ln 2 if the statistics are asked for."""
    q, k, v, score_mod, block_mask, scale, _, score_tensors, mask_tensors = build.old.args
    mask_mod: Any = block_mask[-1]  # type: ignore[index]  # a tuple, see FLEX
    places = _Places(build, owner, q, k)
    mask = (
        None if _is_whole(_graph(owner, mask_mod)) else places.compute(mask_mod, (), mask_tensors)
    )
    q, k, v = repeated(build, q, k, v)  # type: ignore[arg-type]  # nodes
    plain = _is_identity(_graph(owner, score_mod))
    if plain and not statistics:
        fused = build.first(
            build.call(attention, *(build.swap(t) for t in (q, k, v)), mask, False, scale, False)
        )
        return [build.method("transpose", fused, 1, 2)]
    scores = scores_of(build, q, k, scale)  # type: ignore[arg-type]  # a number
    if not plain:
        changed = places.compute(score_mod, (scores,), score_tensors)
        scores = build.method("to", changed, build.example(scores).dtype)
    if mask is not None:
        scores = build.call(torch.where, mask, scores, float("-inf"))
    attended = weighted(build, scores, v, 0.0, masked=True)
    if not statistics:
        return [attended]
    return [
        attended,
        build.call(torch.mul, build.call(torch.logsumexp, scores, -1), 1 / math.log(2)),
    ]


def _is_identity(graph: fx.Graph) -> bool:
    """Return whether a score_mod returns the score that it is given."""
    return _result(graph) is next(iter(graph.nodes))


def _is_whole(graph: fx.Graph) -> bool:
    """Return whether a mask_mod attends to everything, as torch's default one does."""
    return _result(graph).target == "new_ones"


def _result(graph: fx.Graph) -> fx.Node:
    (result,) = graph.output_node().args
    (result,) = result if isinstance(result, tuple | list) else (result,)
    assert isinstance(result, fx.Node)
    return result


def _graph(owner: fx.GraphModule, function: Any) -> fx.Graph:
    module = owner.get_submodule(str(function.target))
    assert isinstance(module, fx.GraphModule)
    return module.graph


class _Places:
    """Compute functions of a place for all places (row, head, query, key) at once."""

    def __init__(self, build: Builder, owner: fx.GraphModule, q: Any, k: Any) -> None:
        self._build, self._owner, self._tensors = build, owner, (q, q, q, k)
        self._made: dict[int, fx.Node] = {}

    def compute(self, function: Any, first: Sequence[fx.Node], tensors: Any) -> fx.Node:
        """Return a function of `first`, of a place and of tables, as a tensor that broadcasts to all places."""
        graph = _graph(self._owner, function)
        placeholders = graph.find_nodes(op="placeholder")
        places = placeholders[len(first) : len(first) + 4]
        env: dict[fx.Node, Any] = dict(zip(placeholders, first, strict=False))
        env |= {node: self._place(dim) for dim, node in enumerate(places) if node.users}
        env |= zip(placeholders[len(first) + 4 :], tensors, strict=True)
        varies = {*placeholders[: len(first)], *places}
        for node in graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if varies.intersection(node.all_input_nodes) and node.target not in _MAKES:
                varies.add(node)
            env[node] = self._copied(node, env, varies)
        result: fx.Node = env[_result(graph)]
        return result

    def _place(self, dim: int) -> fx.Node:
        """Return the numbers of rows, heads, queries or keys, along their dimension of [rows, heads, queries, keys]."""
        if dim not in self._made:
            build = self._build
            numbers = build.call(torch.arange, size_of(build, self._tensors[dim], min(dim, 2)))
            self._made[dim] = build.method(
                "reshape", build.method("to", numbers, torch.int32), -1, *[1] * (3 - dim)
            )
        return self._made[dim]

    def _copied(
        self, node: fx.Node, env: Mapping[fx.Node, fx.Node], varies: set[fx.Node]
    ) -> fx.Node:
        build = self._build
        if node.op == "get_attr":
            raise build.refuse(
                "score_mod or mask_mod has a constant tensor inside",
                "Make it a buffer of the model.",
            )
        copied = build.graph.node_copy(node, env.__getitem__)
        args, kwargs = fx.map_arg((copied.args, dict(copied.kwargs)), build.example)
        watch = _ElementWise()
        try:
            with build.computing(), watch:
                value = _called(copied, args, kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise self._refused(node, f"fails on all places at once ({error})") from error
        if node in varies and not _looked_up(node, args, varies):
            shapes = [
                t.shape
                for t in torch.utils._pytree.tree_leaves((args, kwargs))
                if isinstance(t, Tensor)
            ]
            if (
                watch.others
                or node.target is operator.getitem
                or value.shape != torch.broadcast_shapes(*shapes)
            ):
                raise self._refused(node, "is not computed element by element")
        copied.meta = {**build.old.meta, "example_value": value}
        return copied

    def _refused(self, node: fx.Node, why: str) -> UnsupportedVariant:
        return self._build.refuse(
            f"{getattr(node.target, '__name__', node.target)} in its score_mod or mask_mod {why}",
            "Use element-wise operations of scores and places, and look up a table with all of its indexes at "
            "once, such as table[b, q_idx].",
        )


def _called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _looked_up(node: fx.Node, args: Sequence[Any], varies: set[fx.Node]) -> bool:
    """Return whether a node takes elements of a table, which is the same for all places, by all of its indexes."""
    if node.target is not operator.getitem or node.args[0] in varies:
        return False
    indexes = args[1] if isinstance(args[1], tuple) else (args[1],)
    whole = all(
        isinstance(i, int) or (isinstance(i, Tensor) and i.dtype in (torch.int32, torch.int64))
        for i in indexes
    )
    return whole and len(indexes) == args[0].dim()


class _ElementWise(TorchDispatchMode):
    """Record whether any operation is not element-wise."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.others = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = (
            torch.Tag.pointwise in func.tags
            or func.overloadpacket in _PLAIN
            or func.namespace == "prim"
        )
        self.others = self.others or not plain
        return func(*args, **(kwargs or {}))


def _erase_unused(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Erase the nodes that only an erased call has used: its functions, and a block mask that was made beside it."""
    waiting = list(dict.fromkeys(nodes))
    while waiting:
        node = waiting.pop()
        if not node.users and node.op != "placeholder":
            waiting += [n for n in node.all_input_nodes if n not in waiting]
            graph.erase_node(node)
