"""Hold all of torch's private API that joint graphs use (torch >= 2.11).

See the documentation of torch's `aot_export_joint_with_descriptors`.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.graph_capture_wrappers import set_partitioner_tag
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import detect_fake_mode
from torch._library.simple_registry import singleton
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.traceback import get_current_meta, preserve_node_meta
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed

from piper_capture.torch_api._torch import in_place
from piper_capture.torch_api._torch_strides import as_kernels_lay_out


@dataclass(frozen=True)
class RawJoint:
    """Hold a functional joint graph with its placeholders by meaning.

    Attributes:
        owner: has the constants of the graph as attributes; None if there are none.
        primals: `primals[k]` is the placeholder of argument k.
        tangents: `tangents[k]` is the placeholder of the gradient of output k.
        mutated: the indices of the arguments that are changed in place.
    """

    graph: fx.Graph
    owner: fx.GraphModule | None
    primals: dict[int, fx.Node]
    tangents: dict[int, fx.Node]
    mutated: tuple[int, ...]


def export_joint(module: torch.nn.Module, args: Sequence[torch.Tensor]) -> RawJoint:
    """Return the functional graph of `module(*args)`, with its backward if an output requires grad.

    `module` returns a tuple of tensors that own their bytes, and are contiguous where they require grad. Most modules
    and their backwards change no tensor in place, or overwrite whole ones, as a router's counts are: their graph is
    recorded while they run once. AOTAutograd makes the graph of another module functional; it runs the module twice and
    wraps each tensor twice more.

    The graph of a module that changes arguments may end at its outputs: it is exported again with copies of them.
    """
    with suppress(NotRecorded), _modes_kept():
        return _Recording().joint(module, args)
    return _functionalised(module, args)


@contextmanager
def _modes_kept() -> Iterator[None]:
    """Restore the modes of autograd and autocast, which a graph that ends in its middle does not leave."""
    cast = {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    }
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield
        except NotRecorded:
            for device, (enabled, dtype) in cast.items():
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            torch.clear_autocast_cache()
            raise


class NotRecorded(Exception):
    """Report an operation that a graph cannot hold as it ran."""


class _Recording(TorchDispatchMode):
    """Record the operations below autograd in a graph; the meta of its nodes is as AOTAutograd makes it."""

    supports_higher_order_operators = True  # so that they come here, to be refused

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self._graph = fx.Graph()
        self._known: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        self._aliases: dict[int, set[int]] = {}
        """The known tensors in each storage, all by their identities."""

    def joint(self, module: torch.nn.Module, args: Sequence[torch.Tensor]) -> RawJoint:
        """Run forward and backward, and return their graph."""
        # not leaves, so that a change in place comes here, and not to autograd's refusal
        args = [arg.clone() if arg.requires_grad else arg for arg in args]
        fake = detect_fake_mode(args) or fake_mode()  # a loss that is a number has no arguments
        primals = {k: self._placeholder(f"primals_{k + 1}", arg) for k, arg in enumerate(args)}
        with preserve_node_meta(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Anomaly Detection has been enabled.")
            # it notes at each node of autograd's graph which line of the model made it
            with (
                fake,
                enable_python_dispatcher(),
                _matrices_unchecked(),
                torch.autograd.set_multithreading_enabled(False),
                torch.autograd.detect_anomaly(check_nan=False),
            ):
                with self:
                    outputs = module(*args)
                for node in self._graph.nodes:
                    node.meta["partitioner_tag"] = "is_forward"
                mutated = tuple(
                    k for k, arg in enumerate(args) if self._argument(arg) is not primals[k]
                )
                if mutated:
                    return RawJoint(self._graph, None, primals, {}, mutated)
                tangents, gradients = self._backward(args, outputs)
        meanings = [*map(PlainAOTOutput, range(len(outputs))), *map(_gradient, gradients)]
        results = [*outputs, *gradients.values()]
        self._graph.output(tuple(map(self._argument, results))).meta["desc"] = meanings
        self._graph.eliminate_dead_code()
        return RawJoint(self._graph, None, primals, tangents, ())

    def _backward(
        self, args: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> tuple[dict[int, fx.Node], dict[int, torch.Tensor | None]]:
        """Return the placeholders of the outputs' gradients, and the gradients of the arguments, both by index."""
        roots = {k: output for k, output in enumerate(outputs) if output.requires_grad}
        sources = {k: arg for k, arg in enumerate(args) if arg.requires_grad and roots}
        seeds = [torch.empty_like(root, requires_grad=False) for root in roots.values()]
        tangents: dict[int, fx.Node] = {}
        places = [*self._graph.find_nodes(op="placeholder")]
        for k, seed in zip(roots, seeds, strict=True):
            with self._graph.inserting_after(places[-1]):
                tangents[k] = self._placeholder(f"tangents_{len(tangents) + 1}", seed)
            tangents[k].meta["partitioner_tag"] = "is_backward"
            places.append(tangents[k])
        if not sources:
            return tangents, {}
        setup_stacktrace_preservation_hooks(
            [root.grad_fn for root in roots.values() if root.grad_fn is not None]
        )
        with set_partitioner_tag("is_backward"), preserve_node_meta(), self:
            gradients = torch.autograd.grad(
                [*roots.values()], [*sources.values()], seeds, allow_unused=True
            )
        return tangents, dict(zip(sources, gradients, strict=True))

    def _placeholder(self, name: str, tensor: torch.Tensor) -> fx.Node:
        node = self._graph.placeholder(name)
        self._note(node, tensor)
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            return self._overwritten(*args)
        if not isinstance(func, OpOverload) or func._schema.is_mutable or _has_effect(func):
            raise NotRecorded
        if autograd_would_have_decomposed(func, (*args, *kwargs.values())):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        node = self._graph.create_node(
            "call_function",
            func,
            fx.node.map_aggregate(args, self._argument),
            fx.node.map_aggregate(kwargs, self._argument),
            func.overloadpacket.__name__,
        )
        result = as_kernels_lay_out(func, args, func(*args, **kwargs))
        self._note(node, result)
        return result

    def _overwritten(self, target: torch.Tensor, source: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Record `target.copy_(source)` as a new value of `target`, which no other tensor may show.

        A backward that changes a tensor of the forward is not recorded: the new value may be an output.
        """
        old, new = map(self._argument, (target, source))
        shown = len(self._aliases[target.untyped_storage()._cdata]) > 1
        if shown or recorded_in(old) == "forward":  # known as such in the backward
            raise NotRecorded
        node = self._graph.call_function(torch.ops.aten.copy.default, (old, new))
        target.copy_(source, *rest)
        self._note(node, target)
        return target

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._known:
            raise NotRecorded
        return self._known[id(value)][1]

    def _note(self, node: fx.Node, value: Any) -> None:
        """Write the meta of a node with this value, and remember which node made which tensor."""
        current = get_current_meta()
        node.meta = {key: current[key] for key in META if key in current}
        if isinstance(value, FakeTensor):
            node.meta["val"] = _snapshot(value)
            self._known[id(value)] = value, node
            self._aliases.setdefault(value.untyped_storage()._cdata, set()).add(id(value))
        elif isinstance(value, list | tuple):
            node.meta["val"] = type(value)(map(_snapshot, value))
            for k, item in enumerate(value):
                self._note(self._graph.call_function(operator.getitem, (node, k)), item)


META = ("stack_trace", "custom", "partitioner_tag")
"""The meta of a node that comes from the node that runs: its line and annotations in the model, and its pass."""


def _has_effect(op: OpOverload) -> bool:
    """Return whether an op does more than its results show, so that it may not be dropped where nothing reads them."""
    return singleton.find(op.name()).effect.effect is not None


def _snapshot(value: Any) -> Any:
    """Return a tensor without its history, which autograd adds afterwards."""
    return fast_detach(value.fake_mode, value) if isinstance(value, FakeTensor) else value


def _gradient(argument: int) -> GradAOTOutput:
    return GradAOTOutput(PlainAOTInput(argument))


def _functionalised(module: torch.nn.Module, args: Sequence[torch.Tensor]) -> RawJoint:
    """Return AOTAutograd's graph, in which no op changes a tensor in place."""
    with (
        ExitStack() as stack,
        _use_lazy_graph_module(True),
        _matrices_unchecked(),
        _without_random_states(),
    ):
        exported = aot_export_joint_with_descriptors(
            stack, module, tuple(args)
        ).graph_module  # lazy: its code is not asked for
    primals: dict[int, fx.Node] = {}
    tangents: dict[int, fx.Node] = {}
    for node in exported.graph.find_nodes(op="placeholder"):
        match node.meta["desc"]:
            case PlainAOTInput(idx=index):
                primals[index] = node
            case TangentAOTInput(output=PlainAOTOutput(idx=index)):
                tangents[index] = node
    changed = {
        meaning.mutated_input.idx
        for meaning in exported.graph.output_node().meta["desc"]
        if isinstance(meaning, InputMutationAOTOutput)
        and isinstance(meaning.mutated_input, PlainAOTInput)
    }
    return RawJoint(exported.graph, exported, primals, tangents, tuple(sorted(changed)))


@contextmanager
def _matrices_unchecked() -> Iterator[None]:
    """Let the trace of inv, solve or cholesky drop its check for singular matrices, which a step cannot hold."""
    holder = singleton.find("aten::_linalg_check_errors").effect
    before = holder.effect
    holder.register(None)
    try:
        yield
    finally:
        holder.register(before)


@contextmanager
def _without_random_states() -> Iterator[None]:
    """Leave out the tracker of random states, which makes a dozen tensors for every trace.

    AOTAutograd reads it only if `functionalize_rng_ops` is set.
    """
    if hasattr(aot_autograd, "PhiloxStateTracker") and not functorch_config.functionalize_rng_ops:
        with in_place(aot_autograd, {"PhiloxStateTracker": nullcontext}):
            yield
    else:
        yield


def results_and_gradients(graph: fx.Graph) -> tuple[dict[int, fx.Node], dict[int, fx.Node]]:
    """Return the graph nodes of outputs and of arguments' gradients in a graph of `export_joint`, each by index."""
    output = graph.output_node()
    results: dict[int, fx.Node] = {}
    gradients: dict[int, fx.Node] = {}
    for value, meaning in zip(
        cast(Sequence[fx.Node | None], output.args[0]), output.meta["desc"], strict=True
    ):
        match meaning:
            case PlainAOTOutput(idx=index) if value is not None:
                results[index] = value
            case GradAOTOutput(grad_of=PlainAOTInput(idx=index)) if value is not None:
                gradients[index] = value
    return results, gradients


def fake_mode() -> FakeTensorMode:
    """Return a mode whose tensors have shapes, strides and a storage size, and no bytes."""
    return FakeTensorMode()


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def recorded_in(node: fx.Node) -> Literal["forward", "backward"] | None:
    """Return the pass that AOTAutograd was tracing when it made the node: None in a custom autograd function."""
    tag = str(node.meta.get("partitioner_tag", ""))
    return (
        "backward" if tag.endswith("backward") else "forward" if tag.endswith("forward") else None
    )
