"""Say how much devices that share experts compute and exchange in a step, by the load of the fullest of them.

A mixture with a capacity computes all places of its experts and sends them all, whatever tokens choose: nothing here
changes with the load. A dropless one (`piper_ops.experts.rounds`) has places for `bound` times the mean of a device's
rows:

- Its grouped products meet the rows there are, which are `load` times the mean, and not the places beyond. Element-wise
  operations and messages are of all places.
- Rows above the bound go in further rounds, each of at most as many. All devices run as many rounds as the fullest
  needs. A round computes the experts' forward in F and again in the backward: in I with the gradients of rows, in W
  with the gradients of weights.

Rows are taken to come from all devices alike, so that the fullest pair of devices has the load of the fullest device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from piper_ir.ground.sizes import ITEM_BYTES, Dim, bind
from piper_ir.program.layout import StepCollective
from piper_ir.program.program import Chunk, Cost, Kernel, Step

TRADES = ("experts_send", "experts_take", "experts_give", "experts_home")
"""The operators that bring rows into and out of the places for them."""


def places_over_mean(chunk: Chunk) -> float | None:
    """Return the places for rows over their mean, about the `bound` of a strategy; None if no rows are exchanged."""
    inside = chunk.steps["F"].collectives if "F" in chunk.steps else ()
    return next(
        (bind(c.nbytes, 0) / bind(c.mean_nbytes, 0) for c in inside if c.mean_nbytes and c.nbytes),
        None,
    )


def has_further_rounds(chunk: Chunk) -> bool:
    """Return whether rows above the places go in further rounds."""
    return "F" in chunk.steps and any(c.further for c in chunk.steps["F"].collectives)


def further_rounds(load: float, bound: float) -> int:
    """Return how many rounds a load needs beside the first."""
    return max(0, ceil(load / bound - 1e-9) - 1)


def messages(one: StepCollective, load: float, bound: float | None) -> tuple[int, int]:
    """Return how often a collective inside of a step runs, and its bytes."""
    nbytes = bind(one.nbytes, 0)
    if bound is None or not one.further:
        return 1 if nbytes else 0, nbytes
    rounds = further_rounds(load, bound)
    return rounds, round((load - bound) * bind(one.mean_nbytes, 0) / rounds) if rounds else 0


Loads = tuple[tuple[float, float], ...]
"""The loads of the fullest device over the mean, each with its share of cases (draws, or layers and steps)."""
EVEN: Loads = ((1.0, 1.0),)


def loaded(chunk: Chunk, step: Step, load: float) -> Cost:
    """Return the cost of a step under a load; the step's own if none matters."""
    cost, bound = chunk.steps[step].cost, places_over_mean(chunk)
    if bound is None or cost.seconds is not None:
        return cost
    filled = min(load, bound) / bound
    kernels = [_with_rows(k, filled) if _grouped(k) else k for k in cost.kernels]
    rounds = further_rounds(load, bound)
    if rounds and any(c.further for c in chunk.steps[step].collectives):
        part = (load - bound) / bound / rounds
        kernels += [
            replace(_part(k, part), count=k.count * rounds) for k in _of_a_round(chunk, step)
        ]
    return replace(cost, kernels=tuple(kernels))


def _of_a_round(chunk: Chunk, step: Step) -> Sequence[Kernel]:
    """Return the kernels of a further round of all places in a step."""
    forward = chunk.steps["F"].cost.kernels
    there, body = [k for k in forward if k.op in TRADES[:2]], _between_trades(forward)
    if step in ("F", "R"):
        back = [k for k in forward if k.op == "experts_give"]
        return [*there, *body, *back, *[replace(k, op="experts_home") for k in back]]
    backward, above = chunk.steps["I"].cost.kernels, _between_trades(chunk.steps["I"].cost.kernels)
    if step == "I":
        return [*there, *body, *above, *[k for k in backward if k.op in TRADES]]
    inner = _inner(above, next((k.dims[-1] for k in body if _grouped(k)), 0))
    return [
        *there,
        *there,
        *body,
        *inner,
        *[k for k in chunk.steps[step].cost.kernels if _grouped(k)],
    ]


def _inner(backward: Sequence[Kernel], width: Dim) -> Sequence[Kernel]:
    """Return the backward of experts without the products for gradients of the rows that came, of this width.

    If the inner layer is as wide as these rows, all products have the same sizes, and the last layer's is kept.
    """
    products = [k for k in backward if _grouped(k)]
    inner = [k for k in backward if k.dims[-2:-1] != (width,) or not _grouped(k)]
    if sum(k.count for k in products) > 1 and not any(_grouped(k) for k in inner):
        inner.append(replace(products[0], count=1))
    return inner


def _between_trades(kernels: Sequence[Kernel]) -> Sequence[Kernel]:
    """Return the kernels of a step that work on rows in their places.

    A region may have more than its experts, such as a router or an expert of all tokens. That is before rows come or
    after they go, and in no further round.
    """
    came, gone = (
        [at for at, k in enumerate(kernels) if k.op == op]
        for op in ("experts_take", "experts_give")
    )
    return kernels[came[-1] + 1 : gone[0] if gone else None] if came else ()


def _grouped(kernel: Kernel) -> bool:
    return kernel.kind == "matmul" and "grouped_mm" in kernel.op


def _part(kernel: Kernel, part: float) -> Kernel:
    """Return a kernel of so many of the places."""
    if _grouped(kernel):
        return _with_rows(kernel, part)
    return replace(
        kernel, flops=round(bind(kernel.flops, 0) * part), bytes=round(bind(kernel.bytes, 0) * part)
    )


def _with_rows(kernel: Kernel, part: float) -> Kernel:
    """Return a grouped product with a part of its rows: M of [M, K] x [K, N], or K for gradients of weights.

    The stacks of matrices are read or written all the same.
    """
    at = len(kernel.dims) - (1 if "wgrad" in kernel.op else 3)
    sizes = [bind(d, 0) for d in kernel.dims]
    rows = round(sizes[at] * part)
    other = sum(s for k, s in enumerate(sizes) if k >= len(sizes) - 3 and k != at)
    dims: tuple[Dim, ...] = tuple(rows if k == at else d for k, d in enumerate(kernel.dims))
    fewer = (sizes[at] - rows) * other * ITEM_BYTES[kernel.dtype]
    return replace(
        kernel,
        dims=dims,
        flops=round(bind(kernel.flops, 0) * part),
        bytes=max(0, bind(kernel.bytes, 0) - fewer),
    )
