"""Say how losses loop, and their gradients: over rows or elements, each of which has a loss of its own.

The reduction "sum" makes partial sums, and "mean" divides by a number that a shard does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

import piper_ops  # noqa: F401 - registers the ops
from piper_capture.layouts.loops import Loops, OpCall
from piper_capture.layouts.rules.letters import OUT, Names, all_whole, each, lettered, rank
from piper_capture.layouts.rules.rules_elementwise import elementwise
from piper_capture.torch_api._torch import OpOverload

aten = torch.ops.aten
piper = torch.ops.piper
NONE, MEAN, SUM = 0, 1, 2
"""The numbers of torch's reductions."""
_NAMES = {"none": NONE, "mean": MEAN, "sum": SUM}


def _reduction(call: OpCall) -> int:
    reduction = call.get("reduction")
    return _NAMES[reduction] if isinstance(reduction, str) else int(reduction)


def _cross_entropy(call: OpCall) -> Loops:
    """Return the loops of a loss over classes, which cannot be sharded."""
    reduction = _reduction(call)
    loss = ["row"] if reduction == NONE else []
    names: dict[int, Names] = {
        call.number("logits"): ["row", None],
        call.number("target"): ["row"],
        -1: loss,
        -2: ["row"],
    }
    return lettered(
        names,
        summed=["row"] if reduction == SUM else (),
        whole=["row"] if reduction == MEAN else (),
    )


def _cross_entropy_gradient(call: OpCall) -> Loops:
    reduction = _reduction(call)
    grad, classes = call.number("grad_loss"), ("row", "class")
    names: dict[int, Names] = {
        call.number("logits"): classes,
        call.number("target"): ["row"],
        OUT: classes,
    }
    names |= {call.number("logsumexp"): ["row"], grad: ["row"] if rank(call, grad) else []}
    return lettered(
        names, whole=["row", "class"] if reduction == MEAN else ["class"], linear=each(grad)
    )


def _nll(call: OpCall) -> Loops:
    """Return the loops of the loss of log-probabilities; neither classes nor their weights can be sharded."""
    reduction, logits = _reduction(call), call.number("self")
    if rank(call, logits) != 2:
        return all_whole(call)
    loops: dict[int, Names] = {logits: ["row", None], call.number("target"): ["row"]}
    loops |= {k: [None] for k in call.numbers("weight")}
    loops[-1] = ["row"] if rank(call, -1) else []
    summed = ["row"] if reduction != MEAN else ()
    return lettered(loops, summed=summed, whole=["row"] if reduction == MEAN else ())


def _nll_gradient(call: OpCall) -> Loops:
    reduction, grad, logits = _reduction(call), call.number("grad_output"), call.number("self")
    if rank(call, logits) != 2:
        return replace(all_whole(call), linear=each(grad))
    loops: dict[int, Names] = {k: ["row", None] for k in (logits, OUT)}
    loops |= {k: [None] for k in call.numbers("weight")}
    loops |= {call.number("target"): ["row"], grad: ["row"] if rank(call, grad) else []}
    return lettered(loops, whole=["row"] if reduction == MEAN else (), linear=each(grad))


def _pairs(call: OpCall) -> Loops:
    """Return the loops of a loss of each element of two tensors."""
    reduction = _reduction(call)
    if reduction == NONE:
        return elementwise(call)
    wide = max(call.tensors, key=lambda t: t.dim())
    rows = [str(d) for d in range(wide.dim())]
    names = {
        k: [n if size == wide.shape[d] else None for n, size, d in _from_right(call, k, rows)]
        for k in call.every()
    }
    return lettered(
        names, summed=rows if reduction == SUM else (), whole=rows if reduction == MEAN else ()
    )


def _from_right(call: OpCall, tensor: int, names: list[str]) -> list[tuple[str, int, int]]:
    shape = call.shape(tensor)
    offset = len(names) - len(shape)
    return [(names[offset + d], size, offset + d) for d, size in enumerate(shape)]


def _pairs_gradient(call: OpCall) -> Loops:
    loops = replace(elementwise(call), linear=each(0))
    if _reduction(call) == MEAN:
        return replace(loops, whole=frozenset(at for k in call.every() for at in call.dims(k)))
    return loops


_PAIRS = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
)
_GRADIENTS = (
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)  # fmt: skip

RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    piper.cross_entropy.default: _cross_entropy,
    piper.cross_entropy_dgrad.default: _cross_entropy_gradient,
    aten.nll_loss_forward.default: _nll,
    aten.nll_loss_backward.default: _nll_gradient,
    **dict.fromkeys(_PAIRS, _pairs),
    **dict.fromkeys(_GRADIENTS, _pairs_gradient),
}
