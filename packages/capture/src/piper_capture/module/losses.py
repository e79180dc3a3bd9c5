"""Make the tensors that a loss or metric holds, such as class weights, constants of the captured graph."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from piper_capture.module.model import Loss, named_tensors
from piper_capture.torch_api._torch import choose_divergences, in_place
from piper_capture.torch_api._torch_joint import is_fake
from piper_capture.values.casts import Casts
from piper_capture.values.concrete import tensors_of
from piper_ir.ground.errors import CaptureError

MOST = 2**17
"""The largest number of elements of a tensor that becomes a literal."""
TRAINED = (
    "the loss has {what}, which is trained, and the optimizer of a job has the model's parameters alone. Let the "
    "model hold it: make the loss a part of the model, which then gets the labels among its inputs and returns its "
    "own loss (Job without loss). One that is not trained, as of a teacher, needs no gradient: "
    "teacher.requires_grad_(False)"
)


def cast_loss(loss: Loss, casts: Casts) -> Loss:
    """Return a loss whose own tensors, if it is a module, have the dtypes of buffers of the model."""
    if not isinstance(loss, nn.Module):
        return loss
    copied = copy.deepcopy(loss)
    for name, tensor, _ in named_tensors(copied):
        if tensor.requires_grad:
            raise CaptureError(TRAINED.format(what=f"a parameter {name!r}"))
        tensor.data = tensor.to(casts.of_buffer(tensor))
    return copied


def take_constant(graph: fx.Graph, node: fx.Node, value: Tensor) -> bool:
    """Replace the placeholder of a tensor that only losses and metrics read by a literal; return whether it was one."""
    if is_fake(value) or not _of_loss(node):
        return False
    shape = tuple(value.shape)
    # under no_grad, as of a teacher, nothing that is made of it has a gradient
    if value.requires_grad and any(t.requires_grad for u in node.users for t in tensors_of(u)):
        raise CaptureError(TRAINED.format(what=f"a tensor of shape {shape}"))
    if value.numel() > MOST:
        raise CaptureError(
            f"the loss or a metric holds a tensor of shape {tuple(value.shape)}; give it as a tensor of the batch: "
            f"piper.shared"
        )
    if node.meta["example_value"]._version:
        raise CaptureError(
            f"the loss or a metric changes a tensor of its own, of shape {shape}, in place: the next call would be "
            f"another loss. Copy it first, .clone(), or let it come with the batch: piper.shared(tensor)"
        )
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        constant = graph.call_function(torch.tensor, (value.tolist(),), {"dtype": value.dtype})
    constant.meta = {**next(iter(node.users)).meta, **node.meta}
    node.replace_all_uses_with(constant)
    graph.erase_node(node)
    return True


def _of_loss(node: fx.Node) -> bool:
    """Return whether a placeholder belongs to the loss or a metric, or is read by them alone."""
    return str(node.target).startswith(("L_loss_", "L_metrics_")) or all(
        _in_loss(user) for user in node.users
    )


def _in_loss(node: fx.Node) -> bool:
    trace: Any = node.meta.get("stack_trace") or ""
    return "loss(output, targets)" in trace or "function(output, targets)" in trace


@contextmanager
def losses_traced() -> Iterator[None]:
    """Let Dynamo trace losses that check tensor values without these checks, and divergences of distributions."""
    choose_divergences()
    with in_place(F, {"gaussian_nll_loss": _gaussian_nll_loss}):
        yield


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Compute torch's `gaussian_nll_loss` without its check for negative variances, which a trace cannot do."""
    var = torch.full_like(input, var) if isinstance(var, float) else var
    if var.size() == input.size()[:-1]:
        var = var.unsqueeze(-1)
    if (
        var.dim() != input.dim()
        or sum(a != b for a, b in zip(input.size(), var.size())) > 1
        or reduction not in _REDUCED
    ):
        raise ValueError("var is of incorrect size, or the reduction is not valid")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return _REDUCED[reduction](loss + 0.5 * math.log(2 * math.pi) if full else loss)


_REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "none": torch.clone,
}
