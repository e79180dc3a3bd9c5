"""Write functions of the rows that a mask selects with static shapes.

`out[mask]` has as many rows as the mask has true values, which only a step knows. A loss computes the same of each of
them and then reduces them, so it may as well compute with all rows and leave the others out at the end:

    out[mask]                            out, with a constant in the rows that the mask leaves out
    (out[mask] - y[mask]) ** 2           the same of all rows
    x[mask].mean()                       x.masked_fill(~mask, 0).sum() / (mask.sum() * elements of a row)
    cross_entropy(out[mask], y[mask])    cross_entropy(out, y.masked_fill(~mask, ignore_index))
    x[mask].shape[0]                     mask.sum()

The constant keeps NaN, or another filler of rows without a target, out of the gradients. A selection that is read in
another way stays as it is, and is refused where its shape is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from piper_capture.torch_api import _torch
from piper_capture.trace.dynamo import Forward
from piper_capture.values.concrete import is_size, tensors_of
from piper_capture.whole_batch.batch_loss.calls import tags_of
from piper_capture.whole_batch.batch_loss.pairs import same_values
from piper_capture.whole_batch.batch_loss.reductions import (
    CLASSES,
    IGNORED,
    LOSSES,
    arguments,
    call_name,
    is_portable_loss,
)
from piper_capture.whole_batch.batch_loss.wide import is_half
from piper_capture.whole_batch.batch_loss.writers import writes
from piper_ops import Builder, Examples

_CASTS = {"to", "float", "double", "half", "bfloat16", "long", "bool", "type", "detach", "clone"}
_OF_DIM_1 = "softmax log_softmax logsumexp sum mean amax amin argmax argmin all any select squeeze"
_ALONG = dict.fromkeys((*_OF_DIM_1.split(), "unsqueeze", "gather"), 1) | dict.fromkeys(
    ("norm", "vector_norm", "normalize", "cosine_similarity"), 2
)
"""The calls that compute each row by itself along dimensions other than the first, and the place of that argument."""
_OF_COUNTS: Mapping[Any, Callable[..., Any]] = {
    **{f: f for f in (operator.add, operator.sub, operator.mul, operator.truediv)},
    torch.sym_max: torch.clamp_min,
    torch.sym_min: torch.clamp_max,
}
"""The computations with sizes, and the same of tensors without dimensions."""


@dataclass(frozen=True)
class _Selected:
    """Stand for the rows of a tensor that a mask selects.

    Attributes:
        every: the node of the tensor with all rows, which are its first dimension.
        mask: the node of the mask of these rows, with one dimension.
        fill: the constant for rows that the mask leaves out; None where `every` is computed from such.
    """

    every: fx.Node
    mask: fx.Node
    fill: float | None = None


def with_static_selections(forward: Forward) -> Forward:
    """Return the graph with selections by masks in static shapes, as far as their uses are understood."""
    dynamic = any(_torch.data_dependent(t) for n in forward.graph.nodes for t in tensors_of(n))
    return _Selections(forward).written() if dynamic else forward


class _Selections:
    """Write the selections of one graph, node by node in its order."""

    def __init__(self, forward: Forward) -> None:
        self._forward, self._graph, self._examples = forward, forward.graph, Examples()
        self._changes = any(map(writes, self._graph.nodes))
        self._selected: dict[fx.Node, _Selected] = {}
        self._losses: dict[fx.Node, _Selected] = {}
        self._counts: dict[fx.Node, fx.Node] = {}
        self._flat: dict[fx.Node, fx.Node] = {}
        self._now: dict[fx.Node, fx.Node] = {}
        self._like = forward.loss

    def written(self) -> Forward:
        """Return the graph with all selections whose uses are understood."""
        before = list(self._graph.nodes)
        for node in before:
            if node.op in ("call_function", "call_method") and not writes(node):
                self._like = self._like if is_size(node) else node
                with self._graph.inserting_before(node):
                    new = self._static(node)
                if new is not None:
                    node.replace_all_uses_with(new)
                    self._now[node] = new
        forward, now = self._forward, self._now
        weight = None if forward.weight is None else now.get(forward.weight, forward.weight)
        metrics = tuple([replace(m, node=now.get(m.node, m.node)) for m in forward.metrics])
        forward = replace(
            forward, loss=now.get(forward.loss, forward.loss), weight=weight, metrics=metrics
        )
        kept = {forward.loss, weight, *(m.node for m in metrics)}
        unread = [n for n in self._graph.nodes if n not in kept and self._may_go(n, {*before})]
        for node in reversed(unread):
            if not node.users:
                self._graph.erase_node(node)
        return forward

    def _may_go(self, node: fx.Node, before: set[fx.Node]) -> bool:
        """Return whether a node is new, replaced, or has or checks a size that only a step knows."""
        sizes = [_value(n) for n in (node, *node.all_input_nodes)]
        dynamic = any(map(_torch.data_dependent, tensors_of(node)))
        dynamic = dynamic or any(map(_torch.data_dependent_size, sizes))
        return node.op.startswith("call") and (node not in before or node in self._now or dynamic)

    def _static(self, node: fx.Node) -> fx.Node | None:
        """Note the selected rows of a node, or their number; return a new node for a result that has neither."""
        if (chosen := _by_mask(node)) is not None:
            self._selected[node] = self._selection(node, *chosen)
            return None
        loss = self._losses.get(node.all_input_nodes[0]) if node.all_input_nodes else None
        if loss is not None:
            every = self._call(operator.getitem, loss.every, 0)
            self._selected[node] = _Selected(every, loss.mask)
            return None
        inputs = node.all_input_nodes
        masks = {self._selected[n].mask for n in inputs if n in self._selected}
        if is_size(node):
            self._count(node)
        elif len(masks) == 1:
            return self._of_rows(node, *masks)
        elif not masks and any(n in self._counts for n in inputs):
            if call_name(node) in ("add", "sub", "mul", "div") and tensors_of(node):
                return self._everywhere(node)
            if node.target is torch.full and _value(node).dim() == 0:  # the weight of a pair
                return self._call("to", self._counts[inputs[0]], _value(node).dtype)
        return None

    def _selection(self, node: fx.Node, whole: fx.Node, mask: fx.Node) -> _Selected:
        same = (m for m in self._flat if same_values((m, mask), changed=self._changes))
        mask, dims = next(same, mask), len(_value(mask).shape)
        if mask not in self._flat:
            self._flat[mask] = self._call("flatten", mask) if dims > 1 else mask
        every = self._call("clone", whole) if self._changes else whole
        every = self._call("flatten", every, 0, dims - 1) if dims > 1 else every
        real = _value(whole).is_floating_point()
        # Two tensors have two constants, because the gradient of sqrt(a - b) is infinite where a is b.
        return _Selected(every, self._flat[mask], 1 / (2 + len(self._selected)) if real else 0)

    def _call(self, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """Return a new call of a function, or of the method with that name, in place of the call that is written."""
        method = isinstance(target, str)
        new = self._graph.create_node(
            "call_method" if method else "call_function", target, args, kwargs
        )
        with Builder(self._graph, self._like, self._examples).computing():
            values, named = map_arg(args, _value), map_arg(kwargs, _value)
            call = getattr(values[0], target) if method else target
            value = call(*values[method:], **named)
        new.meta = {**self._like.meta, "example_value": value}
        return new

    def _all_rows(self, selected: _Selected, fill: float | None) -> fx.Node:
        """Return a tensor with all rows, and a constant in rows that the mask leaves out."""
        if fill is None:
            return selected.every
        out = self._call("logical_not", selected.mask)
        more = len(_value(selected.every).shape) - 1
        if more:
            out = self._call("reshape", out, (-1, *[1] * more))
        return self._call("masked_fill", selected.every, out, fill)

    def _argument(self, arg: fx.Node) -> fx.Node:
        """Return the argument of a call that takes all rows."""
        if arg in self._selected:
            return self._all_rows(self._selected[arg], self._selected[arg].fill)
        return self._counts.get(arg, arg)

    def _everywhere(self, node: fx.Node) -> fx.Node:
        """Return a call as it is of all rows."""
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self._argument)
        return self._call(node.target, *args, **kwargs)

    def _of_rows(self, node: fx.Node, mask: fx.Node) -> fx.Node | None:
        """Note the selected rows that a call makes, or return a new node for their reduction."""
        name, first = call_name(node), self._selected.get(node.all_input_nodes[0])
        if name in CLASSES | LOSSES - {"ctc_loss"} or is_portable_loss(node):
            return self._loss(node, mask)
        if not isinstance(_value(node), Tensor) or (name in _ALONG and first is None):
            return None
        dims = _dims(node, name)
        if first is not None and name in ("sum", "mean") and (dims is None or 0 in dims):
            return self._reduced(node, first, dims)
        if self._by_row(node, name, dims):
            self._selected[node] = _Selected(self._everywhere(node), mask)
        return None

    def _by_row(self, node: fx.Node, name: str, dims: frozenset[int] | None) -> bool:
        """Return whether a call computes each selected row by itself, with numbers that are the same for all rows."""
        if name == "getitem":
            index = node.args[1]
            among_columns = isinstance(index, tuple) and index[:1] == (slice(None),)
            return among_columns and len(node.all_input_nodes) == 1
        known = (
            name in _CASTS or _is_pointwise(name) if name not in _ALONG else dims and 0 not in dims
        )
        return bool(known) and self._fits(node)

    def _fits(self, node: fx.Node) -> bool:
        """Return whether selected rows meet only rows of the same rank, and numbers that are the same for all rows."""
        inputs = [n for n in node.all_input_nodes if n not in self._counts]
        ranks = {len(_value(n).shape) for n in inputs if n in self._selected}
        others = [n for n in inputs if n not in self._selected]
        shapes = [t.shape for n in others for t in tensors_of(n)]
        return (
            len(ranks) == 1
            and not any(map(is_size, others))
            and not any(_torch.is_symbolic(s) for shape in shapes for s in shape)
            and all(len(shape) < max(ranks) for shape in shapes)
        )

    def _reduced(
        self, node: fx.Node, selected: _Selected, dims: frozenset[int] | None, loss: str = ""
    ) -> fx.Node:
        """Return the sum or the mean of selected rows along some dimensions, or all; `loss` is the reduction of one."""
        how = loss or call_name(node)
        rest, named = ((), {}) if loss else (node.args[1:], dict(node.kwargs))
        if how != "sum" and is_half(selected.every) and named.get("dtype") is None:
            named["dtype"] = torch.float32  # as torch adds up a mean
        total = self._call("sum", self._all_rows(selected, 0), *rest, **named)
        if how == "sum":
            return total
        shape = _value(selected.every).shape
        elements = prod([n for d, n in enumerate(shape) if d and (dims is None or d in dims)])
        count = self._number(selected.mask, 1 if how == "batchmean" else elements)
        mean, dtype = self._call(operator.truediv, total, count), _value(node).dtype
        return mean if _value(mean).dtype == dtype else self._call("to", mean, dtype)

    def _number(self, mask: fx.Node, elements: int = 1) -> fx.Node:
        """Return how many rows a mask selects, times a number of elements."""
        count = self._call("sum", mask)
        return count if elements == 1 else self._call(operator.mul, count, elements)

    def _count(self, node: fx.Node) -> None:
        """Note the tensor with the value of a size of selected rows."""
        first = node.args[0]
        if isinstance(first, fx.Node) and first in self._selected:
            selected, name = self._selected[first], call_name(node)
            if name == "numel":
                elements = prod(_value(selected.every).shape[1:])
                self._counts[node] = self._number(selected.mask, elements)
            elif name in ("sym_size", "size") and node.args[1:] == (0,):
                self._counts[node] = self._number(selected.mask)
            return
        function, inputs = _OF_COUNTS.get(node.target), node.all_input_nodes
        if function is None or not inputs or not all(n in self._counts for n in inputs):
            return
        args = [self._counts[a] if isinstance(a, fx.Node) else a for a in node.args]
        if function in (torch.clamp_min, torch.clamp_max) and not isinstance(args[0], fx.Node):
            args.reverse()
        self._counts[node] = self._call(function, *args)

    def _loss(self, node: fx.Node, mask: fx.Node) -> fx.Node | None:
        """Note the loss of each selected row, or return a new node for their sum or mean."""
        try:
            given = arguments(node)
        except TypeError:
            return None
        reduction = given.get("reduction", "mean")
        if given.get("size_average") is not None or given.get("reduce") is not None:
            return None
        of_classes = call_name(node) in CLASSES or is_portable_loss(node)
        if of_classes and not _value(given["target"]).is_floating_point():
            return self._of_classes(node, mask, given)
        if not self._fits(node) or reduction not in ("none", "sum", "mean", "batchmean"):
            return None
        given = {name: map_arg(a, self._argument) for name, a in given.items()}
        each = _Selected(self._call(node.target, **{**given, "reduction": "none"}), mask)
        if reduction == "none":
            self._selected[node] = each
            return None
        return self._reduced(node, each, None, reduction)

    def _of_classes(self, node: fx.Node, mask: fx.Node, given: dict[str, Any]) -> fx.Node | None:
        """Note or return the same as `_loss`: rows that the mask leaves out have a target that is ignored."""
        logits, target = (self._selected.get(given[name]) for name in ("input", "target"))
        if logits is None or target is None:
            return None
        labels = self._all_rows(target, given.get("ignore_index", IGNORED))
        given = {**given, "input": logits.every, "target": labels}
        if is_portable_loss(node):
            new = self._call(node.target, *given.values())
        else:
            new = self._call(node.target, **given)
        if given.get("reduction", "mean") != "none":
            return new
        (self._losses if is_portable_loss(node) else self._selected)[node] = _Selected(new, mask)
        return None


def _by_mask(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the tensor and the mask if a node selects the rows of a tensor for which a mask is true."""
    name = call_name(node)
    if name not in ("getitem", "masked_select") or len(node.args) != 2:
        return None
    whole, mask = node.args
    mask = mask[0] if isinstance(mask, tuple | list) and len(mask) == 1 else mask
    if not isinstance(whole, fx.Node) or not isinstance(mask, fx.Node):
        return None
    values = _value(whole), _value(mask)
    if not all(isinstance(v, Tensor) and not _torch.data_dependent(v) for v in values):
        return None
    shape, of_mask = ([_torch.size_at(n, 3) for n in v.shape] for v in values)
    fits = shape == of_mask if name == "masked_select" else shape[: len(of_mask)] == of_mask
    fixed = not any(map(_torch.is_symbolic, values[0].shape[len(of_mask) :]))
    return (whole, mask) if fits and fixed and of_mask and values[1].dtype == torch.bool else None


def _dims(node: fx.Node, name: str) -> frozenset[int] | None:
    """Return the dimensions along which a call computes; None if it names none."""
    if name not in _ALONG:
        return None
    given = dict(enumerate(node.args)) | node.kwargs
    dims = given.get("dim", given.get("axis", given.get(_ALONG[name])))
    if dims is None:
        return None
    rank = len(_value(node.args[0]).shape) + (name == "unsqueeze")
    return frozenset(d % rank for d in (dims if isinstance(dims, tuple | list) else (dims,)))


def _is_pointwise(name: str) -> bool:
    """Return whether torch computes each element of a call's result from one of each argument, and draws none."""
    tags = tags_of(name)
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _value(node: Any) -> Any:
    return node.meta.get("example_value")
