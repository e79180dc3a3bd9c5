"""Hold all of torch's private API that joint graphs use (torch >= 2.11).

See the documentation of torch's `aot_export_joint_with_descriptors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import fx
from torch._functorch import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._library.simple_registry import singleton
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from piper_capture.torch_api._torch import in_place


@dataclass(frozen=True)
class RawJoint:
    """Hold the functionalised joint graph with its placeholders by meaning.

    Attributes:
        primals: `primals[k]` is the placeholder of argument k.
        tangents: `tangents[k]` is the placeholder of the gradient of output k.
        mutated: the indices of the arguments that are changed in place.
    """

    module: fx.GraphModule
    primals: dict[int, fx.Node]
    tangents: dict[int, fx.Node]
    mutated: tuple[int, ...]


def export_joint(module: torch.nn.Module, args: Sequence[torch.Tensor]) -> RawJoint:
    """Return AOTAutograd's functionalised graph of `module(*args)`, with its backward if an output requires grad."""
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
    return RawJoint(exported, primals, tangents, tuple(sorted(changed)))


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
