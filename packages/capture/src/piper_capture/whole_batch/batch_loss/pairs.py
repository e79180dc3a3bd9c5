"""Write a mean whose denominator the batch decides as a pair (sum, weight)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.node import map_arg

from piper_capture.trace.dynamo import Forward
from piper_capture.values.concrete import canonical_text
from piper_capture.whole_batch.batch_loss.calls import JOINED, has_rows, is_drawn
from piper_capture.whole_batch.batch_loss.reductions import (
    IGNORED,
    arguments,
    call_name,
    is_portable_loss,
    reduced,
)
from piper_capture.whole_batch.batch_loss.terms import Dependence
from piper_capture.whole_batch.batch_loss.wide import is_half, wide
from piper_capture.whole_batch.batch_loss.writers import ancestors, owner, with_writers
from piper_ops import Builder, Examples
from piper_ops import cross_entropy as PORTABLE

_OUT_OF_PLACE: Mapping[object, Callable[..., Any] | str] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def write_divisions(forward: Forward) -> Forward:
    """Write each mean over classes in the loss as a sum divided by the number of targets, or by their weights.

    So is a mean over the numbers that are not NaN. Numbers that the loss changes in place (`loss += more`) become new
    numbers. The graph computes the same as before. Nodes outside of the loss, such as a metric, read the mean as it
    was.
    """
    examples, wanted = Examples(), with_writers(forward.graph, ancestors([forward.loss]))
    counts: dict[str, fx.Node] = {}
    loss = forward.loss
    for node in list(forward.graph.nodes):
        if node not in wanted or node.op not in ("call_function", "call_method"):
            continue
        loss = node if _out_of_place(node) is loss else loss
        if node.op == "call_function" and reduced(node) == "classes":
            old, mean = _divided(forward.graph, node, examples, counts)
            old.replace_all_uses_with(mean, delete_user_cb=wanted.__contains__)
            loss = mean if old is loss else loss
        elif (
            call_name(node) == "nanmean"
            and not has_rows(node)
            and has_rows(node.all_input_nodes[0])
        ):
            with forward.graph.inserting_before(node):
                mean = _nan_divided(Builder(forward.graph, node, examples), node)
            node.replace_all_uses_with(mean, delete_user_cb=wanted.__contains__)
            loss = mean if node is loss else loss
    return replace(forward, loss=loss)


def _out_of_place(node: fx.Node) -> fx.Node | None:
    """Turn an in-place change of a number into a new number that all later nodes read; return the old one.

    The same is done to a tensor without rows that nothing else has read before.
    """
    target = _copying(node.target)
    if target is None or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    old, value = node.args[0], node.meta.get("example_value")
    example = old.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or not isinstance(example, torch.Tensor):
        return None
    if has_rows(node) or value.shape != example.shape or value.dtype != example.dtype:
        return None
    if old.op == "placeholder" or owner(old) is not old:  # others see the change of its storage
        return None
    later, reached = set[fx.Node](), node.next
    while reached.op != "root":
        later.add(reached)
        reached = reached.next
    if value.dim() and not later.issuperset(user for user in old.users if user is not node):
        return None
    old.replace_all_uses_with(node, delete_user_cb=lambda user: user in later)
    node.target = target
    return old


def _copying(target: object) -> Callable[..., Any] | str | None:
    """Return the call that makes a new tensor where `target` changes one in place; None for any other call."""
    if target in _OUT_OF_PLACE:
        return _OUT_OF_PLACE[target]
    name = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    if not name.endswith("_") or name.endswith("__"):
        return None
    found = getattr(torch.Tensor if isinstance(target, str) else torch, name[:-1], None)
    if not callable(found):
        return None
    return name[:-1] if isinstance(target, str) else found


def _divided(
    graph: fx.Graph, node: fx.Node, examples: Examples, counts: dict[str, fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """Return the node of a mean, and a new one that makes the same of a sum and a count."""
    by_name = arguments(node)
    ignored = by_name.get("ignore_index", IGNORED)
    first = (
        next(u for u in node.users if u.target is operator.getitem and u.args[1] == 0)
        if is_portable_loss(node)
        else node
    )
    after = Builder(graph, first, examples)
    with graph.inserting_before(node):
        if is_portable_loss(node):
            total = after.first(
                Builder(graph, node, examples).call(
                    PORTABLE, by_name["input"], by_name["target"], "sum", ignored
                )
            )
        else:
            total = _summed(after, node, by_name)
        key = f"{by_name['target']} {ignored} {by_name.get('weight')}"
        if key not in counts:
            counts[key] = _count(after, by_name["target"], ignored, by_name.get("weight"))
        return first, after.call(operator.truediv, total, counts[key])


def _nan_divided(build: Builder, node: fx.Node) -> fx.Node:
    """Return a new node that makes a `nanmean` of a sum and a count."""
    given = zip(("input", "dim", "keepdim"), node.args, strict=False)
    how: dict[str, Any] = {**dict(given), **node.kwargs}
    values, along = how["input"], [how.get("dim"), how.get("keepdim", False)]
    there = build.method("logical_not", build.method("isnan", values))
    summed = build.method("to", values, torch.float32) if is_half(values) else values
    return build.call(
        operator.truediv,
        build.method("nansum", summed, *along),
        build.method("sum", there, *along),
    )


def _summed(after: Builder, node: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    """Return the same call of torch's with the sum in place of the mean; in float32 at least, as of Piper's own."""
    names = [n for n in ("input", "weight") if given.get(n) is not None]
    given = {
        **given,
        **{n: after.method("to", given[n], torch.float32) for n in names if is_half(given[n])},
    }
    total = after.graph.node_copy(node)
    reduction: Any = 2 if call_name(node) == "nll_loss_nd" else "sum"
    total.args, total.kwargs = (
        (given["input"], given["target"]),
        {**_rest(given), "reduction": reduction},
    )
    with after.computing():
        total.meta = {
            **node.meta,
            "example_value": node.meta["example_value"].to(_wide_dtype(node)),
        }
    return total


def _rest(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in given.items() if name not in ("input", "target", "reduction")
    }


def _count(build: Builder, target: fx.Node, ignored: int, weight: fx.Node | None) -> fx.Node:
    """Return the number of targets that count, or the sum of the weights of their classes."""
    counted = build.call(torch.ne, target, ignored)
    if weight is None:
        return build.method("sum", counted)
    if is_half(weight):
        weight = build.method("to", weight, torch.float32)
    of_targets = build.call(
        F.embedding, build.method("clamp", target, 0), build.method("unsqueeze", weight, -1)
    )
    return build.method(
        "sum", build.method("mul", build.method("squeeze", of_targets, -1), counted)
    )


class WrittenPair:
    """Write the numerator of a loss whose terms have one divisor, and that divisor as its weight.

    Constants in the loss, such as a penalty of the weights, are multiplied by the divisor.
    """

    def __init__(
        self, forward: Forward, of: Mapping[fx.Node, Dependence], divisors: Iterable[fx.Node]
    ) -> None:
        self._forward, self._graph, self._of, self._examples = (
            forward,
            forward.graph,
            of,
            Examples(),
        )
        self._divisors = set(divisors)
        self._weight = wide(
            next(n for n in self._graph.nodes if n in self._divisors), self._examples
        )
        self._made: dict[fx.Node, fx.Node] = {}

    def written(self) -> tuple[fx.Node, fx.Node]:
        """Return the nodes of the sum and of its weight."""
        total = self._times_weight(self._forward.loss)
        with self._graph.inserting_before(self._graph.output_node()):
            build = Builder(self._graph, self._forward.loss, self._examples)
            return total, build.method(
                "to", build.method("detach", self._weight), _wide_dtype(self._forward.loss)
            )

    def _carries(self, node: fx.Node) -> bool:
        dependence = self._of[node]
        return dependence.divisor in self._divisors or any(
            t.divisor in self._divisors for t in dependence.terms or ()
        )

    def _times_weight(self, node: fx.Node) -> fx.Node:
        """Return a node with a value times the divisor."""
        if node not in self._made:
            self._made[node] = self._scaled(node)
        return self._made[node]

    def _scaled(self, node: fx.Node) -> fx.Node:
        if call_name(node) == "div" and node.args[1] in self._divisors:
            assert isinstance(node.args[0], fx.Node)
            return node.args[0]
        if call_name(node) in ("add", "sub", *JOINED):
            return weighted(
                self._graph,
                node,
                lambda arg: (
                    self._times_weight(arg) if self._carries(arg) else self._constant(node, arg)
                ),
                self._constant,
            )
        with self._graph.inserting_before(node):
            copied = self._graph.node_copy(node, lambda n: n)
            copied.args = map_arg(
                node.args, lambda arg: self._times_weight(arg) if self._carries(arg) else arg
            )
            copied.meta = dict(node.meta)
        return copied

    def _constant(self, node: fx.Node, value: fx.Node | float) -> fx.Node:
        with self._graph.inserting_before(node):
            build = Builder(self._graph, node, self._examples)
            return build.call(
                operator.mul, build.method("to", self._weight, _wide_dtype(node)), value
            )


def _wide_dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype of a node, or float32 if that is wider."""
    return torch.promote_types(node.meta["example_value"].dtype, torch.float32)


