"""Say how ops loop that sum, normalise or compare along dimensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from piper_compiler.capture._torch import OpOverload
from piper_compiler.capture.layouts.loops import At, Loops, Nest, OpCall
from piper_compiler.capture.layouts.rules_elementwise import alike

aten = torch.ops.aten
piper = torch.ops.piper
OUT = -1


def reduced_dims(call: OpCall, name: str = "dim") -> frozenset[int]:
    """Return the dimensions of the first argument that a reduction takes away: all where none are named."""
    rank, given = len(call.shape(0)), call.get(name)
    named = given if isinstance(given, list | tuple) else () if given is None else (given,)
    return frozenset(int(d) % rank for d in named) or frozenset(range(rank))


def kept(call: OpCall, gone: frozenset[int], result: int = OUT) -> tuple[tuple[Nest, Nest], ...]:
    """Return the dimensions that a reduction keeps, as equal loops of its argument and a result."""
    rank, left = len(call.shape(0)), len(call.shape(result))
    place = {d: d if left == rank else d - sum(g < d for g in gone) for d in range(rank) if d not in gone}
    return tuple(((At(0, d),), (At(result, k),)) for d, k in place.items())


def _sum(call: OpCall) -> Loops:
    gone = reduced_dims(call) if "dim" in call.args else frozenset(range(len(call.shape(0))))
    return Loops(kept(call, gone), summed=frozenset(At(0, d) for d in gone), linear=(frozenset({0}),))


def _mean(call: OpCall) -> Loops:
    """Return the loops of a mean: its parts are no terms of a sum, since each divides by its own number of elements."""
    gone = reduced_dims(call) if "dim" in call.args else frozenset(range(len(call.shape(0))))
    return Loops(kept(call, gone), whole=frozenset(At(0, d) for d in gone), linear=(frozenset({0}),))


def _along(call: OpCall) -> Loops:
    """Return the loops of an op that looks along one dimension and returns what it was given, in the same shape."""
    dim = int(call.get("dim")) % max(1, len(call.shape(0)))
    tensors = [k for k in call.every()]
    return Loops(alike(call, *tensors), whole=frozenset(At(k, dim) for k in tensors))


def _norm(full: tuple[str, ...], statistics: tuple[str, ...], results: str, call: OpCall) -> Loops:
    """Return the loops of a norm over the trailing dimensions, or of its gradients.

    `full` names the arguments of the shape of the first, `statistics` those that lack its normalised dimensions, and
    `results` has a letter for each result: "f" and "s" likewise, "w" for the gradient of a weight, summed over all rows.
    """
    rank, inner = len(call.shape(0)), len(call.get("normalized_shape"))
    outer = rank - inner
    first = call.number(full[0])
    like = [k for name in full for k in call.numbers(name)] + [-1 - k for k, kind in enumerate(results) if kind == "f"]
    rows = [k for name in statistics for k in call.numbers(name)]
    rows += [-1 - k for k, kind in enumerate(results[: len(call.results)]) if kind == "s"]
    weights = [k for name in ("weight", "bias") for k in call.numbers(name)]
    weights += [-1 - k for k, kind in enumerate(results[: len(call.results)]) if kind == "w"]
    same = [*alike(call, *like)]
    same += [((At(k, d),), (At(first, d),)) for k in rows for d in range(outer)]
    same += [((At(k, d),), (At(first, outer + d),)) for k in weights for d in range(inner)]
    summed = frozenset(At(first, d) for d in range(outer)) if "w" in results else frozenset()
    normalised = frozenset(At(k, d) for k in like for d in range(outer, rank)) if set(results) != {"w"} else frozenset()
    return Loops(tuple(same), summed, normalised)


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
    aten._softmax.default: _along,
    aten._log_softmax.default: _along,
    aten._softmax_backward_data.default: _along,
    aten._log_softmax_backward_data.default: _along,
    aten.cumsum.default: _along,
    piper.rms_norm.default: partial(_norm, ("x",), (), "fs"),
    piper.rms_norm_dgrad.default: partial(_norm, ("grad_out", "x"), ("rstd",), "f"),
    piper.rms_norm_wgrad.default: partial(_norm, ("grad_out", "x"), ("rstd",), "w"),
    piper.layer_norm.default: partial(_norm, ("x",), (), "fss"),
    piper.layer_norm_dgrad.default: partial(_norm, ("grad_out", "x"), ("mean", "rstd"), "f"),
    piper.layer_norm_wgrad.default: partial(_norm, ("grad_out", "x"), ("mean", "rstd"), "ww"),
    piper.layer_norm_backward.default: partial(_norm, ("grad_out", "x"), ("mean", "rstd"), "fww"),
}
