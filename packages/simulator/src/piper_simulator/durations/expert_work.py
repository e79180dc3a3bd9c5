"""Say how much devices that share experts compute and exchange in a step, by the load of the fullest of them.

A mixture with a capacity computes all places of its experts and sends them all, whatever tokens choose: nothing here
changes with the load. A dropless one (`piper_ops.experts.rounds`) has places for `bound` times the mean of a device's
rows, as an `ExpertRegion` of the program says:

- Its grouped products meet the rows there are, which are `load` times the mean, and not the places beyond. Element-wise
  operations and messages are of all places.
- Rows above the bound go in further rounds, each of at most as many. All devices run as many rounds as the fullest
  needs. A round computes the experts' forward in F and again in the backward: in I with the gradients of rows, in W
  with the gradients of weights.

Software without places (`Stack.places`) sends and multiplies the rows there are, in one round; element-wise operations
are counted as in the plan.

Rows are taken to come from all devices alike, so that the fullest pair of devices has the load of the fullest device.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from piper_ir.ground.sizes import ITEM_BYTES, bind
from piper_ir.program.layout import StepCollective
from piper_ir.program.program import Chunk, Cost, ExpertRegion, Kernel, Step
from piper_simulator.cluster.device import Device


def without_places(device: Device | None) -> bool:
    """Return whether the software of a device has tensors of as many rows as came to its experts."""
    return device is not None and device.stack is not None and device.stack.places == "rows"


def further_rounds(load: float, bound: float) -> int:
    """Return how many rounds a load needs beside the first."""
    return max(0, ceil(load / bound - 1e-9) - 1)


def messages(
    one: StepCollective, load: float, experts: ExpertRegion | None, *, exact: bool = False
) -> tuple[int, int]:
    """Return how often a collective inside of a step runs, and its bytes; `exact` without places."""
    nbytes = bind(one.nbytes, 0)
    if exact and experts is not None:
        filled = load / experts.bound if one.kind == "all_to_all" else 1.0
        return 1 if nbytes else 0, round(nbytes * filled)
    if experts is None or not one.further:
        return 1 if nbytes else 0, nbytes
    rounds = further_rounds(load, experts.bound)
    above = load - experts.bound
    return rounds, round(above * bind(one.mean_nbytes, 0) / rounds) if rounds else 0


Loads = tuple[tuple[float, float], ...]
"""The loads of the fullest device over the mean, each with its share of cases (draws, or layers and steps)."""
EVEN: Loads = ((1.0, 1.0),)


def loaded(chunk: Chunk, step: Step, load: float, *, exact: bool = False) -> Cost:
    """Return the cost of a step under a load, `exact` without places; the step's own if none matters."""
    cost, experts = chunk.steps[step].cost, chunk.steps[step].experts
    if experts is None or cost.seconds is not None:
        return cost
    bound = experts.bound
    filled = (load if exact else min(load, bound)) / bound
    kernels = [k if k.rows_dim is None else _with_rows(k, k.rows_dim, filled) for k in cost.kernels]
    rounds = 0 if exact else further_rounds(load, bound)
    if rounds:
        part = (load - bound) / bound / rounds
        kernels += [replace(_part(k, part), count=k.count * rounds) for k in experts.round.kernels]
    return replace(cost, kernels=tuple(kernels))


def _part(kernel: Kernel, part: float) -> Kernel:
    """Return a kernel of so many of the places."""
    if kernel.rows_dim is not None:
        return _with_rows(kernel, kernel.rows_dim, part)
    return replace(
        kernel, flops=round(bind(kernel.flops, 0) * part), bytes=round(bind(kernel.bytes, 0) * part)
    )


def _with_rows(kernel: Kernel, rows_dim: int, part: float) -> Kernel:
    """Return a grouped product with a part of its rows; the stacks of matrices are read or written all the same."""
    sizes = [bind(d, 0) for d in kernel.dims]
    rows, places = round(sizes[rows_dim] * part), sizes[rows_dim]
    fewer = (places - rows) * (sum(sizes) - places) * ITEM_BYTES[kernel.dtype]
    return replace(
        kernel,
        dims=(*sizes[:rows_dim], rows, *sizes[rows_dim + 1 :]),
        flops=round(bind(kernel.flops, 0) * part),
        bytes=max(0, bind(kernel.bytes, 0) - fewer),
    )
