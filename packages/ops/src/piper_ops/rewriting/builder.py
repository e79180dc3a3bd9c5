"""Add the nodes that replace a call in a captured graph, each with an example value of its own."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from piper_ops.ground.errors import UnsupportedVariant
from piper_ops.written.examples import Examples
from piper_ops.written.frames import is_model_code

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

Bound = Mapping[str, Any]


def call_name(node: fx.Node) -> str:
    """Return the function that a node calls, by the name that the user knows."""
    return getattr(node.target, "__name__", None) or str(node.target)


def user_line(node: fx.Node) -> str:
    """Return "file:line" of the innermost frame of the node's stack trace that belongs to the model.

    A node without a trace, such as the entry of a context manager, gives "before file:line" of the next node that has
    one.
    """
    traced = node
    while traced.op != "root" and not traced.meta.get("stack_trace"):
        traced = traced.next
    frames: list[tuple[str, str]] = _FRAME.findall(traced.meta.get("stack_trace") or "")
    own = [frame for frame in frames if is_model_code(frame[0])] or frames
    if not own:
        return f"node {node.name}, which has no stack trace"
    return f"{'' if traced is node else 'before '}{own[-1][0]}:{own[-1][1]}"


def unsupported(node: fx.Node, variant: str, way_out: str) -> UnsupportedVariant:
    """Return the refusal of a call: its name, the unsupported variant, its line, and the way out."""
    return UnsupportedVariant(f"{call_name(node)}: {variant} ({user_line(node)}). {way_out}")


class Builder:
    """Add nodes in place of `old`: each has its meta, and the example value of its own call."""

    def __init__(self, graph: fx.Graph, old: fx.Node, examples: Examples) -> None:
        self.graph = graph
        self.old = old
        self._examples = examples

    @property
    def trained(self) -> bool:
        """Return whether the replaced call has a gradient."""
        return bool(self._first_result().requires_grad)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute example values like the replaced call's: fake, and with gradients only if it has one."""
        with (
            getattr(self._first_result(), "fake_mode", nullcontext()),
            torch.set_grad_enabled(self.trained),
        ):
            yield

    def _first_result(self) -> Any:
        example = self.example(self.old)
        return example[0] if isinstance(example, tuple) else example

    def call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Add a call of `target`; arguments are nodes or constants."""
        return self._finish(self.graph.call_function(target, args), target)

    def method(self, name: str, *args: Any) -> fx.Node:
        """Add a call of the tensor method `name` on the first argument."""
        return self._finish(
            self.graph.call_method(name, args), lambda tensor, *rest: getattr(tensor, name)(*rest)
        )

    def first(self, call: fx.Node) -> fx.Node:
        """Add the selection of the first result of a call that has several."""
        return self.call(operator.getitem, call, 0)

    def swap(self, tensor: fx.Node) -> fx.Node:
        """Return `tensor` with heads and positions swapped, or the node whose swap it is."""
        if is_swap(tensor) and isinstance(tensor.args[0], fx.Node):
            return tensor.args[0]
        return self.method("transpose", tensor, 1, 2)

    def example(self, node: fx.Node) -> Any:
        """Return the node's example value; raise UnsupportedVariant when it has none."""
        if "example_value" not in node.meta:
            raise self.refuse(
                f"its argument {node.name} has no example value",
                "Give the graph as Dynamo captured it.",
            )
        return node.meta["example_value"]

    def refuse(self, variant: str, way_out: str) -> UnsupportedVariant:
        """Return an `unsupported` for the node that is being replaced, to be raised."""
        return unsupported(self.old, variant, way_out)

    def _finish(self, node: fx.Node, function: Callable[..., Any]) -> fx.Node:
        values = fx.map_arg(node.args, self.example)
        try:
            with self.computing():
                value = self._examples.of(node.target, function, *values)
        except UnsupportedVariant as error:
            raise UnsupportedVariant(f"{error} ({user_line(self.old)})") from error
        node.meta = {**self.old.meta, "example_value": value}
        return node


def is_swap(node: fx.Node) -> bool:
    """Return whether a node exchanges heads and positions of a tensor of four dimensions."""
    if node.op != "call_method" or node.target != "transpose" or node.kwargs or len(node.args) != 3:
        return False
    dims = [d % 4 if isinstance(d, int) else d for d in node.args[1:]]
    example = node.meta.get("example_value")
    return (
        sorted(map(str, dims)) == ["1", "2"]
        and isinstance(example, torch.Tensor)
        and example.dim() == 4
    )


def constant(build: Builder, bound: Bound, name: str, default: Any) -> Any:
    """Return an argument that must be known at capture; raise UnsupportedVariant if the model computes it."""
    value = bound.get(name, default)
    if isinstance(value, fx.Node):
        raise build.refuse(f"{name} is computed in the model", f"Make {name} a Python constant.")
    return value
