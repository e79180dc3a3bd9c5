"""Build the graph of one step: the ports it reads and writes, its nodes and its accumulators.

Every written port owns its bytes and is contiguous. A tensor that does not (a view of an input, one storage under two
ports, a part of a storage) is copied right after its node. A dense storage with another order of dimensions is written
permuted, and permuted back by the step that reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from piper_capture.values import aliasing
from piper_ir.ground.sizes import TensorSpec
from piper_ops import dtype_name

aten = torch.ops.aten
TOKENS = 1
"""The token dimension of activations between chunks, and of batch tensors; see `Joint.tokens_of`."""


@dataclass(frozen=True)
class Joint:
    """Hold the simplified joint graph of a chunk.

    Attributes:
        kinds: the kind of each input.
        inputs: placeholders by input index.
        outputs: the module's outputs, then the new values of `mutated` inputs.
        tangents: placeholders by output index.
        grads: input index -> the node of its gradient.
        mutated: indices of inputs that are changed in place.
        constant_names: node that stands for a constant -> its key in `constants`.
        reduce: the dtype of gradient accumulators; None for the dtype of their parameters.
        exchanged_inputs: inputs in the form that devices exchange with experts by all-to-all.
        exchanged_outputs: likewise outputs.
        first_inputs: inputs that are sharded along their first dimension, not along the second.
        first_outputs: likewise outputs.
        flat_inputs: inputs whose first dimension is rows x tokens, as experts take them.
        flat_outputs: likewise outputs.
        row_tokens: the tokens of a row in these.
    """

    graph: fx.Graph
    kinds: tuple[str, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    tangents: Mapping[int, fx.Node]
    grads: Mapping[int, fx.Node]
    mutated: tuple[int, ...]
    constant_names: Mapping[fx.Node, str]
    constants: Mapping[str, torch.Tensor]
    reduce: torch.dtype | None = None
    exchanged_inputs: tuple[int, ...] = ()
    exchanged_outputs: tuple[int, ...] = ()
    first_inputs: tuple[int, ...] = ()
    first_outputs: tuple[int, ...] = ()
    flat_inputs: tuple[int, ...] = ()
    flat_outputs: tuple[int, ...] = ()
    row_tokens: int = 0

    @property
    def flat(self) -> frozenset[fx.Node]:
        """Return the inputs and outputs whose first dimension is rows x tokens."""
        return frozenset(
            (
                *(self.inputs[k] for k in self.flat_inputs),
                *(self.outputs[k] for k in self.flat_outputs),
            )
        )

    @property
    def first(self) -> frozenset[fx.Node]:
        """Return the inputs and outputs that are sharded along dimension 0, such as a mask [queries, keys]."""
        return frozenset(
            (
                *(self.inputs[k] for k in self.first_inputs),
                *(self.outputs[k] for k in self.first_outputs),
            )
        )

    def tokens_of(self, node: fx.Node) -> int:
        """Return the token dimension of an activation between chunks."""
        return 0 if node in self.first or node in self.flat else TOKENS

    @property
    def exchanged(self) -> frozenset[fx.Node]:
        """Return the inputs and outputs in the form that devices exchange: their second dimension is not tokens."""
        return frozenset(
            (
                *(self.inputs[k] for k in self.exchanged_inputs),
                *(self.outputs[k] for k in self.exchanged_outputs),
            )
        )


@dataclass
class StepGraph:
    """Hold the graph of one step.

    Placeholders are named by the ports that it reads, then `acc{k}` per accumulator; the output node lists the nodes of
    the ports that it writes. Constants are get_attr nodes.
    """

    graph: fx.Graph
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    accumulates: tuple[int, ...] = ()


@dataclass
class Storage:
    """Describe the port through which another step provides the storage of a node.

    It names the port, and the shape and order of dimensions that turn the port's tensor back into the node's.
    """

    port: str
    shape: tuple[int, ...]
    order: tuple[int, ...]


def spec_of(node: fx.Node, shape: tuple[int, ...] | None = None) -> TensorSpec:
    """Return the spec of a node's tensor, under another shape of as many elements if one is given."""
    value = aliasing.tensor(node)
    return TensorSpec(tuple(value.shape) if shape is None else shape, dtype_name(value.dtype))


def whole(port: str, node: fx.Node) -> Storage:
    """Return a port that holds the node's tensor without a change of shape or order."""
    shape = tuple(aliasing.tensor(node).shape)
    return Storage(port, shape, tuple(range(len(shape))))