def weighted(
    graph: fx.Graph,
    node: fx.Node,
    part: Callable[[fx.Node], fx.Node],
    number: Callable[[fx.Node, float], fx.Node],
) -> fx.Node:
    """Return a copy of a sum, a difference or a stack with another part for each of its parts, and for each number."""
    args = map_arg(node.args, part)
    if call_name(node) not in JOINED:
        args = (
            tuple(number(node, a) if isinstance(a, int | float) and a != 0 else a for a in args[:2])
            + args[2:]
        )
    with graph.inserting_before(node.next):
        copied = graph.node_copy(node, lambda n: n)
        copied.args, copied.meta = args, dict(node.meta)
    return copied


def same_values(nodes: Iterable[fx.Node], changed: bool) -> bool:
    """Return whether nodes have the same value because they are computed in the same way from the same tensors.

    Where the loss writes into tensors (`changed`), or draws a value, only one and the same node counts.
    """
    distinct = list(dict.fromkeys(nodes))
    if len(distinct) == 1:
        return True
    return not (changed or any(map(is_drawn, distinct))) and len({*map(_text, distinct)}) == 1


def _text(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        return node.name
    return canonical_text(
        node, {n: _text(n) for n in node.all_input_nodes if n.op != "placeholder" or _is_tensor(n)}
    )


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)
