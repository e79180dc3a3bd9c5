"""Say how norms and their gradients loop: over rows, or groups of channels, each of which is normalised by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import piper_ops  # noqa: F401 - registers the ops
from piper_capture.layouts.loops import (
    DimOf,
    Inner,
    Localize,
    Loops,
    Nest,
    OpCall,
    Shape,
    unchanged,
)
from piper_capture.layouts.rules.letters import OUT, Names, lettered, numbered, rank
from piper_capture.torch_api._torch import OpOverload

aten = torch.ops.aten
piper = torch.ops.piper


def _norm(full: tuple[str, ...], statistics: tuple[str, ...], results: str, call: OpCall) -> Loops:
    """Return the loops of a norm over the trailing dimensions, or of its gradients.

    `full` names the arguments of the shape of the first, `statistics` those that have 1 for its normalised dimensions,
    and `results` has a letter for each result: "f" and "s" likewise, "w" for the gradient of a weight, a sum over rows.
    """
    inner = len(call.get("normalized_shape"))
    rows = [f"row{d}" for d in range(rank(call, call.number(full[0])) - inner)]
    normalised = [f"normalised{d}" for d in range(inner)]
    of_kind: dict[str, Names] = {
        "f": [*rows, *normalised],
        "s": [*rows, *(None for _ in normalised)],
        "w": normalised,
    }
    names = {k: of_kind["f"] for name in full for k in call.numbers(name)}
    names |= {k: of_kind["s"] for name in statistics for k in call.numbers(name)}
    names |= {
        k: normalised
        for name in ("weight", "bias")
        if _takes(call, name)
        for k in call.numbers(name)
    }
    present = [k for k in range(len(results)) if call.made(k)]
    names |= {-1 - k: of_kind[results[k]] for k in present}
    weights_alone = all(results[k] == "w" for k in present)
    linear = (frozenset({call.number("grad_out")}),) if "grad_out" in full else ()
    localize = _normalized_shape(present[0]) if weights_alone else unchanged
    return lettered(
        names,
        summed=rows if "w" in results else (),
        whole=() if weights_alone else normalised,
        linear=linear,
        localize=localize,
    )


def _takes(call: OpCall, name: str) -> bool:
    return any(a.name == name for a in call.op._schema.arguments)


def _normalized_shape(result: int) -> Localize:
    def localize(call: OpCall, results: Sequence[Shape]) -> Mapping[str, Any]:
        return {"normalized_shape": list(results[result])}

    return localize


def _group_norm(full: tuple[str, ...], results: str, call: OpCall) -> Loops:
    """Return the loops of a norm of groups of channels of [rows, channels, ...], or of its gradients; see `_norm`.

    Channels are [groups, channels of a group], of which the groups can be sharded.
    """
    first, count = call.number(full[0]), int(call.get("group"))
    groups, channels = Inner(count, 0), Inner(call.shape(first)[1] // count, 1)
    present = [k for k in range(len(results)) if call.made(k)]
    wide = [*(call.number(n) for n in full), *(-1 - k for k in present if results[k] == "f")]
    short = [k for n in ("mean", "rstd") if _takes(call, n) for k in call.numbers(n)]
    short += [-1 - k for k in present if results[k] == "s"]
    weights = [k for n in ("weight", "bias") if _takes(call, n) for k in call.numbers(n)]
    weights += [-1 - k for k in present if results[k] == "w"]
    same: list[tuple[Nest, Nest]] = [
        ((DimOf(first, 0),), (DimOf(k, 0),)) for k in (*wide[1:], *short)
    ]
    same += [((DimOf(k, 1),), (groups, channels)) for k in wide] + [
        ((DimOf(k, 1),), (groups,)) for k in short
    ]
    same += [((DimOf(k, 0),), (groups, channels)) for k in weights]
    whole: set[DimOf | Inner] = {
        channels,
        *(DimOf(k, d) for k in wide for d in range(2, rank(call, k))),
    }
    if results[present[0]] != "f":  # the sizes of a part are read off the first result
        whole |= {DimOf(first, 0), groups}
    linear = (frozenset({call.number("grad_out")}),) if "grad_out" in full else ()
    per_group = channels.size

    def localize(call: OpCall, shapes: Sequence[Shape]) -> Mapping[str, Any]:
        rows, columns = shapes[0][:2] if present[0] == 0 else (call.get("N"), call.get("C"))
        return {"N": rows, "C": columns, "group": columns // per_group}

    summed = frozenset({DimOf(first, 0)}) if "w" in results else frozenset()
    return Loops(tuple(same), summed, frozenset(whole), linear, localize)


def _averages(call: OpCall) -> Loops:
    """Return the loops of a batch norm with running averages: one number of each of these per channel."""
    count = rank(call, 0)
    names: dict[int, Names] = {k: ["1"] for k in range(1, len(call.tensors))}
    return lettered({**names, 0: numbered(count), OUT: numbered(count)})


RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    piper.rms_norm.default: partial(_norm, ("x",), (), "fs"),
    piper.rms_norm_dgrad.default: partial(_norm, ("grad_out", "x"), ("rstd",), "f"),
    piper.rms_norm_wgrad.default: partial(_norm, ("grad_out", "x"), ("rstd",), "w"),
    piper.layer_norm.default: partial(_norm, ("x",), (), "fss"),
    piper.layer_norm_dgrad.default: partial(_norm, ("grad_out", "x"), ("mean", "rstd"), "f"),
    piper.layer_norm_wgrad.default: partial(_norm, ("grad_out", "x"), ("mean", "rstd"), "ww"),
    piper.layer_norm_backward.default: partial(_norm, ("grad_out", "x"), ("mean", "rstd"), "fww"),
    aten.native_layer_norm.default: partial(_norm, ("input",), (), "fss"),
    aten.native_layer_norm_backward.default: partial(
        _norm, ("grad_out", "input"), ("mean", "rstd"), "fww"
    ),
    aten._native_batch_norm_legit_no_training.default: _averages,
    aten.native_group_norm.default: partial(_group_norm, ("input",), "fss"),
    aten.native_group_norm_backward.default: partial(_group_norm, ("grad_out", "input"), "fww"),
}
