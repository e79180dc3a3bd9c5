"""Trace equal layers once.

Dynamo's time for a model grows with its operations, and in a large model nearly all are in layers that are equal but
for their weights. Each class of such layers is therefore a nested compile region while Dynamo runs: for each further
layer it is only checked that a trace would give the same graph (`_torch_reuse`), and the graph of the first is called
again. Afterwards these calls get the weights of their own layers and are replaced by copies of the called graphs, with
the module stacks of their own layers. The result is equal to the graph of a plain trace.

If this fails, the model is traced plainly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import fx, nn

from piper_capture.module.model import named_tensors
from piper_capture.module.tags import outermost_entries
from piper_capture.torch_api import _torch

FEWEST = 4
"""The least number of equal layers for which the check is worth its time."""


class NotFlat(Exception):
    """Report that calls of nested regions cannot be replaced by copies of the graphs that they call."""


def repeated_layers(model: nn.Module) -> list[type[nn.Module]]:
    """Return the user's classes that have many layers in outermost ModuleLists, and none anywhere else."""
    layers = Counter(type(entry) for entry in outermost_entries(model, set()))
    everywhere = Counter(map(type, model.modules()))
    return [
        c
        for c, n in layers.items()
        if n >= FEWEST and everywhere[c] == n and not c.__module__.startswith("torch.")
    ]


@contextmanager
def as_regions(model: nn.Module, classes: list[type[nn.Module]]) -> Iterator[None]:
    """Make each call of a layer of these classes a nested region."""
    from piper_capture.torch_api._torch_reuse import (
        checked_reuse,  # may fail: not every version of torch has the private API that it uses
    )

    with ExitStack() as stack, checked_reuse({id(t) for _, t, _ in named_tensors(model)}):
        for layer in classes:
            stack.enter_context(_torch.nested_forward(layer))
        yield


def complete(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Add the missing tensors of calls of regions to the graph as inputs; return the inputs."""
    graph, completed = module.graph, list(inputs)
    placeholders = graph.find_nodes(op="placeholder")
    nodes = {id(value): node for node, value in zip(placeholders, completed, strict=True)}
    for call in graph.find_nodes(op="call_function", target=_torch.INVOKE):
        arguments = list(call.args)
        for position, tensor, example in call.meta.pop(_torch.CAPTURED, ()):
            node = nodes.get(id(tensor))
            if node is None:
                with graph.inserting_after(placeholders[-1]):
                    node = nodes[id(tensor)] = graph.placeholder(f"captured_{len(completed)}")
                node.meta["example_value"] = example
                placeholders.append(node)
                completed.append(tensor)
            arguments.insert(2 + position, node)
        call.args = tuple(arguments)
    return completed


def flatten(module: fx.GraphModule) -> None:
    """Replace the calls of nested regions in a graph by copies of the graphs that they call.

    Raises NotFlat if a copy would differ from the graph of a plain trace.
    """
    graph = module.graph
    calls = graph.find_nodes(op="call_function", target=_torch.INVOKE)
    if not calls:
        return
    first: dict[str, fx.Node] = {}
    for call in calls:
        name = call.args[0].target
        body: fx.Graph = getattr(module, name).graph
        _inline(graph, call, body, first.setdefault(name, call))
    for node in graph.find_nodes(op="get_attr"):
        if not node.users and isinstance(getattr(module, str(node.target), None), fx.GraphModule):
            graph.erase_node(node)


def _stack(node: fx.Node, call: fx.Node, traced: fx.Node) -> dict[str, Any]:
    """Return the module stack for the copy of a node: the call's stack, then its modules in place of the traced ones.

    The paths in it are empty, since nothing reads them.
    """
    own: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    if call is traced and _torch.MODULES not in call.meta:
        return dict(own)
    if _torch.MODULES in traced.meta:
        raise NotFlat("nothing uses the results of the call that was traced")
    around, moved = _around(traced), call.meta.get(_torch.MODULES, {})
    stack = dict(_around(call))
    for key in own:
        if key not in around:
            place = moved.get(key.partition("@")[0])
            if place is None:
                raise NotFlat("a region runs a module that Dynamo does not say that it read")
            stack[str(id(place))] = "", type(place)
    return stack


def _around(call: fx.Node) -> Mapping[str, Any]:
    return call.meta.get("nn_module_stack") or {}


def _inline(graph: fx.Graph, call: fx.Node, body: fx.Graph, traced: fx.Node) -> None:
    inputs = body.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(inputs, call.args[2:], strict=True))
    results: Any = ()
    with graph.inserting_before(call):
        for node in body.nodes:
            if node.op == "output":
                results = fx.node.map_arg(node.args[0], copies.__getitem__)
            elif node.op in ("call_function", "call_method"):
                copy = copies[node] = graph.node_copy(node, copies.__getitem__)
                copy.meta = {**node.meta, "nn_module_stack": _stack(node, call, traced)}
            elif node.op != "placeholder":
                raise NotFlat(f"a region with a node of kind {node.op}")
    for user in list(call.users):
        if getattr(user.target, "__name__", "") != "getitem":
            raise NotFlat("a region's results are used as one")
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)
