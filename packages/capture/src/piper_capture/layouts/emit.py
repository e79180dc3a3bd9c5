"""Add nodes to a graph together with the fake tensors that they make."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from piper_capture.steps.kernels import SHARED
from piper_capture.torch_api._torch import FakeTensorMode, OpOverload

aten = torch.ops.aten

KEPT_META = ("stack_trace", "partitioner_tag", "custom")
"""The keys of a node's meta with its source: stack trace, phase, annotations."""


WHY = "exchange_for"
"""The key of a node's meta with the purpose of a collective."""


RESULTS = "piper_results"
"""The attribute of a mode that holds the fake results of calls, by op and the forms of its arguments."""


class Emitter:
    """Build a graph node by node."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph, self._mode = graph, mode
        # with the mode, since layouts of one chunk have most calls in common, and fake tensors belong to a mode
        self._results: dict[Any, Any] = vars(mode).setdefault(RESULTS, {})
        self._meta: Mapping[str, Any] | None = None

    @contextmanager
    def like(self, node: fx.Node, late: bool, why: str = "", shared: int = 1) -> Iterator[None]:
        """Let all nodes come from where `node` does, in the backward if `late`.

        `why` is the purpose of collectives, `shared` the number of devices that share the work.
        """
        before = self._meta
        tag = "is_backward" if late else "is_forward"
        self._meta = {
            **{k: node.meta[k] for k in KEPT_META if k in node.meta},
            "partitioner_tag": tag,
            WHY: why,
        }
        if shared > 1:
            self._meta = {**self._meta, SHARED: shared}
        try:
            yield
        finally:
            self._meta = before

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with self._mode:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def input(self, node: fx.Node, value: Any) -> fx.Node:
        """Add a placeholder or a constant like `node`, that stands for `value`."""
        copied = self.graph.create_node(node.op, node.target, (), {}, name=node.name)
        copied.meta = {**node.meta, "val": value}
        return copied

    def op(self, node: fx.Node, op: OpOverload, named: Mapping[str, Any]) -> fx.Node:
        """Add a call that comes from where `node` does, unless another place is set."""
        args, kwargs = _positional(op, named)
        call = self._call(op, args, kwargs)
        call.meta = {**dict(node.meta), **(self._meta or {}), "val": call.meta["val"]}
        return call

    def call(self, op: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call in the place that is set."""
        return self._call(op, args, kwargs)

    def item(self, node: fx.Node, number: int) -> fx.Node:
        element = self.graph.call_function(operator.getitem, (node, number))
        element.meta = {**node.meta, "val": node.meta["val"][number]}
        return element

    def _call(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        if op is aten.view.default and not _can_be_viewed(
            args[0].meta["val"], args[1]
        ):  # a device's part has other strides
            args = (
                self._call(
                    aten.clone.default, args[:1], {"memory_format": torch.contiguous_format}
                ),
                args[1],
            )
        call = self.graph.call_function(op, args, dict(kwargs))
        real_args, real_kwargs = fx.node.map_arg((args, dict(kwargs)), lambda n: n.meta["val"])
        form = op, _form(real_args), _form(tuple(real_kwargs.items()))
        if form not in self._results:
            with self._mode, torch.no_grad():
                self._results[form] = op(*real_args, **real_kwargs)
        call.meta = {**(self._meta or {}), "val": self._results[form]}
        return call


def _form(value: Any) -> Any:
    """Return the facts of an argument on which the form of a result depends, so that they can be compared."""
    if isinstance(value, Tensor):
        place = value.storage_offset(), value.untyped_storage().nbytes()
        return value.shape, value.stride(), value.dtype, *place
    if isinstance(value, list | tuple):
        return tuple([_form(item) for item in value])
    return type(value), value


def _can_be_viewed(tensor: Tensor, shape: Sequence[int]) -> bool:
    if tensor.is_contiguous():
        return True
    try:
        torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(
            [int(s) for s in shape]
        )
    except (RuntimeError, ValueError):
        return False
    return True


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments that an op is called with, in the order of its schema, by name."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]  # an op
    by_name = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return {n: by_name[n] for n in names if n in by_name}


def _positional(op: OpOverload, named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments as torch writes them: by position up to the first that is left out or may not be."""
    args: list[Any] = []
    rest = dict(named)
    for argument in op._schema.arguments:
        if argument.kwarg_only or argument.name not in rest:
            break
        args.append(rest.pop(argument.name))
    return tuple(args), rest
