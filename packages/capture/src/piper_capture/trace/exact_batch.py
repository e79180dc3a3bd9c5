"""Find the tensors of a batch that mixed precision does not cast: targets, masks, weights, times and positions.

A product of an input with weights takes both in the compute dtype, so such an input is cast when it is loaded. An input
that only a loss reads, or that only meets activations behind the last product, is not cast. Nor is an input that other
operations read than linear layers and convolutions, such as the sine of a time, or the loss of an autoencoder: the
layers get a cast of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from piper_capture.torch_api import _torch
from piper_capture.values.concrete import tensors_of

_MOVES = (
    "view reshape flatten unflatten unsqueeze squeeze permute transpose swapaxes movedim t mT expand expand_as "
    "repeat getitem select narrow chunk split unbind contiguous clone detach cat stack flip roll pad index_select "
    "getattr"
)
MOVES = frozenset(_MOVES.split())
"""The operators that move elements and compute nothing."""
CONVERSIONS = frozenset({"type", "type_as", "float", "double", "half", "bfloat16"})
"""The methods that convert to another dtype."""
LAYERS = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
"""The functions that cast their input to the dtype of their weight, see `layers_cast_inputs`."""
_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div poisson_nll_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits"
)
LOSSES = frozenset(_LOSSES.split())
"""The losses whose forward or backward kernels take tensors of one dtype only."""
_PRODUCTS = (
    "matmul mm bmm einsum baddbmm addmm addbmm mv dot outer tensordot bilinear conv_transpose1d conv_transpose2d "
    "conv_transpose3d scaled_dot_product_attention attention multi_head_attention_forward layer_norm rms_norm "
    "group_norm batch_norm instance_norm local_response_norm grouped_mm lstm gru rnn_tanh rnn_relu embedding_bag "
    "embedding cross_entropy nll_loss prelu cdist"
)
PRODUCTS = frozenset(_PRODUCTS.split())
"""The other operators that take tensors of one dtype only."""


class _Made(IntEnum):
    """Name how a tensor derives from an input: moved elements, computed from it alone, or combined with weights."""

    MOVED = 0
    ITSELF = 1
    MIXED = 2


def exact_tensors(
    graph: fx.Graph, params: Collection[fx.Node], batch: Mapping[fx.Node, str], compute: torch.dtype
) -> frozenset[str]:
    """Return the names of floating-point tensors of the batch that need no cast to the compute dtype."""
    weighty = set(params)
    for node in graph.nodes:
        if any(n in weighty for n in node.all_input_nodes):
            weighty.add(node)
    candidates = {
        node: name for node, name in batch.items() if node.meta["example_value"].dtype == compute
    }
    return frozenset(name for node, name in candidates.items() if _stays(graph, node, weighty))


def _stays(graph: fx.Graph, source: fx.Node, weighty: set[fx.Node]) -> bool:
    """Return whether no operator needs an input, or a tensor derived from it, in the compute dtype."""
    derived, by_layers = {source: _Made.MOVED}, False
    for node in graph.nodes:
        of = [derived[n] for n in node.all_input_nodes if n in derived]
        if not of or node.op not in ("call_function", "call_method") or _converts(node):
            continue
        name = _name(node)
        if name in LAYERS:
            first = node.args[0] if node.args else node.kwargs.get("input")
            if max(of) == _Made.MIXED or first not in derived or len(of) > 1:
                return False
            by_layers |= max(of) == _Made.MOVED
            continue  # cast in front of it, see `layers_cast_inputs`
        if name in PRODUCTS or not _is_of_torch(node):
            return False
        if not any(t.is_floating_point() for t in tensors_of(node)) or (
            name.endswith("_") and node.args[0] not in derived
        ):
            continue  # a comparison, or a tensor that is written into
        if any(n in weighty and n not in derived for n in node.all_input_nodes):
            derived[node] = _Made.MIXED
        else:
            derived[node] = max(of) if name in MOVES else max(*of, _Made.ITSELF)
    # Where layers alone read an input, one cast when it is loaded is the same and keeps fewer bytes.
    return not by_layers or max(derived.values()) > _Made.MOVED


def _name(node: fx.Node) -> str:
    name = (
        node.target
        if isinstance(node.target, str)
        else str(getattr(node.target, "__name__", node.target))
    )
    return name.strip("_") if name.startswith("__") else name


def _converts(node: fx.Node) -> bool:
    """Return whether an operator makes a tensor of a dtype that the user names."""
    named = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.dtype)]
    return bool(named) or _name(node) in CONVERSIONS


def _is_of_torch(node: fx.Node) -> bool:
    if isinstance(node.target, str):
        return True
    home = str(getattr(node.target, "__module__", None) or "torch").partition(".")[0]
    known = home in ("torch", "_operator", "operator", "builtins", "math")
    return known and not isinstance(node.target, _torch.HigherOrderOperator | _torch.OpOverload)


@contextmanager
def layers_cast_inputs() -> Iterator[None]:
    """Let linear layers and convolutions cast an input to the dtype of their weight, and losses use the wider dtype.

    Autocast does the same.
    """
    with _torch.in_place(
        F,
        {**{name: _narrowed(name) for name in LAYERS}, **{name: _widened(name) for name in LOSSES}},
    ):
        yield


def _narrowed(name: str) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(F, name)

    def cast(input: Tensor, weight: Tensor, *rest: Any, **more: Any) -> Tensor:
        return function(
            input if input.dtype == weight.dtype else input.to(weight.dtype), weight, *rest, **more
        )

    return cast


def _widened(name: str) -> Callable[..., Tensor]:
    function: Callable[..., Tensor] = getattr(F, name)

    def cast(input: Tensor, target: Tensor, *rest: Any, **more: Any) -> Tensor:
        if input.dtype != target.dtype and target.is_floating_point():
            dtype = torch.promote_types(input.dtype, target.dtype)
            input, target = input.to(dtype), target.to(dtype)
        return function(input, target, *rest, **more)

    return cast
