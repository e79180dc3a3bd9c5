"""Let a loss read numbers of the whole batch, such as how many targets count, which a step knows before it begins.

A loss with several means, or with a denominator like `count.clamp(min=1)`, cannot be divided when its step ends. The
reductions of the batch in it are replaced by their totals over all microbatches, which come with the batch as one more
tensor without rows. Then the loss is linear in the rows, and microbatches add up.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from piper_capture.trace.dynamo import Counted, Forward, InputOrigin
from piper_capture.values.concrete import concrete_call, concrete_shape, line_of
from piper_capture.whole_batch.batch_loss.calls import JOINED, is_drawn
from piper_capture.whole_batch.batch_loss.pairs import weighted
from piper_capture.whole_batch.batch_loss.reductions import call_name
from piper_capture.whole_batch.batch_loss.terms import Dependences
from piper_capture.whole_batch.batch_loss.wide import is_half, wide
from piper_capture.whole_batch.batch_loss.writers import (
    LIKE_ANOTHER,
    ancestors,
    filling,
    is_size,
    like_another,
    with_writers,
)
from piper_ir.ground.errors import CaptureError
from piper_ops import Builder, Examples

NAME = "loss_totals"
"""The name of the tensor: the number of microbatches, then the totals of each reduction."""
DTYPE = torch.float64


@dataclass(frozen=True)
class _Root:
    """Hold a reduction of the batch with the place of its totals, and whether it is a mean."""

    node: fx.Node
    start: int
    shape: tuple[int, ...]
    mean: bool


class Totals:
    """Write the loss of a microbatch with the totals of the batch in it."""

    def __init__(self, forward: Forward, found: Dependences) -> None:
        self._forward, self._graph, self._found, self._of = forward, forward.graph, found, found.of
        self._examples = Examples()
        self._made: dict[fx.Node, fx.Node] = {}
        self._roots = self._reductions()

    def written(self) -> Forward:
        """Return the graph with another loss, whose sum over microbatches is the loss of the batch."""
        forward = self._forward
        size = 1 + sum(prod(root.shape) for root in self._roots)
        counted = self._placeholder(size)
        self._counted = counted
        wanted = set(self._of) - ancestors(
            root.node for root in self._roots
        )  # which count in one microbatch
        for root in self._roots:
            self._replace(root, wanted)
        return replace(
            forward,
            loss=self._spread(forward.loss),
            loss_kind="total",
            origins={**forward.origins, counted: InputOrigin("batch", NAME)},
            batch={**forward.batch, NAME: torch.zeros(size, dtype=DTYPE)},
            fixed=forward.fixed | {NAME},
            counted=Counted(
                counted, tuple(wide(root.node, self._examples) for root in self._roots)
            ),
        )

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._forward.loss.meta["example_value"].dtype
        return dtype

    def _reductions(self) -> list[_Root]:
        """Return the reductions of the batch that the loss reads, directly or by a formula of several."""
        roots: dict[fx.Node, None] = {}
        read = [
            n for node in self._found.tail for n in node.all_input_nodes if not self._decided(node)
        ]
        queue = [n for n in read if self._decided(n) and not is_size(n)]
        queue += [self._forward.loss] if self._decided(self._forward.loss) else []
        seen = set[fx.Node]()
        while queue:
            node = queue.pop()
            if node in seen:
                continue
            if is_size(node):
                raise CaptureError(
                    f"{line_of(node)}: the loss divides by a function of the number of rows, which a microbatch "
                    f"has other than the batch. Divide by the number itself, or by one of its multiples, or take "
                    f"it out of the loss"
                )
            seen.add(node)
            if self._of[node].plain is not None:
                roots[node] = None
            else:
                queue += [n for n in node.all_input_nodes if self._decided(n)]
        if drawn := next(filter(is_drawn, roots), None):
            raise CaptureError(
                f"{line_of(drawn)}: the loss divides by a count of random numbers, beside other terms. Such counts are "
                f"taken of the whole batch before a step draws: draw the numbers in Job.batch, and return them as a "
                f"tensor of the batch"
            )
        reductions, start = [], 1
        for node in self._graph.nodes:
            if node in roots:
                shape = concrete_shape(node.meta["example_value"], 2, node)
                reductions.append(_Root(node, start, shape, self._of[node].plain == "mean"))
                start += prod(shape)
        return reductions

    def _decided(self, node: fx.Node) -> bool:
        """Return whether a value is a number, or several, that the rows of the batch alone decide."""
        dependence = self._of.get(node)
        return (
            dependence is not None
            and not dependence.rows
            and not dependence.model
            and not dependence.constant
        )

    def _placeholder(self, size: int) -> fx.Node:
        loss = self._forward.loss.meta["example_value"]
        with self._graph.inserting_before(next(iter(self._graph.nodes))):
            node = self._graph.placeholder(NAME)
        with loss.fake_mode:
            node.meta["example_value"] = torch.empty(size, dtype=DTYPE)
        return node

    def _replace(self, root: _Root, wanted: set[fx.Node]) -> None:
        with self._graph.inserting_before(root.node.next):
            build = Builder(self._graph, root.node, self._examples)
            total = build.method(
                "reshape",
                build.method("narrow", self._counted, 0, root.start, prod(root.shape)),
                root.shape,
            )
            if root.mean:
                total = build.call(
                    operator.truediv, total, build.method("select", self._counted, 0, 0)
                )
            number = not root.shape and is_half(
                root.node
            )  # a tensor is rounded as the user has it, once for the batch
            total = build.method(
                "to", total, torch.float32 if number else root.node.meta["example_value"].dtype
            )
        root.node.replace_all_uses_with(total, delete_user_cb=lambda user: user in wanted)
        self._of[total] = self._of[root.node]
        if root.node is self._forward.loss:
            raise CaptureError(
                "the loss does not depend on any parameter with requires_grad=True; there is nothing to train"
            )

    def _spread(self, node: fx.Node) -> fx.Node:
        """Return the part of a value that one microbatch has: its own sums, and its share of means and constants."""
        if node not in self._made:
            self._made[node] = self._part(node)
        return self._made[node]

    def _part(self, node: fx.Node) -> fx.Node:
        dependence = self._of.get(node)
        bases = (
            {t.base for t in dependence.terms or ()}
            if dependence is not None and dependence.model
            else {"constant"}
        )
        if bases == {"sum"}:
            return node
        if "sum" not in bases:
            with self._graph.inserting_before(node.next):
                return self._shared(node, node)
        if call_name(node) in ("add", "sub", *JOINED):
            return weighted(self._graph, node, self._spread, self._number)
        if call_name(node) == "where":
            return self._chosen(node)

        def part(arg: fx.Node) -> fx.Node:
            return (
                self._spread(arg)
                if arg in self._of and self._of[arg].model and not self._of[arg].constant
                else arg
            )

        with self._graph.inserting_before(node.next):
            copied = self._graph.node_copy(node, lambda n: n)
            copied.args, copied.meta = map_arg(node.args, part), dict(node.meta)
        return copied

    def _chosen(self, node: fx.Node) -> fx.Node:
        """Return the part of one of two values, which numbers of the whole batch choose."""
        choices: tuple[Any, ...] = node.args[1:]
        values = [
            self._spread(a) if isinstance(a, fx.Node) else a if a == 0 else self._number(node, a)
            for a in choices
        ]
        with self._graph.inserting_before(node.next):
            copied = self._graph.node_copy(node, lambda n: n)
            copied.args, copied.meta = (node.args[0], *values), dict(node.meta)
        return copied

    def _number(self, node: fx.Node, value: float) -> fx.Node:
        with self._graph.inserting_before(node):
            return self._shared(node, value)

    def _shared(self, node: fx.Node, value: fx.Node | float) -> fx.Node:
        """Return a value divided by the number of microbatches, in the place of `node`: each stage computes its own."""
        build = Builder(self._graph, node, self._examples)
        microbatches = build.method("to", build.method("select", self._counted, 0, 0), self._dtype)
        return build.call(operator.truediv, value, microbatches)


def counting(forward: Forward, rows: int) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return the module that counts in one microbatch of that many rows, and the tensors of the batch that it reads.

    Its result has 1, for the microbatch, and the values of all reductions, in float64.
    """
    assert forward.counted is not None
    wanted = with_writers(
        forward.graph, ancestors(forward.counted.reductions, shapes=False), shapes=False
    )
    graph, env, reads = fx.Graph(), dict[fx.Node, Any](), list[str]()
    for node in forward.graph.nodes:
        if node in wanted and node in forward.origins:
            origin = forward.origins[node]
            if origin.kind != "batch":
                raise CaptureError(
                    f"{line_of(forward.counted.reductions[0])}: the loss divides by a number that is made of "
                    f"{origin.name!r} and the batch, beside other means. Numbers of the whole batch are counted "
                    f"before a step, without the model: make {origin.name!r} a constant of the loss, or return a "
                    f"pair (sum, weight)"
                )
            reads.append(origin.name)
            env[node] = graph.placeholder(f"in{len(env)}")
    env |= {node: graph.call_method("clone", (source,)) for node, source in list(env.items())}
    for node in forward.graph.nodes:
        if (
            node in wanted
            and node.op in ("call_function", "call_method", "get_attr")
            and not is_size(node)
        ):
            if (number := filling(node)) is not None:
                example = node.meta["example_value"]
                call = (
                    torch.full,
                    (concrete_shape(example, rows, node), number),
                    {"dtype": example.dtype},
                )
                env[node] = graph.call_function(*call)
            elif like_another(node) is not None:
                example, method = node.meta["example_value"], LIKE_ANOTHER[call_name(node)]
                like = example.dtype if method == "to" else concrete_shape(example, rows, node)
                env[node] = graph.call_method(method, (env[node.args[0]], like))
            else:
                args, kwargs = concrete_call(node, env, rows)
                env[node] = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
            env[node].meta = {k: node.meta[k] for k in ("stack_trace",) if k in node.meta}
    values = [graph.call_method("to", (env[n], DTYPE)) for n in forward.counted.reductions]
    flat = [graph.call_method("reshape", (value, (-1,))) for value in values]
    one = graph.call_function(torch.ones, (1,), {"dtype": DTYPE})
    graph.output((graph.call_function(torch.cat, ([one, *flat],)),))
    return fx.GraphModule(forward.owner, graph), tuple(reads)