class StepBuilder:
    """Build the graph of one step.

    `provided` gives the storages that other steps and the caller provide; `placed` holds the storages that this step
    provides, after `write` and `hand_over`.
    """

    def __init__(
        self,
        joint: Joint,
        rank: Mapping[fx.Node, int],
        body: set[fx.Node],
        provided: Mapping[fx.Node, Storage],
    ) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self.placed: dict[fx.Node, Storage] = {}
        self._joint, self._provided = joint, provided
        self._body = sorted(body, key=rank.__getitem__)
        self._inside = body
        self._results: list[tuple[str, fx.Node, str]] = []
        self._gradients: dict[int, fx.Node] = {}
        self._owners: dict[fx.Node, str] = {}

    def write(self, ports: Iterable[tuple[str, fx.Node]]) -> None:
        """Write outputs and input gradients to ports, in the nodes' own shapes."""
        for port, node in ports:
            self.specs[port] = spec_of(node)
            base = aliasing.root(node)
            value = aliasing.tensor(node)
            if (
                base in self._inside
                and base not in self._owners
                and value.is_contiguous()
                and _same_bytes(value, base)
            ):
                self._owners[base] = port
                self._place(port, base)
                self._results.append((port, node, "contiguous"))
            else:
                self._results.append((port, node, "copy"))

    def hand_over(self, prefix: str, nodes: Iterable[fx.Node], first: int = 0) -> None:
        """Write whole storages for later steps, to new ports from number `first` unless an output port owns them."""
        count = first
        for node in nodes:
            if node in self.placed and not self.placed[node].port.startswith("gin"):
                continue
            port = f"{prefix}{count}"
            count += 1
            dense = aliasing.fills_storage(aliasing.tensor(node)) and node not in self._owners
            shape = self._place(port, node) if dense else tuple(aliasing.tensor(node).shape)
            if not dense:
                self.placed[node] = whole(port, node)
            self.specs[port] = spec_of(node, shape)
            self._results.append((port, node, "permuted" if dense else "copy"))

    def write_again(self, storages: Mapping[fx.Node, Storage]) -> None:
        """Write storages to the same ports, with the same shapes, as another step does."""
        for node, storage in storages.items():
            dense = aliasing.fills_storage(aliasing.tensor(node))
            self.placed[node] = storage
            self.specs[storage.port] = spec_of(node, storage.shape)
            self._results.append((storage.port, node, "permuted" if dense else "copy"))

    def _place(self, port: str, node: fx.Node) -> tuple[int, ...]:
        value = aliasing.tensor(node)
        order = aliasing.dense_order(value)
        assert order is not None
        shape = tuple([value.shape[d] for d in order])
        self.placed[node] = Storage(port, shape, order)
        return shape

    def accumulate(self, gradients: Mapping[int, fx.Node]) -> None:
        """Add the gradient of parameter input k to accumulator k right after its node."""
        self._gradients = dict(gradients)

    def finish(self) -> StepGraph:
        """Return the step's graph; copies for ports and accumulations follow directly on the node of their tensor."""
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        reads = self._reads(graph, env)
        accumulators = {k: self._accumulator(graph, k) for k in self._gradients}
        node_by_port: dict[str, fx.Node] = {}
        for node in list(env):
            self._deliver(graph, node, env, node_by_port, accumulators)
        for node in self._body:
            self._copy(graph, node, env)
            self._deliver(graph, node, env, node_by_port, accumulators)
        graph.output(tuple(node_by_port[port] for port, _, _ in self._results))
        return StepGraph(
            graph, reads, tuple(port for port, _, _ in self._results), tuple(self._gradients)
        )

    def _reads(self, graph: fx.Graph, env: dict[fx.Node, fx.Node]) -> tuple[str, ...]:
        """Add placeholders for all ports that are read, in the order of `_port_order`, and nodes for their views."""
        wanted = {n for b in self._body for n in b.all_input_nodes if n not in self._inside}
        wanted |= {n for _, n, _ in self._results if n not in self._inside}
        wanted |= {n for n in self._gradients.values() if n not in self._inside}
        constants = [
            n for n in self._joint.graph.nodes if n in wanted and n in self._joint.constant_names
        ]
        outside = sorted(wanted - set(constants), key=lambda n: _port_order(self._provided[n].port))
        placeholders: dict[str, fx.Node] = {}
        for node in outside:
            placeholders[self._provided[node].port] = self._placeholder(
                graph, self._provided[node].port, node
            )
        for node in outside:
            env[node] = self._restore(graph, node, placeholders[self._provided[node].port])
        for node in constants:
            env[node] = graph.get_attr(self._joint.constant_names[node])
            env[node].meta = dict(node.meta)
        return tuple(placeholders)

    def _placeholder(self, graph: fx.Graph, name: str, like: fx.Node) -> fx.Node:
        node = graph.placeholder(name)
        node.meta = {"val": aliasing.tensor(like)}
        return node

    def _accumulator(self, graph: fx.Graph, k: int) -> fx.Node:
        """Add the placeholder of the accumulator of input k, in the dtype of gradient accumulation."""
        node = self._placeholder(graph, f"acc{k}", self._joint.inputs[k])
        if self._joint.reduce is not None:
            node.meta["val"] = torch.empty_like(node.meta["val"], dtype=self._joint.reduce)
        return node

    def _restore(self, graph: fx.Graph, node: fx.Node, given: fx.Node) -> fx.Node:
        """Return a node for the joint graph's tensor, from the port's, which may have another shape or order."""
        place, value = self._provided[node], aliasing.tensor(node)
        order = list(range(value.dim()))
        if list(place.order) == order and self._port_shape(place.port, node) == tuple(value.shape):
            given.meta["val"] = value
            return given
        inverse = [place.order.index(d) for d in order]
        flat = value.permute(place.order)
        port_shape = self._port_shape(place.port, node)
        given.meta["val"] = flat if tuple(flat.shape) == port_shape else flat.view(port_shape)
        if port_shape != tuple(flat.shape):
            given = graph.call_function(aten.view.default, (given, list(flat.shape)))
            given.meta["val"] = flat
        if inverse != order:
            given = graph.call_function(aten.permute.default, (given, inverse))
            given.meta["val"] = value
        return given

    def _port_shape(self, port: str, node: fx.Node) -> tuple[int, ...]:
        if port.startswith("out"):
            return tuple(aliasing.tensor(self._joint.outputs[int(port.removeprefix("out"))]).shape)
        return self._provided[node].shape

    def _copy(self, graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> None:
        name = "getitem" if node.target is operator.getitem else str(node.target).split(".")[1]
        args = fx.node.map_arg(node.args, env.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, env.__getitem__)
        env[node] = graph.create_node(
            "call_function", node.target, args, kwargs, name=name.lstrip("_")
        )
        env[node].meta = dict(node.meta)

    def _deliver(
        self,
        graph: fx.Graph,
        node: fx.Node,
        env: Mapping[fx.Node, fx.Node],
        made: dict[str, fx.Node],
        accumulators: Mapping[int, fx.Node],
    ) -> None:
        """Add the copies of `node` for its ports, and its addition to accumulators, directly behind it."""
        for k, gradient in self._gradients.items():
            if gradient is node:
                added = graph.create_node(
                    "call_function",
                    aten.add_.Tensor,
                    (accumulators[k], env[node]),
                    name="accumulate",
                )
                added.meta = {**node.meta, "val": accumulators[k].meta["val"]}
        for port, result, how in self._results:
            if result is not node:
                continue
            made[port] = env[node]
            if how == "copy":
                made[port] = graph.call_function(
                    aten.clone.default, (env[node],), {"memory_format": torch.contiguous_format}
                )
                made[port].meta = {
                    **node.meta,
                    "val": torch.empty_like(
                        aliasing.tensor(node), memory_format=torch.contiguous_format
                    ),
                }
            elif how == "permuted" and not aliasing.tensor(node).is_contiguous():
                order = self.placed[node].order
                made[port] = graph.call_function(aten.permute.default, (env[node], list(order)))
                made[port].meta = {**node.meta, "val": aliasing.tensor(node).permute(order)}


def _same_bytes(value: torch.Tensor, owner: fx.Node) -> bool:
    """Return whether a view and the owner of its storage both cover the whole storage, in one dtype."""
    whole = aliasing.tensor(owner)
    return (
        value.dtype == whole.dtype
        and aliasing.fills_storage(value)
        and aliasing.fills_storage(whole)
    )


def _port_order(port: str) -> tuple[int, int]:
    prefix = port.rstrip("0123456789")
    return ("in", "out", "saved", "iw", "tan").index(prefix), int(port.removeprefix(prefix))
