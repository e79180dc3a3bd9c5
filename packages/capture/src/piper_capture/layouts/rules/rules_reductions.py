"""Say how ops loop that sum or compare along dimensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from piper_capture.layouts.loops import Loops, OpCall
from piper_capture.layouts.rules.letters import lettered, numbered, place, rank
from piper_capture.torch_api._torch import OpOverload

aten = torch.ops.aten
ALL = (frozenset({0}),)


def reduced_dims(call: OpCall) -> frozenset[int]:
    """Return the reduced dimensions of the first argument: all if none is named."""
    count = rank(call, 0)
    argument = call.get("dim") if any(a.name == "dim" for a in call.op._schema.arguments) else None
    named = (
        argument if isinstance(argument, list | tuple) else () if argument is None else (argument,)
    )
    return frozenset(int(d) % max(1, count) for d in named if count) or frozenset(range(count))


def _reduced(call: OpCall, *, adds: bool = False, linear: bool = False) -> Loops:
    """Return the loops of a reduction; only a sum can be sharded along the reduced dimensions, as partial sums.

    Means of shards are no partial sums, since each divides by its own number of elements.
    """
    gone = reduced_dims(call)
    names = [str(d) for d in range(rank(call, 0))]
    taken = {names[d] for d in gone}
    left: dict[int, list[str | None]] = {}
    for k in range(len(call.results)):
        kept = rank(call, -1 - k) == rank(call, 0)
        left[-1 - k] = [
            None if d in gone else n for d, n in enumerate(names) if kept or d not in gone
        ]
    summed, whole = (taken, set()) if adds else (set(), taken)
    return lettered({0: names, **left}, summed=summed, whole=whole, linear=ALL if linear else ())


def _along(name: str, call: OpCall, *, linear: bool = False) -> Loops:
    """Return the loops of an op that looks along one dimension, which its results have in another size or the same."""
    count = rank(call, 0)
    names = numbered(count, without=[place(call, 0, name)])
    tensors = [k for k in call.every() if rank(call, k) == count]
    return lettered({k: names for k in tensors}, linear=ALL if linear else ())


_EXTREMES = (
    aten.amax.default, aten.amin.default, aten.argmax.default, aten.argmin.default, aten.max.default, aten.min.default,
    aten.max.dim, aten.min.dim, aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims,
    aten.prod.default, aten.prod.dim_int, aten.logsumexp.default, aten.linalg_vector_norm.default, aten.var.correction,
    aten.std.correction, aten.var_mean.correction, aten.std_mean.correction, aten.aminmax.default, aten.median.dim,
    aten.mode.default, aten.kthvalue.default, aten.nanmedian.dim,
)  # fmt: skip
_SCANS = (aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default)
_ORDERS = (aten.sort.default, aten.sort.stable, aten.topk.default, aten.argsort.default)

RULES: dict[OpOverload, Callable[[OpCall], Loops]] = {
    aten.sum.dim_IntList: partial(_reduced, adds=True, linear=True),
    aten.sum.default: partial(_reduced, adds=True, linear=True),
    aten.count_nonzero.dim_IntList: partial(_reduced, adds=True),
    aten.mean.dim: partial(_reduced, linear=True),
    aten.mean.default: partial(_reduced, linear=True),
    **dict.fromkeys(_EXTREMES, _reduced),
    aten._softmax.default: partial(_along, "dim"),
    aten._safe_softmax.default: partial(_along, "dim"),
    aten._log_softmax.default: partial(_along, "dim"),
    aten._softmax_backward_data.default: partial(_along, "dim", linear=True),
    aten._log_softmax_backward_data.default: partial(_along, "dim", linear=True),
    aten.cumsum.default: partial(_along, "dim", linear=True),
    **dict.fromkeys((*_SCANS, *_ORDERS), partial(_along, "dim")),
}
